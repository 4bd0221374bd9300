"""Waits of asyncio programs. A node has no descriptor to sleep on, so each awaits by looks: at every
turn of the loop for a while, then every millisecond. A look makes progress and does not wait."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from ._errors import Timeout
from ._native import Memory, Node, Peer, Request, Slice

T = TypeVar("T")

EAGER = 0.001
PAUSE = 0.001


async def _look(look: Callable[[], T | None], timeout: float) -> T:
    begun = time.monotonic()
    while (found := look()) is None:
        spent = time.monotonic() - begun
        if spent >= timeout:
            raise Timeout(f"nothing came within {timeout} seconds", "deadline")
        await asyncio.sleep(0 if spent < EAGER else PAUSE)
    return found


async def finished(request: Request) -> Any:
    """Awaits the end of a request, without a timeout: use `asyncio.wait_for`."""
    await _look(lambda: request.done() or None, float("inf"))
    return request.wait(0)


async def until(
    node: Node,
    at: Memory | Slice,
    compare: Literal["==", "!=", ">=", ">", "<=", "<"],
    value: int,
    peer: Peer | None = None,
    timeout: float | None = None,
) -> int:
    """`Node.until`."""
    limit = node.timeout if timeout is None else timeout
    return await _look(lambda: node.test(at, compare, value, peer), limit)
