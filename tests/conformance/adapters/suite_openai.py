"""openai-python's tests; stores the one chat completion that they expect to exist.

They name it "completion_id", but the server chooses the ids. So each request with this name first
stores a completion through the API, and is then sent with the id of that completion.
"""

import json
import os
import urllib.request
from typing import Any

from openai._base_client import BaseClient
from suite_server import serve

_MODEL = os.environ["SUITE_MODEL"]
_URL = serve("--served-model-name", _MODEL) + "/v1"
os.environ["TEST_API_BASE_URL"] = _URL
_FIXED = "/chat/completions/completion_id"
_prepare_url = BaseClient._prepare_url


def _stored() -> str:
    # The SDK's type of a stored message allows only this role.
    messages = [{"role": "assistant", "content": "Hello"}]
    body = {"model": _MODEL, "messages": messages, "store": True, "max_tokens": 4}
    request = urllib.request.Request(
        f"{_URL}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["id"]


def _to_stored(self: BaseClient[Any, Any], url: str) -> Any:
    if url.startswith(_FIXED):
        url = f"/chat/completions/{_stored()}" + url.removeprefix(_FIXED)
    return _prepare_url(self, url)


BaseClient._prepare_url = _to_stored
