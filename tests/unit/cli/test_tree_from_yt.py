"""A pool tree of another cluster, as ``yt get`` prints it, becomes a tree file that can be applied."""

import pytest
from scheduler_world import World

from cpumond.cli.scheduler.tree_from_yt import read_yt_tree
from cpumond.cli.scheduler.tree_text import read_tree_text, write_tree
from cpumond.core.errors import ConfigError
from cpumond.scheduler.settings.tree_file import ApplyTree

PRINTED = r"""
<
    "nodes_filter" = "gpu";
    "config" = {
        "default_parent_pool" = "research";
        "main_resource" = "cpu";
        "enable_scheduled_and_preempted_resources_profiling" = %true;
    };
    "id" = "1-2-3-4";
    "acl" = [];
> {
    "research" = <
        "strong_guarantee_resources" = {"cpu" = 100.;};
        "mode" = "fair_share";
        "abc" = {"id" = 7u; "name" = "\xD0\xAF"};
        "resource_limits" = {};
        "parent_name" = #;
        "id" = "1-2-3-5";
    > {
        "nightly" = <
            "weight" = 2.5;
            "strong_guarantee_resources" = {"cpu" = 10;};
            "min_share_resources" = {"cpu" = 10;};
            "inherit_acl" = %true;
            "fair_share_preemption_timeout" = 60000;
            "enable_lightweight_operations" = %true;
        > {};
        "plain" = {};
    };
}
"""


def test_a_tree_of_another_cluster_can_be_applied():
    text = write_tree("gpu", read_yt_tree(PRINTED, "gpu.yson"), "toml")
    found = read_tree_text(text, "gpu.toml", "toml")
    world = World()
    change = world.do(ApplyTree(found.tree, found.tables))
    tree = world.state.config.trees["gpu"]
    assert (tree.settings.nodes_filter, tree.settings.default_parent_pool) == ("gpu", "research")
    assert (tree.settings.default_memory_limit, tree.settings.enable_memory_reserve) == (2**29, True)
    parents = {name: pool.parent for name, pool in tree.pools.items()}
    assert parents == {"research": "<Root>", "nightly": "research", "plain": "research"}
    nightly = tree.pools["nightly"].settings
    assert (nightly.weight, nightly.strong_guarantee_resources) == (2.5, {"cpu": 10.0})
    assert nightly.fair_share_starvation_timeout == 60_000.0
    assert tree.pools["research"].attributes["abc"] == {"id": 7, "name": "\u042f"}
    assert tree.pools["plain"].attributes == {}
    assert any("enable_lightweight_operations has no effect" in text for text in change.warnings)


@pytest.mark.parametrize(("printed", "says"), [
    ('{"$attributes":{},"$value":{}}', "expected the output of `yt get //sys/pool_trees/TREE` without --format"),
    ("{a=", "t.yson: "),
    ("<weight=1>#", "the tree: its pools are missing"),
    ("{a=<weight=1>#}", 'pool "a": its pools are missing'),
])  # fmt: skip
def test_what_is_no_tree_is_refused(printed, says):
    with pytest.raises(ConfigError) as caught:
        read_yt_tree(printed, "t.yson")
    assert says in str(caught.value)
