"""The exceptions of fishplate. `kind` distinguishes errors of one class. Most messages say
what to do."""


class Error(Exception):
    """The base class of all exceptions of fishplate."""

    kind: str

    def __init__(self, text: str, kind: str = "failed") -> None:
        super().__init__(text)
        self.kind = kind

    def __reduce__(self) -> tuple[type["Error"], tuple[str, str]]:
        return type(self), (str(self), self.kind)


class Timeout(Error, TimeoutError):
    """The deadline expired. Operations in flight continue: wait again, or disconnect the peer.
    After a timeout of `fetch` the atomic may still be executed, but its result is lost."""


class PeerFailed(Error, ConnectionError):
    """The peer is gone. `kind` is "closed" (it closed its node), "died", "failed", or "unknown" if
    operations may still land."""


class NotConnected(Error, ConnectionError):
    """The peer did not connect to this node in time."""


class Full(Error):
    """A queue or a table is full. `kind` is "again" if an operation found no room within its
    patience, or "limit" if a table is full; most tables have an argument of `Node` that sets
    their size."""


class InUse(Error):
    """Operations, receives or imports still use the memory."""


class Closed(Error):
    """The node accepts no more calls. `kind` is "closed", "forked" in a forked child, or "broken"
    after an internal error."""


class Misuse(Error, ValueError):
    """A wrong argument, or an object that was freed or belongs to another node."""
