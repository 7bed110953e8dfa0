"""Who may ask what: every request that the scheduler answers, against kinds of users (semantics.md 12). Pure.

The document's table is made of this one, and a test tries each of its cells. ``scheduler/rights/entries.py`` decides;
here stands on what of it a request depends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, get_args

from cpumond.api.endpoints import ENDPOINTS
from cpumond.api.json.endpoint import Needs
from cpumond.api.yt.transport import COMMANDS

Role = Literal["anonymous", "user", "owner", "manager", "node", "administrator"]
"""``user``: a known one whom no access list names; ``owner`` of the operation; ``manager``: may administer its pool."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)

_KNOWN: Final[frozenset[Role]] = frozenset({"user", "owner", "manager", "administrator"})
_MANAGERS: Final[frozenset[Role]] = frozenset({"manager", "administrator"})

NEEDS: Final[Mapping[Needs, frozenset[Role]]] = {
    "nothing": frozenset(ROLES),
    "a node's token": frozenset({"node"}),
    "a known user": _KNOWN,
    "a known user, for the own": _KNOWN,
    "`read`": _KNOWN,
    "`use`": _MANAGERS,
    "`modify_children`": _MANAGERS,
    "`write`": _MANAGERS,
    "`write`, `modify_children`": _MANAGERS,
    "what the change needs": _MANAGERS,
    "`manage`": _MANAGERS | {"owner"},
    "`read_secrets`": _MANAGERS | {"owner"},
    "`write` on the tree": frozenset({"administrator"}),
    "`administer` on the tree": frozenset({"administrator"}),
    "an administrator": frozenset({"administrator"}),
}
"""What a request needs, in words -> who has it where the pool's access list lets its manager administer it."""

_OF_COMMAND: Final[Mapping[str, Needs]] = {
    **dict.fromkeys(("list_operations", "get_operation", "list_jobs", "get_job"), "`read`"),
    **dict.fromkeys(("set", "multiset_attributes", "transfer_pool_resources"), "`write`"),
    **dict.fromkeys(("remove", "move"), "`write`, `modify_children`"),
    "create": "`modify_children`",
    "start_operation": "`use`",
    "get_job_stderr": "`read_secrets`",
    **dict.fromkeys(
        (
            "abort_operation", "update_operation_parameters", "suspend_operation", "resume_operation",
            "complete_operation",
        ),
        "`manage`",
    ),
    **dict.fromkeys(("check_permission", "check_operation_permission"), "a known user, for the own"),
    "execute_batch": "a known user",
}  # fmt: skip
"""By the name of a command of ``yt``; what is not here needs a known user. A batch needs what its commands need."""

OTHERS: Final[Mapping[str, tuple[str, Needs]]] = {
    "GET /": ("The page, without data", "nothing"),
    "GET /web/{name:path}": ("Its files, without data", "nothing"),
    "GET /metrics": ("Figures for Prometheus", "nothing"),
    "GET /api": ("Versions of the protocol of `yt`", "nothing"),
    "GET /api/v4": ("Its commands", "nothing"),
    "GET /auth/whoami": ("Who asks", "a known user"),
    "GET /hosts": ("The address", "nothing"),
    "GET /version": ("The version", "nothing"),
    "GET /ping": ("Whether the process answers", "nothing"),
}
"""Request -> what it is and what it needs, of all that is neither an endpoint nor a command."""

CATCHING: Final = ("/api/v1/{rest:path}", "/api/{rest:path}", "/api/v4/{command}")
"""Routes that refuse what is not in the table, and the one by which all commands come."""


class AccessRow(NamedTuple):
    """A request, what it does, and what it needs: a key of NEEDS."""

    request: str
    what: str
    needs: Needs

    def allows(self, role: Role) -> bool:
        """Whether a user of that kind may ask this, about the pool or operation of that manager or owner."""
        return role in NEEDS[self.needs]


def list_rows() -> Iterator[AccessRow]:
    """All requests: endpoints, commands of ``yt``, others."""
    for endpoint in ENDPOINTS:
        yield AccessRow(f"{endpoint.method} {endpoint.path}", endpoint.summary, endpoint.needs)
    for name in COMMANDS:
        yield AccessRow(f"yt {name}", "Command of `yt`", _OF_COMMAND.get(name, "a known user"))
    for request, (what, needs) in OTHERS.items():
        yield AccessRow(request, what, needs)


INTRODUCTION: Final = """# Who may ask what

Made of the program by `python -m cpumond.api.access_table`; a test tries each cell against a running scheduler.

*user*: has a token, and no access list names it. *owner*: started the operation. *manager*: an access list lets it
`administer` the pool of that operation, or the one in which the pools of the request are. *node*: has a node's token.
What each permission lets one do is in [the specification](specification/semantics.md), section 12. What is refused for
want of a token has HTTP status 401 and code 900, for want of rights 403 and 901; with `yt` the latter has status 400,
and a plan is an answer that says by code 901 that the change would be refused. A user may read what no access list
denies.

"""


def write_table() -> str:
    """The document that holds the table."""
    lines = ["| request | what | needs | " + " | ".join(ROLES) + " |", "|---|---|---|" + "---|" * len(ROLES)]
    for row in list_rows():
        cells = " | ".join("yes" if row.allows(role) else "-" for role in ROLES)
        lines.append(f"| `{row.request}` | {row.what} | {row.needs} | {cells} |")
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(write_table(), end="")
