"""The page at /, whose files are packed once, and what it asks for."""

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_mtp.connect.clients import Served, setup_text
from mlx_mtp.connect.command import NAMES
from mlx_mtp.errors import NotFoundError
from mlx_mtp.server.context import context_of
from mlx_mtp.server.http.access import key_of
from mlx_mtp.server.live import Live

FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS = {
    # Nothing inline, nothing from elsewhere, in nobody's frame; and no text ever becomes HTML.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304
    "Vary": "Accept, Accept-Encoding",
}


class _File(NamedTuple):
    content: bytes
    packed: bytes
    media_type: str
    tag: str


@cache
def files() -> dict[str, _File]:
    """The page's files by their paths."""
    found = {}
    for path in FOLDER.rglob("[!.]*.*"):
        if path.suffix not in _TYPES:
            continue  # The Finder, editors and package managers put files of theirs anywhere.
        content, tag = path.read_bytes(), hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        packed = gzip.compress(content, 9, mtime=0)
        name = path.relative_to(FOLDER).as_posix()
        found[name] = _File(content, packed, _TYPES[path.suffix], f'"{tag}"')
    return found


def _response(request: Request, name: str) -> Response:
    file = files().get(name)
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
    if context_of(request).config.page and "text/html" in request.headers.get("accept", ""):
        return _response(request, "index.html")
    # Agents ask whether there is a server. No version: it is open to all.
    return JSONResponse({"name": "mlx-mtp"}, headers={"Vary": "Accept"})


async def file(request: Request) -> Response:
    """GET /page/..: one of its files."""
    if not context_of(request).config.page:
        raise NotFoundError("The page is turned off (--no-page).")
    return _response(request, request.path_params["name"].rstrip("/"))


async def clients(request: Request) -> Response:
    """GET /clients: how to set up each client that `mlx-mtp connect` knows."""
    context = context_of(request)
    url, keys = f"http://{request.headers.get('host', '')}", context.config.api_keys
    served = Served(url, context.model_names[0], context.engine.info.max_model_len, bool(keys))
    return JSONResponse([{"name": name, "text": setup_text(name, served)} for name in NAMES])


class _Watch(StreamingResponse):
    """The messages of /live; its watcher has a place until the last one, or until it leaves."""

    def __init__(self, watched: Live) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(watched.messages(), media_type="text/event-stream", headers=headers)
        self._place = watched.place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place():
            if scope["method"] == "HEAD":
                await Response(headers=self.headers)(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)


async def live(request: Request) -> Response:
    """GET /live: what the server does now, as server-sent events."""
    return _Watch(request.app.state.live)


async def cancel(request: Request) -> Response:
    """DELETE /live/ID: end an answer."""
    request_id = request.path_params["name"].rstrip("/")
    request.app.state.live.cancel(request_id, key_of(request.scope))
    return JSONResponse({"id": request_id, "cancelled": True})
