"""The pool table and the totals of the overview, and the orders in which operations are listed."""

import msgspec
import pytest
from test_views import NOW, TREE, Living, plain

from cpumond.api import overview, pool_views, tables, views
from cpumond.cli.scheduler import cluster_top
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.settings import operations


@pytest.fixture
def living() -> Living:
    return Living()


def sum_cores(tree: Tree) -> tables.CoreSums:
    sums = tables.CoreSums()
    sums.add(tree.operations.values())
    return sums.finish(tree)


def rows_of(living: Living) -> dict[str, dict[str, object]]:
    table = plain(tables.make_pool_table(living.tree(), sum_cores(living.tree()), NOW))
    assert table["columns"] == list(tables.COLUMNS)
    return {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}


def test_a_row_says_the_same_as_the_pool_itself(living):
    living.node("n1", cpu=8.0)
    living.create_pool("a", strong_guarantee_resources={"cpu": 2}, weight=3.0, max_running_operation_count=5)
    living.create_pool("b", integral_guarantees={"guarantee_type": "relaxed", "resource_flow": {"cpu": 1}})
    living.begin("a", 2)
    living.begin("mine", 1, user="somebody")
    living.work("update")
    rows = rows_of(living)
    for pool in pool_views.view_pools(living.tree(), NOW).pools:
        row = rows.pop(pool.name)
        for name in ("parent", "is_ephemeral", "mode", "weight", "operation_count", "max_operation_count",
                     "running_operation_count", "max_running_operation_count"):  # fmt: skip
            assert row[name] == getattr(pool, name), (pool.name, name)
        assert row["fair_share_ratio"] == pytest.approx(pool.fair_share_ratio, abs=1e-6)
        assert row["usage_ratio"] == pytest.approx(pool.usage_ratio, abs=1e-6)
        assert row["strong_guarantee_ratio"] == pytest.approx(pool.strong_guarantee.get("cpu", 0.0) / 8.0, abs=1e-6)
        assert row["limit_cores"] == pytest.approx(pool.usage["cpu"], abs=1e-6)
        assert row["child_count"] == len(pool.children)
        assert row["starvation"] == pool.starvation_status.replace("non_starving", "")
    assert not rows


def test_a_share_names_its_resource_in_answers_tables_and_lists(living):
    living.node("n1", cpu=8.0, memory=2**33)
    for pool, cpu, memory in (("cores", 2.0, 0), ("bytes", 0.5, 2**32)):
        living.create_pool(pool)
        living.begin(pool, cpu=cpu, memory=memory)
    living.work("update")
    rows, pools = rows_of(living), pool_views.view_pools(living.tree(), NOW).pools
    names = {pool.name: (pool.fair_share_resource, pool.usage_resource) for pool in pools}
    assert (names["cores"], names["bytes"]) == (("cpu", "cpu"), ("memory", "memory"))
    for name in ("fair_share", "usage", "demand", "strong_guarantee"):
        resources = {pool: rows[pool][f"{name}_resource"] for pool in ("cores", "bytes")}
        assert resources == {"cores": None, "bytes": None if name == "strong_guarantee" else "memory"}, name
    parts = [part for each in living.operations().operations for part in each.trees.values()]
    found = {part.pool: (part.fair_share_resource, part.usage_resource) for part in parts}
    assert found == {pool: names[pool] for pool in ("cores", "bytes")}
    picture = cluster_top.ClusterPicture(pool_views.view_tree(living.rights, living.tree(), living.now), pools, [], [])
    lines = cluster_top.draw_view(picture, "pools", "share", None, False).split("\n")
    [line] = [line for line in lines if "(by" in line]
    assert "50.0 % (by memory)" in line, lines


def test_cores_are_those_of_the_whole_subtree(living):
    living.node("n1", cpu=4.0)
    living.create_pool("a")
    living.create_pool("b", "a")
    living.begin("b", 2)
    living.begin("a", 1)
    living.work("beat")
    rows = rows_of(living)
    # Each job ordered 1 core, may use 0.5 and was last seen to use 0.4.
    expected = {"<Root>": (3.0, 1.5, 1.2), "a": (3.0, 1.5, 1.2), "b": (2.0, 1.0, 0.8)}
    for name, cores in expected.items():
        row = rows[name]
        assert (row["ordered_cores"], row["limit_cores"], row["used_cores"]) == pytest.approx(cores)
    totals = overview.view_totals(living.tree(), sum_cores(living.tree()), True)
    assert (totals.capacity_cores, totals.ordered_cores, totals.limit_cores) == (4.0, 3.0, 1.5)
    assert (totals.used_cores, totals.reclaimed_cores) == pytest.approx((1.2, 1.5))
    assert (totals.node_count, totals.pool_count, totals.running_operation_count) == (1, 2, 2)


def test_pools_come_depth_first_with_integral_columns_where_they_apply(living):
    for name, parent in (("b", "<Root>"), ("z", "b"), ("a", "<Root>"), ("c", "b")):
        living.create_pool(name, parent)
    living.create_pool("i", integral_guarantees={"guarantee_type": "relaxed", "resource_flow": {"cpu": 1}})
    living.node("n1", cpu=4.0)
    living.update()
    rows = rows_of(living)
    assert [(name, row["depth"]) for name, row in rows.items()] == [
        ("<Root>", 0), ("a", 1), ("b", 1), ("c", 2), ("z", 2), ("i", 1)
    ]  # fmt: skip
    integral = rows["i"]
    assert (integral["integral_type"], integral["flow_ratio"]) == ("relaxed", 0.25)
    assert (integral["volume"], integral["capacity"]) == (0, 0.25 * 86_400)
    assert (rows["a"]["integral_type"], rows["a"]["flow_ratio"], rows["a"]["volume"]) == ("none", None, None)


def test_an_empty_tree_without_nodes_is_a_root_of_nothing(living):
    assert len(tables.make_pool_table(living.tree(), sum_cores(living.tree()), NOW).rows) == 1
    assert overview.view_totals(living.tree(), tables.CoreSums(), False).capacity_cores == 0.0


def ids(living: Living, **query: object) -> list[str]:
    return [each.id for each in living.operations(**query).operations]


def test_operations_are_found_by_any_part_of_any_name_whatever_the_case(living):
    living.create_pool("Research")
    one = living.begin("Research", title="Nightly Build", alias="*night")
    two = living.begin("other", user="Ann")
    for text, found in (
        ("NIGHT", [one]), ("ly bu", [one]), ("research", [one]), ("ANN", [two]), ("oth", [two]), (two, [two]),
        ("", [two, one]), ("nothing of it", []),
    ):  # fmt: skip
        assert ids(living, search=text) == found, text
    # Names do not run into each other.
    assert ids(living, search="build*night") == []
    assert living.operations(search="night").total == 1


def test_a_search_finds_what_holds_now_and_keeps_no_text_of_what_is_gone(living):
    texts = views.SearchTexts()
    one = living.begin("a", title="First")
    for _ in range(2):
        assert ids(living, search="first", texts=texts) == [one]
    living.do(operations.UpdateOperation(one, {"pool": "elsewhere"}))
    assert ids(living, search="elsewhere", texts=texts) == [one]
    record = living.state.find_record(one)
    for number in range(200):
        texts.of(msgspec.structs.replace(record, id=f"gone-{number}"))
    assert len(texts) == 201
    texts.forget_gone(living.state)
    assert len(texts) == 1
    assert texts.of(record) is texts.of(record)


def test_operations_are_sorted_both_ways_and_newer_first_where_equal(living):
    living.node("n1", cpu=8.0)
    living.create_pool("a")
    small = living.begin("a", 1, title="b", user="zoe")
    large = living.begin("a", 3, title="A", user="ann")
    none = living.begin("a", 1, title="c", user="ann")
    living.do(operations.AbortOperation(none))
    living.work("update")
    assert ids(living, sort="start_time") == [none, large, small]
    assert ids(living, sort="start_time", descending=False) == [small, large, none]
    assert ids(living, sort="title", descending=False) == [large, small, none]
    assert ids(living, sort="user", descending=False) == [none, large, small]
    assert ids(living, sort="user") == [small, none, large]
    assert ids(living, sort="state", descending=False) == [none, large, small]
    for order in ("jobs", "usage", "fair_share"):
        assert ids(living, sort=order) == [large, small, none], order
    assert ids(living, sort="jobs", limit=1, offset=1) == [small]


def test_one_job_is_the_same_as_in_the_list_and_is_found_after_its_end(living):
    living.node("n1", cpu=4.0)
    living.create_pool("a")
    operation = living.begin("a", 2)
    living.work()
    record = living.state.find_record(operation)
    job = views.view_jobs(living.state, record, limit=1).jobs[0]
    assert views.find_job(living.state, record, job.id) == job
    living.beat(ended=(job.id,))
    assert views.find_job(living.state, living.state.find_record(operation), job.id).state == "completed"
    other = living.state.find_record(living.begin("a"))
    for unknown in (job.id, "1-2-3-4"):
        with pytest.raises(CommandError, match="No such job"):
            views.find_job(living.state, other, unknown)


def test_the_specification_has_what_was_given_and_all_that_holds(living):
    living.create_pool("a")
    operation = living.begin("a", title="x", weight=2)
    shown = plain(views.view_specification(living.state, living.state.find_record(operation)))
    task = {"command": "true", "job_count": 1, "cpu_limit": 1.0, "memory_limit": 0}
    assert shown["provided"] == {"pool": "a", "tasks": {"t": task}, "title": "x", "weight": 2}
    assert shown["resulting"]["scheduling_options_per_pool_tree"][TREE]["weight"] == 2.0
    assert set(shown["resulting"]["job_cpu_monitor_sources"]) == set(shown["resulting"]["job_cpu_monitor"])
    assert set(shown["resulting"]["job_cpu_monitor_sources"].values()) == {"default"}
    assert "[monitor]" in shown["note"]
