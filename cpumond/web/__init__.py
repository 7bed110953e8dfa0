"""The files of the web pages, the scheduler's and the agent's, and the routes that serve them.

Each file is read and compressed once. The headers forbid pages to load from other hosts, and text to become markup."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

FOLDER: Final = "/web/"

TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
"""Ending of a file name -> its type; files with other endings are not served."""

SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_ZERO: Final = re.compile(r"\s*q\s*=\s*0(\.0*)?\s*")


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file in the form in which it is sent. ``etag`` is weak: it covers the content, compressed or not."""

    content: bytes
    compressed: bytes
    content_type: str
    etag: str


def make_web_routes(index: str) -> list[Route]:
    """``/`` is the file ``index``, ``/web/NAME`` any other. No authentication, because the files contain no data.

    Raises ValueError if there is no such file, which is a mistake of the package."""
    files = read_files()
    if index not in files:
        raise ValueError(f"cpumond/web/static has no {index}; it has {', '.join(sorted(files))}")
    return [Route("/", _Files({"": files[index]})), Route(FOLDER + "{name:path}", _Files(files))]


def read_files() -> dict[str, StaticFile]:
    files: dict[str, StaticFile] = {}
    for entry in (resources.files(__name__) / "static").iterdir():
        content_type = TYPES.get(entry.name.rpartition(".")[2])
        if content_type is not None and entry.is_file():
            content = entry.read_bytes()
            etag = f'W/"{hashlib.sha256(content).hexdigest()[:20]}"'
            files[entry.name] = StaticFile(content, gzip.compress(content, 9, mtime=0), content_type, etag)
    return files


class _Files:
    """An ASGI application: the file that the path names, looked up in a dictionary and never on the disk."""

    def __init__(self, files: Mapping[str, StaticFile]) -> None:
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if request.method not in ("GET", "HEAD"):
            raise HTTPException(405, "this method is not supported here; use GET, HEAD", {"Allow": "GET, HEAD"})
        file = self._files.get(request.path_params.get("name", ""))
        if file is None:
            raise HTTPException(404, "there is no such file; the page begins at /", dict(SECURITY_HEADERS))
        await _answer(request, file)(scope, receive, send)


def _answer(request: Request, file: StaticFile) -> Response:
    headers = {**SECURITY_HEADERS, "Cache-Control": "no-cache", "ETag": file.etag, "Vary": "Accept-Encoding"}
    if matches_etag(request.headers, file.etag):
        return Response(status_code=304, headers=headers)
    content = file.content
    if accepts_gzip(request.headers) and len(file.compressed) < len(content):
        content = file.compressed
        headers["Content-Encoding"] = "gzip"
    headers |= {"Content-Type": file.content_type, "Content-Length": str(len(content))}
    return Response(b"" if request.method == "HEAD" else content, headers=headers)


def accepts_gzip(headers: Headers) -> bool:
    """Whether ``Accept-Encoding`` names gzip, or everything, with a weight above 0 (RFC 9110, 12.5.3)."""
    wanted: dict[str, bool] = {}
    for part in headers.get("accept-encoding", "").lower().split(","):
        coding, _, weight = part.partition(";")
        wanted[coding.strip()] = _ZERO.fullmatch(weight) is None
    return wanted.get("gzip", wanted.get("*", False))


def matches_etag(headers: Headers, etag: str) -> bool:
    """Whether ``If-None-Match`` names this content, by weak comparison (RFC 9110, 13.1.2)."""
    given = headers.get("if-none-match", "")
    return given.strip() == "*" or etag.removeprefix("W/") in (
        each.strip().removeprefix("W/") for each in given.split(",")
    )
