"""Two processes: each writes to the other, then signals. Run it twice, on one host or on two:
`python put_signal.py HOST:PORT`, where HOST runs the process that is started first."""

import sys

import fishplate


def main() -> None:
    place = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7117"
    job = fishplate.Job(place, 2)
    with fishplate.Node() as node:
        peer = node.connect(job.exchange(node.address))
        inbox = node.alloc(4096)
        theirs = peer.import_memory(job.exchange(inbox.handle()))

        hello = f"hello from rank {job.rank}".encode()
        node.put_signal(hello, theirs.at(64), signal=theirs.at(0))
        node.wait(inbox.at(0), "==", 1, peer)
        before = node.fetch_add(theirs.at(8), 5)

        said = inbox.read(64, len(hello)).decode()
        print(f"rank {job.rank} read {said!r}; the counter was {before}")
        job.barrier(node)


if __name__ == "__main__":
    main()
