"""llama.cpp's tests: what they start is our server, with those of the options that it has.

Their requests name no model, or any, as llama.cpp has one and does not look: here the served one's
name is filled in. Paths without /v1 get it where llama.cpp has OpenAI's route under both.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from openai._base_client import BaseClient
from suite_server import serve
from suite_stubs import stub

stub("wget")

import utils  # noqa: E402

_V1 = ("/chat/completions", "/completions", "/models", "/responses", "/embeddings", "/messages")
_ANY = ("/tokenize", "/detokenize", "/v1/models")


def _start(self: Any, timeout_seconds: int = 0) -> None:
    flags = ["--served-model-name", self.model_alias, "--max-num-seqs", str(self.n_slots or 4)]
    if self.n_ctx:
        flags += ["--max-model-len", str(self.n_ctx // (self.n_slots or 1))]
    if self.api_key:
        flags += ["--api-key", self.api_key]
    address = urlsplit(serve(*flags))
    self.server_host, self.server_port = address.hostname, address.port


def _stop(self: Any) -> None:
    """It goes on for the next test that wants the same."""


def _make_url(self: Any, path: str, host: str | None = None) -> str:
    prefix = "/v1" if path.startswith(_V1) else ""
    return f"http://{host or self.server_host}:{self.server_port}{prefix}{path}"


def _with_model(ask: Any) -> Any:
    def asking(
        self: Any, method: str, path: str, data: Any = None, *more: Any, **named: Any
    ) -> Any:
        if isinstance(data, dict) and path not in _ANY:
            data = {**data, "model": self.model_alias}
        return ask(self, method, path, data, **named)

    return asking


def _role_first(ask: Any) -> Any:
    """Their reader wants no content beside the role; OpenAI sends an empty one, and so do we."""

    def asking(*given: Any, **named: Any) -> Iterator[Any]:
        for chunk in ask(*given, **named):
            for choice in chunk.get("choices") or ():
                if choice.get("delta", {}).get("role") and choice["delta"].get("content") == "":
                    choice["delta"]["content"] = None
            yield chunk

    return asking


def _served_name(self: BaseClient[Any, Any], options: Any, **more: Any) -> Any:
    if isinstance(options.json_data, dict) and "model" in options.json_data:
        name = utils.ServerPreset.tinyllama2().model_alias
        options.json_data = {**options.json_data, "model": name}
    return _build_request(self, options, **more)


_process = utils.ServerProcess
_process.start, _process.stop, _process.make_url = _start, _stop, _make_url
_process.make_request = _with_model(_process.make_request)
_process.make_stream_request = _role_first(_with_model(_process.make_stream_request))
utils.ServerPreset.load_all = staticmethod(lambda: None)
_build_request = BaseClient._build_request
BaseClient._build_request = _served_name
