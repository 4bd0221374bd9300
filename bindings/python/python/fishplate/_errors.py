"""What fishplate raises. `kind` tells errors of one class apart; the text says what to do."""


class Error(Exception):
    """An error of fishplate, and the base of the others."""

    kind: str

    def __init__(self, text: str, kind: str = "failed") -> None:
        super().__init__(text)
        self.kind = kind

    def __reduce__(self) -> tuple[type["Error"], tuple[str, str]]:
        return type(self), (str(self), self.kind)


class Timeout(Error, TimeoutError):
    """The deadline expired. Nothing is lost: wait again, or give the peer up."""


class PeerFailed(Error, ConnectionError):
    """The peer is gone. `kind`: "closed" in good order, "died", "failed", or "unknown" where
    something may still land."""


class NotConnected(Error, ConnectionError):
    """The other process has not connected to this node's address in time."""


class Full(Error):
    """No room. `kind`: "again" for operations, after the patience; "limit" for a table, whose
    size is an argument of `Node`."""


class InUse(Error):
    """Operations, receives or imports still use the memory."""


class Closed(Error):
    """The node takes no more calls. `kind`: "closed", "forked" in a child of its process, or
    "broken" by a defect."""


class Misuse(Error, ValueError):
    """A wrong argument, or an object that is freed or of another node."""
