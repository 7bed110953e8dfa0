import math

import pytest
from scheduler_world import World, burst

from cpumond.api.updated_tree import UpdatedTree, look_once
from cpumond.api.views import view_operation_details
from cpumond.api.yt.formats import write_json
from cpumond.api.yt.jobs import NO_DATA, job_info
from cpumond.api.yt.lazy import materialise
from cpumond.api.yt.orchid import operation_info, scheduler_orchid
from cpumond.api.yt.orchid_attributes import MAX_SATISFACTION
from cpumond.api.yt.yson import write_yson
from cpumond.fairshare.resources import RESOURCES
from cpumond.scheduler.model import Rules
from cpumond.scheduler.settings.commands import ChangePool, Edit

START_S = 1_000_000.0
START_TIME = "1970-01-12T13:46:40.000000Z"


class Cluster(World):
    def __init__(self, cpu=0.0, **options):
        super().__init__(Rules(), START_S, **options)
        if cpu:
            self.node("host", cpu, user_slots=100, address="host:1")

    @property
    def result(self):
        return self.updates["default"][1] if self.updates else None

    def begin(self, pool, jobs=1, user="ann", **spec):
        return self.start(pool, user, jobs, **spec)

    def pass_time(self, seconds=1.0):
        self.after(seconds).update()

    def heartbeat(self, finished=(), **usage):
        """All jobs of the node run, those in ``finished`` have ended; ``usage`` is the current limit in cores."""
        node = self.nodes["host"]
        for job_id, outcome in finished:
            node.finish(job_id, outcome, reason="exit code 1")
        for job_id in node.jobs if usage else ():
            node.limit(job_id, usage["cpu"])
        node.beat()

    @property
    def orchid(self):
        return scheduler_orchid(self.rights, {"default": self.result})

    def of_tree(self, name):
        return materialise(self.orchid["pool_trees"]["default"][name])

    def of_pool(self, pool, name):
        return materialise(self.orchid["pool_trees"]["default"]["pools"][pool])[name]

    def pool(self, pool, names):
        found = materialise(self.orchid["pool_trees"]["default"]["pools"][pool])
        return {name: found[name] for name in names}

    def of_operation(self, operation, name):
        return materialise(self.orchid["pool_trees"]["default"]["operations"][operation])[name]


def vector(**shares):
    return {name: shares.get(name, 0.0) for name in RESOURCES}


def same(found, expected):
    """Whether two plain values are equal up to the rounding of floats; types count."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same(found[key], expected[key]) for key in expected)
        )
    if isinstance(expected, float):
        return isinstance(found, float) and math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
    return found == expected and type(found) is type(expected)


@pytest.fixture
def busy():
    """10 cores and 100 slots. ``a`` has 4 cores guaranteed and wants 2, ``b`` wants 20 and may have 5; all run."""
    cluster = Cluster(10.0)
    cluster.create_pool("a", weight=3, strong_guarantee_resources={"cpu": 4})
    cluster.create_pool("b", resource_limits={"cpu": 5})
    cluster.first = cluster.begin("a", 2)
    cluster.second = cluster.begin("b", 20, title="greedy")
    cluster.pass_time()
    cluster.heartbeat()
    cluster.pass_time()
    return cluster


def alike(value, *names):
    return dict.fromkeys(names, value)


NOTHING = {"user_slots": 0, "cpu": 0.0, "gpu": 0, "memory": 0, "network": 0}
OPTIONS_OF_STARVATION = {
    "fair_share_starvation_tolerance": 0.8,
    **alike(30_000, "fair_share_starvation_timeout", "fair_share_preemption_timeout", "min_share_preemption_timeout"),
    **alike(0, "fair_share_aggressive_starvation_timeout", "min_run_time"),
    "aggressive_preemption_allowed": True,
    "non_preemptible_resource_usage_threshold": {},
}
OF_STARVATION = {
    **OPTIONS_OF_STARVATION,
    **{f"effective_{name}": value for name, value in OPTIONS_OF_STARVATION.items()},
    "scheduling_status": "normal",
    "starvation_status": "non_starving",
    **alike("", "lowest_starving_ancestor", "lowest_aggressively_starving_ancestor", "scheduling_tag_filter"),
    "adjusted_fair_share_starvation_tolerance": 0.8,
    **alike(30_000, "adjusted_fair_share_preemption_timeout", "adjusted_min_share_preemption_timeout"),
    **alike(False, "starving", "aggressive_starvation_enabled", "effective_aggressive_starvation_enabled"),
    "lost_core_seconds": 0.0,
}


def share(cores):
    """Of 10 cores and 100 slots, for jobs of one core in one slot each."""
    return vector(user_slots=cores / 100, cpu=cores / 10)


def amount(cores):
    return {**NOTHING, "user_slots": int(cores), "cpu": cores}


def of_fair_share(strong=0.0, weight=0.0):
    """By a strong guarantee and by weight, in cores."""
    total = strong + weight
    parts = {"strong_guarantee": strong, "integral_guarantee": 0.0, "weight_proportional": weight, "total": total}
    return {
        **alike(total / 10, "fair_share_ratio", "dominant_fair_share"),
        "fair_share": share(total),
        "detailed_fair_share": {name: share(cores) for name, cores in parts.items()},
        "detailed_dominant_fair_share": {name: cores / 10 for name, cores in parts.items()},
        "fair_resources": amount(total),
    }


def of_use(usage, demand):
    return {
        **alike(usage / 10, "usage_ratio", "dominant_usage_share"),
        "usage_share": share(usage),
        "resource_usage": amount(usage),
        **alike(demand / 10, "demand_ratio", "dominant_demand_share"),
        "demand_share": share(demand),
        "resource_demand": amount(demand),
    }


def of_limit(cores):
    return {
        **alike(vector(user_slots=1.0, cpu=cores / 10), "limits_share", "best_allocation_share"),
        "best_allocation_ratio": cores / 10,
        "resource_limits": {**NOTHING, "user_slots": 100, "cpu": cores},
    }


def of_guarantee(own, promised):
    """What is guaranteed, and what it comes to with the part by weight: in cores, and of slots the same part."""
    promised_share = vector(user_slots=promised / 10, cpu=promised / 10)
    return {
        **alike(own / 10, "min_share_ratio", "adjusted_min_share_ratio", "recursive_min_share_ratio"),
        **alike(vector(user_slots=own / 10, cpu=own / 10), "min_share", "strong_guarantee_share"),
        "guaranteed_resources_ratio": promised / 10,
        "guaranteed_resources": {**NOTHING, "user_slots": int(promised * 10), "cpu": promised},
        **alike(promised_share, "estimated_guarantee_share", "promised_fair_share"),
    }


OF_POOL = {
    # What an operation has not.
    **alike(NOTHING, "waiting_resource_demand", "effective_strong_guarantee_resources"),
    "full_path": "/b",
    "mode": "fair_share",
    **alike(False, "is_ephemeral", "forbid_immediate_operations", "create_ephemeral_subpools"),
    **alike(0, "child_pool_count", "pending_operation_count", "lightweight_running_operation_count"),
    **alike(1, "operation_count", "running_operation_count", "pool_operation_count", "schedulable_operation_count"),
    "max_operation_count": 50,
    "max_running_operation_count": 8,
    "integral_guarantee_type": "none",
    **alike({}, "specified_burst_guarantee_resources", "specified_resource_flow"),
    **alike(0.0, "specified_burst_ratio", "specified_resource_flow_ratio"),
    **alike(0.0, "total_burst_ratio", "total_resource_flow_ratio"),
}
OF_B = {
    # The demand is 20 cores, the limit 5 of 10, and nothing is guaranteed: all of it is by weight.
    **of_fair_share(weight=5.0),
    **of_use(5.0, 20.0),
    **of_limit(5.0),
    # Of the 6 cores that a's guarantee leaves, by weight 1 of 1 + 3.
    **of_guarantee(0.0, 1.5),
    "limited_demand_share": vector(user_slots=0.2, cpu=0.5),
    **alike(1.0, "max_share_ratio", "satisfaction_ratio", "local_satisfaction_ratio", "weight"),
    "max_possible_usage_ratio": 0.5,
    "dominant_resource": "cpu",
    **alike({}, "min_share_resources", "strong_guarantee_resources"),
    "limited_resource_demand": {**NOTHING, "user_slots": 20, "cpu": 5.0},
    "specified_resource_limits": {"cpu": 5.0},
    "aggregated_preempted_cpu_x100": 0,
    **OF_STARVATION,
    **OF_POOL,
    "parent": "<Root>",
    **alike(True, "enabled", "schedulable"),
}
OF_A = {
    **OF_B,
    # It wants 2 of the 4 cores that are guaranteed, and of everything else the same part: all of it is guaranteed.
    **of_fair_share(strong=2.0),
    **of_use(2.0, 2.0),
    **of_limit(10.0),
    # 4 cores, and of the other 6 by weight 3 of 1 + 3.
    **of_guarantee(4.0, 8.5),
    "limited_demand_share": share(2.0),
    "max_possible_usage_ratio": 0.2,
    **alike({"cpu": 4.0}, "min_share_resources", "strong_guarantee_resources"),
    "limited_resource_demand": amount(2.0),
    "specified_resource_limits": {},
    "full_path": "/a",
    "weight": 3.0,
    "effective_strong_guarantee_resources": {**NOTHING, "user_slots": 40, "cpu": 4.0},
}
OF_ROOT = {
    **{name: value for name, value in OF_B.items() if name not in ("parent", "full_path", "mode", "is_ephemeral")},
    **of_fair_share(strong=2.0, weight=5.0),
    **of_use(7.0, 22.0),
    **of_limit(10.0),
    **of_guarantee(4.0, 10.0),
    "limited_demand_share": vector(user_slots=0.22, cpu=0.7),
    "max_possible_usage_ratio": 0.7,
    "limited_resource_demand": {**NOTHING, "user_slots": 22, "cpu": 7.0},
    "specified_resource_limits": {},
    "forbid_immediate_operations": True,
    **alike(2, "child_pool_count", "operation_count", "running_operation_count"),
    **alike(0, "pool_operation_count", "schedulable_operation_count"),
    "max_operation_count": 50_000,
    "max_running_operation_count": 2000,
    "effective_strong_guarantee_resources": {**NOTHING, "user_slots": 100, "cpu": 10.0},
}
OF_GREEDY = {
    **{name: value for name, value in OF_B.items() if name not in OF_POOL},
    # The limit of 5 cores is the pool's.
    **of_limit(10.0),
    "limited_demand_share": vector(user_slots=0.2, cpu=1.0),
    "max_possible_usage_ratio": 1.0,
    "limited_resource_demand": {**NOTHING, "user_slots": 20, "cpu": 10.0},
    "specified_resource_limits": {},
    **alike("b", "pool", "parent"),
    "start_time": START_TIME,
    "user": "ann",
    "title": "greedy",
    "type": "vanilla",
    "state": "running",
    **alike(False, "suspended", "tentative", "is_gang"),
    "scheduling_index": 1,
    "job_count": 5,
    "pending_job_count": 15,
    # Half of the fair share, 2.5 cores, is safe: three jobs begin below it.
    **alike(0, "slot_index", "preemptible_job_count", "min_needed_resources_unsatisfied_count"),
    "aggressively_preemptible_job_count": 2,
    "deactivation_reasons": {},
}


@pytest.mark.parametrize(("pool", "expected"), [("a", OF_A), ("b", OF_B), ("<Root>", OF_ROOT)])
def test_every_attribute_of_a_pool_has_its_value(busy, pool, expected):
    found = materialise(busy.orchid["pool_trees"]["default"]["pools"][pool])
    assert found.keys() == expected.keys()
    assert {name: found[name] for name in found if not same(found[name], expected[name])} == {}


def test_every_attribute_of_an_operation_has_its_value(busy):
    found = materialise(busy.orchid["pool_trees"]["default"]["operations"][busy.second])
    assert found.keys() == OF_GREEDY.keys()
    assert {name: found[name] for name in found if not same(found[name], OF_GREEDY[name])} == {}


def test_one_attribute_is_the_same_alone(busy):
    pools = busy.orchid["pool_trees"]["default"]["pools"]
    for name, value in OF_B.items():
        assert same(materialise(pools["b"][name]), value)


def test_what_is_asked_for_is_all_that_is_computed(busy):
    asked = []
    pools = busy.orchid["pool_trees"]["default"]["pools"]
    find = pools._find
    pools._find = lambda name: asked.append(name) or find(name)
    assert pools["b"]["weight"] == 1.0
    assert asked == ["b"]


def test_before_the_first_update_shares_are_zero():
    cluster = Cluster(1000.0)
    cluster.create_pool("p", weight=2, integral_guarantees=burst(100, 500))
    operation = cluster.begin("p")
    assert cluster.result is None
    expected = {
        "fair_share_ratio": 0.0, "demand_ratio": 0.0, "accumulated_resource_ratio_volume": 0.0, "weight": 2.0,
        "integral_pool_capacity": 8640.0, "specified_burst_ratio": 0.5,
    }  # fmt: skip
    assert cluster.pool("p", expected) == expected
    assert cluster.of_pool("p", "detailed_dominant_fair_share")["total"] == 0.0
    assert cluster.of_operation(operation, "fair_share_ratio") == 0.0


def test_an_empty_cluster_has_no_infinite_value_and_no_nan():
    cluster = Cluster()
    guarantees = {"guarantee_type": "relaxed", "resource_flow": {"cpu": 1}}
    cluster.create_pool("p", integral_guarantees=guarantees, resource_limits={"cpu": 1})
    cluster.begin("p")
    cluster.pass_time()
    everything = {
        name: materialise(cluster.orchid["pool_trees"]["default"][name])
        for name in cluster.orchid["pool_trees"]["default"]
    }
    assert cluster.of_pool("p", "satisfaction_ratio") == MAX_SATISFACTION
    numbers = list(all_numbers(everything))
    assert len(numbers) > 100
    assert all(math.isfinite(number) for number in numbers)
    assert write_yson(everything)
    assert write_json(everything)


def all_numbers(value):
    if isinstance(value, dict):
        for item in value.values():
            yield from all_numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from all_numbers(item)
    elif isinstance(value, float | int):
        yield value


def test_a_value_set_after_the_update_is_shown_at_once():
    cluster = Cluster(1000.0)
    cluster.create_pool("p", integral_guarantees={"guarantee_type": "relaxed", "resource_flow": {"cpu": 10}})
    cluster.pass_time()
    changes = {
        "integral_guarantees/resource_flow": {"cpu": 100.0}, "weight": 7.0, "resource_limits": {"cpu": 250.0},
        "max_share_ratio": 0.1, "fair_share_starvation_tolerance": 0.5, "fair_share_preemption_timeout": 45_000,
    }  # fmt: skip
    for path, value in changes.items():
        cluster.do(ChangePool("default", "p", (Edit(tuple(path.split("/")), value),)))
    expected = {
        "integral_pool_capacity": 8640.0, "specified_resource_flow": {"cpu": 100.0}, "weight": 7.0,
        "max_share_ratio": 0.1, "specified_resource_limits": {"cpu": 250.0},
        "limits_share": vector(user_slots=0.1, cpu=0.1), "effective_fair_share_starvation_tolerance": 0.5,
        "fair_share_preemption_timeout": 45_000, "effective_fair_share_starvation_timeout": 45_000,
    }  # fmt: skip
    assert cluster.pool("p", expected) == expected
    assert cluster.of_pool("p", "resource_limits")["cpu"] == 100.0


# --- integral guarantees (semantics.md 5.3) ----------------------------------------------------------------------


def test_a_flow_of_100_on_1000_cores_fills_up_to_8640_share_seconds():
    cluster = Cluster(1000.0)
    cluster.create_pool("p", integral_guarantees=burst(100, 200))
    cluster.create_pool("no-type-yet", integral_guarantees={"resource_flow": {"cpu": 100}})
    cluster.pass_time()
    cluster.pass_time(60.0)
    expected = {
        "specified_resource_flow_ratio": 0.1, "integral_pool_capacity": 8640.0,
        "integral_pool_capacity_resources": {**NOTHING, "user_slots": 864_000, "cpu": 8_640_000.0},
        # 60 seconds of a tenth of the cluster.
        "accumulated_resource_volume": {**NOTHING, "user_slots": 600, "cpu": 6000.0},
        "accumulated_resource_ratio_volume": pytest.approx(6.0),
        # 6 share*s at 0.2 - 0.1 of the cluster.
        "estimated_burst_usage_duration_seconds": pytest.approx(60.0),
    }  # fmt: skip
    assert cluster.pool("p", expected) == expected
    assert cluster.of_pool("no-type-yet", "integral_pool_capacity") == 8640.0
    cluster.set_tree(integral_guarantees={"pool_capacity_saturation_period": 3_600_000})
    assert cluster.of_pool("p", "integral_pool_capacity") == 360.0


def test_only_pools_with_a_guarantee_type_count_for_the_total_ratios():
    cluster = Cluster(10.0)
    cluster.create_pool("parent", integral_guarantees={**burst(8, 8), "guarantee_type": "none"})
    cluster.create_pool("child", "parent", integral_guarantees=burst(3, 5))
    totals = {"total_resource_flow_ratio": 0.3, "total_burst_ratio": 0.5}
    assert [cluster.pool(pool, totals) for pool in ("parent", "child", "<Root>")] == [totals] * 3
    specified = {"specified_burst_ratio": 0.0, "specified_burst_guarantee_resources": {"cpu": 8.0}}
    assert cluster.pool("parent", specified) == specified


CAPACITY = {"integral_pool_capacity", "integral_pool_capacity_resources"}
VOLUME = CAPACITY | {"accumulated_resource_ratio_volume", "accumulated_resource_volume"}
DURATION = "estimated_burst_usage_duration_seconds"


@pytest.mark.parametrize(
    ("guarantees", "present"),
    [
        ({"guarantee_type": "none"}, set()),
        ({"resource_flow": {"cpu": 1}}, CAPACITY),
        ({"guarantee_type": "relaxed", "resource_flow": {"cpu": 1}}, VOLUME),
        (burst(1, 1), VOLUME),
        (burst(1, 2), {*VOLUME, DURATION}),
    ],
)
def test_volumes_are_shown_of_integral_pools_only(guarantees, present):
    cluster = Cluster(10.0)
    cluster.create_pool("p", integral_guarantees=guarantees)
    assert materialise(cluster.orchid["pool_trees"]["default"]["pools"]["p"]).keys() & {*VOLUME, DURATION} == present


def test_resource_distribution_info_sums_what_the_root_has_given_away():
    cluster = Cluster(100.0)
    cluster.create_pool("strong", strong_guarantee_resources={"cpu": 30})
    cluster.create_pool("below", "strong", strong_guarantee_resources={"cpu": 20})
    cluster.create_pool("fast", integral_guarantees=burst(5, 20))
    cluster.create_pool("slow", integral_guarantees={"guarantee_type": "relaxed", "resource_flow": {"cpu": 8}})
    assert cluster.of_tree("resource_distribution_info") == {
        "distributed_resources": {**NOTHING, "cpu": 58.0},
        "distributed_strong_guarantee_resources": {**NOTHING, "cpu": 30.0},
        "distributed_burst_guarantee_resources": {**NOTHING, "cpu": 20.0},
        "distributed_resource_flow": {**NOTHING, "cpu": 13.0},
        "undistributed_resources": {**NOTHING, "user_slots": 100, "cpu": 42.0},
        "undistributed_resource_flow": {**NOTHING, "cpu": 7.0},
        "undistributed_burst_guarantee_resources": NOTHING,
    }


# --- other kinds of pools ----------------------------------------------------------------------------------------


def test_a_fifo_pool_shows_its_order_and_its_operations_their_places():
    cluster = Cluster(10.0)
    cluster.create_pool("f", mode="fifo", fifo_sort_parameters=["start_time"])
    first, second = cluster.begin("f", 10), cluster.begin("f", 10)
    cluster.pass_time()
    expected = {"mode": "fifo", "fifo_sort_parameters": ["start_time"]}
    assert cluster.pool("f", expected) == expected
    assert [cluster.of_operation(each, "fifo_index") for each in (first, second)] == [0, 1]
    assert (cluster.of_operation(second, "slot_index"), cluster.of_operation(second, "fair_share_ratio")) == (1, 0.0)


def test_an_ephemeral_pool_is_one_of_the_pools_and_of_its_user():
    cluster = Cluster()
    cluster.create_pool("explicit")
    cluster.begin("explicit")
    cluster.begin("made", user="bob")
    assert cluster.of_pool("made", "is_ephemeral") is True
    assert cluster.of_tree("pool_count") == 2
    assert list(cluster.of_tree("pools")) == ["<Root>", "explicit", "made"]
    assert materialise(cluster.orchid["user_to_ephemeral_pools"]) == {"default": {"bob": ["made"]}}
    assert cluster.of_tree("user_to_ephemeral_pools") == {"bob": ["made"]}


def test_inferred_weights_are_the_ones_shown():
    cluster = Cluster(10.0, infer_weight_from_guarantees_share_multiplier=10)
    cluster.create_pool("a", strong_guarantee_resources={"cpu": 6})
    cluster.create_pool("b", strong_guarantee_resources={"cpu": 2})
    cluster.create_pool("c", weight=4, strong_guarantee_resources={"cpu": 2})
    # Its part of what all children of the root have guaranteed, times ten.
    assert cluster.of_pool("a", "weight") == pytest.approx(6.0)
    assert cluster.of_pool("b", "weight") == pytest.approx(2.0)
    assert cluster.of_pool("c", "weight") == 4.0


# --- satisfaction and starvation ---------------------------------------------------------------------------------


def test_the_satisfaction_of_a_pool_is_the_least_below_it(busy):
    """A second operation of ``b`` has its fair share of 2.5 cores and nothing yet."""
    busy.begin("b", 20)
    busy.pass_time()
    assert [busy.of_pool(pool, "satisfaction_ratio") for pool in ("a", "b", "<Root>")] == [1.0, 0.0, 0.0]
    assert busy.of_pool("b", "local_satisfaction_ratio") == 1.0
    assert busy.of_operation(busy.second, "satisfaction_ratio") == pytest.approx(2.0)


def test_a_starving_pool_says_so_and_since_when():
    cluster = Cluster(10.0, fair_share_starvation_timeout=10_000, enable_aggressive_starvation=False)
    cluster.create_pool("a", strong_guarantee_resources={"cpu": 4})
    cluster.create_pool("b")
    greedy = cluster.begin("b", 10)
    cluster.pass_time()
    cluster.heartbeat()
    poor = cluster.begin("a", 4)
    cluster.pass_time()
    since = "1970-01-12T13:46:42.000000Z"
    early = {"scheduling_status": "below_min_share", "starving": False, "below_fair_share_since": since}
    assert cluster.pool("a", early) == early
    cluster.pass_time(11.0)
    late = {"starving": True, "starvation_status": "starving", "starving_since": since, "lowest_starving_ancestor": "a"}
    assert cluster.pool("a", late) == late
    assert cluster.of_operation(poor, "lowest_starving_ancestor") == poor
    assert cluster.of_operation(poor, "lowest_aggressively_starving_ancestor") == ""
    assert cluster.of_pool("b", "starving") is False
    assert cluster.of_operation(greedy, "lowest_starving_ancestor") == ""
    cluster.heartbeat()
    told = {
        "operation_id": greedy, "preemptor_operation_id": poor, "pool": "b", "at": "1970-01-12T13:46:53.000000Z",
    }  # fmt: skip
    [record] = materialise(cluster.orchid["preemptions"])
    assert {name: record[name] for name in told} == told


def test_thresholds_name_what_they_limit_only():
    cluster = Cluster(non_preemptible_resource_usage_threshold={"cpu": 2})
    cluster.create_pool("a")
    cluster.create_pool("b", non_preemptible_resource_usage_threshold={"user_slots": 3})
    assert cluster.of_pool("a", "non_preemptible_resource_usage_threshold") == {"cpu": 2.0}
    assert cluster.of_pool("b", "non_preemptible_resource_usage_threshold") == {"user_slots": 3}
    assert cluster.of_pool("b", "effective_non_preemptible_resource_usage_threshold") == {"user_slots": 3}


def test_an_operation_that_was_passed_over_says_why(busy):
    busy.heartbeat()
    assert busy.of_operation(busy.second, "deactivation_reasons") == {'resource_limits of pool "b"': 1}


# --- trees and everything ----------------------------------------------------------------------------------------


def test_a_tree_shows_its_resources_and_nodes(busy):
    busy.node("other", 5.0, user_slots=100, address="other:1")
    tree = busy.orchid["pool_trees"]["default"]
    expected = {
        "resource_usage": {**NOTHING, "user_slots": 7, "cpu": 7.0},
        "resource_limits": {**NOTHING, "user_slots": 200, "cpu": 15.0},
        "node_count": 2, "node_addresses": ["host:1", "other:1"], "pool_count": 2, "operation_count": 2,
        "running_operation_count": 2,
    }  # fmt: skip
    assert {name: tree[name] for name in expected} == expected


def test_the_config_of_a_tree_has_all_options():
    config = Cluster(fair_share_starvation_tolerance=0.5).of_tree("config")
    assert config["fair_share_starvation_tolerance"] == 0.5
    assert config["max_running_operation_count_per_pool"] == 8
    assert config["integral_guarantees"]["pool_capacity_saturation_period"] == 86_400_000.0
    assert None not in config.values()
    assert write_yson(config)


def test_children_and_operations_are_found_by_pool():
    cluster = Cluster()
    cluster.create_pool("a")
    cluster.create_pool("b", "a")
    operation = cluster.begin("b")
    tree = cluster.orchid["pool_trees"]["default"]
    assert list(tree["child_pools_by_pool"]) == ["<Root>", "a", "b"]
    assert list(tree["child_pools_by_pool"]["a"]) == ["b"]
    assert [tree["child_pools_by_pool"]["a"]["b"][name] for name in ("parent", "full_path")] == ["a", "/a/b"]
    assert list(tree["child_pools_by_pool"]["<Root>"]) == ["a"]
    assert list(tree["operations_by_pool"]["b"]) == [operation]
    assert list(tree["operations_by_pool"]["a"]) == []
    assert tree["operations_by_pool"]["b"][operation]["pool"] == "b"


def test_the_older_paths_lead_to_the_same(busy):
    old = busy.orchid["scheduling_info_per_pool_tree"]["default"]["fair_share_info"]
    assert materialise(old["pools"]["b"]) == materialise(busy.orchid["pool_trees"]["default"]["pools"]["b"])
    assert list(old["operations"]) == [busy.first, busy.second]
    of_operation = busy.orchid["operations"][busy.second]["progress"]["scheduling_info_per_pool_tree"]["default"]
    assert of_operation["fair_share_ratio"] == 0.5
    assert (busy.orchid["default_pool_tree"], busy.orchid["default_fair_share_tree"]) == ("default", "default")


def test_what_is_large_is_not_shown_with_the_rest(busy):
    shown, tree = materialise(busy.orchid), materialise(busy.orchid["pool_trees"]["default"])
    assert (shown["pool_trees"], shown["default_pool_tree"]) == (None, "default")
    assert (tree["operations"], tree["pools"]["b"]["weight"]) == (None, 1.0)


def test_what_is_not_there_is_explained(busy):
    pools = busy.orchid["pool_trees"]["default"]["pools"]
    with pytest.raises(KeyError):
        pools["nope"]
    assert pools.explain("nope") == 'Pool tree "default" has no pool "nope"'
    assert pools["b"].explain("fair_share_rat") == 'there is no "fair_share_rat"; did you mean "fair_share_ratio"?'
    assert "accumulated_resource_volume" not in pools["b"]
    assert busy.orchid["operations"].explain("x") == "No such operation x"


def test_what_operations_have_in_common_is_made_once_in_a_request(busy, monkeypatch):
    made = []
    monkeypatch.setattr(UpdatedTree, "_service_key", lambda *_: made.append(1) or ())
    operations = busy.orchid["operations"]
    shown = [materialise(operations[name])["progress"]["scheduling_info_per_pool_tree"] for name in operations]
    assert len(shown) > 1
    assert len(made) == len(busy.state.operations)


def test_nodes_are_shown_by_address(busy):
    node = busy.orchid["nodes"]["host:1"]
    expected = {"state": "online", "tags": ["host:1"], "pool_tree": "default", "running_job_count": 7}
    assert {name: node[name] for name in expected} == expected
    assert (node["resource_usage"]["cpu"], node["resource_limits"]["cpu"]) == (7.0, 10.0)


# --- operations and jobs -----------------------------------------------------------------------------------------


def test_an_operation_is_described(busy):
    info = operation_info(busy.rights, busy.state.find_record(busy.second), look_once({"default": busy.result}))
    found = materialise(info)
    expected = {
        "id": busy.second, "state": "running", "authenticated_user": "ann", "alerts": {},
        "brief_spec": {"title": "greedy", "pool": "b"},
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["runtime_parameters"]["scheduling_options_per_pool_tree"] == {"default": {"weight": 1.0, "pool": "b"}}
    assert found["brief_progress"]["jobs"] == {
        "total": 20, "pending": 15, "running": 5, "completed": 0, "failed": 0, "aborted": 0, "lost": 0,
    }  # fmt: skip
    [task] = found["progress"]["tasks"]
    assert (task["task_name"], task["job_counter"]["running"]) == ("t", 5)
    assert found["progress"]["scheduling_info_per_pool_tree"]["default"]["usage_ratio"] == 0.5
    assert not {"result", "finish_time"} & set(found)
    assert write_yson(found)
    assert write_json(found)


def test_an_operation_that_waits_has_an_alert():
    cluster = Cluster()
    cluster.create_pool("p", max_running_operation_count=1)
    cluster.begin("p")
    waiting = cluster.begin("p", weight=3, max_share_ratio=0.5, unheard_of=1)
    info = operation_info(cluster.rights, cluster.state.find_record(waiting), look_once({}))
    assert (info["state"], info["unrecognized_spec"]) == ("pending", {"unheard_of": 1})
    assert info["alerts"]["operation_pending"]["attributes"] == {"pool": "p", "limit": 1, "pool_tree": "default"}
    expected = {"state": "pending", "weight": 3.0, "max_share_ratio": 0.5, "scheduling_index": -1}
    assert {name: cluster.of_operation(waiting, name) for name in expected} == expected
    assert cluster.of_pool("p", "pending_operation_count") == 1


def test_options_without_effect_are_an_alert_also_of_an_ended_operation():
    """UNR-1."""
    cluster = Cluster()
    operation = cluster.begin("p", nonsense={"environment": {"TOKEN": "x"}}, max_core_info_count=3)
    told = (
        'spec option "max_core_info_count" has no effect: core dumps are not collected; '
        'spec option "nonsense" is not recognized'
    )
    for act in (None, cluster.abort):
        if act is not None:
            act(operation)
        record = cluster.state.find_record(operation)
        info = operation_info(cluster.rights, record, look_once({}))
        assert info["alerts"]["unrecognized_spec"]["message"] == told
        assert view_operation_details(cluster.rights, record, cluster.now).alerts == told.split("; ")
        assert set(info["unrecognized_spec"]) == {"nonsense", "max_core_info_count"}


def test_a_failed_operation_has_its_reason_and_its_jobs_theirs():
    cluster = Cluster(10.0)
    operation = cluster.begin("p", 2, max_failed_job_count=1)
    cluster.pass_time()
    cluster.heartbeat()
    failed, stopped = list(cluster.state.jobs)
    cluster.now += 5.0
    cluster.heartbeat()
    record = cluster.state.find_record(operation)
    assert job_info(cluster.state.jobs[failed], record, "host:1") == {
        "id": failed, "job_id": failed, "allocation_id": failed, "operation_id": operation, "type": "vanilla",
        "state": "running", "controller_state": "running", "address": "host:1", "task_name": "t", "pool": "p",
        "pool_tree": "default", "cgroup": f"jobs/{failed}", "class": "ordinary", "cpu_monitor_mode": "reclaim",
        "cpu_limit": 1.0, "current_cpu_limit": 1.0, "set_container_cpu_limit": True, "progress": 0.0,
        "start_time": "1970-01-12T13:46:41.000000Z",
        "events": [{"time": "1970-01-12T13:46:41.000000Z", "state": "running"}],
        "job_cookie": 0, "job_index": 0, "task_job_index": 0, "is_stale": False, "has_spec": False,
        "has_competitors": False, "core_infos": [], "exec_attributes": {}, "brief_statistics": NO_DATA,
    }  # fmt: skip
    cluster.heartbeat(finished=[(failed, "failed")])
    info = materialise(operation_info(cluster.rights, cluster.state.find_record(operation), look_once({})))
    assert (info["state"], info["finish_time"]) == ("failed", "1970-01-12T13:46:46.000000Z")
    exit_error = {"code": 10_000, "message": "exit code 1", "attributes": {"exit_code": 1}, "inner_errors": []}
    job_error = {"code": 1205, "message": "User job failed", "attributes": {}, "inner_errors": [exit_error]}
    assert info["result"]["error"] == {
        "code": 215, "message": "Failed jobs limit exceeded", "attributes": {"max_failed_job_count": 1},
        "inner_errors": [job_error],
    }  # fmt: skip
    assert info["brief_progress"]["jobs"]["failed"] == 1
    assert info["progress"]["scheduling_info_per_pool_tree"] == {}
    ended = job_info(cluster.state.finished_jobs[operation][failed], record, "host:1")
    assert (ended["state"], ended["error"]) == ("failed", job_error)
    stopping = job_info(cluster.state.jobs[stopped], record, "host:1")
    assert (stopping["state"], stopping["why_preempted"]["kind"]) == ("aborting", "aborted")
