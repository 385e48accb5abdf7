"""The page at /, its files, and the routes that need no model."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_mtp.connect.clients import Served, setup_text
from mlx_mtp.connect.command import NAMES
from mlx_mtp.errors import NotFoundError
from mlx_mtp.server.http.record import record_of

if TYPE_CHECKING:
    from mlx_mtp.server.context import Context
    from mlx_mtp.server.live import Live

FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_OLLAMA_VERSION = "0.12.11"  # clients check that it is new enough
HEADERS = {
    # No inline code, nothing from other origins, no framing, and no text that becomes HTML. Blobs
    # are the images that the user attaches.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; font-src 'self'; img-src 'self' blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # Browsers revalidate each time, and get a 304.
    "Vary": "Accept, Accept-Encoding",
}


class _PageFile(NamedTuple):
    content: bytes
    packed: bytes
    media_type: str
    tag: str


@cache
def page_files() -> dict[str, _PageFile]:
    """Returns the page's files, read and compressed, by their path within `FOLDER`."""
    files = {}
    for path in FOLDER.rglob("[!.]*.*"):
        if path.suffix not in _TYPES or not path.is_file():
            continue  # The Finder, editors and package managers leave their own files in folders.
        content, tag = path.read_bytes(), hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        packed = gzip.compress(content, 9, mtime=0)
        name = path.relative_to(FOLDER).as_posix()
        files[name] = _PageFile(content, packed, _TYPES[path.suffix], f'"{tag}"')
    return files


def _file_response(request: Request, name: str) -> Response:
    file = page_files().get(name)
    if file is None:
        raise NotFoundError("The page has no such file.")
    headers = {**HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(file.packed, media_type=file.media_type, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


async def root(request: Request) -> Response:
    """GET /: the page to a browser, and JSON to everybody else."""
    if request.app.state.context.config.page and "text/html" in request.headers.get("accept", ""):
        return _file_response(request, "index.html")
    # Agents probe whether there is a server. No version, as this needs no API key.
    return JSONResponse({"name": "mlx-mtp"}, headers={"Vary": "Accept"})


async def page_file(request: Request) -> Response:
    """GET /page/..: one of the page's files."""
    if not request.app.state.context.config.page:
        raise NotFoundError("The page is turned off (--no-page).")
    return _file_response(request, request.path_params["name"].rstrip("/"))


async def health(request: Request) -> Response:
    """GET /health."""
    context: Context = request.app.state.context
    if context.limiter.draining:
        left = context.limiter.num_reserved
        reason = f"the server is shutting down; {left} answers are not finished"
        return JSONResponse({"status": "draining", "reason": reason}, 503)
    if context.fault is not None:
        return JSONResponse({"status": "unhealthy", "reason": context.fault}, 503)
    return JSONResponse({"status": "ok"})


async def ollama_version(_: Request) -> Response:
    """GET /api/version."""
    return JSONResponse({"version": _OLLAMA_VERSION})


async def clients(request: Request) -> Response:
    """GET /clients: how to set up each client that `mlx-mtp connect` knows."""
    context: Context = request.app.state.context
    url, keys = f"http://{request.headers.get('host', '')}", context.config.api_keys
    sees = context.sees_images
    served = Served(url, context.model_names[0], context.max_model_len, bool(keys), sees)
    return JSONResponse([{"name": name, "text": setup_text(name, served)} for name in NAMES])


class _Watch(StreamingResponse):
    """The stream of /live, which counts as a watcher while it lasts."""

    def __init__(self, live: Live) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(live.event_stream(), media_type="text/event-stream", headers=headers)
        self._watching = live.watching

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watching():
            if scope["method"] == "HEAD":
                await Response(headers=self.headers)(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)


async def live(request: Request) -> Response:
    """GET /live: the server's state, as server-sent events."""
    return _Watch(request.app.state.live)


async def cancel(request: Request) -> Response:
    """DELETE /live/ID: end an answer."""
    request_id = request.path_params["name"].rstrip("/")
    request.app.state.live.cancel(request_id, record_of(request.scope).key)
    return JSONResponse({"id": request_id, "cancelled": True})
