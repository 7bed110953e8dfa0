"""Which entries count for trees, pools and operations (semantics.md 12.1, 12.2)."""

from typing import Any

import pytest
from scheduler_world import TREE, World, entry

from cpumond.scheduler.access import Rights, read_access
from cpumond.scheduler.model import ROOT_POOL
from cpumond.scheduler.rights.entries import Permission
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.commands import RemovePool, RemoveTree


class Lists(World):
    """Pools ``a``, in it ``b``, in that ``c``, and ``z`` beside them."""

    def __init__(self, **tree: Any) -> None:
        super().__init__(**tree)
        for name, parent in (("a", ROOT_POOL), ("b", "a"), ("c", "b"), ("z", ROOT_POOL)):
            self.create_pool(name, parent)

    def on(self, operation: str, user: str, **more: Any) -> list[Permission]:
        rights, record = Rights(self.state, User(user, **more)), self.record(operation)
        words: tuple[Permission, ...] = ("read", "manage", "read_secrets", "administer")
        return [each for each in words if rights.on_operation(record, each).allowed]


@pytest.fixture
def lists() -> Lists:
    return Lists()


def test_an_operation_has_the_lists_of_its_pools_in_all_trees_and_its_own():
    lists = Lists(nodes_filter="!x")
    lists.create_tree("other", nodes_filter="x")
    lists.create_pool("o", tree="other")
    lists.set_pool("a", acl=[entry("lead", "administer"), entry("bad", "read", action="deny")])
    lists.set_pool("o", "other", acl=[entry("second", "manage"), entry("lead", "manage", action="deny")])
    options = {"default": {"pool": "b"}, "other": {"pool": "o"}}
    started = lists.start(user="ann", scheduling_options_per_pool_tree=options, acl=[entry("friend", "read_secrets")])
    assert lists.on(started, "ann", needs_entry=True) == ["read", "manage", "read_secrets", "administer"]
    assert lists.on(started, "lead") == ["read", "read_secrets", "administer"]
    assert lists.on(started, "second") == ["read", "manage"]
    assert lists.on(started, "friend") == ["read", "read_secrets"]
    assert lists.on(started, "bad") == []
    assert lists.on(started, "other") == ["read"]
    lists.abort(started)
    assert lists.on(started, "second") == ["read", "manage"]


def test_an_ephemeral_pool_has_the_rights_of_the_one_that_it_is_in(lists):
    lists.set_pool("a", acl=[entry("lead", "manage")])
    lists.set_pool("c", create_ephemeral_subpools=True)
    started = lists.start("c", user="ann")
    assert lists.record(started).trees[TREE].pool == "c$ann"
    assert lists.on(started, "lead") == ["read", "manage"]
    lists.abort(started)
    assert lists.on(started, "lead") == ["read", "manage"]
    open_to_all = lists.start(user="bob")
    assert "manage" in lists.on(open_to_all, "lead")
    lists.set_tree(acl=[])
    assert "manage" not in lists.on(open_to_all, "lead")


def test_an_operation_of_a_removed_pool_is_the_trees(lists):
    lists.set_tree(acl=[entry("lead", "manage")])
    lists.set_pool("z", acl=[entry("bob", "manage")])
    started = lists.start("z", user="ann")
    lists.do(RemovePool(TREE, "z"))
    assert [lists.on(started, name) for name in ("lead", "bob")] == [["read", "manage"], ["read"]]


def test_an_operation_without_any_tree_is_its_owners(lists):
    lists.create_tree("other", nodes_filter="x")
    started = lists.start(user="ann", pool_trees=["other"], pool="")
    lists.do(RemoveTree("other", recursive=True))
    assert lists.record(started).state == "aborted"
    assert "manage" in lists.on(started, "ann")
    assert lists.on(started, "bob") == ["read"]


def test_what_may_be_read_of_many_is_what_may_be_read_of_each(lists):
    lists.set_pool("b", acl=[entry("spy", "read", action="deny")])
    own = ([], [entry("spy", "read", action="deny")], [entry("bob", "read", action="deny")], [entry("spy", "manage")])
    started = [
        lists.start(pool, user=user, acl=acl) for pool in ("c", "z") for user in ("ann", "spy") for acl in (*own, *own)
    ]
    for operation in started[::3]:
        lists.abort(operation)
    records = [lists.record(name) for name in started]
    for name in ("ann", "bob", "spy"):
        user = User(name, needs_entry=True)
        each = [record for record in records if Rights(lists.state, user).on_operation(record, "read").allowed]
        assert Rights(lists.state, user).readable(records) == each
        assert each
    assert Rights(lists.state, User("spy", admin=True)).readable(records) == records


def test_what_a_child_inherits_is_not_what_its_parent_has(lists):
    lists.set_pool("a", acl=[entry("x", "use", inheritance_mode="object_only"), entry("y", "use")])
    tree = lists.state.config.trees[TREE]
    subjects = [[each.entry.subjects for each in read_access(tree, "a", of_child=child).entries] for child in (0, 1)]
    assert subjects == [[("x",), ("y",)], [("y",)]]
