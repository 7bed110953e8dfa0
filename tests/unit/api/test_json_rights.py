"""Requests about rights, and filtering of answers by rights (semantics.md 12)."""

import asyncio
from dataclasses import replace

import pytest
from scheduler_world import TREE, World, entry

from cpumond.api.json.requests import CanQuery
from cpumond.api.json.rights import judge_question, list_rights
from cpumond.scheduler.access import Rights
from cpumond.scheduler.model import ROOT_POOL, CommandError, Config, PoolConfig
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.commands import RemovePool, RemoveTree
from cpumond.scheduler.state.commands import Command
from cpumond.scheduler.state.transaction import Transaction

ADMIN = User("root", admin=True)


@pytest.fixture
def world() -> World:
    world = World(acl_required=True)
    world.create_pool("a", acl=[entry("ml", "use"), entry("spy", "read", action="deny")])
    return world


def can(world: World, asker: User, **query: str) -> bool:
    def find_known(name: str) -> User:
        return User(name, groups=frozenset({"ml"} if name == "ann" else ()))

    given = CanQuery(**{"action": "use", "object": "a", **query})
    return judge_question(Rights(world.state, asker), given, find_known).allowed


def test_of_another_user_known_groups_and_given_ones_count(world):
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


async def test_rights_are_listed_for_pools_that_are_still_there(world):
    names = [f"p{number}" for number in range(300)]
    pools = {name: PoolConfig(f"1-2-3-{number:x}", name, ROOT_POOL) for number, name in enumerate(names, 16)}
    tree = world.state.config.trees[TREE]
    whole = replace(tree, pools={**tree.pools, **pools})
    world.carry_out(Transaction(config=Config({TREE: whole}, TREE)))

    async def list_while(command: Command) -> set[str]:
        asked = asyncio.ensure_future(list_rights(Rights(world.state, ADMIN), world.tree()))
        await asyncio.sleep(0)
        world.do(command)
        return set((await asked).pools)

    assert await list_while(RemovePool(TREE, names[-1])) == {"<Root>", "a", *names[:-1]}
    assert len(await list_while(RemoveTree(TREE, recursive=True))) == 200
