"""Put, get, put-signal, atomics and tagged messages to other processes, in order, over shared
memory on one host and over libfabric between hosts. See docs/python.md of the repository.

Two processes write to each other, then signal:

    import fishplate

    job = fishplate.Job("127.0.0.1:7117", 2)
    with fishplate.Node() as node:
        peer = node.connect(job.exchange(node.address))
        inbox = node.alloc(4096)
        theirs = peer.import_memory(job.exchange(inbox.handle()))
        node.put_signal(b"hello", theirs.at(64), signal=theirs.at(0))
        node.wait(inbox, "==", 1, peer)
        print(inbox.read(64, 5))
        job.barrier(node)
"""

from ._errors import Closed, Error, Full, InUse, Misuse, NotConnected, PeerFailed, Timeout
from ._native import (
    ADDRESS_MAX,
    Memory,
    Message,
    Node,
    Peer,
    Place,
    Remote,
    Job,
    Request,
    Slice,
    __version__,
)

__all__ = [
    "ADDRESS_MAX",
    "Closed",
    "Error",
    "Full",
    "InUse",
    "Memory",
    "Message",
    "Misuse",
    "Node",
    "NotConnected",
    "Peer",
    "PeerFailed",
    "Place",
    "Remote",
    "Job",
    "Request",
    "Slice",
    "Timeout",
    "__version__",
]
