"""A browser's session: a user's token, split into two halves of random bytes; only both together give the token.

One half is a cookie that no script can read. Browsers send a cookie to every port of a host. So the other half stays
with the page's scripts, whose storage belongs to one port; they send it as a header. Neither half reveals anything
about the token except its length, and no page of another origin can send the header. The server stores nothing: each
request carries the token, so the session ends with it, and every scheduler on the same store accepts it."""

from __future__ import annotations

import re
import secrets
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cpumond.api.figures import View
from cpumond.api.views import Done
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.rights.users import User

SESSION_KEY: Final = "x-cpumond-session"
"""The header in which the page sends its half."""

MAX_TOKEN: Final = 1024
"""Maximum bytes of a token that signs in, because browsers drop cookies of more than 4096 bytes."""

_PORT: Final = re.compile(r":([0-9]{1,5})\Z")


class BrowserSession(View, frozen=True):
    """``key``: the half that the page sends in X-Cpumond-Session; the response sets the other half as a cookie."""

    user: str
    key: str


def begin_session(request: Request, user: User) -> Response:
    """Begin a session with ``user``'s token, which is in the Authorization header. Raises CommandError without one."""
    token = request.headers.get("authorization", "").partition(" ")[2].strip().encode("latin-1")
    if not user.token_id or not 0 < len(token) <= MAX_TOKEN:
        raise CommandError(f"sign in with a token of at most {MAX_TOKEN} bytes, as Authorization: Bearer TOKEN")
    pad = secrets.token_bytes(len(token))
    answer = Response(msgspec.json.encode(BrowserSession(user.name, pad.hex())), media_type="application/json")
    _set_cookie(request, answer, _mix(token, pad).hex())
    return answer


def end_session(request: Request) -> Response:
    """Make the browser forget its half, whether or not the token is valid."""
    answer = Response(msgspec.json.encode(Done("", [])), media_type="application/json")
    _set_cookie(request, answer, "", 0)
    return answer


def find_session_token(request: Request) -> str:
    """Return the token whose two halves a request carries; if they do not match, return "" or an invalid token."""
    halves = (request.cookies.get(_name_cookie(request), ""), request.headers.get(SESSION_KEY, ""))
    try:
        return _mix(*map(bytes.fromhex, halves)).decode("latin-1")
    except ValueError:
        return ""


def _mix(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _name_cookie(request: Request) -> str:
    """Return the cookie's name, with the port: else schedulers on one host would overwrite each other's cookies."""
    port = _PORT.search(request.headers.get("host", ""))
    return f"cpumond-session-{port[1] if port else ''}"


def _set_cookie(request: Request, answer: Response, value: str, max_age_s: int | None = None) -> None:
    # If TLS ends at a proxy, only the browser's Origin shows TLS.
    is_tls = request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:")
    answer.set_cookie(_name_cookie(request), value, max_age_s, secure=is_tls, httponly=True, samesite="strict")
