"""Entries of access lists of trees, pools and operations, and decisions by these entries (semantics.md 12). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_args

import msgspec

from cpumond.scheduler.rights.users import User

Permission = Literal["read", "use", "modify_children", "write", "administer", "manage", "read_secrets"]
"""On pools: ``use`` starts operations; ``modify_children`` creates, removes and moves child pools; ``write`` changes
options; ``administer`` changes the access list. On operations: ``read``, ``manage`` (abort, pin, update),
``read_secrets`` (environment, logs)."""

PERMISSIONS: Final[tuple[Permission, ...]] = get_args(Permission)

OPERATION_PERMISSIONS: Final[tuple[Permission, ...]] = ("read", "manage", "read_secrets")
"""Permissions that the access list of an operation itself may contain."""

OWNED: Final[frozenset[Permission]] = frozenset({*OPERATION_PERMISSIONS, "administer"})
"""Permissions that the user who started an operation has on it."""

ALLOWED_BY: Final[Mapping[Permission, tuple[Permission, ...]]] = {
    **{name: (name, "administer") for name in PERMISSIONS},
    "administer": ("administer",),
    "read": ("read", "manage", "administer"),
}
"""Permission -> permissions that imply it: an entry that allows any of these also allows the permission."""

DENIED_BY: Final[Mapping[Permission, tuple[Permission, ...]]] = {
    **{name: (name,) for name in PERMISSIONS},
    "manage": ("manage", "read"),
    "read_secrets": ("read_secrets", "read"),
}
"""Permission -> permissions whose denial also denies it: users cannot act on an object that they may not see."""

NEVER_OPEN: Final[frozenset[Permission]] = frozenset({"administer"})
"""Permissions that users do not have if there is no access list, while others are then open to them: stores without
access lists are older than these permissions, so their users never relied on them."""

EVERYONE: Final = "everyone"
OWNER: Final = "owner"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class AccessEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of ``@acl``. ``subjects``: users, groups, EVERYONE, OWNER. A denial overrides entries that allow."""

    action: Literal["allow", "deny"]
    subjects: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1)]
    permissions: Annotated[tuple[Permission, ...], msgspec.Meta(min_length=1)]
    inheritance_mode: Literal["object_and_descendants", "object_only", "descendants_only"] = "object_and_descendants"


class Verdict(msgspec.Struct, frozen=True):
    """Whether something is allowed, and the reason as a sentence."""

    allowed: bool
    because: str


@dataclass(frozen=True, slots=True)
class StandingEntry:
    """An entry that applies to an object. ``where``: object whose access list contains the entry. ``heir``: pool that
    inherits the entry; "" if it is in the object's own list."""

    entry: AccessEntry
    where: str
    heir: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """Everything that decides about the rights on one tree, pool or operation.

    ``is_open``: the object has neither an own nor an inherited access list, and its tree does not set ``acl_required``.
    All that no entry decides is then allowed, except NEVER_OPEN, as it was before access lists existed. ``owner``: user
    who has the permissions ``owned`` even if no entry allows them."""

    what: str
    entries: tuple[StandingEntry, ...]
    is_open: bool
    closed_by: str
    """Why the object is not open, for the sentence of a refusal; "" if it is open."""
    owner: str = ""
    owned: frozenset[Permission] = frozenset()


def judge(user: User, permission: Permission, access: Access) -> Verdict:
    """Decide whether a user has a permission on an object, and why (12.2)."""
    if user.admin:
        return Verdict(True, f"{user.name} is an administrator")
    allowing: StandingEntry | None = None
    for standing in access.entries:
        entry = standing.entry
        table = DENIED_BY if entry.action == "deny" else ALLOWED_BY
        if not any(name in entry.permissions for name in table[permission]) or not find_subject(user, entry, access):
            continue
        if entry.action == "deny":
            return Verdict(False, _describe_decision(standing, permission, user, access))
        allowing = allowing or standing
    if access.owner == user.name and permission in access.owned:
        return Verdict(True, f"{user.name} is the owner of {access.what}")
    if allowing is not None:
        return Verdict(True, _describe_decision(allowing, permission, user, access))
    if permission == "read":
        return Verdict(True, "every user may read objects that no access list denies")
    is_given = access.is_open and not user.needs_entry
    if is_given and permission not in NEVER_OPEN:
        return Verdict(True, "there is no access list up to the tree, and the tree does not set acl_required")
    alone = "without one only administrators may" if is_given else f"{user.name} may do only what an access list allows"
    closed = access.closed_by or alone
    return Verdict(False, f"no access list allows {permission} to {user.name}, and {closed}")


def find_subject(user: User, entry: AccessEntry, access: Access) -> str:
    """Return in words the subject of an entry that matches the user; "" if no subject does."""
    for subject in entry.subjects:
        if subject == EVERYONE:
            return EVERYONE
        if subject == OWNER:
            if access.owner and access.owner == user.name:
                return f"{OWNER} ({user.name})"
        elif subject == user.name:
            return user.name
        elif subject in user.groups:
            return f"group {subject}"
    return ""


def _describe_decision(standing: StandingEntry, permission: Permission, user: User, access: Access) -> str:
    entry = standing.entry
    table = DENIED_BY if entry.action == "deny" else ALLOWED_BY
    word: str = next(name for name in table[permission] if name in entry.permissions)
    verb = "denies" if entry.action == "deny" else "allows"
    if word != permission:
        word = f"{word}, and with it {permission},"
    heir = f", inherited by {standing.heir}" if standing.heir else ""
    return f"the access list of {standing.where} {verb} {word} to {find_subject(user, entry, access)}{heir}"


def list_administrators(access: Access) -> list[str]:
    """Return the subjects that entries allow to administer an object. OWNER is replaced by the object's owner."""
    names = [
        access.owner if subject == OWNER else subject
        for standing in access.entries
        if standing.entry.action == "allow" and "administer" in standing.entry.permissions
        for subject in standing.entry.subjects
    ]
    return list(dict.fromkeys(filter(None, names)))
