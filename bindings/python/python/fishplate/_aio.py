"""Waits of asyncio programs. For each node and event loop, one task (the pump) runs while
coroutines await that node. It makes progress and checks the conditions of all waiting coroutines.
At first it checks in every iteration of the loop. After a while it sleeps on the node's descriptor,
or on a timer if the node has none, for example because a worker makes its progress. If two loops
await the same node, one loop may sleep up to 20 ms too long."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Literal

from ._errors import Error, Timeout
from ._native import Memory, Node, Peer, Remote, Request, Slice, _Waker

EAGER = 0.001
PAUSE = 0.001

_pumps: dict[tuple[asyncio.AbstractEventLoop, int], "_Pump"] = {}


class _Pump:
    def __init__(self, loop: asyncio.AbstractEventLoop, waker: _Waker) -> None:
        self.loop = loop
        self.waker = waker
        self.waiting: dict[asyncio.Future[Any], Callable[[], Any]] = {}
        self.start()

    def start(self) -> None:
        self.task = self.loop.create_task(self.run())
        # Not a `finally` in `run`: a task that is cancelled before its first step runs no code.
        self.task.add_done_callback(self.ended)

    def ended(self, _: asyncio.Task[None]) -> None:
        """Starts again if coroutines still wait. The program may cancel the pump's task alone."""
        if any(not future.done() for future in self.waiting):
            self.start()
        else:
            del _pumps[self.loop, self.waker.key]

    async def run(self) -> None:
        try:
            eager = time.monotonic() + EAGER
            while self.waiting:
                if self.look()[0]:
                    eager = time.monotonic() + EAGER
                elif time.monotonic() >= eager:
                    await self.sleep()
                    continue
                await asyncio.sleep(0)
        except Exception as error:
            for future in self.waiting:
                if not future.done():
                    future.set_exception(error)

    def look(self) -> tuple[bool, int]:
        """Checks all waits. Returns whether a wait has ended, and the number of calls made to
        the node."""
        ended, calls = False, 0
        for future, look in list(self.waiting.items()):
            if future.done():
                continue
            calls += 1
            try:
                found = look()
            except Exception as error:
                # `look` may run code of the program, which may cancel this wait.
                if not future.done():
                    future.set_exception(error)
            else:
                if found is None:
                    continue
                if not future.done():
                    future.set_result(found)
            ended = True
        return ended, calls

    async def sleep(self) -> None:
        """Sleeps until there may be work."""
        fd = self.waker.fd
        if fd is None:
            await asyncio.sleep(PAUSE)
            return
        longest, calls = self.waker.arm()
        ended, looks = self.look()
        if ended or longest == 0 or not self.waker.sleep(calls + looks):
            await asyncio.sleep(0)
            return
        woken = self.loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        self.loop.add_reader(fd, wake)
        timer = self.loop.call_later(longest, wake)
        try:
            await woken
        finally:
            timer.cancel()
            self.loop.remove_reader(fd)


async def _wait(waker: _Waker, look: Callable[[], Any], timeout: float | None) -> Any:
    if (found := look()) is not None:
        return found
    loop = asyncio.get_running_loop()
    pump = _pumps.get((loop, waker.key))
    if pump is None:
        # Tasks of a closed loop never end, and their pumps would keep nodes open.
        for closed in [key for key in list(_pumps) if key[0].is_closed()]:
            _pumps.pop(closed, None)
        pump = _pumps[loop, waker.key] = _Pump(loop, waker)
    future = loop.create_future()
    pump.waiting[future] = look
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await future
    except TimeoutError:
        if not limit.expired():
            raise
        raise Timeout(
            f"the wait timed out after {timeout} seconds; wait again", "deadline"
        ) from None
    finally:
        del pump.waiting[future]


async def finished(request: Request) -> Any:
    """Awaits the completion of a request. Has no timeout; use `asyncio.wait_for`."""
    await _wait(request._waker(), lambda: request.done() or None, None)
    return request.wait(0)


async def until(
    node: Node,
    at: Memory | Slice,
    compare: Literal["==", "!=", ">=", ">", "<=", "<"],
    value: int,
    peer: Peer | None = None,
    timeout: float | None = None,
) -> int:
    """Implements `Node.until`."""
    limit = node.timeout if timeout is None else timeout
    found: int = await _wait(node._waker(), lambda: node.test(at, compare, value, peer), limit)
    return found


async def connected(peer: Peer, timeout: float) -> None:
    """Implements `Peer.until_connected`."""
    await _wait(peer._waker(), lambda: peer.connected() or None, timeout)


async def imported(peer: Peer, handle: bytes, timeout: float) -> Remote:
    """Implements `Peer.until_imported`."""
    made: list[Remote] = []

    def look() -> Remote | None:
        remote = peer._try_import(handle)
        if remote is not None:
            made.append(remote)
        return remote

    try:
        remote: Remote = await _wait(peer._waker(), look, timeout)
        return remote
    except BaseException:
        # The wait may end after the import was made, and before the program gets it.
        for lost in made:
            with contextlib.suppress(Error):
                lost.release()
        raise
