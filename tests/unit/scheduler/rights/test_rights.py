"""Verdicts of access lists (semantics.md 12.2)."""

from __future__ import annotations

from typing import Any

from cpumond.scheduler.rights.entries import (
    PERMISSIONS,
    Access,
    AccessEntry,
    Permission,
    StandingEntry,
    Verdict,
    judge,
    list_administrators,
)
from cpumond.scheduler.rights.users import User

ANN = User("ann", groups=frozenset({"ml"}))
LOCAL = User("ann", needs_entry=True)
ADMIN = User("root", admin=True)


def allow(*permissions: Permission, to: tuple[str, ...] = ("ann",)) -> AccessEntry:
    return AccessEntry("allow", to, permissions)


def deny(*permissions: Permission, to: tuple[str, ...] = ("ann",)) -> AccessEntry:
    return AccessEntry("deny", to, permissions)


def access(*entries: AccessEntry, closed_by: str = 'pool "p" has one', **more: Any) -> Access:
    standing = tuple(StandingEntry(entry, 'pool "p"') for entry in entries)
    return Access('pool "p"', standing, not closed_by, closed_by, **more)


def may(user: User, permission: Permission, *entries: AccessEntry, **more: Any) -> bool:
    return judge(user, permission, access(*entries, **more)).allowed


def test_12_2_1_an_administrator_may_do_everything():
    assert all(may(ADMIN, each, deny(each, to=("everyone", "root"))) for each in PERMISSIONS)
    assert judge(ADMIN, "use", access()) == Verdict(True, "root is an administrator")


def test_12_1_the_owner_is_the_one_of_the_object():
    assert may(ANN, "write", allow("write", to=("owner",)), owner="ann")
    assert not may(ANN, "write", allow("write", to=("owner",)), owner="bob")
    assert not may(User(""), "write", allow("write", to=("owner",)))


def test_12_2_administer_includes_all_others_and_manage_includes_read():
    assert all(may(ANN, each, allow("administer")) for each in PERMISSIONS)
    assert not may(ANN, "modify_children", allow("write"))
    verdict = judge(ANN, "read", access(allow("manage")))
    assert verdict.because == 'the access list of pool "p" allows manage, and with it read, to ann'


def test_12_2_what_may_not_be_read_may_not_be_managed():
    for permission in ("manage", "read_secrets"):
        verdict = judge(ANN, permission, access(allow("administer"), deny("read")))
        assert verdict == Verdict(False, f'the access list of pool "p" denies read, and with it {permission}, to ann')
    assert may(ANN, "read", allow("administer"), deny("manage"))


def test_12_2_4_without_lists_it_is_as_it_was_before_for_those_who_had_rights():
    assert may(ANN, "write", closed_by="")
    assert not may(LOCAL, "write", closed_by="")
    text = "there is no access list up to the tree, and the tree does not set acl_required"
    assert judge(ANN, "write", access(closed_by="")).because == text


def test_a_refusal_says_what_closes_the_object():
    assert judge(ANN, "use", access()).because == 'no access list allows use to ann, and pool "p" has one'
    text = "no access list allows use to ann, and ann may do only what an access list allows"
    assert judge(LOCAL, "use", access(closed_by="")).because == text


def test_the_sentence_names_list_subject_and_heir():
    standing = StandingEntry(allow("write", to=("bob", "ml")), 'pool "research"', 'pool "nlp"')
    found = judge(ANN, "write", Access('pool "nlp"', (standing,), False, "x"))
    text = 'the access list of pool "research" allows write to group ml, inherited by pool "nlp"'
    assert found == Verdict(True, text)
    owned = judge(ANN, "write", access(allow("write", to=("owner",)), owner="ann"))
    assert owned.because == 'the access list of pool "p" allows write to owner (ann)'


def test_an_owner_needs_no_entry_for_what_it_owns():
    owned = access(owner="ann", owned=frozenset({"manage"}))
    assert judge(LOCAL, "manage", owned) == Verdict(True, 'ann is the owner of pool "p"')
    assert not judge(ANN, "use", owned).allowed
    assert not may(ANN, "manage", deny("manage"), owner="ann", owned=frozenset({"manage"}))


def test_who_administers_an_object_is_told():
    entries = allow("administer", to=("lead", "owner")), allow("write", to=("x",)), deny("administer", to=("y",))
    assert list_administrators(access(*entries, owner="bob")) == ["lead", "bob"]
    assert list_administrators(access(*entries)) == ["lead"]
