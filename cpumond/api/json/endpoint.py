"""A row of the table of endpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cpumond.api import views
from cpumond.api.json.call import Call
from cpumond.api.json.costs import COST_OF_A_BODY, Cost
from cpumond.api.json.requests import Query
from cpumond.api.token_views import NewToken

Needs = Literal[
    "nothing", "a node's token", "a known user", "a known user, for the own", "`read`", "`use`", "`modify_children`",
    "`write`", "`write`, `modify_children`", "what the change needs", "`manage`", "`read_secrets`",
    "`write` on the tree", "`administer` on the tree", "an administrator",
]  # fmt: skip
"""Right that a request needs: permissions of semantics.md 12 in backticks, or a kind of user. Only unknown users and
nodes are refused by this value itself; the handler checks the rest, and leaves unreadable items out of lists."""


Handler = Callable[[Call], Any]
"""Returns the answer, or an awaitable of it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint. ``name`` is the operationId in the OpenAPI document.

    ``answer`` is the type of a successful answer, returned with ``status``; ``others`` are further answers by status.
    ``needs_body``: a body is required."""

    method: str
    path: str
    name: str
    summary: str
    handler: Handler
    answer: Any
    needs: Needs = "a known user"
    body: Any = None
    query: type[Query] | None = None
    status: int = 200
    refusals: tuple[int, ...] = ()
    others: Mapping[int, Any] = field(default_factory=dict)
    needs_body: bool = True
    cost: Cost = COST_OF_A_BODY
    """Number of requests as which this one counts in addition to itself; charged to the user before the answer."""
    has_etag: bool = False
    """Whether a successful answer has an ETag; a request with this ETag in If-None-Match gets 304 without a body."""
    content_type: str = "application/json"
    """Content type of a successful answer; all others are JSON."""

    @property
    def is_change(self) -> bool:
        return self.method != "GET"

    @property
    def takes_key(self) -> bool:
        """Whether a repeat with the same Idempotency-Key gets the first one's answer: yes for changes, no for plans."""
        return self.answer in (views.Done, NewToken) and not self.is_public

    @property
    def is_public(self) -> bool:
        """Whether the endpoint requires no user."""
        return self.needs == "nothing"

    @property
    def is_of_nodes(self) -> bool:
        """Whether the endpoint is for agents, whose requests do not count in any user's rate."""
        return self.needs == "a node's token"

    @property
    def statuses(self) -> dict[int, Any]:
        """All statuses of responses, and the type of the body of each."""
        known = {self.status: self.answer, **self.others}
        found = set(self.refusals)
        if not self.is_public:
            found |= {401, 403, 500}
        if self.body is not None:
            found |= {400, 413, 422}
        if "{" in self.path:
            found |= {404, 422}
        if self.query is not None:
            found |= {422}
        if self.is_change and not self.is_public:
            found |= {503}
        return {**known, **dict.fromkeys(sorted(found - set(known)), views.Failure)}
