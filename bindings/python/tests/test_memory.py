"""The buffer protocol in both directions, and the lifetime of the bytes."""

import array
import ctypes
import gc
import mmap
import threading
import time

import numpy
import pytest
from conftest import SOON, run

import fishplate


def test_arrays_over_memory_copy_nothing(own):
    words = numpy.frombuffer(own.memory, numpy.uint64)
    assert words.size == 512 and not words.any()
    own.node.put_signal(b"\x07" + bytes(7), own.theirs.at(16), own.theirs)
    own.node.wait(own.memory, "==", 1)
    assert list(words[:3]) == [1, 0, 7]
    words[3] = 9
    assert own.memory.load(24) == 9
    part = numpy.frombuffer(own.memory[16:32], numpy.uint64)
    assert list(part) == [7, 9]
    assert own.memory.at(16).__len__() == 4080 and len(own.memory.at(16, 8)) == 8
    assert bytes(own.memory[16:17]) == b"\x07"
    assert memoryview(own.memory).nbytes == 4096 and not memoryview(own.memory).readonly


def test_arrays_outlive_memory_and_node():
    node = fishplate.Node(fabric="off")
    memory = node.alloc(4096)
    kept = numpy.frombuffer(memory, numpy.uint8)
    memory.write(b"abc")
    memory.free()
    with pytest.raises(BufferError):
        memoryview(memory)
    assert bytes(kept[:3]) == b"abc"
    other = node.alloc(4096)
    other.write(b"def")
    late = numpy.frombuffer(other, numpy.uint8)
    node.close()
    del node, memory, other
    gc.collect()
    late[3] = kept[0] = 1
    assert bytes(late[:4]) == b"def\x01" and kept[0] == 1


def lend(here):
    """Rank 1 registers an array; rank 0 writes and reads that array."""
    node, peer = here.node, here.peers[1 - here.rank]
    words = numpy.zeros(1024, numpy.uint64)
    lent = node.register(words)
    theirs = peer.import_memory(here.job.exchange(lent.handle()))
    if here.rank == 0:
        node.put_signal(numpy.arange(1, 101, dtype=numpy.uint64), theirs.at(64), theirs)
        node.quiet(peer)
        node.get(words, theirs)
        assert words[8:108].sum() == 5050
    else:
        node.wait(lent, "==", 1, peer)
        assert words[0] == 1 and words[8:108].sum() == 5050
    here.job.barrier(node)
    theirs.release()
    here.job.barrier(node)
    lent.free()


def test_an_array_that_is_lent_is_written_by_the_peer(way):
    run(2, lend, way)


def test_a_registered_buffer_cannot_be_resized_until_it_is_freed(node):
    buffer = bytearray(4096)
    with node.register(buffer) as memory:
        with pytest.raises(BufferError):
            buffer.extend(b"more")
        del memory
    buffer.extend(b"more")
    memory = node.register(buffer)
    del memory
    gc.collect()
    with pytest.raises(BufferError):
        buffer.clear()
    node.close()
    buffer.clear()


def test_a_buffer_whose_handle_was_given_out_stays_until_the_node_is_closed(node):
    buffer = bytearray(4096)
    memory = node.register(buffer)
    memory.handle()
    memory.free()
    del memory
    with pytest.raises(BufferError):
        buffer.clear()
    node.close()
    buffer.clear()


def test_a_buffer_in_flight_cannot_be_resized(own):
    buffer = bytearray(1 << 16)
    request = own.node.irecv(buffer, own.peer, 1)
    with pytest.raises(BufferError):
        buffer.clear()
    del request
    gc.collect()
    with pytest.raises(BufferError):
        buffer.clear()
    own.node.send(own.peer, 1, b"x" * 100)
    for _ in range(100):
        own.node.poll()
    assert buffer[:100] == b"x" * 100
    buffer.clear()


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(b"12345678"),
        lambda: b"12345678",
        lambda: memoryview(b"0123456789")[1:9],
        lambda: array.array("B", b"12345678"),
        lambda: numpy.frombuffer(b"12345678", numpy.float64),
        lambda: numpy.frombuffer(b"12345678", "S4").reshape(2, 1),
        lambda: (ctypes.c_char * 8)(*b"12345678"),
    ],
    ids=["bytearray", "bytes", "memoryview", "array", "float64", "strings", "ctypes"],
)
def test_any_contiguous_buffer_is_put_and_sent(own, make):
    own.node.put(make(), own.theirs.at(8))
    own.node.quiet()
    assert own.memory.read(8, 8) == b"12345678"
    own.memory.write(bytes(8), 8)
    own.node.iput(make(), own.theirs.at(8)).wait()
    assert own.memory.read(8, 8) == b"12345678"
    own.node.send(own.peer, 1, make())
    own.node.isend(own.peer, 1, make()).wait()
    assert [own.node.recv_bytes(tag=1)[1] for _ in range(2)] == [b"12345678"] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: numpy.array([None] * 8),
        lambda: memoryview(numpy.array([None] * 8)),
        lambda: numpy.zeros(4, [("n", "i8"), ("object", "O")]),
        lambda: numpy.zeros(4, [("time", "M8[s]"), ("object", "O")]),
        lambda: (ctypes.py_object * 8)(*[None] * 8),
    ],
    ids=["objects", "memoryview", "fields", "fields without a format", "ctypes"],
)
def test_references_to_objects_are_refused(own, make):
    """A peer's bytes in their place would crash the interpreter."""
    for call in [
        lambda buffer: own.node.get(buffer, own.theirs),
        lambda buffer: own.node.put(buffer, own.theirs),
        lambda buffer: own.node.irecv(buffer),
        own.node.register,
        own.memory.write,
    ]:
        with pytest.raises(BufferError, match="references to Python objects"):
            call(make())


def test_numbers_of_any_type_are_buffers(own):
    fields = [[("O", "i4"), ("time", "m8[s]")], [("O", "i4"), ("n", "i8")]]
    for kind in ["M8[s]", "f2", "c16", "U4", "V5", "?", *fields]:
        own.node.get(numpy.zeros(16, kind), own.theirs)
        own.node.put(numpy.zeros(16, kind), own.theirs)


def test_buffers_of_maps_are_received_into(own):
    with mmap.mmap(-1, 4096) as place:
        own.node.send(own.peer, 3, b"mapped")
        assert own.node.recv(place, tag=3).len == 6
        assert place[:6] == b"mapped"
        into = own.node.irecv(place, tag=3)
        with pytest.raises(BufferError):
            place.close()
        own.node.send(own.peer, 3, b"again")
        into.wait()
        assert place[:5] == b"again"


def test_memory_in_use_is_not_freed(own):
    request = own.node.irecv(own.memory, tag=1)
    with pytest.raises(fishplate.InUse) as caught:
        own.memory.free()
    assert caught.value.kind == "in_use"
    assert request.cancel()
    own.theirs.release()
    own.memory.free()
    with pytest.raises(fishplate.Misuse):
        own.memory.free()
    assert "freed" in repr(own.memory) and "released" in repr(own.theirs)


def test_threads_that_free_memory_in_use_leave_it_as_it_is(own):
    request, stop = own.node.irecv(own.memory, tag=1), threading.Event()
    word = own.node.alloc(8)

    def hold():
        """Keeps the node busy, so that calls of `free` overlap."""
        while not stop.is_set():
            with pytest.raises(fishplate.Timeout):
                own.node.wait(word, "==", 1, timeout=0.01)

    def free():
        for _ in range(300):
            with pytest.raises(fishplate.InUse):
                own.memory.free()

    threads = [threading.Thread(target=target) for target in (hold, free, free, free)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert "freed" not in repr(own.memory) and len(numpy.frombuffer(own.memory, "u1")) == 4096
    assert request.cancel()


def test_an_import_of_freed_memory_times_out_and_lets_threads_run():
    node = fishplate.Node(fabric="off", connect_timeout=0.5)
    owner = fishplate.Node(fabric="off", worker=True)
    peer, _ = node.connect(owner.address), owner.connect(node.address)
    memory = owner.alloc(64)
    handle = memory.handle()
    memory.free()
    deadline = time.monotonic() + SOON
    while not peer.connected():
        assert time.monotonic() < deadline
    turns, stop = [], threading.Event()

    def count():
        while not stop.wait(0.001):
            turns.append(1)

    thread = threading.Thread(target=count)
    thread.start()
    begun = time.monotonic()
    try:
        with pytest.raises(fishplate.Timeout, match="has freed it"):
            peer.import_memory(handle)
    finally:
        stop.set()
        thread.join()
    assert 0.5 <= time.monotonic() - begun < 4 and len(turns) > 10


def test_words(node):
    memory = node.alloc(64)
    memory.store(2**64 - 1, 8)
    assert memory.load(8) == 2**64 - 1 and memory.load() == 0
    assert memory.read(8, 8) == b"\xff" * 8 and memory.read(60) == bytes(4)
    memory.write(numpy.arange(8, dtype=numpy.uint64))
    assert memory.load(56) == 7 and len(memory) == 64 and len(memory.read()) == 64
