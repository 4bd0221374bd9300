"""Put, get, signals and atomics between processes."""

import numpy
import pytest
from conftest import run

import fishplate


def swap_greetings(here):
    node, peer = here.node, here.peers[1 - here.rank]
    inbox = node.alloc(4096)
    theirs = peer.import_memory(here.job.exchange(inbox.handle()))
    node.put_signal(f"hello from {here.rank}".encode(), theirs.at(64), signal=theirs)
    assert node.wait(inbox, "==", 1, peer) == 1
    before = node.fetch_add(theirs.at(8), 5)
    return inbox.read(64, 12).decode(), before


def test_two_processes_put_and_signal(way):
    assert run(2, swap_greetings, way) == [("hello from 1", 0), ("hello from 0", 0)]


def move(here, size):
    """Rank 0 puts arrays of one size with each call, and reads them back."""
    node, peer = here.node, here.peers[1 - here.rank]
    inbox = node.alloc(size + 8)
    theirs = peer.import_memory(here.job.exchange(inbox.handle()))
    ours = node.alloc(size)
    if here.rank == 1:
        for turn in range(1, 5):
            node.wait(inbox.at(size), "==", turn, peer)
            seen = numpy.frombuffer(inbox, numpy.uint8, size)
            assert (seen == turn).all()
            here.job.barrier(node)
        return
    view = numpy.frombuffer(ours, numpy.uint8)
    for turn in range(1, 5):
        data = numpy.full(size, turn, numpy.uint8)
        if turn == 1:
            node.put_signal(data, theirs, theirs.at(size), turn)
        elif turn == 2:
            view[:] = turn
            node.put_signal(ours, theirs, theirs.at(size), turn)
        elif turn == 3:
            node.iput(data, theirs).wait()
            node.signal(theirs.at(size), turn)
        else:
            node.put(data.tobytes(), theirs)
            node.fence(peer)
            node.signal(theirs.at(size), turn)
        node.quiet(peer)
        here.job.barrier(node)
        # Gets write to memory of the node, to an array, and to an unaligned array.
        view[:] = 0
        node.get(ours, theirs)
        assert (view == turn).all()
        into = numpy.zeros(size + 1, numpy.uint8)
        node.get(into[:size], theirs)
        assert (into[:size] == turn).all() and into[size] == 0
        into[:] = 0
        node.get(into[1:], theirs)
        assert into[0] == 0 and (into[1:] == turn).all()


@pytest.mark.parametrize("size", [8, 4096, 1 << 20])
def test_arrays_move_in_all_ways(way, size):
    run(2, move, way, size)


def count(here, each):
    """All other ranks add `each` times to a counter of rank 0."""
    node, counter = here.node, here.node.alloc(64)
    handles = here.job.allgather(counter.handle())
    if here.rank == 0:
        here.job.barrier(node)
        return counter.load()
    theirs = here.peers[0].import_memory(handles[0])
    found = [node.fetch_add(theirs) for _ in range(each)]
    assert found == sorted(set(found))
    here.job.barrier(node)
    return node.fetch(theirs, "fetch")


@pytest.mark.parametrize("size", [2, 4])
def test_processes_count_together(way, size):
    assert run(size, count, way, 25) == [(size - 1) * 25] * size


def ring(here, rounds):
    """A token passes from rank to rank. Each rank adds its number to it."""
    node, size = here.node, here.job.size
    inbox = node.alloc(64)
    handles = here.job.allgather(inbox.handle())
    right, left = (here.rank + 1) % size, (here.rank - 1) % size
    theirs = here.peers[right].import_memory(handles[right])
    token = 0
    for turn in range(1, rounds + 1):
        if here.rank != 0 or turn > 1:
            node.wait(inbox, "==", turn if here.rank else turn - 1, here.peers[left])
            token = int.from_bytes(inbox.read(8, 8), "little")
        node.put_signal((token + here.rank).to_bytes(8, "little"), theirs.at(8), theirs, turn)
    if here.rank == 0:
        node.wait(inbox, "==", rounds, here.peers[left])
    return int.from_bytes(inbox.read(8, 8), "little")


def test_four_processes_in_a_ring(way):
    assert run(4, ring, way, 10)[0] == 60


def test_atomics_of_all_kinds_and_widths(own):
    node, memory, theirs = own.node, own.memory, own.theirs
    for width in [1, 2, 4, 8]:
        full = (1 << 8 * width) - 1
        memory.store(0)
        node.atomic(theirs, "set", 6, width=width)
        node.quiet()
        assert memory.load() == 6
        assert node.fetch(theirs, "add", full, width=width) == 6
        assert node.fetch(theirs, "fetch", width=width) == 5
        assert node.fetch(theirs, "or", 8, width=width) == 5
        assert node.fetch(theirs, "and", 12, width=width) == 13
        assert node.fetch(theirs, "xor", 5, width=width) == 12
        assert node.fetch(theirs, "swap", 7, width=width) == 9
        assert node.fetch(theirs, "compare_swap", 1, 8, width=width) == 7
        assert node.fetch(theirs, "compare_swap", 1, 7, width=width) == 7
        assert node.ifetch(theirs, "fetch", width=width).wait() == 1
        assert memory.load() == 1


def test_comparisons(own):
    own.memory.store(5)
    holds = {("==", 5), ("!=", 4), (">=", 5), (">", 4), ("<=", 5), ("<", 6)}
    for compare in ["==", "!=", ">=", ">", "<=", "<"]:
        for value in [4, 5, 6]:
            expected = eval(f"5 {compare} {value}")
            assert ((compare, value) not in holds) or expected
            assert own.node.test(own.memory, compare, value) == (5 if expected else None)
            if expected:
                assert own.node.wait(own.memory.at(0), compare, value) == 5
            else:
                with pytest.raises(fishplate.Timeout) as caught:
                    own.node.wait(own.memory, compare, value, timeout=0)
                assert caught.value.kind == "deadline"


def test_signals_add(own):
    for turn in range(1, 4):
        own.node.signal(own.theirs.at(16) + 8, 2, "add")
        own.node.wait(own.memory.at(24), "==", 2 * turn)
    own.node.put_signal(b"12345678", own.theirs, own.theirs.at(24), 1, op="add")
    assert own.node.wait(own.memory.at(24), ">=", 7) == 7
    assert own.memory.read(0, 8) == b"12345678"
