"""Verdicts of access lists (semantics.md 12.2)."""

from typing import Any

import pytest

from cpumond.scheduler.rights import entries
from cpumond.scheduler.rights.users import User

ANN = User("ann", groups=frozenset({"ml"}))
LOCAL = User("ann", needs_entry=True)
ADMIN = User("root", admin=True)


def allow(*permissions: entries.Permission, to: tuple[str, ...] = ("ann",)) -> entries.AccessEntry:
    return entries.AccessEntry("allow", to, permissions)


def deny(*permissions: entries.Permission, to: tuple[str, ...] = ("ann",)) -> entries.AccessEntry:
    return entries.AccessEntry("deny", to, permissions)


def access(*listed: entries.AccessEntry, closed_by: str = 'pool "p" has one', **more: Any) -> entries.Access:
    standing = tuple(entries.StandingEntry(entry, 'pool "p"') for entry in listed)
    return entries.Access('pool "p"', standing, not closed_by, closed_by, **more)


OWNED = {"owner": "ann", "owned": frozenset({"manage"})}
INHERITED = entries.StandingEntry(allow("write", to=("bob", "ml")), 'pool "research"', 'pool "nlp"')
LIST = 'the access list of pool "p"'


@pytest.mark.parametrize(
    ("user", "permission", "seen", "verdict"),
    [
        (ADMIN, "use", access(deny("use", to=("everyone", "root"))), (True, "root is an administrator")),
        (ANN, "write", access(allow("write", to=("owner",)), owner="ann"),
         (True, f"{LIST} allows write to owner (ann)")),
        (ANN, "read", access(allow("manage")), (True, f"{LIST} allows manage, and with it read, to ann")),
        (ANN, "manage", access(allow("administer"), deny("read")),
         (False, f"{LIST} denies read, and with it manage, to ann")),
        (ANN, "write", access(closed_by=""),
         (True, "there is no access list up to the tree, and the tree does not set acl_required")),
        (LOCAL, "use", access(closed_by=""),
         (False, "no access list allows use to ann, and ann may do only what an access list allows")),
        (ANN, "use", access(), (False, 'no access list allows use to ann, and pool "p" has one')),
        (LOCAL, "manage", access(**OWNED), (True, 'ann is the owner of pool "p"')),
        (ANN, "manage", access(deny("manage"), **OWNED), (False, f"{LIST} denies manage to ann")),
        (ANN, "use", access(**OWNED), (False, 'no access list allows use to ann, and pool "p" has one')),
        (User(""), "write", access(allow("write", to=("owner",))),
         (False, 'no access list allows write to , and pool "p" has one')),
        (ANN, "write", entries.Access('pool "nlp"', (INHERITED,), False, "x"),
         (True, 'the access list of pool "research" allows write to group ml, inherited by pool "nlp"')),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_12_2_a_verdict_says_why(
    user: User, permission: entries.Permission, seen: entries.Access, verdict: tuple[bool, str]
) -> None:
    """What is allowed where follows from the text, too: tests/property/test_rights_laws.py."""
    assert entries.judge(user, permission, seen) == entries.Verdict(*verdict)


def test_who_administers_an_object_is_told():
    listed = allow("administer", to=("lead", "owner")), allow("write", to=("x",)), deny("administer", to=("y",))
    assert entries.list_administrators(access(*listed, owner="bob")) == ["lead", "bob"]
    assert entries.list_administrators(access(*listed)) == ["lead"]
