"""Waiting, but not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


async def within(seconds: float, work: Awaitable[Result], error: Exception) -> Result:
    """What `work` gives, if it does so in time.

    Not by asyncio.wait_for: before Python 3.12 it swallows a cancellation that comes with the
    result.

    Raises:
        Exception: `error`, when the time is over; `work` has been cancelled.
    """
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            return await work
    except TimeoutError:
        raise error from None
