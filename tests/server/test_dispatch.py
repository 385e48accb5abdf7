"""What an inbox promises its reader."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.dispatch import Dispatcher
from tests.server.fake_engine import FakeEngine, endless, out


@pytest.mark.parametrize("ticks", range(4))
def test_a_reader_cancelled_as_something_arrives_is_cancelled(ticks: int) -> None:
    async def main() -> None:
        request = Request("a", (1,), SamplingParams(max_tokens=8))
        inbox = Dispatcher(FakeEngine(endless(40))).open([request])
        reader = asyncio.ensure_future(inbox.take(10))
        await asyncio.sleep(0)
        inbox.put(0.0, dataclasses.replace(out(40), request_id="a"))
        for _ in range(ticks):
            await asyncio.sleep(0)
        # cancel() tells whether it came in time; if it did, it must not be forgotten.
        if reader.cancel():
            with pytest.raises(asyncio.CancelledError):
                await reader
        else:
            assert reader.result()

    asyncio.run(main())
