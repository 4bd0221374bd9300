"""The classes of fishplate. Offsets and lengths are in bytes. Timeouts are in seconds; `None` is
the node's default, and `math.inf` never expires. Exceptions are in `_errors`."""

from types import TracebackType
from typing import Any, Coroutine, Generator, Literal, Protocol, Self, TypeAlias, final

from typing_extensions import Buffer

__all__ = [
    "ADDRESS_MAX",
    "Memory",
    "Message",
    "Node",
    "Peer",
    "Place",
    "Remote",
    "Job",
    "Request",
    "Slice",
    "__version__",
    "_Waker",
]
__version__: str
ADDRESS_MAX: int

class _Tensor(Protocol):
    """A tensor in host or GPU memory, taken through DLPack. Tensors on a GPU are requested with
    `stream=-1`."""

    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class _Array(Protocol):
    """An array in GPU memory, such as an array of numba."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

_Buffer: TypeAlias = Buffer | _Tensor | _Array
_Signal = Literal["set", "add"]
_Compare = Literal["==", "!=", ">=", ">", "<=", "<"]
_Atomic = Literal["set", "add", "and", "or", "xor", "swap", "compare_swap", "fetch"]

@final
class Node:
    """The transport of one process: rails, peers and memory. Any thread may call, one at a time."""

    def __new__(
        cls,
        *,
        fabric: Literal["auto", "off", "required"] | int | None = None,
        shared_memory: bool = True,
        providers: list[str] | None = None,
        interfaces: list[str] | None = None,
        max_rails: int | None = None,
        local_rank: int | None = None,
        peers: int | None = None,
        regions: int | None = None,
        imports: int | None = None,
        operations: int | None = None,
        receives: int | None = None,
        patience: float = 10.0,
        connect_timeout: float = 10.0,
        timeout: float = 30.0,
        worker: bool | int | None = None,
        gpu: str | None = None,
        counters: bool = False,
    ) -> Self:
        """Opens a node over shared memory, and over libfabric if it is installed.

        `fabric` is "auto", "off", "required", or the number of libfabric rails. `providers` and
        `interfaces` select the rails. `local_rank` is the number of this process among those of its
        host: processes that may open fewer rails (`max_rails`) than there are near NICs begin with
        different NICs. Its default is that of `Job.from_env`, or 0. `peers`, `regions`, `imports`,
        `operations` and `receives` limit how many exist at once. `patience` is the maximum time in
        seconds that an operation waits for room. `connect_timeout` is the maximum time that the
        first use of a peer waits for its connection. `timeout` is the default timeout. `worker`
        starts a thread that makes progress while the program computes; an int also pins the thread
        to that processor. `gpu` selects the device for device memory: "cuda:N", "hip:N", or
        "stand-in" for host memory instead. `counters` creates a page of counters, which
        `fishplate stat` shows while the program runs."""

    @property
    def address(self) -> bytes:
        """The address that peers pass to `connect`, at most `ADDRESS_MAX` bytes. It changes when a
        libfabric rail fails, so read it again before another peer connects. After `close`: the
        address when the node was opened."""

    @property
    def closed(self) -> bool: ...
    @property
    def timeout(self) -> float: ...
    def connect(self, address: bytes) -> Peer:
        """Connects a peer by its address. Does not wait. The peer must connect too."""

    def alloc(self, len: int) -> Memory:
        """Allocates zeroed memory that peers can access. It stays registered until it is freed or
        the node is closed. Arrays over it keep the bytes alive longer."""

    def alloc_device(self, len: int) -> Memory:
        """Allocates memory of the node's device that peers can access, with any contents."""

    def register(self, buffer: _Buffer) -> Memory:
        """Registers a writable buffer at an address that is a multiple of 8. Holds the buffer until
        the memory is freed. If `handle` was called, holds the buffer until the node is closed,
        because peers on this host access it without the node. If a peer does not learn of the
        close, holds the buffer forever."""

    def put(self, data: Memory | Slice | _Buffer, to: Remote | Place) -> None:
        """Writes to memory of a peer. A buffer of the host may be reused on return. Memory of the
        node and of a device must not change until `quiet`. First finish the work
        that writes device memory, because no call waits for a stream."""

    def put_signal(
        self,
        data: Memory | Slice | _Buffer,
        to: Remote | Place,
        signal: Remote | Place,
        value: int = 1,
        op: _Signal = "set",
    ) -> None:
        """Puts, then signals. The signal is applied after this data and all earlier data."""

    def signal(self, signal: Remote | Place, value: int = 1, op: _Signal = "set") -> None:
        """Applies a signal after everything that was sent to the peer earlier."""

    def iput(self, data: Memory | Slice | _Buffer, to: Remote | Place) -> Request:
        """Starts a put. The request completes when the data is applied. Until then the data must
        not change, and the node holds a buffer."""

    def iget(self, into: Memory | Slice | _Buffer, at: Remote | Place) -> Request:
        """Starts to read memory of a peer. A buffer is held until the request completes."""

    def get(
        self, into: Memory | Slice | _Buffer, at: Remote | Place, timeout: float | None = None
    ) -> None:
        """Reads memory of a peer, and waits until the data has arrived."""

    def atomic(
        self,
        at: Remote | Place,
        op: _Atomic,
        operand: int = 0,
        compare: int = 0,
        width: int = 8,
    ) -> None:
        """Executes an atomic at a peer, after everything that was sent to the peer earlier."""

    def ifetch(
        self,
        at: Remote | Place,
        op: _Atomic,
        operand: int = 0,
        compare: int = 0,
        width: int = 8,
    ) -> Request:
        """Starts an atomic. The result of the request is the previous value."""

    def fetch(
        self,
        at: Remote | Place,
        op: _Atomic,
        operand: int = 0,
        compare: int = 0,
        width: int = 8,
        timeout: float | None = None,
    ) -> int:
        """Executes an atomic, and waits for the previous value. After a timeout the atomic may
        still be executed."""

    def fetch_add(self, at: Remote | Place, value: int = 1, timeout: float | None = None) -> int:
        """Adds to a 64-bit word of a peer, and waits for the previous value."""

    def wait(
        self,
        at: Memory | Slice,
        compare: _Compare,
        value: int,
        peer: Peer | None = None,
        timeout: float | None = None,
    ) -> int:
        """Waits until the requested comparison of the 64-bit word with `value` holds, and returns
        the word. If `peer` is given, the wait fails when that peer fails."""

    def test(
        self, at: Memory | Slice, compare: _Compare, value: int, peer: Peer | None = None
    ) -> int | None:
        """Checks the word once. Returns the word if the comparison holds, else `None`."""

    def until(
        self,
        at: Memory | Slice,
        compare: _Compare,
        value: int,
        peer: Peer | None = None,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, int]:
        """The asyncio version of `wait`."""

    def _waker(self) -> _Waker: ...

    def quiet(self, peer: Peer | None = None, timeout: float | None = None) -> None:
        """Waits until everything sent to the peer, or to all peers, is applied there, and until all
        reads from that peer, or from all peers, have completed."""

    def fence(self, peer: Peer) -> None:
        """Makes later writes to the peer land after everything issued earlier. Does not wait."""

    def send(self, peer: Peer, tag: int, data: Memory | Slice | _Buffer) -> None:
        """Sends a message. A buffer of the host may be reused on return. Memory of the node and of
        a device must not change until `quiet`. The first message to a peer waits until the peer is
        connected."""

    def isend(self, peer: Peer, tag: int, data: Memory | Slice | _Buffer) -> Request:
        """Starts to send. The buffer must not change until the request completes. In the thread of
        an asyncio loop this call does not wait for the peer to connect: the send starts later, or
        fails when the node is closed first."""

    def irecv(
        self,
        into: Memory | Slice | _Buffer,
        source: Peer | None = None,
        tag: int | None = None,
        ignore: int | None = None,
    ) -> Request:
        """Posts a receive for the oldest message that matches: from `source`, or from any peer, and
        with `tag` (default 0) except for the bits in `ignore`. The result of the request is a
        `Message`. A buffer is held until the request completes. In the thread of an asyncio loop
        this call does not wait for `source` to connect."""

    def recv(
        self,
        into: _Buffer,
        source: Peer | None = None,
        tag: int | None = None,
        ignore: int | None = None,
        timeout: float | None = None,
    ) -> Message:
        """Waits for the oldest message that matches, and copies it into the buffer. If it is longer
        than the buffer, copies its first bytes, drops the rest, and raises."""

    def recv_bytes(
        self,
        source: Peer | None = None,
        tag: int | None = None,
        ignore: int | None = None,
        max: int = 65536,
        timeout: float | None = None,
    ) -> tuple[Message, bytes]:
        """Receives a message of at most `max` bytes, and returns it with its bytes."""

    def probe(
        self, source: Peer | None = None, tag: int | None = None, ignore: int | None = None
    ) -> Message | None:
        """Describes the oldest message that matches, if there is one. Does not wait."""

    def poll(self) -> int:
        """Makes progress without waiting. Returns the number of events."""

    def stats(self) -> dict[str, int]:
        """Returns the counters of the engine."""

    def gpu_stats(self) -> dict[str, int] | None:
        """Counts the transfers of device memory: copied by the device ("direct"), through host
        memory ("relayed"), and by the processor ("stored"). Returns `None` without a device."""

    def defer_device_frees(self, defer: bool) -> None:
        """If `defer`, calls that make progress keep freed device memory allocated, and keep memory
        of peers open. The driver frees and closes memory only when no kernel runs, so defer before
        a kernel polls a word."""

    def rails(self) -> list[tuple[str, str]]:
        """Returns the provider and the interface of each libfabric rail."""

    def close(self, timeout: float | None = None) -> None:
        """Waits until everything sent is applied and all peers know that this node leaves. The node
        is closed even if that fails. Does nothing if it is closed already."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Closes the node. After an exception, does not wait."""

@final
class Peer:
    """A connected peer. Two objects for the same peer are equal."""

    def connected(self) -> bool:
        """False while a peer on this host has not connected yet. The first use of a peer on another
        host connects it. Raises if the peer has failed."""

    def import_memory(self, handle: bytes) -> Remote:
        """Imports memory of the peer by its handle. Waits until the peer is connected and has
        announced the memory."""

    def until_connected(self, timeout: float | None = None) -> Coroutine[Any, Any, None]:
        """Waits in an asyncio program until the peer is connected."""

    def until_imported(
        self, handle: bytes, timeout: float | None = None
    ) -> Coroutine[Any, Any, Remote]:
        """The asyncio version of `import_memory`."""

    def _try_import(self, handle: bytes) -> Remote | None: ...
    def _waker(self) -> _Waker: ...

    def disconnect(self) -> None:
        """Disconnects the peer. Its operations fail, and its imported memory is released."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Memory:
    """Registered memory. Memory of the host has the buffer protocol: `numpy.frombuffer(memory)` and
    `torch.frombuffer(memory, dtype=...)` copy nothing. Memory of a CUDA device has
    `__cuda_array_interface__`. Both export DLPack tensors of bytes."""

    def __len__(self) -> int: ...
    def __getitem__(self, range: slice, /) -> Slice: ...
    def __dlpack__(self, **_options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def at(self, offset: int, len: int | None = None) -> Slice:
        """Returns a range, by default to the end of the memory."""

    def handle(self) -> bytes:
        """Returns the handle with which peers import the memory."""

    def free(self) -> None:
        """Frees the memory. Arrays over host memory stay valid, but no peer writes there any more.
        Raises `InUse` if tensors over memory of `alloc_device` exist. Arrays made through
        `__cuda_array_interface__` do not count, and become invalid."""

    def read(self, offset: int = 0, len: int | None = None) -> bytes: ...
    def write(self, data: _Buffer, offset: int = 0) -> None: ...
    def load(self, offset: int = 0) -> int:
        """Loads a 64-bit word. Data sent before the signal that wrote the word is then visible."""

    def store(self, value: int, offset: int = 0) -> None:
        """Stores a 64-bit word."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Frees the memory."""

@final
class Slice:
    """A range of memory of the node."""

    def __len__(self) -> int: ...
    def __dlpack__(self, **_options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Remote:
    """Imported memory of a peer."""

    @property
    def peer(self) -> Peer: ...
    def at(self, offset: int) -> Place: ...
    def release(self) -> None:
        """Releases the imported memory."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Releases the imported memory."""

@final
class Place:
    """An address in memory of a peer."""

    def __add__(self, bytes: int, /) -> Place: ...

@final
class Request:
    """An operation or a receive in flight. Awaitable. Dropping the object does not stop it."""

    def done(self) -> bool:
        """True if the request has completed. Makes progress; does not wait."""

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for completion. Returns the `Message` of a receive, or the previous value of a
        fetch. Raises if the operation failed."""

    def cancel(self) -> bool:
        """Cancels a receive that has not matched. Returns true if it was cancelled."""

    def __await__(self) -> Generator[Any, None, Any]: ...
    def _waker(self) -> _Waker: ...

@final
class _Waker:
    """Lets an event loop sleep until the node has work."""

    @property
    def key(self) -> int:
        """Identifies the node: equal for all wakers of one node."""

    @property
    def fd(self) -> int | None:
        """The descriptor to wait on. Call `arm`, check all conditions and call `sleep` first."""

    def arm(self) -> tuple[float, int]:
        """Prepares a wait. Returns the maximum time to wait, 0 if there is work, and the count of
        calls on the node."""

    def sleep(self, calls: int) -> bool:
        """True if the loop may wait: the count of calls on the node is still `calls`."""

@final
class Message:
    """The source, tag and length of a message."""

    @property
    def source(self) -> Peer: ...
    @property
    def tag(self) -> int: ...
    @property
    def len(self) -> int:
        """Length in bytes at the sender."""

@final
class Job:
    """Lets the processes of a job find each other. A program with MPI or torch.distributed does not
    need this class, because it can exchange addresses through either. Each call waits for all
    processes. Errors name the missing ranks."""

    def __new__(
        cls, address: str = "127.0.0.1:7117", size: int = 2, timeout: float | None = None
    ) -> Self:
        """Joins a job of `size` processes. The first process to listen at the address is rank 0."""

    @staticmethod
    def from_env(timeout: float | None = None) -> Job:
        """Joins the job that a launcher or FISHPLATE_RENDEZVOUS describes (docs/jobs.md)."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int | None:
        """The number of this process among those of its host, if the launcher of `from_env` has set
        it. Nodes that are opened later use it."""

    def exchange(self, data: bytes) -> bytes:
        """Exchanges bytes with the other process of a job of two."""

    def allgather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of all processes, by rank."""

    def barrier(self, node: Node | None = None) -> None:
        """Waits for all processes. Makes progress on `node` meanwhile."""
