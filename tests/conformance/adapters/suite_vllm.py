"""vLLM's tests against our server, which serves the bundled model under the name they ask for."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import anthropic
import openai
from suite_server import serve
from suite_stubs import stub
from transformers import AutoTokenizer

import mlx_mtp

stub("vllm", "torch", "pybase64")
_KEY = "none"
_NAME = "--served-model-name"
_LENGTH = "--max-model-len"
_OURS = (_NAME, _LENGTH)


class RemoteOpenAIServer:
    """The part of vLLM's class of this name that the tests use; it shares two flags with us."""

    DUMMY_API_KEY = _KEY

    def __init__(self, model: str, vllm_serve_args: Any = (), **_: Any) -> None:
        given = list(vllm_serve_args)
        # Some requests set no limit, as a larger model would end its answer by itself.
        flags = {_NAME: model, _LENGTH: "2048"}
        flags |= {flag: given[given.index(flag) + 1] for flag in _OURS if flag in given}
        self._url = serve(*(word for pair in flags.items() for word in pair))

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def url_root(self) -> str:
        return self._url

    def url_for(self, *parts: str) -> str:
        return "/".join([self._url, *parts])

    def get_client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._fields("/v1", more))

    def get_async_client(self, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._fields("/v1", more))

    def get_client_anthropic(self, **more: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._fields("", more))

    def get_async_client_anthropic(self, **more: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._fields("", more))

    def _fields(self, path: str, more: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self._url + path, "api_key": _KEY, "max_retries": 0, **more}


def _tokenizer(*_: Any, **__: Any) -> Any:
    return AutoTokenizer.from_pretrained(f"{mlx_mtp.__path__[0]}/demo")


_utils = ModuleType("tests.utils")
_utils.RemoteOpenAIServer = RemoteOpenAIServer
_utils.ROCM_EXTRA_ARGS = []
sys.modules["tests.utils"] = _utils
_tokenizers = ModuleType("vllm.tokenizers")
_tokenizers.get_tokenizer = _tokenizer
sys.modules["vllm.tokenizers"] = _tokenizers
