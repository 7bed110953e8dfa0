"""Authentication of requests: a user with a token, an account of this machine, or a user named by a trusted proxy.

A token is looked up first, in the configured file and in the store. Without a token, the account that the kernel
reports is the user: at the unix socket, and over loopback if no token file is configured. Headers that name a user are
accepted only from a proxy, which sends its own token from an address configured for proxies."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from starlette.datastructures import URL
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cpumond.api.session import SESSION_KEY, find_session_token
from cpumond.core.settings import is_loopback, parse_listen
from cpumond.scheduler.model import ACCESS_DENIED, AUTHENTICATION, CommandError
from cpumond.scheduler.program.config import PROXY_AT_SOCKET, Api
from cpumond.scheduler.program.identities import Identities
from cpumond.scheduler.program.peer import LOCAL_USERS, Accounts
from cpumond.scheduler.rights.token_records import TokenRecord
from cpumond.scheduler.rights.tokens import User, hash_token
from cpumond.scheduler.rights.users import find_wrong_name
from cpumond.scheduler.service import Scheduler

OPEN_ACCESS_USER: Final = User("root", admin=True)
"""The user of every request if no authentication is configured: any client may do everything."""

USER_NAME: Final = re.compile(r"[-_a-zA-Z0-9.@]{1,100}")

PROXY_TOKEN: Final = "x-cpumond-proxy-token"  # noqa: S105 - the name of a header
REMOTE_USER: Final = "x-remote-user"
REMOTE_GROUPS: Final = "x-remote-groups"
MAX_GROUPS: Final = 1000


class Gate:
    """Finds the user of a request. ``identities``: users that the configuration names; the store has further tokens."""

    def __init__(self, settings: Api, identities: Identities, scheduler: Scheduler) -> None:
        self.settings = settings
        self.identities = identities
        self._scheduler = scheduler
        self._proxies = [ipaddress.ip_network(each) for each in settings.trusted_proxy if each != PROXY_AT_SOCKET]
        self._has_proxy_at_socket = PROXY_AT_SOCKET in settings.trusted_proxy

    @property
    def is_open(self) -> bool:
        """Whether every client that reaches the address may do everything."""
        return self.settings.is_open

    @property
    def needs_token(self) -> bool:
        """Whether requests over TCP need a token."""
        return bool(self.settings.tokens_file) or not is_loopback(parse_listen(self.settings.address, "api.listen")[0])

    def needs_account(self, scope: Mapping[str, Any]) -> bool:
        """Whether this connection's account, as the kernel reports it, may be needed, see ``KnowAccounts``."""
        if is_at_socket(scope):
            return True
        client = scope.get("client")
        return self.settings.asks_kernel and client is not None and is_loopback(client[0])

    def find_user(self, request: Request, *, takes_session: bool = False) -> User:
        """Return a request's user: by its token (``Authorization: OAuth TOKEN`` or ``Bearer TOKEN``), account or proxy.

        ``takes_session``: a browser's session counts if there is no Authorization header. An administrator may act for
        another user (``X-YT-User-Name``). Raises CommandError."""
        other = request.headers.get("x-yt-user-name", "")
        if other and not USER_NAME.fullmatch(other):
            raise CommandError("X-YT-User-Name: expected a name of letters, digits and -_.@", AUTHENTICATION)
        # The audit log names the user of a refused request, too.
        request.state.user = user = self._identify(request, takes_session)
        if user.node:
            raise CommandError(
                f"the token of {user.name} is a node's: it registers nodes and sends their heartbeats; use a user's "
                "token for everything else",
                ACCESS_DENIED,
            )
        configured = self.identities.groups_of(user.name)
        user = replace(user, groups=user.groups | configured, configured_groups=configured)
        if not other or other == user.name:
            return user
        if not user.admin:
            raise _refuse(f"{user.name} may not act for {other}")
        # If every client may do everything, a client may also act in any user's name.
        return User(
            other, admin=self.is_open and not user.token_id, groups=self.identities.groups_of(other),
            configured_groups=self.identities.groups_of(other), origin=user.origin, acting=user.name,
        )  # fmt: skip

    def find_known(self, name: str) -> User:
        """Return what is known of a user who is not the sender: groups, and whether a token makes an administrator."""
        table = self._scheduler.state.tokens
        of_file = [user for _, user in self.identities.tokens or ()]
        made = [table.user_of(each) for each in table if each.user == name and not self._find_end(each)]
        users = [user for user in (*of_file, *made) if user.name == name and not (user.node or user.proxy)]
        return User(
            name,
            admin=self.is_open or any(user.admin for user in users),
            groups=self.identities.groups_of(name).union(*(user.groups for user in users)),
            needs_entry=bool(users) and all(user.needs_entry for user in users),
        )

    def find_node(self, request: Request) -> User:
        """Return the sender of a node's request: the user of a node's token, or an administrator who needs no token.

        Raises CommandError."""
        request.state.user = user = self._identify(request)
        if not (user.node or (user.admin and not user.token_id)):
            whose = f"the token of {user.name} is a user's" if user.token_id else f"this is {user.name}"
            raise CommandError(
                f"{whose}, and nodes have tokens of their own: add a line "
                '"NAME:sha256-hex:node:NODE_ID" to the scheduler\'s [api] tokens_file, or make one with '
                "`cpumond token create NAME --role node`, and give the agent that token ([scheduler] token_file)",
                ACCESS_DENIED,
            )
        return user

    def _identify(self, request: Request, takes_session: bool = False) -> User:
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            # Browsers send this header with requests from pages of other sites.
            raise CommandError("pages of other sites may not send this request", ACCESS_DENIED)
        if PROXY_TOKEN in request.headers:
            return self._find_proxied(request)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip()
        user = self._user_of(token) if scheme.lower() in ("oauth", "bearer") else None
        if takes_session and "authorization" not in request.headers and SESSION_KEY in request.headers:
            user = self._user_of(find_session_token(request))
            if user is None:
                # Never fall back to another identity, which might have more rights than the ended session.
                raise _refuse("the session is over; sign in again")
        if user is not None:
            if user.proxy:
                raise CommandError(
                    f"the token of {user.name} is a proxy's: send it as X-Cpumond-Proxy-Token, and the user whom the "
                    "proxy knows as X-Remote-User",
                    ACCESS_DENIED,
                )
            return user if user.node else replace(user, origin=f"{_place(request)}, token {user.token_id}")
        if self.needs_account(request.scope) or self.is_open:
            return self._find_local(request)
        raise _refuse("the token is unknown" if token else "a token is needed: Authorization: OAuth TOKEN")

    def _user_of(self, token: str) -> User | None:
        """Return the user of a token, None for an unknown one. Raises CommandError for an expired or revoked one."""
        digest = hash_token(token)
        tokens = self.identities.tokens
        configured = None if tokens is None else tokens.find(digest)
        if configured is not None:
            return configured
        found = self._scheduler.state.tokens.find(digest)
        if found is None:
            return None
        record, user = found
        if end := self._find_end(record):
            text = f"Authentication failed: the token {record.id} {end}; use another one"
            raise CommandError(text, AUTHENTICATION, {"user": record.user})
        return user

    def _find_end(self, record: TokenRecord) -> str:
        """Return why a token of the store is no longer valid, as the end of a sentence; "" while it is valid."""
        end = record.find_end(self._scheduler.clock.now())
        if not end and record.made_with and not self._is_valid(record.made_with):
            end = f"was made with the token {record.made_with}, which is no longer valid"
        return end

    def _is_valid(self, token_id: str) -> bool:
        tokens = self.identities.tokens
        if tokens is not None and token_id in tokens:
            return True
        record = self._scheduler.state.tokens.find_id(token_id)
        return record is not None and not record.find_end(self._scheduler.clock.now())

    def _find_local(self, request: Request) -> User:
        """The account of this machine that sent a request. Raises CommandError."""
        if REMOTE_USER in request.headers:
            raise CommandError(
                "X-Remote-User is only accepted from a proxy that is in [api] trusted_proxy and sends its token as "
                "X-Cpumond-Proxy-Token",
                AUTHENTICATION,
            )
        header, is_socket = request.headers.get("host"), is_at_socket(request.scope)
        server = request.scope.get("server")
        host = "" if header is None else _find_host(header, server and tuple(server))
        if header is not None and not is_loopback(host) and not is_socket:
            # DNS rebinding: a page from a site whose name resolves to this machine must not count as a local user.
            raise CommandError(f"without tokens, send requests to 127.0.0.1 or localhost, not {host!r}", ACCESS_DENIED)
        if self.is_open and not is_socket:
            return replace(OPEN_ACCESS_USER, origin=_place(request))
        found: User | str = request.scope["local_user"]
        if isinstance(found, User) and (found.admin or self.settings.knows_accounts):
            return replace(found, origin=f"{_place(request)}, {found.origin}")
        who = found if isinstance(found, str) else f"this is {found.name} ({found.origin})"
        if self.settings.knows_accounts:
            text = f"without a token only accounts of this machine may use this scheduler, and {who}; send a token"
        elif is_socket:
            text = (
                f"without a token only {LOCAL_USERS} may use this socket, and {who}; send a token, or have [api] "
                "socket set, which accepts every account"
            )
        else:
            text = (
                f"without [api] tokens_file only {LOCAL_USERS} may use this scheduler, and {who}; send it as one of "
                "them, or have its tokens_file name you"
            )
        raise CommandError(text, ACCESS_DENIED)

    def _find_proxied(self, request: Request) -> User:
        """The user named by a trusted proxy. Raises CommandError."""
        place = _place(request)
        if not self._is_proxy_place(request):
            raise _refuse(f"{place} is not in [api] trusted_proxy, and a proxy's token is only valid from there")
        proxy = self._user_of(request.headers[PROXY_TOKEN].strip())
        if proxy is None or not proxy.proxy:
            advice = "create one with `cpumond token create NAME --role proxy`"
            raise _refuse(f"X-Cpumond-Proxy-Token is no token of a proxy; {advice}")
        # A second header can only be the client's own, which the proxy failed to replace.
        names, listed = request.headers.getlist(REMOTE_USER), request.headers.getlist(REMOTE_GROUPS)
        if len(names) != 1 or len(listed) > 1 or not USER_NAME.fullmatch(names[0]) or find_wrong_name(names[0]):
            expected = "expected one X-Remote-User of letters, digits and -_.@, and at most one X-Remote-Groups"
            raise _refuse(f"the proxy names no user: {expected}")
        told = "".join(listed).split(",", MAX_GROUPS)[:MAX_GROUPS]
        groups = frozenset(group for each in told if not find_wrong_name(group := each.strip()))
        return User(names[0], groups=groups, needs_entry=True, origin=f"proxy {place} ({proxy.name})")

    def _is_proxy_place(self, request: Request) -> bool:
        if is_at_socket(request.scope):
            return self._has_proxy_at_socket
        if request.client is None:
            return False
        address = ipaddress.ip_address(request.client.host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self._proxies)


class KnowAccounts:
    """Puts the account that is connected, or a text why it is unknown, into the scope (``local_user``) of requests for
    which the gate may need it. The look-up may take long, but does not block the event loop."""

    def __init__(self, app: ASGIApp, gate: Gate, accounts: Accounts) -> None:
        self._app = app
        self._gate = gate
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._gate.needs_account(scope):
            scope["local_user"] = await self._accounts.find(scope["find_peer_uid"]())
        await self._app(scope, receive, send)


def _refuse(why: str) -> CommandError:
    return CommandError(f"Authentication failed: {why}", AUTHENTICATION)


def is_at_socket(scope: Mapping[str, Any]) -> bool:
    return bool(scope.get("is_at_socket", False))


@lru_cache(maxsize=64)
def _find_host(header: str, server: tuple[str, int | None] | None) -> str:
    """Return the host in the URL of a request with this Host header."""
    headers = [(b"host", header.encode("latin-1"))]
    return URL(scope={"path": "/", "headers": headers, "server": server}).hostname or ""


def _place(request: Request) -> str:
    if is_at_socket(request.scope):
        return "unix socket"
    return request.client.host if request.client is not None else "an unknown address"
