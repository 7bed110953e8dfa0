"""One request of the JSON interface, read and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from cpumond.scheduler.rights.users import User


@dataclasses.dataclass(slots=True)
class Call:
    """What a handler gets."""

    path: Mapping[str, str]
    user: User
    body: Any
    query: Any
    node: User | None = None
    """The user of a node's request, where the endpoint is for nodes."""
    plan: str = ""
    """What the user was shown before, as the client tells it in the header X-Cpumond-Plan."""
    request: Request = dataclasses.field(default_factory=lambda: Request({"type": "http"}))
    """For what is neither of its values nor of its user: the cookie of a session."""
