"""llama.cpp's tests: what they start is our server, with those of the options that it has.

Their requests name no model, or any, as llama.cpp has one and does not look.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from suite_server import serve
from suite_stubs import stub

stub("wget")

import utils  # noqa: E402


def _start(self: Any, timeout_seconds: int = 0) -> None:
    flags = ["--served-model-name", self.model_alias, "--any-model-name"]
    # Theirs never thinks; whether ours does depends on the seed.
    flags += ["--max-num-seqs", str(self.n_slots or 4), "--reasoning-parser", "none"]
    if self.n_ctx:
        flags += ["--max-model-len", str(self.n_ctx // (self.n_slots or 1))]
    if self.api_key:
        flags += ["--api-key", self.api_key]
    address = urlsplit(serve(*flags))
    self.server_host, self.server_port = address.hostname, address.port


def _stop(self: Any) -> None:
    """It goes on for the next test that wants the same."""


def _role_first(ask: Any) -> Any:
    """Their reader wants no content beside the role; OpenAI sends an empty one, and so do we."""

    def asking(*given: Any, **named: Any) -> Iterator[Any]:
        for chunk in ask(*given, **named):
            for choice in chunk.get("choices") or ():
                if choice.get("delta", {}).get("role") and choice["delta"].get("content") == "":
                    choice["delta"]["content"] = None
            yield chunk

    return asking


_process = utils.ServerProcess
_process.start, _process.stop = _start, _stop
_process.make_stream_request = _role_first(_process.make_stream_request)
utils.ServerPreset.load_all = staticmethod(lambda: None)
