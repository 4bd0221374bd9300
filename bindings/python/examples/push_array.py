"""Rank 0 pushes numpy arrays into memory of rank 1, which works on them in place. Run it twice:
`python push_array.py HOST:PORT`. With torch: `torch.frombuffer(slot, dtype=torch.float32)`."""

import sys

import numpy

import fishplate

COUNT = 250_000
SLOTS = 2


def main() -> None:
    place = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7118"
    job = fishplate.Job(place, 2)
    with fishplate.Node() as node:
        peer = node.connect(job.exchange(node.address))
        # One word for "arrived", one for "free", then the slots.
        memory = node.alloc(64 + SLOTS * 4 * COUNT)
        theirs = peer.import_memory(job.exchange(memory.handle()))
        slots = [memory.at(64 + slot * 4 * COUNT, 4 * COUNT) for slot in range(SLOTS)]
        arrays = [numpy.frombuffer(slot, numpy.float32) for slot in slots]

        for turn in range(20):
            slot = turn % SLOTS
            if job.rank == 0:
                node.wait(memory.at(8), ">=", max(0, turn + 1 - SLOTS), peer)
                arrays[slot][:] = turn
                to = theirs.at(64 + slot * 4 * COUNT)
                node.put_signal(slots[slot], to, signal=theirs.at(0), value=turn + 1)
                node.quiet(peer)
            else:
                node.wait(memory.at(0), ">=", turn + 1, peer)
                assert arrays[slot].mean() == turn
                node.signal(theirs.at(8), turn + 1)
        print(f"rank {job.rank}: {20 * 4 * COUNT >> 20} MiB, the last is {arrays[1][-1]}")
        job.barrier(node)


if __name__ == "__main__":
    main()
