"""llama.cpp's tests, which start our server with the options that it supports.

Their requests name no model or any model, as llama.cpp serves one model and ignores the name.
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
    # llama.cpp's model never thinks in these tests; ours may think, depending on the seed.
    flags += ["--max-num-seqs", str(self.n_slots or 4), "--reasoning-parser", "none"]
    if self.n_ctx:
        flags += ["--max-model-len", str(self.n_ctx // (self.n_slots or 1))]
    if self.api_key:
        flags += ["--api-key", self.api_key]
    address = urlsplit(serve(*flags))
    self.server_host, self.server_port = address.hostname, address.port


def _stop(self: Any) -> None:
    """Leave the server running for the next test with the same flags."""


def _role_first(ask: Any) -> Any:
    """Their reader expects null content beside the role; OpenAI and we send an empty string."""

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
