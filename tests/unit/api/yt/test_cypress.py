"""Commands of the ``yt`` protocol against a living scheduler (semantics.md 2, 5; yt_protocol.md 6, 10)."""

import asyncio
import contextlib
import copy
from types import SimpleNamespace

import pytest
from calls import count_calls
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import ServedNode, StillClock
from yt_client import Client, error_of

from cpumond.api.yt.commands import LISTED_ATTRIBUTES
from cpumond.api.yt.cypress import materialise_in_parts
from cpumond.api.yt.orchid import scheduler_orchid
from cpumond.api.yt.parameters import MAX_NAMES, YtRequest
from cpumond.api.yt.transport import COMMANDS
from cpumond.api.yt.values import Attributed, Uint, YtError
from cpumond.scheduler.model import CommandError, Rules
from cpumond.scheduler.rights.tokens import User
from cpumond.scheduler.service import Scheduler

ORCHID = "//sys/scheduler/orchid/scheduler"
DEFAULT = f"{ORCHID}/pool_trees/default"
LISTED = ["type", "account", "resource_usage", "modification_time"]


# --- pools and trees as nodes ------------------------------------------------------------------------------------


async def test_pools_are_nested_nodes(yt):
    await yt.create_pools("a", "a/b", "b/c", "d")
    shape = {"a": {"b": {"c": {}}}, "d": {}}
    assert await yt.get("//sys/pools") == shape
    assert await yt.get("//sys/pool_trees/default") == shape
    assert await yt.get("//sys/pool_trees") == {"default": shape}
    assert await yt.get("//sys/pools/a") == {"b": {"c": {}}}
    assert await yt.list("//sys/pools") == ["a", "d"]
    assert await yt.list("//sys/pools/a/b") == ["c"]
    assert await yt.list("//sys") == ["cluster_nodes", "pool_trees", "pools", "scheduler"]
    assert await yt.list("/") == ["sys"]
    assert await yt.exists("//sys/pools/a/b")
    assert not await yt.exists("//sys/pools/b")


async def test_children_come_with_the_attributes_that_they_have(yt):
    await yt.create_pool("a", weight=2.5)
    await yt.create_pool("b", "a")
    assert await yt.get("//sys/pools", attributes=["weight", "type"]) == Attributed(
        {"a": Attributed({"b": Attributed({}, {"type": "scheduler_pool"})}, {"weight": 2.5, "type": "scheduler_pool"})},
        {"type": "scheduler_pool_tree"},
    )
    assert await yt.list("//sys/pools", attributes=["weight"]) == [Attributed("a", {"weight": 2.5})]
    assert await yt.list("//sys/pools/a", attributes=["weight"]) == ["b"]


def count_steps(work):
    with contextlib.closing(asyncio.new_event_loop()) as loop, count_calls() as calls:
        loop.run_until_complete(work)
    return calls.total()


@pytest.mark.parametrize(
    "names", [[f"a{i}" for i in range(MAX_NAMES)], ["weight"] * 9000, ["type", "weigth", "burst-ram", "nested"] * 2000]
)
@pytest.mark.parametrize("path", ["//sys/pool_trees/default", "//sys/cluster_nodes", f"{DEFAULT}/pools"])
@pytest.mark.parametrize("command", ["list", "get"])
def test_what_attributes_cost_is_no_product(store, names, path, command):
    yt, pools = Client(Scheduler(Rules(), store, StillClock(1e9)), None), 50

    async def ask(*attributes):
        given = {"path": path, "attributes": list(attributes)}
        return await yt.backend(YtRequest(command, given, None, User("a", admin=True), "1-2-3-4"))

    async def fill():
        for number in range(pools):
            await yt.create_pool(f"p{number}", weight=2.0)
            await ServedNode(yt.scheduler, 1.0, f"n{number}").register()
        await yt.scheduler.update_all()

    asyncio.run(fill())
    plain = count_steps(ask("type"))
    assert count_steps(ask(*names)) < plain + 20 * len(names) + pools * (10 * len(set(names)) + 200)


async def test_only_some_attributes_are_asked_for_at_a_time(yt):
    names = [f"a{i}" for i in range(MAX_NAMES + 1)]
    for command, more in (("list", {}), ("get", {}), ("list_operations", {})):
        asked = yt(command, path="//sys/pools", attributes=names, **more)
        await error_of(asked, said=f'"attributes" has {MAX_NAMES + 1} names, more than the limit of {MAX_NAMES}')
    assert await yt.list("//sys/pools", attributes=["a"] * 9000) == []


async def test_a_list_is_cut_at_max_size(yt):
    await yt.create_pools("a", "b", "c")
    assert await yt.list("//sys/pools", max_size=2) == Attributed(["a", "b"], {"incomplete": True})
    assert await yt.list("//sys/pools", max_size=3) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "path",
    [
        "/", "//sys", "//sys/pool_trees", "//sys/pools", "//sys/pools/a", "//sys/cluster_nodes", "//sys/scheduler",
        "//sys/scheduler/instances", ORCHID, f"{ORCHID}/pool_trees", DEFAULT, f"{DEFAULT}/pools",
        f"{DEFAULT}/pools/a", f"{DEFAULT}/pools/a/fair_share",
    ],
)  # fmt: skip
async def test_every_node_can_be_listed_in_long_form(yt, path):
    await yt.register()
    await yt.create_pools("a", "a/b")
    for item in await yt.list(path, attributes=LISTED):
        assert set(item.attributes) == set(LISTED)
    attributes = await yt.get(f"{path}/@" if path != "/" else "/@")
    assert set(LISTED) | {"id", "count", "name", "parent_name", "creation_time"} <= set(attributes)
    assert attributes["account"] == "sys"
    assert attributes["resource_usage"]["disk_space"] == 0
    assert attributes["modification_time"].endswith("Z")
    assert attributes["count"] == len(await yt.list(path))


async def test_a_pool_answers_what_it_is(yt):
    made = await yt.create_pool("a")
    inner = await yt.create_pool("b", "a", weight=3)
    expected = {
        "id": inner, "type": "scheduler_pool", "name": "b", "parent_name": "a", "parent_id": made, "full_path": "/a/b",
        "path": "//sys/pool_trees/default/a/b", "pool_tree": "default", "weight": 3.0,
    }  # fmt: skip
    found = await yt.get("//sys/pools/a/b/@")
    assert {name: found[name] for name in expected} == expected
    assert await yt.get("//sys/pools/a/@parent_name") == "<Root>"
    assert await yt.get("//sys/pools/a/@count") == 1
    assert await yt.get("//sys/pools/@type") == "scheduler_pool_tree"


async def test_an_id_opens_a_path(yt):
    made = await yt.create_pool("a")
    await yt.create_pool("b", "a", weight=3)
    tree = await yt.get("//sys/pool_trees/default/@id")
    assert await yt.get(f"#{made}/@name") == "a"
    assert await yt.get(f"#{made}/b/@weight") == 3.0
    assert await yt.get(f"#{tree}") == {"a": {"b": {}}}
    await yt.set(f"#{made}/@weight", 5)
    assert await yt.get("//sys/pools/a/@weight") == 5.0
    error = await error_of(yt.get("#1-2-3-4"), 500)
    assert "No such object 1-2-3-4" in error.inner[0].message


async def test_pools_is_a_link_to_the_default_tree(yt):
    await yt("create", type="scheduler_pool_tree", attributes={"name": "gpu", "nodes_filter": "gpu"})
    await yt("create", type="scheduler_pool", attributes={"name": "p", "pool_tree": "gpu"})
    assert await yt.get("//sys/pools") == {}
    assert await yt.get("//sys/pools&/@type") == "link"
    assert await yt.get("//sys/pools&/@target_path") == "//sys/pool_trees/default"
    await yt.set("//sys/pool_trees/default/@nodes_filter", "!gpu")
    await yt.set("//sys/pool_trees/@default_tree", "gpu")
    assert await yt.get("//sys/pool_trees/@default_tree") == "gpu"
    assert await yt.get("//sys/pools") == {"p": {}}
    assert await yt.get("//sys/pools&/@target_path") == "//sys/pool_trees/gpu"
    assert await yt.get("//sys/pools/p&/@name") == "p"
    await yt.set("//sys/pools/p&/@weight", 2)
    await yt.set("//sys/pools&/@custom", 1)
    assert await yt.get("//sys/pool_trees/gpu/@custom") == 1
    await error_of(yt.set("//sys/pool_trees/@default_tree", "nope"), said="nope")


# --- what is not there -------------------------------------------------------------------------------------------


async def test_a_path_that_leads_nowhere_is_refused_in_the_words_of_the_protocol(yt):
    for path, reason in (
        ("//sys/none", 'Node //sys has no child with key "none"'),
        ("//home/x/@y", 'Node / has no child with key "home"'),
    ):
        error = await error_of(yt.get(path), 500)
        assert (error.message, error.attributes) == (f"Error resolving path {path}", {"path": path})
        assert [(inner.message, inner.code) for inner in error.inner] == [(reason, 500)]
    for path in ("//sys/client_config", "//sys/@local_mode_proxy_address", "//sys/@local_mode_fqdn"):
        await error_of(yt.get(path), 500)
        assert not await yt.exists(path)


async def test_a_pool_that_is_elsewhere_is_pointed_at(yt):
    await yt.create_pools("a", "a/burst")
    error = await error_of(yt.get("//sys/pools/burst"), 500)
    assert error.inner[0].message == 'Node //sys/pools has no child with key "burst"'
    assert error.inner[0].inner[0].message == 'pool "burst" is at //sys/pool_trees/default/a/burst'
    error = await error_of(yt.get("//sys/pools/bursd"), 500)
    assert error.inner[0].inner[0].message == "did you mean //sys/pool_trees/default/a/burst?"
    await yt.start(pool="made")
    error = await error_of(yt.get("//sys/pools/made"), 500)
    assert "ephemeral" in error.inner[0].inner[0].message
    error = await error_of(yt.get(f"{DEFAULT}/pools/nope/weight"), 500)
    assert error.inner[0].message == f'Node {DEFAULT}/pools has no child with key "nope"'
    assert error.inner[0].inner[0].message == 'Pool tree "default" has no pool "nope"'


async def test_a_missing_attribute_is_told_with_what_may_be_meant(yt):
    await yt.create_pool("a", weight=3)
    for name, told in (
        ("weigth", '; did you mean "weight"?'),
        ("mode", ': it is not set; "fair_share" applies'),
        ("max_running_operation_count", ": it is not set"),
        ("resource_usage/disk_spac", '; did you mean "disk_space"?'),
    ):
        error = await error_of(yt.get(f"//sys/pools/a/@{name}"), 500)
        assert error.message == f"Error resolving path //sys/pools/a/@{name}"
        assert error.inner[0].message == f'Attribute "{name}" is not found{told}'
    assert not await yt.exists("//sys/pools/a/@mode")
    assert await yt.exists("//sys/pools/a/@weight")


async def test_2_3_without_a_default_tree_an_operation_must_name_its_trees(yt):
    await yt.remove("//sys/pool_trees/@default_tree")
    assert not await yt.exists("//sys/pool_trees/@default_tree")
    await error_of(yt.remove("//sys/pool_trees/@default_tree"), 500)
    await yt.remove("//sys/pool_trees/@default_tree", force=True)
    await error_of(yt.start(1), 214, "Pool trees are unspecified")
    assert await yt.start(1, pool_trees=["default"])
    await yt.set("//sys/pool_trees/@default_tree", "default")
    assert await yt.start(1, user="bob")


async def test_an_empty_scheduler_has_no_default_tree_to_link_to(yt):
    await yt.remove("//sys/pool_trees/default")
    assert "which does not exist" in (await error_of(yt.get("//sys/pools"), 500)).inner[0].message
    assert await yt.get("//sys/pools&/@broken") is True
    assert not await yt.exists("//sys/pool_trees/@default_tree")
    await error_of(yt("create", type="scheduler_pool", attributes={"name": "a"}), said="there is no default tree")


# --- attributes --------------------------------------------------------------------------------------------------


async def test_attributes_are_set_and_read_in_every_spelling(yt):
    await yt.create_pools("root-pool", "root-pool/burst")
    await yt.set("//sys/pools/root-pool/@integral-guarantees/resource_flow", {"cpu": Uint(100)})
    await yt.set("//sys/pools/root-pool/burst/@integral-guarantees/guarantee_type", "burst")
    await yt.set("//sys/pools/root-pool/burst/@integral-guarantees/resource_flow", {"cpu": 100})
    await yt.set("//sys/pools/root-pool/burst/@min_share_resources", Attributed({}, {"ignored": 1}))
    path = "//sys/pools/root-pool/burst/@"
    assert await yt.get(f"{path}integral_guarantees/resource_flow/cpu") == 100.0
    assert await yt.get(f"{path}integral-guarantees") == {"guarantee_type": "burst", "resource_flow": {"cpu": 100.0}}
    assert await yt.list(f"{path}integral-guarantees") == ["guarantee_type", "resource_flow"]
    assert await yt.get(f"{path}strong_guarantee_resources") == {}
    assert "weight" not in await yt.list(path)
    await yt.set(f"{path}weight", 3)
    assert await yt.get(f"{path}weight") == 3.0
    assert "weight" in await yt.list(path)


async def test_all_attributes_are_replaced_at_once(yt):
    await yt.create_pool("a", weight=3, mode="fifo")
    await yt.set("//sys/pools/a/@", {"weight": 4, "max_share_ratio": 0.5})
    found = await yt.get("//sys/pools/a/@")
    assert (found["weight"], found["max_share_ratio"], "mode" in found) == (4.0, 0.5, False)
    await error_of(yt.set("//sys/pools/a/@", 5))
    await error_of(yt.set("//sys/pools/a/@weight", "heavy"), said="weight")
    await error_of(yt.set("//sys/pools/a/@id", "1-2-3-4"))
    assert await yt.get("//sys/pools/a/@weight") == 4.0
    await error_of(yt.set("//sys/pools/a", {}), said="cannot be set as a whole")


async def test_several_attributes_are_set_at_once_or_none(yt):
    await yt.create_pool("a")
    assert await yt("multiset_attributes", path="//sys/pools/a/@", value={"weight": 2, "mode": "fifo"}) == {}
    assert await yt.get("//sys/pools/a/@mode") == "fifo"
    await error_of(yt("multiset_attributes", path="//sys/pools/a/@", value={"weight": 9, "mode": "x"}))
    assert await yt.get("//sys/pools/a/@weight") == 2.0
    flow = {"resource_flow": {"cpu": 1}, "guarantee_type": "relaxed"}
    await yt("multiset_attributes", path="//sys/pools/a/@integral_guarantees", value=flow)
    assert await yt.get("//sys/pools/a/@integral_guarantees/resource_flow/cpu") == 1.0
    await error_of(yt("multiset_attributes", path="//sys/pools/a", value={}))


async def test_attributes_are_removed(yt):
    await yt.create_pool("a", weight=3, strong_guarantee_resources={"cpu": 1, "memory": 5}, note="x")
    await yt.remove("//sys/pools/a/@min_share_resources/memory")
    assert await yt.get("//sys/pools/a/@min_share_resources") == {"cpu": 1.0}
    await yt.remove("//sys/pools/a/@weight")
    assert not await yt.exists("//sys/pools/a/@weight")
    await error_of(yt.remove("//sys/pools/a/@weight"), 500)
    await yt.remove("//sys/pools/a/@weight", force=True)
    await yt.remove("//sys/pools/a/@")
    assert not await yt.exists("//sys/pools/a/@note")
    await error_of(yt.remove("//sys/pools/a/@name"))


async def test_access_lists_are_attributes(yt):
    await yt.create_pools("a", "a/b")
    entry = {"action": "allow", "subjects": ["kim"], "permissions": ["use"]}
    await yt.set("//sys/pools/a/@acl/end", entry)
    assert await yt.get("//sys/pools/a/@acl") == [entry]
    assert await yt.get("//sys/pools/a/@inherit_acl") is True
    assert await yt.get("//sys/pools/a/b/@effective_acl") == [entry]
    assert await yt.get("//sys/pools/a/b/@acl") == []
    error = await error_of(yt.set("//sys/pools/a/@acl", [{**entry, "permissions": ["uze"]}]))
    assert 'acl/0/permissions: "uze" is unknown; did you mean "use"?' in str(error)
    await error_of(yt.set("//sys/pools/a/@effective_acl", []), said="cannot be set or removed")


async def test_rights_to_operations_are_asked_about(yt):
    await yt.create_pool("a", acl=[])
    operation = await yt.start(pool="a", by="ann")

    async def ask(asker, user, permission):
        given = {"operation_id": operation, "user": user, "permission": permission}
        return (await yt("check_operation_permission", by=asker, is_admin=asker == "root", **given))["action"]

    assert await ask("root", "ann", "manage") == "allow"
    assert await ask("root", "bob", "read") == "allow"
    assert await ask("bob", "bob", "manage") == "deny"
    await error_of(ask("bob", "ann", "manage"), 901)


async def test_an_option_of_a_tree_that_is_not_set_answers_what_holds(yt):
    """Of a pool it is no attribute, as in YTsaurus."""
    await yt.create_pool("a")
    tree = "//sys/pool_trees/default"
    config = await yt.get(f"{DEFAULT}/config")
    assert {name: await yt.get(f"{tree}/@{name}") for name in config} == config
    assert await yt.get(f"{tree}/@max-running-operation-count") == 2000
    assert await yt.get(f"{tree}/@integral_guarantees/smooth_period") == 60_000
    await yt.set(f"{tree}/@integral_guarantees/smooth_period", 1000)
    assert await yt.get(f"{tree}/@integral_guarantees/relaxed_share_multiplier_limit") == 3.0
    assert await yt.exists(f"{tree}/@preempt_cheapest_first")
    for none in ("set_container_cpu_limit", "max_preemptions_per_minute", "nonsense"):
        assert not await yt.exists(f"{tree}/@{none}")
    found = await yt.get("//sys/pool_trees", attributes=["main_resource", "nonsense"])
    assert found["default"].attributes == {"main_resource": "cpu"}
    assert "main_resource" not in await yt.get(f"{tree}/@")
    assert 'it is not set; "cpu" applies' in str((await error_of(yt.remove(f"{tree}/@main_resource"), 500)).inner[0])
    assert (await yt.get(f"{tree}/@config"), "config" in await yt.list(f"{tree}/@")) == ({}, True)
    for none in ("@config/main_resource", "a/@config", "a/@mode"):
        assert not await yt.exists(f"{tree}/{none}")


async def test_options_of_a_tree_are_attributes_or_in_its_config(yt):
    await yt.set("//sys/pool_trees/default/@config/max_operation_count", 77)
    await yt.set("//sys/pool_trees/default/@fair-share_starvation_tolerance", 0.5)
    assert await yt.get("//sys/pool_trees/default/@config/max_operation_count") == 77
    assert await yt.get("//sys/pool_trees/default/@max_operation_count") == 77
    assert await yt.get("//sys/pool_trees/default/@fair_share_starvation_tolerance") == 0.5
    assert await yt.get(f"{DEFAULT}/config/max_operation_count") == 77
    assert await yt.get(f"{DEFAULT}/pools/<Root>/max_operation_count") == 77
    await yt.remove("//sys/pool_trees/default/@config")
    assert await yt.get("//sys/pool_trees/default/@max_operation_count") == 50_000
    await error_of(yt.set("//sys/pool_trees/default/@nodes_filter", "a &"))
    await error_of(yt.set("//sys/pool_trees/default/@name", "other"))
    await error_of(yt.set("//sys/pool_trees/@other", "x"))
    await error_of(yt.set("//sys/pool_trees/@default_tree", 5))


@pytest.mark.parametrize(
    "path", ["//sys/@x", "//@x", "//sys/scheduler/@x", f"{ORCHID}/@x", f"{DEFAULT}/pools/a/@weight"]
)
async def test_what_is_not_configuration_cannot_be_set(yt, path):
    await yt.create_pool("a")
    await error_of(yt.set(path, 1), said="cannot be changed")


# --- creating, removing, moving ----------------------------------------------------------------------------------


async def test_a_pool_is_created_in_the_default_tree_under_the_root(yt):
    answer = await yt("create", type="scheduler_pool", attributes={"name": "a", "weight": 2})
    assert list(answer) == ["object_id"]
    assert await yt.get("//sys/pools/a/@id") == answer["object_id"]
    await error_of(yt("create", type="scheduler_pool", attributes={"name": "a"}), 501, "already exists")
    again = await yt("create", type="scheduler_pool", attributes={"name": "a"}, ignore_existing=True)
    assert again == answer


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "table", "path": "//tmp/t"}, "is not supported"),
        ({"type": "scheduler_pool"}, 'needs the attribute "name"'),
        ({"type": "scheduler_pool", "attributes": {"name": "a", "pool_tree": 5}}, "pool_tree must be text"),
        ({"type": "scheduler_pool", "attributes": {"name": "a", "pool_tree": "x"}}, "does not exist"),
        ({"type": "scheduler_pool", "attributes": {"name": "a", "parent_name": "x"}}, "does not exist"),
        ({"type": "scheduler_pool", "attributes": {"name": "a", "weight": "x"}}, "weight"),
        ({"type": "scheduler_pool", "attributes": 7}, "must be a map"),
        ({"attributes": {"name": "a"}}, '"type" is missing'),
        ({"type": "map_node"}, '"path" is missing'),
        ({"type": "map_node", "path": "//sys/a"}, "cannot be created"),
        ({"type": "map_node", "path": "//sys/none/a"}, "Error resolving path"),
        ({"type": "scheduler_pool_tree", "path": "//sys/pools/a"}, "cannot be created"),
        ({"type": "map_node", "path": "//sys/pools/a/@b"}, "cannot hold a node"),
        ({"type": "map_node", "path": "//sys/pools/a", "attributes": {"name": "b"}}, "leave the attribute name out"),
    ],
)
async def test_what_cannot_be_created_is_refused(yt, parameters, reason):
    await error_of(yt("create", **parameters), said=reason)
    assert await yt.get("//sys/pool_trees") == {"default": {}}


async def test_pools_and_trees_are_created_by_their_paths(yt):
    answer = await yt("create", type="map_node", path="//sys/pools/a", attributes={"weight": 2})
    assert list(answer) == ["node_id"]
    assert await yt.get("//sys/pools/a/@weight") == 2.0
    await yt("create", type="scheduler_pool", path="//sys/pool_trees/default/a/b")
    await error_of(yt("create", type="map_node", path="//sys/pools/c/d"), 500)
    await yt("create", type="map_node", path="//sys/pools/c/d/e", recursive=True, attributes={"weight": 3})
    assert await yt.get("//sys/pools") == {"a": {"b": {}}, "c": {"d": {"e": {}}}}
    assert await yt.get("//sys/pools/c/d/e/@weight") == 3.0
    await yt("create", type="map_node", path="//sys/pool_trees/gpu", attributes={"nodes_filter": "gpu"})
    assert await yt.list("//sys/pool_trees") == ["default", "gpu"]


async def test_a_recursive_creation_that_fails_leaves_nothing(yt):
    await error_of(yt("create", type="map_node", path="//sys/pools/a/b/c", recursive=True, attributes={"weight": "x"}))
    assert await yt.get("//sys/pools") == {}


async def test_pools_are_removed(yt):
    await yt.create_pools("a", "a/b")
    assert str(await error_of(yt.remove("//sys/pools/a"), 1)).startswith("Cannot remove non-empty composite node")
    await yt.remove("//sys/pools/a", recursive=True)
    assert await yt.get("//sys/pools") == {}
    await error_of(yt.remove("//sys/pools/a"), 500)
    await yt.remove("//sys/pools/a", force=True)
    for path in ("//sys/pools", "//sys", ORCHID, f"{DEFAULT}/pools/<Root>"):
        await error_of(yt.remove(path, recursive=True), said="cannot be removed")


async def test_trees_are_removed(yt):
    await yt("create", type="scheduler_pool_tree", attributes={"name": "gpu", "nodes_filter": "gpu"})
    await yt("create", type="scheduler_pool", attributes={"name": "p", "pool_tree": "gpu"})
    await error_of(yt.remove("//sys/pool_trees/gpu"))
    await yt.remove("//sys/pool_trees/gpu", recursive=True)
    assert await yt.list("//sys/pool_trees") == ["default"]


async def test_a_move_renames_and_gives_another_parent(yt):
    made = await yt.create_pool("a", weight=3)
    await yt.create_pool("parent")
    move = {"source_path": "//sys/pools/a", "destination_path": "//sys/pools/parent/a2"}
    assert await yt("move", **move) == {"node_id": made}
    assert await yt.get("//sys/pools") == {"parent": {"a2": {}}}
    assert await yt.get("//sys/pools/parent/a2/@weight") == 3.0
    await error_of(yt("move", **move), 500)
    await yt.create_pool("taken")
    await error_of(yt("move", source_path="//sys/pools/taken", destination_path="//sys/pools/a2"), 501)
    await error_of(yt("move", source_path="//sys/pools/taken", destination_path="//sys/pools/taken"), 501)
    await error_of(yt("move", source_path="//sys/pools/parent", destination_path="//sys/pools/parent/a2/x"))
    await error_of(yt("move", source_path="//sys/pools/taken", destination_path="//sys/scheduler/x"))
    await error_of(yt("move", source_path="//sys/pools", destination_path="//sys/pools/x"))
    await yt("create", type="scheduler_pool_tree", attributes={"name": "gpu", "nodes_filter": "gpu"})
    to_another_tree = yt("move", source_path="//sys/pools/taken", destination_path="//sys/pool_trees/gpu/x")
    await error_of(to_another_tree, said='cannot be moved to tree "gpu"')


async def test_guarantees_are_transferred(yt):
    await yt.create_pool("a", strong_guarantee_resources={"cpu": 5})
    await yt.create_pool("b")
    delta = {"strong_guarantee_resources": {"cpu": Uint(2)}}
    transfer = {"source_pool": "a", "destination_pool": "b", "pool_tree": "default", "resource_delta": delta}
    assert await yt("transfer_pool_resources", **transfer) == {}
    assert await yt.get("//sys/pools/a/@strong_guarantee_resources") == {"cpu": 3.0}
    assert await yt.get("//sys/pools/b/@strong_guarantee_resources") == {"cpu": 2.0}
    await error_of(yt("transfer_pool_resources", source_pool="a", resource_delta=delta))


# --- the orchid --------------------------------------------------------------------------------------------------


async def test_the_orchid_shows_what_lives(yt):
    await yt.register(cpu=1000.0)
    await yt.create_pool("root-pool", integral_guarantees={"resource_flow": {"cpu": 100}})
    flow = {"guarantee_type": "relaxed", "resource_flow": {"cpu": 100}}
    await yt.create_pool("burst", "root-pool", integral_guarantees=flow)
    await yt.update()
    assert await yt.get(f"{DEFAULT}/pools/burst/integral_pool_capacity") == 8640.0
    assert await yt.get(f"{DEFAULT}/resource_limits/cpu") == 1000.0
    assert sorted(await yt.list(f"{DEFAULT}/pools")) == ["<Root>", "burst", "root-pool"]
    assert await yt.list(f"{DEFAULT}/child_pools_by_pool/root-pool") == ["burst"]
    assert await yt.get(f"{ORCHID}/default_pool_tree") == "default"
    assert await yt.get(f"{DEFAULT}/node_addresses/0") == "host"
    assert await yt.exists(f"{DEFAULT}/pools/burst/fair_share_ratio")
    for none in ("pools/nope/fair_share_ratio", "node_addresses/1", "node_addresses/x"):
        assert not await yt.exists(f"{DEFAULT}/{none}")
    assert (await yt.get(f"{DEFAULT}/pools"))["burst"]["specified_resource_flow_ratio"] == 0.1
    await error_of(yt.list(f"{DEFAULT}/pool_count"), said="not a map")


async def test_a_get_from_above_does_not_bring_everything(yt):
    assert await yt.get("//sys/scheduler") == {"instances": {"test-cluster": {"orchid": None}}, "orchid": None}
    assert (await yt.get("//sys"))["pools"] is None
    shown = await yt.get("//sys/scheduler/orchid")
    assert shown["service"]["version"] == "1.2.3"
    assert shown["scheduler"]["pool_trees"] is None
    assert await yt.get("//sys/scheduler/instances/test-cluster/orchid/scheduler/default_pool_tree") == "default"
    assert await yt.get("//sys/@cluster_name") == "test-cluster"


async def test_types_of_the_orchid_are_those_of_its_values(yt):
    await yt.create_pool("a")
    kinds = {
        "/weight": "double",
        "/pool_operation_count": "int64",
        "/starving": "boolean",
        "/mode": "string",
        "": "map",
    }
    for name, kind in kinds.items():
        assert await yt.get(f"{DEFAULT}/pools/a{name}/@type") == f"{kind}_node"
    assert await yt.get(f"{DEFAULT}/errors/@type") == "list_node"
    assert await yt.get("//sys/scheduler/orchid/@type") == "orchid"


async def test_a_tree_may_change_while_it_is_shown(yt):
    await yt.create_pools(*(f"p{number}" for number in range(20)))
    await yt.register()
    await yt.start(pool="made")
    await yt.update()
    root = scheduler_orchid(yt.rights, yt.backend.cypress.results())
    showing = asyncio.create_task(materialise_in_parts(root["pool_trees"], pause_s=0.0))
    await asyncio.sleep(0)
    for number in range(10):
        await yt.remove(f"//sys/pools/p{number + 5}")
    await yt.set("//sys/pools/p19/@name", "q")
    await yt.create_pool("new")
    shown = (await showing)["default"]["pools"]
    assert set(shown) <= {"<Root>", "made", *(f"p{number}" for number in range(20))}
    assert {"<Root>", "made", "p0", "p18"} <= set(shown)


async def test_hosts_are_nodes_with_attributes(yt):
    await yt.register(tags=["big"])
    host = "//sys/cluster_nodes/host"
    assert await yt.list("//sys/cluster_nodes") == ["host"]
    assert await yt.get("//sys/cluster_nodes") == {"host": {}}
    found = await yt.get(f"{host}/@")
    assert (found["state"], found["tags"], found["type"]) == ("online", ["big", "host"], "cluster_node")
    assert found["resource_usage"] == {
        "disk_space": 0, "user_slots": 0, "cpu": 0.0, "gpu": 0, "memory": 0, "network": 0,
    }  # fmt: skip
    for name, value in found.items():
        assert await yt.get(f"{host}/@{name}") == value
    assert await yt.get(f"{host}/@resource_limits/cpu") == 10.0
    await error_of(yt.set(f"{host}/@banned", True), said="one at a time: disable_scheduler_jobs, user_tags")
    await yt.set(f"{host}/@user_tags", ["ssd", "rack1"])
    assert await yt.get(f"{host}/@user_tags") == ["rack1", "ssd"]
    assert await yt.get(f"{host}/@tags") == ["big", "host", "rack1", "ssd"]
    for value in ("ssd", [1], {"a": 1}):
        await error_of(yt.set(f"{host}/@user_tags", value), said="user_tags: must be a list of tags")
    await yt.remove(f"{host}/@user_tags")
    assert await yt.get(f"{host}/@tags") == ["big", "host"]


# --- operations --------------------------------------------------------------------------------------------------


async def test_an_operation_runs_from_start_to_end(yt):
    await yt.register()
    operation = await yt.start(2, pool="p", title="work", by="bob")
    assert await yt("get_operation", operation_id=operation, attributes=["state", "nonsense"]) == {"state": "running"}
    await yt.update()
    await yt.heartbeat()
    found = await yt("get_operation", operation_id=operation)
    assert (found["authenticated_user"], found["start_time"]) == ("bob", "2023-11-14T22:13:20.000000Z")
    assert found["brief_progress"]["jobs"]["running"] == 2
    assert {job["state"] for job in (await yt("list_jobs", operation_id=operation))["jobs"]} == {"waiting"}
    await yt.heartbeat()
    answer = await yt("list_jobs", operation_id=operation)
    assert (answer["state_counts"], answer["errors"]) == ({"running": 2}, [])
    assert {job["address"] for job in answer["jobs"]} == {"host"}
    await yt.heartbeat(finished=[(job["id"], "completed") for job in answer["jobs"]])
    found = await yt("get_operation", operation_id=operation, attributes=["state", "result", "finish_time", "alerts"])
    assert (found["state"], found["result"]["error"]["code"], found["alerts"]) == ("completed", 0, {})
    assert found["finish_time"] > "2023-11-14T22:13:20"
    assert (await yt("list_jobs", operation_id=operation))["state_counts"] == {"completed": 2}
    await error_of(yt("abort_operation", operation_id=operation), said="completed")


async def test_operations_are_aborted_suspended_resumed_and_completed(yt):
    await yt.register()
    first, second = await yt.start(pool="p"), await yt.start(pool="p", alias="*mine")
    assert await yt("suspend_operation", operation_id=first) == {}
    assert (await yt("get_operation", operation_id=first, attributes=["suspended"])) == {"suspended": True}
    assert await yt("resume_operation", operation_id=first) == {}
    assert (await yt("get_operation", operation_id=first, attributes=["suspended"])) == {"suspended": False}
    assert await yt("abort_operation", operation_id=first, abort_message="enough") == {}
    found = await yt("get_operation", operation_id=first, attributes=["state", "result"])
    assert (found["state"], found["result"]["error"]["message"]) == ("aborted", "enough")
    assert await yt("complete_operation", operation_alias="*mine") == {}
    assert (await yt("get_operation", operation_alias="*mine"))["id"] == second
    assert (await yt("get_operation", operation_id=second))["state"] == "completed"


async def test_pool_and_weight_of_an_operation_change(yt):
    await yt.create_pool("p2")
    operation = await yt.start(pool="p")
    parameters = {"scheduling_options_per_pool_tree": {"default": {"weight": 5, "pool": "p2"}}}
    assert await yt("update_operation_parameters", operation_id=operation, parameters=parameters) == {}
    found = await yt("get_operation", operation_id=operation, attributes=["runtime_parameters"])
    assert found["runtime_parameters"]["scheduling_options_per_pool_tree"] == {"default": {"weight": 5.0, "pool": "p2"}}
    await yt("update_operation_parameters", operation_id=operation, parameters={"weight": 2})
    assert await yt.get(f"{DEFAULT}/operations/{operation}/weight") == 2.0


@pytest.mark.parametrize(
    ("command", "parameters", "code", "reason"),
    [
        ("get_operation", {"operation_id": "1-2-3-4"}, 1915, "No such operation 1-2-3-4"),
        ("list_jobs", {"operation_id": "1-2-3-4"}, 1915, "No such operation 1-2-3-4"),
        ("abort_operation", {"operation_alias": "*x"}, 1915, "No such operation"),
        ("abort_operation", {}, 1, '"operation_id" or "operation_alias" is missing'),
        ("get_operation", {"operation_id": 5}, 1, "must be text"),
        ("start_operation", {"operation_type": "map", "spec": {}}, 1, "not supported"),
        ("start_operation", {"operation_type": "vanilla", "spec": {}}, 1, "spec/tasks"),
        ("start_operation", {"operation_type": "vanilla", "spec": []}, 1, "must be a map"),
        ("start_operation", {"spec": {}}, 1, '"type" is missing'),
        ("get", {}, 1, '"path" is missing'),
        ("get", {"path": "sys"}, 1, "a path must begin with"),
        ("get", {"path": "//sys", "attributes": "x"}, 1, "must be a list of names"),
        ("list_operations", {"limit": "x"}, 1, "must be a whole number"),
        ("list_operations", {"from_time": "yesterday"}, 1, "must be a time"),
        ("list_operations", {"cursor_direction": "left"}, 1, "cursor_direction"),
        ("no_such_command", {}, 1, "is not supported"),
    ],
)
async def test_what_is_wrong_with_a_command_is_said(yt, command, parameters, code, reason):
    await error_of(yt(command, **parameters), code, reason)


async def test_operations_are_listed_newest_first_and_filtered(yt):
    await yt.create_pool("full", max_running_operation_count=1)
    first = await yt.start(pool="full", by="ann", title="Nightly")
    yt.clock.at += 10
    second = await yt.start(pool="full", by="bob")
    yt.clock.at += 10
    third = await yt.start(pool="other", by="bob")
    yt.clock.at += 10
    await yt("abort_operation", operation_id=third)

    async def listed(**parameters):
        return [each["id"] for each in (await yt("list_operations", **parameters))["operations"]]

    for parameters, expected in (
        ({}, [third, second, first]),
        ({"state": "pending"}, [second]),
        ({"state": "aborted"}, [third]),
        ({"user": "bob"}, [third, second]),
        ({"pool": "full"}, [second, first]),
        ({"pool_tree": "default", "pool": "other"}, [third]),
        ({"pool_tree": "gpu"}, []),
        ({"type": "vanilla"}, [third, second, first]),
        ({"type": "map"}, []),
        ({"filter": "NIGHT"}, [first]),
        ({"filter": second[:12]}, [second]),
        ({"from_time": "2023-11-14T22:13:30Z"}, [third, second]),
        ({"to_time": "2023-11-14T22:13:30.000000Z"}, [second, first]),
        ({"from_time": 1_700_000_015_000_000}, [third]),
        ({"cursor_time": "2023-11-14T22:13:40Z"}, [second, first]),
        ({"cursor_time": "2023-11-14T22:13:20Z", "cursor_direction": "future", "limit": 1}, [second]),
        ({"with_failed_jobs": True}, []),
        ({"limit": 1}, [third]),
        ({"limit": 0}, []),
        ({"limit": 0, "cursor_direction": "future"}, []),
    ):
        assert await listed(**parameters) == expected, parameters
    answer = await yt("list_operations", limit=1, user="bob")
    counts = {
        "user_counts": {"ann": 1, "bob": 2}, "state_counts": {"pending": 1, "aborted": 1},
        "pool_counts": {"full": 1, "other": 1}, "type_counts": {"vanilla": 2}, "failed_jobs_count": 0,
    }  # fmt: skip
    assert answer["incomplete"] is True
    assert {name: answer[name] for name in counts} == counts
    assert set(answer["operations"][0]) == set(LISTED_ATTRIBUTES)
    answer = await yt("list_operations", include_counters=False, attributes=["id", "spec"])
    assert set(answer) == {"operations", "incomplete"}
    assert set(answer["operations"][0]) == {"id", "spec"}


async def test_one_job_is_found_while_it_runs_and_after(yt):
    operation, (first, _) = await yt.run(2)
    assert (await yt("get_job", operation_id=operation, job_id=first))["state"] == "running"
    await yt.heartbeat(finished=[(first, "failed")])
    found = await yt("get_job", operation_id=operation, job_id=first, attributes=["state", "address"])
    assert found == {"state": "failed", "address": "host"}
    await error_of(yt("get_job", operation_id=operation, job_id="1-2-3-4"), 203)
    await error_of(yt("get_job_stderr", operation_id=operation, job_id="1-2-3-4"), 203)


# --- the rest ----------------------------------------------------------------------------------------------------


async def test_small_commands_answer(yt):
    assert await yt("get_version") == {"version": "1.2.3"}
    assert "features" in await yt("get_supported_features")
    answer = await yt("check_permission", user="x", permission="read", path="//sys/pools")
    assert answer == {"action": "allow", "because": "every user may read objects that no access list denies"}
    await error_of(yt("check_permission", user="x", permission="read", path="//tmp/x"), 500)


NAMES = st.sampled_from(["a", "b", "<Root>", "default", "sys", "pools", "pool_trees", "scheduler", "orchid", "x$y"])
KEYS = st.sampled_from(
    ["weight", "name", "parent_name", "config", "mode", "resource_usage", "0", "integral-guarantees"]
)
PATHS = st.builds(
    lambda start, steps, keys: "/".join([start, *steps]) + ("" if keys is None else "/@" + "/".join(keys)),
    st.sampled_from(["//sys/pools", "//sys/pool_trees", "//sys/pool_trees/default", "//sys", "/", DEFAULT, "#1-2-3-4"]),
    st.lists(NAMES, max_size=3),
    st.none() | st.lists(KEYS, max_size=3),
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | NAMES
VALUES = st.recursive(
    PLAIN, lambda items: st.lists(items, max_size=2) | st.dictionaries(KEYS, items, max_size=2), max_leaves=4
)
REQUESTS = st.tuples(
    st.sampled_from([*COMMANDS]),
    st.fixed_dictionaries(
        {},
        optional={
            "path": PATHS | VALUES,
            "type": st.sampled_from(["scheduler_pool", "scheduler_pool_tree", "map_node"]) | VALUES,
            "attributes": st.fixed_dictionaries({"name": NAMES}, optional={"weight": VALUES, "parent_name": VALUES})
            | VALUES,
            **dict.fromkeys(("source_path", "destination_path"), PATHS),
            **dict.fromkeys(("recursive", "force", "ignore_existing"), st.booleans()),
            "max_size": st.integers(-1, 3),
            "operation_type": st.just("vanilla") | VALUES,
            **dict.fromkeys(("source_pool", "destination_pool"), NAMES),
            **dict.fromkeys(("spec", "operation_id", "job_id", "limit", "cursor_time", "parameters"), VALUES),
            "resource_delta": VALUES,
        },
    ),
    VALUES,
)


@examples(60)
@given(st.lists(REQUESTS, min_size=1, max_size=12))
def test_whatever_is_asked_is_answered_or_refused(requests):
    async def body():
        clock = StillClock(1_700_000_000.0)
        nothing = SimpleNamespace(load=lambda: iter(()), write=lambda *_: None, lost_total=0, commit_s=0.0)
        yt = Client(Scheduler(Rules(), nothing, clock), clock)
        await yt.create_pool("a")
        for command, parameters, value in requests:
            with contextlib.suppress(YtError, CommandError):
                await yt(command, value=value, **parameters)
        await yt.get("//sys")
        await yt.get(f"{ORCHID}/pool_trees")

    asyncio.run(body())


async def test_no_command_changes_what_it_was_given(yt):
    spec = {"tasks": {"t": {"job_count": Uint(1), "command": Attributed("x", {"a": 1})}}, "pool": "p"}
    before = copy.deepcopy(spec)
    await yt("start_operation", operation_type="vanilla", spec=spec)
    attributes = {"name": "a", "pool_tree": "default", "weight": 2}
    await yt("create", type="scheduler_pool", attributes=attributes)
    assert spec == before
    assert attributes == {"name": "a", "pool_tree": "default", "weight": 2}
