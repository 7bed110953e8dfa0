"""Requests about rights, and what answers leave out for want of them (semantics.md 12)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scheduler_world import TREE, World

from cpumond.api.json.requests import CanQuery
from cpumond.api.json.rights import judge_question, list_rights, show_readable_plan, show_readable_report
from cpumond.scheduler.access import Rights
from cpumond.scheduler.history.model import ReportRow, ReportTree, ReportView
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.settings.commands import RemovePool, RemoveTree
from cpumond.scheduler.users import User
from cpumond.scheduler.why.plan import Effect, Plan

ADMIN = User("root", admin=True)


def entry(subject: str, *permissions: str, action: str = "allow") -> dict[str, Any]:
    return {"action": action, "subjects": [subject], "permissions": list(permissions)}


@pytest.fixture
def world() -> World:
    """Pool ``a``, which group ml may use, with an operation that spy may not read."""
    world = World(acl_required=True)
    world.create_pool("a", acl=[entry("ml", "use"), entry("spy", "read", action="deny")])
    return world


def can(world: World, asker: User, **query: str) -> bool:
    def find_known(name: str) -> User:
        return User(name, groups=frozenset({"ml"} if name == "ann" else ()))

    given = CanQuery(**{"action": "use", "object": "a", **query})
    return judge_question(Rights(world.state, asker), given, find_known).allowed


def test_of_another_user_what_is_known_counts_and_the_groups_that_are_given(world):
    assert can(world, ADMIN)
    assert can(world, ADMIN, user="ann")
    assert not can(world, ADMIN, user="bob")
    assert can(world, ADMIN, user="bob", groups="x,ml")
    assert not can(world, ADMIN, user="root", groups="x")  # as if it were another one


def test_of_oneself_the_request_counts(world):
    bob = User("bob", groups=frozenset({"ml"}))
    assert can(world, bob)
    assert can(world, bob, user="bob")
    for query in ({"user": "ann"}, {"groups": "ml"}):
        with pytest.raises(CommandError, match="bob may not ask what"):
            can(world, bob, **query)


def test_rights_are_listed_for_pools_that_are_still_there(world):
    names = [f"p{number}" for number in range(300)]
    for name in names:
        world.create_pool(name)

    async def look() -> dict[str, Any]:
        asked = asyncio.ensure_future(list_rights(Rights(world.state, ADMIN), world.tree()))
        await asyncio.sleep(0)
        world.do(RemovePool(TREE, names[-1]))
        return (await asked).pools

    assert set(asyncio.run(look())) == {"<Root>", "a", *names[:-1]}

    async def lose() -> dict[str, Any]:
        asked = asyncio.ensure_future(list_rights(Rights(world.state, ADMIN), world.tree()))
        await asyncio.sleep(0)
        world.do(RemoveTree(TREE, recursive=True))
        return (await asked).pools

    assert len(asyncio.run(lose())) == 200


def test_plans_and_reports_leave_out_what_may_not_be_read(world):
    operation = world.start("a", user="ann")
    effects = [Effect(kind, TREE, name, "", None, None, []) for kind, name in (("operation", operation), ("pool", "a"))]
    rows = [ReportRow(name=operation), ReportRow(name="of a run before")]
    tree = ReportTree(TREE, ReportRow(name="<Root>"), [], rows, 1)
    for user, left_out in ((User("spy"), 1), (User("bob"), 0)):
        rights = Rights(world.state, user)
        assert len(show_readable_plan(Plan(accepted=True, effects=effects), rights).effects) == 2 - left_out
        (shown,) = show_readable_report(ReportView(0.0, 1.0, 1.0, 1.0, [tree]), rights).trees
        assert (len(shown.operations), shown.left_out_operations) == (2 - left_out, 1 + left_out)
