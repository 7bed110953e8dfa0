"""HTTP client of the scheduler for commands: address and token, requests, and printing of answers.

Exit codes by the HTTP status of a refusal: 77 without the rights (401, 403), 73 for objects that exist already or are
too many (409), 78 for wrong values (400, 413, 422), 67 for an operation, pool, node or job that does not exist (404),
75 for answers that are not available yet, 69 for a failing scheduler (5xx)."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import click
import msgspec

from cpumond.cli.options import given
from cpumond.cli.output import print_json, print_json_and_end, print_text, warn
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import (
    EXIT_CANNOT_CREATE,
    EXIT_CONFIG,
    EXIT_NO_SUCH,
    EXIT_PERMISSION,
    EXIT_TRY_AGAIN,
    EXIT_UNAVAILABLE,
    AccessError,
    ConfigError,
    CpumondError,
    UnavailableError,
    UsageError,
    describe,
)
from cpumond.core.route import LOST_LEAD, Route, Terms, is_standby, was_not_done
from cpumond.core.settings import find_rights_of_others
from cpumond.core.term import LEADER_HEADER, TERM_HEADER, parse_term
from cpumond.core.tls import describe_tls_error, make_client_context
from cpumond.scheduler.model import NO_SUCH_JOB, NO_SUCH_OPERATION, RESOLVE

if TYPE_CHECKING:
    import httpx2

DEFAULT_SCHEDULER: Final = "http://127.0.0.1:9757"
UNIX: Final = "unix:"
"""Prefix that marks the path of a unix socket in place of an address."""
AT_SOCKET: Final = "http://localhost"
DEFAULT_TOKEN_FILE: Final = "~/.config/cpumond/token"  # noqa: S105 - a path
TIMEOUT_S: Final = 30.0
CONNECT_S: Final = 5.0
PATIENCE_S: Final = 20.0
"""Seconds to wait for a leader: longer than another scheduler needs to lead after the leader has stopped."""
POLL_S: Final = 1.0
MAX_PAGE: Final = 1000
RETRY_MAX_S: Final = 2.0
MAX_TOKEN_CHARS: Final = 4096

Kind = TypeVar("Kind")

EXIT_OF_STATUS: Final = {
    400: EXIT_CONFIG, 401: EXIT_PERMISSION, 403: EXIT_PERMISSION, 409: EXIT_CANNOT_CREATE, 413: EXIT_CONFIG,
    422: EXIT_CONFIG,
}  # fmt: skip


NO_SUCH: Final = frozenset({RESOLVE, NO_SUCH_OPERATION, NO_SUCH_JOB})


class SchedulerRefusedError(CpumondError):
    """The scheduler answered with an error: its sentence, the HTTP status, and YTsaurus' error code."""

    def __init__(self, sentence: str, status: int, code: int = 0, is_early: bool = False) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code
        self.exit_code = EXIT_OF_STATUS.get(status, EXIT_UNAVAILABLE)
        if code in NO_SUCH:
            self.exit_code = EXIT_TRY_AGAIN if is_early else EXIT_NO_SUCH


class _Warned(msgspec.Struct):
    warnings: list[str] = []


class _UnreachedError(UnavailableError):
    """No server accepted a connection at ``url``, so nothing was sent."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url} ({reason})")


class SchedulerClient:
    """HTTP client of a scheduler; each request has its own connection. ``as_json``: answers are printed for programs.

    ``urls``: the address of the scheduler, or of each of several of which one leads; the leader is found. During a
    take-over requests wait up to ``patience_s`` seconds for the next leader. ``ca_file``: the authority that signed the
    scheduler's certificate, "" for those the system trusts."""

    def __init__(
        self, urls: str | Sequence[str], token: str = "", as_json: bool = False, timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S, ca_file: str = "",
    ) -> None:  # fmt: skip
        self._urls = [urls] if isinstance(urls, str) else urls
        self._route = Route(self._urls, RETRY_MAX_S, random.SystemRandom())
        self._terms = Terms()
        self.token = token
        self.as_json = as_json
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        self.ca_file = ca_file
        self.plan_shown = ""
        """The plan that the user saw before the next change, for the audit log."""

    def clone(self, patience_s: float) -> SchedulerClient:
        """A client with the same addresses and token, for another thread."""
        return SchedulerClient(self._urls, self.token, self.as_json, self.timeout_s, patience_s, self.ca_file)

    @property
    def url(self) -> str:
        return self._route.current

    def request(self, method: str, path: str, body: object = None, query: dict[str, Any] | None = None) -> bytes:
        """Content of a successful answer to ``/api/v1`` + ``path``: JSON, except for logs.

        Raises UnavailableError if no scheduler answers, SchedulerRefusedError for an error answer."""
        return self.exchange(method, path, body, query)[0]

    def exchange(
        self, method: str, path: str, body: object = None, query: dict[str, Any] | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return the content of ``request`` and the headers of the answer by case-insensitive names.

        A change is sent to the next address only if the scheduler at the last one has certainly not made it. If the
        answer was lost, the change is sent again with the same Idempotency-Key, to a scheduler that supports these."""
        content = None if body is None else _encode(body)
        headers = {} if method == "GET" else {"Idempotency-Key": str(uuid.uuid4())}
        end_s, found_standby = time.monotonic() + self.patience_s, False
        lost: UnavailableError | None = None
        tried: dict[str, CpumondError] = {}
        self._route.taken()  # the leader of the last request may have changed
        while True:
            url, began_at_s = self.url, time.monotonic()
            try:
                answer = self._send(url, method, path, content, query, headers)
            except UnavailableError as error:
                if method != "GET" and not isinstance(error, _UnreachedError):
                    lost = lost or error
                    if not self._may_send_again(end_s):
                        raise lost from None
                    continue
                tried[url] = error
                wait_s = self._route.unanswered(began_at_s, time.monotonic())
            else:
                if answer.is_success:
                    return answer.content, answer.headers
                leader = answer.headers.get(LEADER_HEADER)
                refusal = _read_refusal(url, answer.status_code, answer.content)
                is_safe = method == "GET" or was_not_done(str(refusal))
                stands_by = is_standby(answer.status_code, leader, str(refusal)) or str(refusal) == LOST_LEAD
                if not is_safe or not stands_by:
                    raise refusal
                tried[url], found_standby = refusal, True
                wait_s = self._route.standby(leader, POLL_S, began_at_s, time.monotonic())
            is_over = time.monotonic() + wait_s >= end_s if found_standby else self.url in tried
            if is_over:
                raise lost or _sum_up(tried)
            time.sleep(wait_s)

    def _may_send_again(self, end_s: float) -> bool:
        """Whether a scheduler that supports idempotency keys is found before ``end_s``."""
        while time.monotonic() < end_s:
            try:
                return bool(self.get("/me", dict[str, Any]).get("takes_idempotency_keys"))
            except UnavailableError:
                time.sleep(POLL_S)
            except CpumondError:
                break
        return False

    def _send(
        self, url: str, method: str, path: str, content: bytes | None, query: dict[str, Any] | None,
        headers: Mapping[str, str],
    ) -> httpx2.Response:  # fmt: skip
        """Send one request and return its answer, of any status. Raises UnavailableError."""
        import httpx2

        # Of several hosts one may be dead, so the time limit for a connection is shorter than that for an answer.
        connect_s = self.timeout_s if len(self._urls) == 1 else min(self.timeout_s, CONNECT_S)
        try:
            with self._open(url, connect_s) as client:
                answer = client.request(method, f"/api/v1{path}", content=content, params=query, headers=headers)
        except httpx2.ConnectTimeout:
            raise _UnreachedError(url, f"no connection in {connect_s:g} s") from None
        except httpx2.TimeoutException:
            raise UnavailableError(
                f"{url}: the scheduler did not answer in {self.timeout_s:g} s; see its log"
            ) from None
        except httpx2.ConnectError as error:
            advice = "name the authority that signed it with --ca-file or CPUMOND_CA_FILE"
            raise _UnreachedError(url, describe_tls_error(error, advice) or _reason(error)) from None
        except UnicodeEncodeError:
            raise UsageError("an argument on the command line is not readable text (UTF-8); type it again") from None
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            hint = "; with a certificate its address begins with https://" if url.startswith("http:") else ""
            raise UnavailableError(f"{url}: the connection to the scheduler failed: {error}{hint}") from None
        term = parse_term(answer.headers.get(TERM_HEADER))
        if not self._terms.accept(term):
            raise UnavailableError(
                f"{url}: answered in term {term}, but term {self._terms.highest} has begun: it no longer leads and its "
                "answer is out of date; try again"
            )
        return answer

    def _open(self, url: str, connect_s: float) -> httpx2.Client:
        import httpx2

        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        if self.plan_shown:
            headers["x-cpumond-plan"] = self.plan_shown
        # Certificates take longer to load than a request takes; without TLS they are not needed.
        verify = make_client_context(self.ca_file, "--ca-file") if url.startswith("https:") else False
        place = url.removeprefix(UNIX) if url.startswith(UNIX) else None
        transport = httpx2.HTTPTransport(verify=verify, trust_env=False, uds=place)
        base = url if place is None else AT_SOCKET
        timeout = httpx2.Timeout(self.timeout_s, connect=connect_s)
        return httpx2.Client(transport=transport, timeout=timeout, trust_env=False, base_url=base, headers=headers)

    def stream(self, path: str, body: object) -> Iterator[bytes]:
        """Send a POST that changes nothing, and yield its answer's lines as they arrive. Raises as ``request`` does."""
        import httpx2

        self.request("GET", "/me")  # finds the leader
        try:
            with (
                self._open(self.url, CONNECT_S) as client,
                client.stream("POST", f"/api/v1{path}", content=_encode(body)) as answer,
            ):
                if not answer.is_success:
                    raise _read_refusal(self.url, answer.status_code, answer.read())
                # Not `iter_lines`, which also splits at characters that a title may have (U+2028).
                rest = b""
                for content in answer.iter_bytes():
                    *lines, rest = (rest + content).split(b"\n")
                    yield from lines
        except httpx2.TransportError as error:
            raise UnavailableError(f"{self.url}: the connection to the scheduler failed: {error}") from None

    def get(self, path: str, kind: type[Kind], /, **query: Any) -> Kind:
        """The answer to GET as a value; None in ``query`` is left out."""
        return self.decode(self.request("GET", path, query=given(query)), kind)

    def fetch(self, path: str, kind: type[Kind], query: dict[str, Any] | None = None, rows: str | None = None) -> Kind:
        """The answer to GET as a value for people; for JSON or CSV it is printed, and the command ends.

        ``rows`` as in ``print_json``."""
        content = self.request("GET", path, query=query)
        if self.as_json:
            print_json_and_end(content, kind, rows)
        return self.decode(content, kind)

    def fetch_list(self, path: str, kind: type[Kind], rows: str, query: dict[str, Any], what: str) -> Kind:
        """Answer to GET for a list in pages, like ``fetch``; a warning gives the number of ``what`` that are left out.

        ``rows``: the field with the items. ``query`` has ``limit``, None for all."""
        whole: dict[str, Any] = {rows: [], "next": ""}
        limit = query["limit"]
        while whole["next"] is not None and (limit is None or len(whole[rows]) < limit):
            size = MAX_PAGE if limit is None else min(limit - len(whole[rows]), MAX_PAGE)
            asked = given({**query, "limit": size, "cursor": whole["next"] or None})
            page = self.decode(self.request("GET", path, query=asked), dict[str, Any])
            whole = {**page, rows: whole[rows] + page[rows], "next": page.get("next")}
        content = msgspec.json.encode(whole)
        if self.as_json:
            print_json(content, kind, rows)
        if whole["next"] is not None:
            warn(f"{whole['total'] - len(whole[rows])} {what} are not shown; --all shows them, or filter")
        if self.as_json:
            click.get_current_context().exit()
        return self.decode(content, kind)

    def change(self, sentence: str, method: str, path: str, body: object = None, **query: Any) -> None:
        """Make a change, and print its answer as ``print_done`` does."""
        self.print_done(self.request(method, path, body, query or None), sentence)

    def print_done(self, content: bytes, sentence: str) -> None:
        """Print the answer to a change: ``sentence``, or JSON or CSV; its warnings on standard error."""
        if self.as_json:
            print_json(content)
        else:
            print_text(sentence)
        with contextlib.suppress(ContentError):
            for warning in decode_json(content, _Warned).warnings:
                warn(warning)

    def decode(self, content: bytes, kind: type[Kind]) -> Kind:
        """Decode an answer. Raises UnavailableError if the answer is not of this ``kind``."""
        try:
            return decode_json(content, kind)
        except ContentError as error:
            raise UnavailableError(
                f"{self.url}: the answer cannot be decoded: {error}; is this a scheduler of this version of cpumond?"
            ) from None

    def find_tree(self, tree: str | None) -> str:
        """``tree``, or the scheduler's default tree. Raises UsageError when it has no default tree."""
        if tree:
            return tree
        found = self.get("/trees", dict[str, Any])
        default = found.get("default_tree")
        if not isinstance(default, str) or not default:
            names = ", ".join(each["name"] for each in found.get("trees", ()))
            raise UsageError(
                f"the scheduler has no default tree; choose one with --tree: {names or 'there is none yet'}"
            )
        return default


def _sum_up(tried: Mapping[str, CpumondError]) -> CpumondError:
    """Return one error for several addresses none of which served the request; a standby's sentence comes first."""
    told = sorted(
        tried.values(), key=lambda error: (isinstance(error, _UnreachedError), isinstance(error, UnavailableError))
    )
    if not isinstance(told[0], _UnreachedError):
        return told[0]
    return UnavailableError(
        f"no scheduler answers on {' or '.join(map(str, told))}; start one with `cpumond scheduler`, or name "
        "another one with --scheduler or CPUMOND_SCHEDULER"
    )


def _encode(body: object) -> bytes:
    _refuse_infinite(body)
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        raise UsageError("an argument on the command line is not readable text (UTF-8)") from None


def _refuse_infinite(value: object) -> None:
    """Refuse infinity and NaN, which JSON lacks: they would be sent as null, which removes an attribute."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{value} is not a number that can be set; give a finite one")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_infinite(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_infinite(item)


def _reason(error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return describe(cause)
        cause = cause.__cause__ or cause.__context__
    match = re.search(r"\[Errno (-?\d+)\]", str(error))
    return os.strerror(int(match[1])) if match and int(match[1]) in errno.errorcode else str(error)


def _read_refusal(url: str, status: int, content: bytes) -> SchedulerRefusedError:
    try:
        told = decode_json(content, dict[str, Any])
    except ContentError:
        told = {}
    sentence = told.get("error")
    if not isinstance(sentence, str):
        sentence = f"{url}: HTTP status {status}; is this the address of a cpumond scheduler?"
    elif status == 401:
        sentence += "; give one with --token, --token-file or CPUMOND_TOKEN"
    code, attributes = told.get("code"), told.get("attributes")
    is_early = isinstance(attributes, dict) and attributes.get("try_again") is True
    return SchedulerRefusedError(sentence, status, code if isinstance(code, int) else 0, is_early)


def read_urls(text: str) -> list[str]:
    """The addresses of schedulers, separated by commas, each normalized by ``read_url``. Raises UsageError."""
    return [read_url(each.strip()) for each in text.split(",")]


def read_url(text: str) -> str:
    """The address of a scheduler without a trailing slash; ``http://`` is optional. Raises UsageError."""
    if text.startswith(UNIX):
        if not text.startswith(f"{UNIX}/"):
            raise UsageError(f"--scheduler {text}: expected the whole path of a socket, for example unix:/run/api.sock")
        return text
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    wrong = UsageError(f"--scheduler {text}: expected an address, for example {DEFAULT_SCHEDULER}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise wrong
    return url


def read_token(token: str | None, token_file: str | None) -> str:
    """The token: ``token``, else the content of ``token_file``, else of DEFAULT_TOKEN_FILE if it exists, else "".

    Raises UsageError, ConfigError or AccessError."""
    where = "--token"
    if not token:
        where = os.path.expanduser(token_file or DEFAULT_TOKEN_FILE)
        if not token_file and not os.path.exists(where):
            return ""
        try:
            with open(where, encoding="utf-8") as file:
                problem = find_rights_of_others(where, os.fstat(file.fileno()))
                token = file.read(MAX_TOKEN_CHARS + 1).strip()
        except PermissionError:
            raise AccessError(
                f"{where}: the token cannot be read: permission denied; name another file with --token-file"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: the token cannot be read: {describe(error)}") from None
        if problem:
            raise ConfigError(f"{where}: {problem}")
    if not re.fullmatch(r"[\x21-\x7e]+", token) or len(token) > MAX_TOKEN_CHARS:
        raise ConfigError(f"{where}: a token is one word of printable ASCII characters")
    return token


def make_client(values: Mapping[str, Any], **more: Any) -> SchedulerClient:
    """Make a client from the parameters of ``connection_options``."""
    urls = read_urls(values.get("url") or DEFAULT_SCHEDULER)
    token = read_token(values.get("token"), values.get("token_file"))
    return SchedulerClient(urls, token, ca_file=values.get("ca_file") or "", **more)
