"""Direct sends: a receiver exports a tensor once, and the sender writes into it any number of
times, without a message per transfer. Both ends use the same channel number. Another channel may
have this number in the other direction.

    receiver                                    sender
    inlet = Inlet(node, peer, tensor)           outlet = Outlet(node, peer)
    inlet.wait()                                outlet.send_direct(data)
    ... use tensor ...
    inlet.notify()                              # waits for notify before it overwrites
    inlet.close()                               outlet.close()     # waits for the last notify too

The tensor is anything that `Node.register` takes, or `Memory`. Each end allocates a signal word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._errors import Misuse
from ._native import Memory, Node, Peer, Remote, Request, Slice

if TYPE_CHECKING:
    from ._native import _Buffer

__all__ = ["Inlet", "Outlet"]

# The upper 32 bits of the tags of handles that an inlet and an outlet send. The channel is in the
# lower 64. With one tag, an outlet would take the handle of another outlet for that of an inlet.
_INLET = 0x46504449 << 64
_OUTLET = 0x4650444F << 64


class Inlet:
    """The receiving end of a channel. Sends the tensor's handle, and does not wait for the
    sender."""

    def __init__(self, node: Node, peer: Peer, tensor: Memory | _Buffer, channel: int = 0) -> None:
        self._node, self._peer = node, peer
        self._memory = tensor if isinstance(tensor, Memory) else node.register(tensor)
        self._word = node.alloc(8)
        self._held = [self._word] if isinstance(tensor, Memory) else [self._memory, self._word]
        self._tag = _OUTLET | channel
        self._count = 0
        self._freed: Remote | None = None
        self._released = False
        size = len(self._memory).to_bytes(8, "little")
        for part in (size, self._memory.handle(), self._word.handle()):
            node.send(peer, _INLET | channel, part)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the next send has arrived."""
        self._node.wait(self._word, ">=", self._count + 1, self._peer, timeout)
        self._count += 1

    def notify(self) -> None:
        """Tells the sender that it may overwrite the tensor. Call this after every `wait`,
        the last one too."""
        if self._freed is None:
            handle = self._node.recv_bytes(self._peer, self._tag)[1]
            self._freed = self._peer.import_memory(handle)
        self._node.signal(self._freed, self._count)

    def close(self) -> None:
        """Frees the memory that this end has registered. The sender must have closed first. If
        this raises `InUse`, for instance because the sender uses the same node, call it again
        later."""
        if self._freed is not None and not self._released:
            self._freed.release()
            self._released = True
        while self._held:
            self._held[-1].free()
            self._held.pop()


class Outlet:
    """The sending end of a channel. Waits for the receiver's handle."""

    def __init__(
        self, node: Node, peer: Peer, channel: int = 0, timeout: float | None = None
    ) -> None:
        self._node, self._peer = node, peer
        tag = _INLET | channel
        parts = [node.recv_bytes(peer, tag, timeout=timeout)[1] for _ in range(3)]
        self.size = int.from_bytes(parts[0], "little")
        self._imports = [peer.import_memory(part) for part in parts[1:]]
        self._theirs, self._arrived = self._imports
        self._word = node.alloc(8)
        node.send(peer, _OUTLET | channel, self._word.handle())
        self._count = 0
        # Whether a write may be in flight without its signal.
        self._written = False

    def _room(self, data: Memory | Slice | _Buffer, timeout: float | None) -> None:
        size = len(data) if isinstance(data, Memory | Slice) else _size(data)
        if size > self.size:
            raise Misuse("range", f"data too long: {size} bytes; the tensor has {self.size}")
        self._node.wait(self._word, ">=", self._count, self._peer, timeout)

    def isend_direct(
        self, data: Memory | Slice | _Buffer, timeout: float | None = None
    ) -> Request:
        """Waits until the tensor may be overwritten, then writes and signals. The request
        completes when all data has arrived. Do not change the data before that."""
        self._room(data, timeout)
        if self._written:
            # The earlier write must not land after this one.
            self._node.fence(self._peer)
        self._written = True
        request = self._node.iput(data, self._theirs)
        self._node.signal(self._arrived, self._count + 1)
        self._written = False
        # Counts last: the receiver notifies only for sends that were signalled.
        self._count += 1
        return request

    def send_direct(self, data: Memory | Slice | _Buffer, timeout: float | None = None) -> None:
        """Like `isend_direct`, but waits until all data has arrived."""
        self.isend_direct(data, timeout).wait(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Waits for the receiver's last `notify`, then releases the receiver's memory. If the
        deadline expires, nothing is released, and `close` may be called again. If this raises
        `InUse`, for instance because the receiver uses the same node, call it again later."""
        # The receiver's last signal must arrive before its target is freed.
        self._node.wait(self._word, ">=", self._count, self._peer, timeout)
        self._node.quiet(self._peer)
        while self._imports:
            self._imports[-1].release()
            self._imports.pop()
        self._word.free()


def _size(data: _Buffer) -> int:
    try:
        return memoryview(data).nbytes  # type: ignore[arg-type]
    except (TypeError, ValueError):
        # A tensor with DLPack but without the buffer protocol, or an array of a type for which
        # NumPy has no format.
        size = getattr(data, "nbytes", None)
        if size is None:
            raise
        return int(size)
