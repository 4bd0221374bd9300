"""Tests `await` on requests and signals."""

import asyncio
import multiprocessing
import time

import numpy
import pytest
from conftest import SOON, run

import fishplate
from fishplate import _aio


def test_requests_are_awaited(own):
    async def main():
        into = numpy.zeros(1 << 16, numpy.uint8)
        receive = own.node.irecv(into, own.peer, 1)
        send = own.node.isend(own.peer, 1, numpy.full(1 << 16, 7, numpy.uint8))
        message, none = await asyncio.gather(receive, send)
        assert message.len == 1 << 16 and none is None and (into == 7).all()
        assert await own.node.ifetch(own.theirs, "add", 5) == 0
        assert await own.node.ifetch(own.theirs, "fetch") == 5
        await own.node.iput(b"12345678", own.theirs.at(8))
        assert own.memory.read(8, 8) == b"12345678"

    asyncio.run(main())


def test_other_tasks_run_while_a_signal_is_awaited(own):
    async def main():
        turns = 0

        async def others():
            nonlocal turns
            for _ in range(20):
                await asyncio.sleep(0.005)
                turns += 1
            own.node.signal(own.theirs, 3)

        other = asyncio.create_task(others())
        assert await own.node.until(own.memory, ">=", 2, own.peer) == 3
        await other
        assert turns == 20

    asyncio.run(main())


def test_an_await_sleeps(own):
    async def main():
        await own.node.until(own.memory, "==", 1, timeout=1.0)

    before = own.node.stats()["passes"]
    with pytest.raises(fishplate.Timeout):
        asyncio.run(main())
    assert own.node.stats()["passes"] - before < 500


@pytest.mark.parametrize("away", [False, True], ids=["task", "thread"])
def test_a_call_elsewhere_wakes_who_awaits_what_it_takes(own, away):
    async def main():
        waits = []
        for _ in range(20):
            receive = asyncio.ensure_future(own.node.irecv(bytearray(8), own.peer, 1))
            await asyncio.sleep(0.005)
            begun = time.monotonic()
            if away:
                await asyncio.to_thread(own.node.send, own.peer, 1, b"call")
            else:
                own.node.send(own.peer, 1, b"call")
            await receive
            waits.append(time.monotonic() - begun)
        # Without a wake-up by a call, a sleep lasts up to 20 ms.
        assert min(waits) < 0.005

    asyncio.run(main())


def test_many_await_at_once(own):
    async def main():
        into = [bytearray(8) for _ in range(10)]
        tasks = [asyncio.ensure_future(_one(own, tag, at)) for tag, at in enumerate(into)]
        await asyncio.sleep(0.01)
        tasks[7].cancel()
        for tag in reversed(range(10)):
            own.node.send(own.peer, tag, bytes([tag]) * 8)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ended[7], asyncio.CancelledError)
        assert all(into[tag] == bytes([tag]) * 8 for tag in range(10) if tag != 7)

    async def _one(own, tag, into):
        return await own.node.irecv(into, own.peer, tag)

    asyncio.run(main())


def test_who_awaits_is_told_that_the_node_was_closed(own):
    async def main():
        task = asyncio.create_task(own.node.until(own.memory, "==", 1))
        await asyncio.sleep(0.01)
        own.node.close()
        with pytest.raises(fishplate.Closed):
            await task

    asyncio.run(main())


def test_an_await_uses_little_of_the_processor(own):
    async def main():
        await own.node.until(own.memory, "==", 1, timeout=1.0)

    begun = time.process_time()
    with pytest.raises(fishplate.Timeout):
        asyncio.run(main())
    assert time.process_time() - begun < 0.5


def test_an_await_ends_at_its_deadline_or_with_its_task(own):
    async def main():
        receive = own.node.irecv(bytearray(8), own.peer, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive, 0.05)
        with pytest.raises(fishplate.Timeout):
            await own.node.until(own.memory, "==", 1, timeout=0.05)
        with pytest.raises(fishplate.Misuse):
            await own.node.until(own.memory.at(4), "==", 1)
        task = asyncio.create_task(own.node.until(own.memory, "==", 1))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        own.node.send(own.peer, 1, b"late")
        assert (await receive).len == 4

    asyncio.run(main())


def test_a_wait_cancelled_by_its_own_buffer_harms_no_other(own):
    """When the message has arrived, the node gives the array back, which cancels the task."""

    class Array(numpy.ndarray):
        def __del__(self):
            if getattr(self, "task", None):
                self.task.cancel()

    async def main():
        other = asyncio.ensure_future(own.node.until(own.memory, "==", 1))
        array = numpy.zeros(4096, numpy.uint8).view(Array)
        array.task = task = asyncio.ensure_future(own.node.irecv(array, own.peer, 7))
        del array
        await asyncio.sleep(0.02)
        own.node.isend(own.peer, 7, bytes(4096))
        with pytest.raises(asyncio.CancelledError):
            await task
        own.node.signal(own.theirs)
        assert await other == 1

    asyncio.run(main())


@pytest.mark.parametrize("steps", [1, 2, 50])
def test_waits_go_on_after_all_other_tasks_are_cancelled(own, steps):
    """The program also cancels the task that polls, once before its first step."""

    async def main():
        kept = asyncio.ensure_future(own.node.until(own.memory, "==", 2, timeout=20))
        task = asyncio.create_task(own.node.until(own.memory, "==", 1))
        for _ in range(steps):
            await asyncio.sleep(0)
        for other in asyncio.all_tasks() - {asyncio.current_task(), kept}:
            other.cancel()
        later = asyncio.ensure_future(own.node.until(own.memory, ">=", 2, timeout=20))
        with pytest.raises(asyncio.CancelledError):
            await task
        own.node.signal(own.theirs, 2)
        assert await asyncio.gather(kept, later) == [2, 2]
        own.node.signal(own.theirs, 3)
        assert await own.node.until(own.memory, "==", 3, timeout=20) == 3

    asyncio.run(main())
    assert not _aio._pumps


def test_a_loop_that_is_closed_with_its_tasks_keeps_no_node_open(own):
    for _ in range(2):
        loop = asyncio.new_event_loop()
        task = loop.create_task(own.node.until(own.memory, "==", 1))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        del task, loop

    async def main():
        asyncio.get_running_loop().call_later(0.05, own.node.signal, own.theirs)
        await own.node.until(own.memory, "==", 1)

    asyncio.run(main())
    assert not _aio._pumps


def talk(here):
    async def echo(turns):
        node, (peer,) = here.node, here.peers.values()
        into = bytearray(100_000)
        for turn in range(turns):
            if here.rank == 0:
                await node.isend(peer, turn, bytes([turn]) * 100_000)
            message = await node.irecv(into, peer, turn)
            assert message.len == 100_000 and into[-1] == turn
            if here.rank == 1:
                await node.isend(peer, turn, into)

    asyncio.run(echo(10))


def test_two_processes_await_each_other(way):
    run(2, talk, way)


def late(pipe):
    """Connects to the node of the other process a second after that node knows this one."""
    with fishplate.Node(fabric="off", timeout=SOON) as node:
        inbox = node.alloc(64)
        pipe.send((node.address, inbox.handle()))
        address = pipe.recv()
        time.sleep(1)
        peer = node.connect(address)
        for tag, message in enumerate([b"first", b"second", bytes(200_000)]):
            assert node.recv_bytes(peer, tag, max=200_000)[1] == message
        for message in b"abc":
            node.send(peer, 7, bytes([message]))
        node.wait(inbox, "==", 5, peer)
        pipe.recv()


@pytest.fixture(params=[False, True], ids=["shm", "worker"])
def unconnected(request):
    """A node, a peer that connects after a second, and the handle of memory there."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=late, args=(theirs,), daemon=True)
    process.start()
    with fishplate.Node(fabric="off", timeout=SOON, worker=request.param) as node:
        address, handle = ours.recv()
        ours.send(node.address)
        yield node, node.connect(address), handle
        ours.send(None)
    process.join(SOON)
    assert process.exitcode == 0


def test_the_loop_goes_on_while_a_peer_connects(unconnected):
    node, peer, handle = unconnected

    async def main():
        longest = turns = 0

        async def tick():
            nonlocal longest, turns
            while True:
                begun = time.monotonic()
                await asyncio.sleep(0.005)
                longest = max(longest, time.monotonic() - begun)
                turns += 1

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        begun = time.monotonic()
        into = [bytearray(1) for _ in range(4)]
        cancelled = node.irecv(into[3], peer, 7)
        receives = [node.irecv(into[0], peer, 7), node.irecv(into[1], None, 7)]
        sends = [node.isend(peer, 0, b"first"), node.isend(peer, 1, bytearray(b"second"))]
        sends.append(node.isend(peer, 2, bytearray(200_000)))
        assert cancelled.cancel() and cancelled.done()
        assert not any(request.done() for request in receives + sends)
        remote = await peer.until_imported(handle)
        assert time.monotonic() - begun > 0.5 and turns > 50
        await peer.until_connected()
        # A call after those that waited does not overtake them.
        receives.append(node.irecv(into[2], peer, 7))
        messages = await asyncio.gather(*receives, *sends)
        assert [bytes(buffer) for buffer in into] == [b"a", b"b", b"c", b"\0"]
        assert [message.len for message in messages[:3]] == [1, 1, 1]
        with pytest.raises(fishplate.Error, match="cancelled"):
            await cancelled
        node.signal(remote, 5)
        ticking.cancel()
        # The peer connects after a second. Other load may delay a turn.
        assert longest < 0.5

    asyncio.run(main())


def test_an_import_that_nobody_gets_is_released(two):
    """The task is cancelled after its import was made. The node has room for one import."""

    async def main(peer, handle):
        task = asyncio.ensure_future(peer.until_imported(handle, SOON))
        await asyncio.sleep(0.01)
        assert not task.done()
        two.b.connect(node.address)
        while not any(wait.done() for pump in _aio._pumps.values() for wait in pump.waiting):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (await peer.until_imported(handle, SOON)).release()

    with fishplate.Node(fabric="off", imports=1) as node:
        asyncio.run(main(node.connect(two.b.address), two.b.alloc(64).handle()))


def test_a_loop_is_told_of_a_peer_that_never_comes():
    async def main(node, peer):
        sent, received = node.isend(peer, 1, b"x"), node.irecv(bytearray(8), peer)
        for wait in [sent, received]:
            with pytest.raises(fishplate.NotConnected):
                await wait
        for wait in [peer.until_connected(0.1), peer.until_imported(b"", 0.1)]:
            with pytest.raises(fishplate.Timeout):
                await wait
        held = bytearray(100_000)
        kept = node.isend(peer, 1, held)
        node.quiet(peer)
        late = node.isend(peer, 1, held)
        node.close()
        for wait in [kept, late]:
            with pytest.raises(fishplate.Error):
                await wait
        held.clear()

    with fishplate.Node(fabric="off") as absent:
        node = fishplate.Node(fabric="off", connect_timeout=0.2)
        asyncio.run(main(node, node.connect(absent.address)))


def test_a_peer_that_never_comes_delays_no_other(two):
    async def main(node, peer, absent):
        back = two.b.connect(node.address)
        await peer.until_connected(SOON)
        into, any_into = bytearray(4), bytearray(3)
        begun = time.monotonic()
        stuck = [
            node.isend(absent, 1, b"x"),
            node.irecv(bytearray(8), absent, 5),
            # These wait, because earlier receives may match the same messages.
            node.irecv(bytearray(8), None, 5),
            node.irecv(bytearray(8), peer, 0x15, ignore=0x10),
        ]
        for _ in range(2):
            two.b.send(back, 2, b"any")
            two.b.send(back, 4, b"four")
            sent = node.isend(peer, 3, b"sent")
            received = [node.irecv(any_into, None, 2), node.irecv(into, peer, 4)]
            await asyncio.gather(sent, *received)
            assert (bytes(into), bytes(any_into)) == (b"four", b"any")
            assert two.b.recv_bytes(back, 3)[1] == b"sent"
            node.send(peer, 3, b"too")
            assert two.b.recv_bytes(back, 3)[1] == b"too"
            node.quiet(peer)
        assert time.monotonic() - begun < 5
        for wait in stuck:
            assert not wait.done()
            with pytest.raises(fishplate.NotConnected, match=f"peer {repr(absent)[16:-1]} "):
                wait.wait(0.05)

    with (
        fishplate.Node(fabric="off") as absent,
        fishplate.Node(fabric="off", connect_timeout=SOON) as node,
    ):
        asyncio.run(main(node, node.connect(two.b.address), node.connect(absent.address)))


def test_a_message_never_overtakes_one_that_waits_for_the_connection(unconnected):
    node, peer, handle = unconnected

    async def main():
        waits = [node.isend(peer, 0, b"first")]
        # Waits in this thread, because it has no awaitable form.
        node.send(peer, 1, b"second")
        assert waits[0].done()
        node.quiet(peer)
        waits.append(node.isend(peer, 2, bytes(200_000)))
        for _ in range(3):
            await node.irecv(bytearray(1), peer, 7)
        node.signal(await peer.until_imported(handle), 5)
        await asyncio.gather(*waits)

    asyncio.run(main())
