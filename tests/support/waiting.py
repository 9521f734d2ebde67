"""Waiting for a state instead of a time, so that tests pass on a stalling machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

LIMIT_S = 180.0  # of any wait that must end: no test measures it


async def until(
    condition: Callable[[], Any], what: str, *, limit_s: float = LIMIT_S, every_s: float = 0.02
) -> Any:
    """Wait until `condition`, a function or a coroutine function, is true; return its result.

    Fails with the message `what` after `limit_s`.
    """
    try:
        async with asyncio.timeout(limit_s):
            while True:
                answer = condition()
                if isinstance(answer, Awaitable):
                    answer = await answer
                if answer:
                    return answer
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise AssertionError(what) from None
