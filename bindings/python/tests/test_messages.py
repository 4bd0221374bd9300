"""Tagged messages between processes, and the lifetime of their buffers."""

import threading

import numpy
import pytest
from conftest import run

import fishplate

SIZES = [0, 1, 8, 4096, 65536, 1 << 20, (1 << 20) + 3]


def talk(here):
    """Rank 0 sends messages of several sizes with each call; rank 1 receives them with each
    call."""
    node, peer = here.node, here.peers[1 - here.rank]
    rng = numpy.random.default_rng(7)
    own = node.alloc(SIZES[-1] + 8)
    for size in SIZES:
        data = rng.integers(0, 256, size, numpy.uint8)
        if here.rank == 0:
            node.send(peer, 1, data)
            node.send(peer, 2, data.tobytes())
            requests = [node.isend(peer, 3, data), node.isend(peer, 4, data.tobytes())]
            requests.append(
                node.isend(peer, 5, numpy.concatenate([[0], data]).astype(numpy.uint8)[1:])
            )
            own.write(data)
            requests.append(node.isend(peer, 6, own.at(0, size)))
            for request in requests:
                assert request.wait() is None
            assert all(request.done() for request in requests)
            node.quiet(peer)
        else:
            into = numpy.zeros(size + 9, numpy.uint8)
            message = node.recv(into, peer, 1)
            assert (message.len, message.tag, message.source) == (size, 1, peer)
            assert (into[:size] == data).all() and not into[size:].any()
            message, got = node.recv_bytes(None, 2, max=size)
            assert got == data.tobytes()
            into[:] = 0
            assert node.irecv(into, peer, 3).wait().len == size
            assert (into[:size] == data).all() and not into[size:].any()
            into[:] = 0
            assert node.irecv(into[1:], peer, 4).wait().len == size
            assert (into[1:-8] == data).all() and not into[-8:].any() and into[0] == 0
            assert node.irecv(own, None, 5).wait().len == size
            assert own.read(0, size) == data.tobytes()
            assert node.irecv(own[8 : size + 8], peer, 6).wait().len == size
            assert own.read(8, size) == data.tobytes()


def test_messages_of_all_sizes_in_all_ways(way):
    run(2, talk, way)


def exchange(here):
    """Every rank sends to every other rank. The tag names the sender."""
    node, size = here.node, here.job.size
    into = {rank: numpy.zeros(50_000, numpy.uint64) for rank in here.peers}
    receives = {rank: node.irecv(into[rank], peer, rank << 80) for rank, peer in here.peers.items()}
    ours = numpy.full(50_000, here.rank, numpy.uint64)
    sends = [node.isend(peer, here.rank << 80, ours) for peer in here.peers.values()]
    for rank, receive in receives.items():
        message = receive.wait()
        assert message.source == here.peers[rank] and message.tag == rank << 80
        assert (into[rank] == rank).all()
    for send in sends:
        send.wait()
    return size


@pytest.mark.parametrize("size", [2, 4])
def test_all_to_all(way, size):
    assert run(size, exchange, way) == [size] * size


def test_matching_by_source_tag_and_mask(own):
    node, peer = own.node, own.peer
    for tag in [0x11, 0x21, 0x22]:
        node.send(peer, tag, bytes([tag]))
    assert node.recv_bytes(peer, 0x02, ignore=0xF0)[1] == b"\x22"
    assert node.recv_bytes(None, 0x20, ignore=0x0F)[1] == b"\x21"
    assert node.recv_bytes(ignore=2**96 - 1)[0].tag == 0x11
    assert node.probe(ignore=2**96 - 1) is None
    node.send(peer, 2**96 - 1, b"wide")
    found = node.probe(peer, 2**96 - 1)
    assert (found.tag, found.len, found.source) == (2**96 - 1, 4, peer)
    assert node.recv_bytes(tag=2**96 - 1)[1] == b"wide"


def test_a_message_that_is_too_long_is_cut_and_says_so(own):
    own.node.send(own.peer, 1, b"0123456789")
    with pytest.raises(fishplate.Error) as caught:
        own.node.recv(bytearray(4), tag=1)
    assert caught.value.kind == "truncated"
    for into in [bytearray(8), memoryview(bytearray(16))[1:9]]:
        own.node.send(own.peer, 1, b"0123456789")
        with pytest.raises(fishplate.Error) as caught:
            own.node.irecv(into, tag=1).wait()
        assert caught.value.kind == "truncated" and "10 bytes" in str(caught.value)
        assert bytes(into) == b"01234567"


def test_receives_are_cancelled(own):
    into = bytearray(64)
    first, second = (own.node.irecv(into, own.peer, tag) for tag in (1, 2))
    assert not first.done() and first.cancel() and first.done() and not first.cancel()
    with pytest.raises(fishplate.Error) as caught:
        first.wait()
    assert caught.value.kind == "cancelled"
    own.node.send(own.peer, 2, b"second")
    assert second.wait().len == 6 and not second.cancel()
    assert into[:6] == b"second"
    into.clear()
    long = numpy.ones(1 << 20, numpy.uint8)
    send = own.node.isend(own.peer, 3, long)
    with pytest.raises(fishplate.Misuse):
        send.cancel()
    assert own.node.recv_bytes(tag=3, max=1 << 20)[1] == long.tobytes()
    send.wait()


def test_a_wait_for_a_message_ends_at_its_deadline(own):
    with pytest.raises(TimeoutError):
        own.node.recv_bytes(tag=9, timeout=0.05)
    request = own.node.irecv(bytearray(8), tag=9)
    for timeout in [0, 0.05]:
        with pytest.raises(fishplate.Timeout):
            request.wait(timeout)
    own.node.send(own.peer, 9, b"late")
    assert request.wait().len == 4


def test_requests_that_nobody_keeps_end_and_give_room(own):
    """Starts more requests than the tables hold at once."""
    data = numpy.ones(1 << 16, numpy.uint8)
    for turn in range(300):
        own.node.isend(own.peer, 1, data)
        own.node.recv_bytes(tag=1)
        own.node.iput(data[:1024], own.theirs)
        own.node.iget(bytearray(1024), own.theirs)
        own.node.ifetch(own.theirs, "fetch")
    own.node.poll()
    handed = [own.node.alloc(8) for _ in range(40)]
    assert len(handed) == 40
    data.resize(10, refcheck=False)


def test_more_sends_than_regions_wait_for_room(two):
    """Each long isend takes a region. If none is free, it waits until the peer receives."""
    data = numpy.ones(1 << 17, numpy.uint8)
    into = [numpy.zeros(1 << 17, numpy.uint8) for _ in range(60)]

    def receive():
        for place in into:
            assert two.b.recv(place, two.at_b, 1).len == place.size

    receiver = threading.Thread(target=receive)
    receiver.start()
    sends = [two.a.isend(two.at_a, 1, data) for _ in into]
    for request in sends:
        request.wait()
    receiver.join()
    assert all(place.all() for place in into)


def test_without_patience_a_full_table_says_so_and_what_to_raise():
    with fishplate.Node(fabric="off", regions=4, patience=0.0) as node:
        peer = node.connect(node.address)
        data = numpy.ones(1 << 17, numpy.uint8)
        sends = [node.isend(peer, 1, data) for _ in range(4)]
        with pytest.raises(fishplate.Full) as caught:
            node.isend(peer, 1, data)
        assert caught.value.kind == "limit" and "`regions`" in str(caught.value)
        into = bytearray(1 << 17)
        with pytest.raises(fishplate.Full):
            node.irecv(into, peer, 1)
        into.clear()
        # A receive needs a region too. None is free, so the messages stay unreceived.
        del sends
        peer.disconnect()
