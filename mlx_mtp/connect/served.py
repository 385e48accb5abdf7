"""What a running server tells of itself."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from mlx_mtp.errors import UsageError

_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server.

    Args:
        url: its address, without a path.
        model: the id of its model.
        context: most tokens of prompt and answer together.
        wants_key: it lets nobody in without its API key.
    """

    url: str
    model: str
    context: int
    wants_key: bool

    @property
    def openai_url(self) -> str:
        """The base that OpenAI's clients want."""
        return f"{self.url}/v1"


def ask(url: str, api_key: str | None) -> Served:
    """Ask a server for its model.

    Args:
        url: its address; a path at its end, such as /v1, is left out.
        api_key: its API key, if it has one.

    Raises:
        UsageError: nobody answers there, or not as this server does.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{url} is not an address; it should look like http://127.0.0.1:8000.")
    base = f"{parts.scheme}://{parts.netloc}"
    status, _ = _get(base, None)
    if status == 401 and api_key is None:
        raise UsageError(
            f"The server at {base} requires its API key: pass --api-key or set MLX_MTP_API_KEY."
        )
    wants_key = status == 401
    status, listed = _get(base, api_key) if wants_key else (status, _)
    if status == 401:
        raise UsageError(f"The server at {base} refuses this API key.")
    try:
        (card,) = listed["data"]
        return Served(base, card["id"], card["max_model_len"], wants_key)
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"What answers at {base} is not an mlx-mtp server: its /v1/models differs."
        ) from None


def _get(base: str, api_key: str | None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{base}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None
    except ValueError:
        return 200, None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UsageError(
            f"No server answers at {base} ({reason}). Start one with `mlx-mtp serve`, or pass its "
            "address with --url."
        ) from None
