"""Who may do what on trees, pools and operations (semantics.md 12): access lists and what they allow. Pure."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

import msgspec

Permission = Literal["read", "use", "modify_children", "write", "administer", "manage", "read_secrets"]
"""``use``: start operations in a pool; ``modify_children``: make, remove and move pools in it; ``write``: its options;
``administer``: its access list. ``read``, ``manage`` (abort, pin, update), ``read_secrets`` (environment, logs): of
operations."""

PERMISSIONS: Final[tuple[Permission, ...]] = get_args(Permission)

EVERYONE: Final = "everyone"
OWNER: Final = "owner"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class AccessEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of ``@acl``. ``subjects``: users, groups, EVERYONE, OWNER. A denial wins over whatever allows."""

    action: Literal["allow", "deny"]
    subjects: tuple[_Name, ...]
    permissions: tuple[Permission, ...]
    inheritance_mode: Literal["object_and_descendants", "object_only", "descendants_only"] = "object_and_descendants"


class Verdict(msgspec.Struct, frozen=True):
    """Whether something is allowed, and the sentence that says by what."""

    allowed: bool
    because: str
