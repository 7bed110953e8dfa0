"""The requests by which a page shows much at a glance: their parameters, and their rows in the table of endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from cpumond.api import glance_views

PREFIX: Final = "/api/v1"
MAX_TRENDS: Final = 200

_Text = Annotated[str, msgspec.Meta(max_length=1000)]


class TrendsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``pools``: names, one a line, at most 200. The last ``since_s`` seconds, as far as
    the history goes back, in ``count`` parts."""

    pools: Annotated[str, msgspec.Meta(min_length=1, max_length=5000)]
    since_s: Annotated[float, msgspec.Meta(gt=0.0, le=31_536_000.0)] = 3600.0
    count: Annotated[int, msgspec.Meta(ge=1, le=120)] = 30


class GroupsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Filters, as of the list of operations."""

    user: _Text = ""
    tree: _Text = ""
    pool: _Text = ""
    search: _Text = ""


class PreemptionGroupsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Filters, as of the list of preemptions."""

    operation: _Text = ""
    pool: _Text = ""


ROWS: Final[tuple[dict[str, Any], ...]] = (
    {"method": "GET", "path": PREFIX + "/trees/{tree}/trends", "name": "list_trends",
     "summary": "How the CPU that pools may use has changed, of many pools at once", "answer": glance_views.PoolTrends,
     "query": TrendsQuery, "refusals": (404, 429, 503, 504)},
    {"method": "GET", "path": PREFIX + "/operation_groups", "name": "group_operations",
     "summary": "How many operations wait for what", "answer": glance_views.OperationGroups, "query": GroupsQuery},
    {"method": "GET", "path": PREFIX + "/preemption_groups", "name": "group_preemptions",
     "summary": "The preemptions that are kept, by kind and for whom", "answer": glance_views.PreemptionGroups,
     "query": PreemptionGroupsQuery},
)  # fmt: skip
