"""The classes of fishplate. All numbers of bytes are counted from 0; timeouts are seconds, `None`
stands for the node's default, and `math.inf` for ever. Exceptions are in `_errors`."""

from types import TracebackType
from typing import Any, Coroutine, Generator, Literal, Self, final

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

_Signal = Literal["set", "add"]
_Compare = Literal["==", "!=", ">=", ">", "<=", "<"]
_Atomic = Literal["set", "add", "and", "or", "xor", "swap", "compare_swap", "fetch"]

@final
class Node:
    """The assembled transport of one process. Any thread may call; one at a time is inside."""

    def __new__(
        cls,
        *,
        fabric: Literal["auto", "off", "required"] | int | None = None,
        shared_memory: bool = True,
        providers: list[str] | None = None,
        interfaces: list[str] | None = None,
        max_rails: int | None = None,
        peers: int | None = None,
        regions: int | None = None,
        imports: int | None = None,
        operations: int | None = None,
        receives: int | None = None,
        patience: float = 10.0,
        connect_timeout: float = 10.0,
        timeout: float = 30.0,
        worker: bool | int | None = None,
    ) -> Self:
        """Opens a node over shared memory, and libfabric where there is one.

        `fabric`: "auto", "off", "required", or how many rails; `providers` and `interfaces` name
        them. `peers`, `regions`, `imports`, `operations`, `receives`: how many at once. `patience`:
        seconds that an operation waits for room; `connect_timeout`: that the first use of a peer
        waits for it; `timeout`: the default of waits. `worker`: a thread makes progress while the
        program computes, on that processor if it is a number."""

    @property
    def address(self) -> bytes:
        """What peers `connect` to: at most `ADDRESS_MAX` bytes."""

    @property
    def closed(self) -> bool: ...
    @property
    def timeout(self) -> float: ...
    def connect(self, address: bytes) -> Peer:
        """Adds a peer by its address. Does not wait. The peer connects too, before or after."""

    def alloc(self, len: int) -> Memory:
        """Takes zeroed memory that peers can reach. It stays until it is freed or the node is
        closed; arrays over it keep the bytes, if not the registration, longer."""

    def register(self, buffer: Buffer) -> Memory:
        """Registers a writable buffer that begins at a multiple of 8, and holds it until it is
        freed. If its handle was taken, it is held until the node is closed, since peers of this
        host write it by the kernel; for ever if a peer does not learn of that."""

    def put(self, data: Memory | Slice | Buffer, to: Remote | Place) -> None:
        """Writes to memory of a peer. A buffer may be reused on return; memory of the node stays as
        it is until `quiet`."""

    def put_signal(
        self,
        data: Memory | Slice | Buffer,
        to: Remote | Place,
        signal: Remote | Place,
        value: int = 1,
        op: _Signal = "set",
    ) -> None:
        """`put`, and then a signal, applied once the data and all before it has landed."""

    def signal(self, signal: Remote | Place, value: int = 1, op: _Signal = "set") -> None:
        """Applies a signal after everything that was sent to its peer before."""

    def iput(self, data: Memory | Slice | Buffer, to: Remote | Place) -> Request:
        """`put` with a request, which ends when it is applied. Until then the data stays as it
        is, and a buffer is held."""

    def iget(self, into: Memory | Slice | Buffer, at: Remote | Place) -> Request:
        """Reads memory of a peer. Until the request ends, a buffer is held."""

    def get(
        self, into: Memory | Slice | Buffer, at: Remote | Place, timeout: float | None = None
    ) -> None:
        """Reads memory of a peer, and waits until it is there."""

    def atomic(
        self,
        at: Remote | Place,
        op: _Atomic,
        operand: int = 0,
        compare: int = 0,
        width: int = 8,
    ) -> None:
        """Executes an atomic at a peer, in the order of operations."""

    def ifetch(
        self,
        at: Remote | Place,
        op: _Atomic,
        operand: int = 0,
        compare: int = 0,
        width: int = 8,
    ) -> Request:
        """`atomic` whose request ends with the value from before."""

    def fetch(
        self,
        at: Remote | Place,
        op: _Atomic,
        operand: int = 0,
        compare: int = 0,
        width: int = 8,
        timeout: float | None = None,
    ) -> int:
        """`atomic`, and waits for the value from before."""

    def fetch_add(self, at: Remote | Place, value: int = 1, timeout: float | None = None) -> int:
        """Adds to a 64-bit word of a peer, and waits for the value from before."""

    def wait(
        self,
        at: Memory | Slice,
        compare: _Compare,
        value: int,
        peer: Peer | None = None,
        timeout: float | None = None,
    ) -> int:
        """Waits until the 64-bit word compares as asked, and returns it. `peer`, if given, sends
        the signal: the wait ends when that fails."""

    def test(
        self, at: Memory | Slice, compare: _Compare, value: int, peer: Peer | None = None
    ) -> int | None:
        """Looks once whether the word compares as asked."""

    def until(
        self,
        at: Memory | Slice,
        compare: _Compare,
        value: int,
        peer: Peer | None = None,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, int]:
        """`wait` for asyncio."""

    def _waker(self) -> _Waker: ...

    def quiet(self, peer: Peer | None = None, timeout: float | None = None) -> None:
        """Waits until everything sent to the peer, or to all, is applied there, and everything
        asked of it is here."""

    def fence(self, peer: Peer) -> None:
        """Later writes to the peer land after everything issued before. Does not wait."""

    def send(self, peer: Peer, tag: int, data: Memory | Slice | Buffer) -> None:
        """Sends a message. A buffer may be reused on return; memory of the node stays as it is
        until `quiet`. The first message to a peer waits until that is connected."""

    def isend(self, peer: Peer, tag: int, data: Memory | Slice | Buffer) -> Request:
        """Sends a message. A long writable buffer is not copied but held until the request ends."""

    def irecv(
        self,
        into: Memory | Slice | Buffer,
        source: Peer | None = None,
        tag: int | None = None,
        ignore: int | None = None,
    ) -> Request:
        """Posts a receive for the oldest message that matches: from `source`, or from anybody, with
        this tag (0 without one) but for the bits in `ignore`. The request ends with a `Message`.
        Until then a buffer is held."""

    def recv(
        self,
        into: Buffer,
        source: Peer | None = None,
        tag: int | None = None,
        ignore: int | None = None,
        timeout: float | None = None,
    ) -> Message:
        """Waits for the oldest message that matches, and copies it into the buffer. One that is
        longer is lost."""

    def recv_bytes(
        self,
        source: Peer | None = None,
        tag: int | None = None,
        ignore: int | None = None,
        max: int = 65536,
        timeout: float | None = None,
    ) -> tuple[Message, bytes]:
        """`recv` of at most `max` bytes, into new ones."""

    def probe(
        self, source: Peer | None = None, tag: int | None = None, ignore: int | None = None
    ) -> Message | None:
        """What the oldest message that matches says of itself. Does not wait."""

    def poll(self) -> int:
        """Makes progress without waiting, and returns how many events there were."""

    def stats(self) -> dict[str, int]:
        """The counters of the engine."""

    def rails(self) -> list[tuple[str, str]]:
        """Provider and interface of each libfabric rail."""

    def close(self, timeout: float | None = None) -> None:
        """Waits until everything sent is applied and all peers know that this node leaves. The node
        is closed even if that fails. Once closed, it does nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Closes the node; after an exception, without waiting."""

@final
class Peer:
    """Another node. Peers are equal if they stand for the same one."""

    def connected(self) -> bool:
        """Whether it is connected, too. Raises if it has failed."""

    def import_memory(self, handle: bytes) -> Remote:
        """Makes memory of the peer reachable, by the handle that it gave out. Waits until the peer
        is connected."""

    def disconnect(self) -> None:
        """Gives the peer up: its operations fail, its memory is released."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Memory:
    """Registered memory. It has the buffer protocol: `numpy.frombuffer(memory)` and
    `torch.frombuffer(memory, dtype=...)` copy nothing."""

    def __len__(self) -> int: ...
    def __getitem__(self, range: slice, /) -> Slice: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def at(self, offset: int, len: int | None = None) -> Slice:
        """A range: to the end, if it has no length."""

    def handle(self) -> bytes:
        """What peers import."""

    def free(self) -> None:
        """Takes the memory back. Arrays over it stay valid, and nothing arrives there any more."""

    def read(self, offset: int = 0, len: int | None = None) -> bytes: ...
    def write(self, data: Buffer, offset: int = 0) -> None: ...
    def load(self, offset: int = 0) -> int:
        """The 64-bit word: what was sent before the signal that wrote it is visible."""

    def store(self, value: int, offset: int = 0) -> None:
        """Stores a 64-bit word."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Frees the memory."""

@final
class Slice:
    """A range of memory of the node."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Remote:
    """Imported memory of a peer."""

    @property
    def peer(self) -> Peer: ...
    def at(self, offset: int) -> Place: ...
    def release(self) -> None:
        """Gives it up."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Releases it."""

@final
class Place:
    """A place in memory of a peer."""

    def __add__(self, bytes: int, /) -> Place: ...

@final
class Request:
    """An operation or a receive in flight, which goes on without this object. Awaitable."""

    def done(self) -> bool:
        """Whether it has ended. Makes progress; does not wait."""

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the end. Returns the `Message` of a receive, the value from before of a fetch;
        raises if it failed."""

    def cancel(self) -> bool:
        """Takes a receive back, if nothing has matched it. Whether that was so."""

    def __await__(self) -> Generator[Any, None, Any]: ...
    def _waker(self) -> _Waker: ...

@final
class _Waker:
    """What an event loop needs of a node to sleep until there is something to do."""

    @property
    def key(self) -> int:
        """The same for all wakers of a node, and for no other while one of them lives."""

    @property
    def fd(self) -> int | None:
        """What to wait on until it is readable, after `arm`, a look, and `sleep`."""

    def arm(self) -> tuple[float, int]:
        """Prepares a wait. Returns for how long at most, 0 if there is something to do, and the
        count of calls of the node."""

    def sleep(self, calls: int) -> bool:
        """Whether to wait: the node has seen no other call than `calls` tells."""

@final
class Message:
    """What a message says of itself."""

    @property
    def source(self) -> Peer: ...
    @property
    def tag(self) -> int: ...
    @property
    def len(self) -> int:
        """Its length in bytes, as it was sent."""

@final
class Job:
    """How the processes of a job find each other. A program with MPI or torch.distributed needs
    none: it only has to hand over a few bytes. Each call waits for all processes. Its errors name
    the ranks that are missing."""

    def __new__(
        cls, address: str = "127.0.0.1:7117", size: int = 2, timeout: float | None = None
    ) -> Self:
        """Joins a job of `size` processes. The first that listens at the address is rank 0."""

    @staticmethod
    def from_env(timeout: float | None = None) -> Job:
        """Joins the job that a launcher or FISHPLATE_RENDEZVOUS describes: see docs/jobs.md."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def exchange(self, data: bytes) -> bytes:
        """In a job of two: swaps bytes with the other."""

    def allgather(self, data: bytes) -> list[bytes]:
        """The bytes of all processes, by rank."""

    def barrier(self, node: Node | None = None) -> None:
        """Waits for all processes. `node` makes progress meanwhile."""
