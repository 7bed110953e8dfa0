"""The rule that holds an element's share, and the words for it. Shares come from real updates."""

from __future__ import annotations

import pytest

from cpumond.fairshare import (
    ROOT,
    IntegralGuarantees,
    Operation,
    Options,
    Pool,
    Snapshot,
    Vector,
    fair_share_update,
)
from cpumond.fairshare.explain import Explanation, explain, show_amount, show_percent
from cpumond.fairshare.resources import UNLIMITED
from cpumond.fairshare.validate import validate

TOTAL: Vector = (1000.0, 200.0, 0.0, 2.0**38, 0.0)
"""200 cores, 256 GiB."""

NORMAL, PLAIN_ROOT = Options(), Pool(ROOT, "")
GANGS = Options(step_function_for_gang_operations=True)


def cpu(value: float) -> Vector:
    return (0.0, value, 0.0, 0.0, 0.0)


def limit(value: float) -> Vector:
    return (UNLIMITED[0], value, *UNLIMITED[2:])


def strong(value: float) -> tuple[None, float, None, None, None]:
    return (None, value, None, None, None)


def why(
    name: str,
    pools: list[Pool],
    operations: list[Operation],
    options: Options = NORMAL,
    root: Pool = PLAIN_ROOT,
) -> Explanation:
    snapshot = Snapshot(TOTAL, tuple(pools), tuple(operations), options, root)
    validate(snapshot)
    return explain(snapshot, fair_share_update(snapshot, 1000.0, None), name)


def operation(name: str, parent: str, cores: float, **fields: object) -> Operation:
    return Operation(name, parent, demand=cpu(cores), **fields)


# ---- demand


def test_an_element_that_has_all_it_asks_for():
    found = why("o", [Pool("q")], [operation("o", "q", 46.0)])
    assert found == Explanation(
        "o",
        "demand",
        (
            "o gets 23.0 % of the cluster (46 of 200 cpu): all it asks for.",
            "from the root down, in percent of the cluster:",
            "  <root>, fair_share pool: 23.0 of 23.0 cpu demanded = 0.0 strong + 0.0 integral + 23.0 by weight",
            "    nothing is used up",
            "  q, fair_share pool: 23.0 of 23.0 cpu demanded = 0.0 strong + 0.0 integral + 23.0 by weight",
            "    no siblings to share with",
            "  o, operation: 23.0 of 23.0 cpu demanded",
            "    no siblings to share with",
        ),
    )


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (cpu(0.0), "o gets nothing: it asks for nothing."),
        ((0.0, 0.0, 3.0, 0.0, 0.0), "o gets nothing: the cluster has none of what it asks for."),
    ],
)
def test_an_element_that_cannot_get_anything(demand, words):
    found = why("o", [], [Operation("o", ROOT, demand=demand)])
    assert (found.rule, found.lines[0]) == ("demand", words)


def test_an_idle_pool_asks_for_nothing():
    assert why("q", [Pool("q")], []).lines[0] == "q gets nothing: it asks for nothing."


def test_an_unknown_name_is_a_key_error():
    with pytest.raises(KeyError):
        why("nobody", [Pool("q")], [operation("o", "q", 1.0)])


# ---- weight


WEIGHTED = [operation("a", "q", 100.0, weight=1.0), operation("b", "q", 900.0, weight=3.0), operation("c", "q", 1.0)]


def test_weight_among_the_siblings_that_want_more():
    found = why("a", [Pool("q")], WEIGHTED)
    assert found.rule == "weight"
    assert found.lines[0] == (
        "a gets 24.9 % of the cluster (49.75 of 200 cpu): limited by its weight, 1 of 4 among the siblings that still "
        "want more; cpu is the scarce resource."
    )
    assert "    cpu is used up" in found.lines
    assert found.lines[-1] == "    weight 1 of 5 among all siblings, 1 of 4 with those that want more"


def test_the_weight_of_a_pool_above():
    found = why("o", [Pool("q", weight=2.0), Pool("r")], [operation("o", "q", 300.0), operation("p", "r", 300.0)])
    assert found.rule == "weight"
    assert "limited by the weight of q above it, 2 of 3 among the siblings that still want more" in found.lines[0]


# ---- limits


def test_limits_of_its_own():
    found = why("o", [Pool("q")], [operation("o", "q", 60.0, resource_limits=limit(46.0))])
    assert found.rule == "limit"
    assert found.lines[0] == (
        "o gets 23.0 % of the cluster (46 of 200 cpu): limited by its resource_limits, 23.0 % of cpu (46)."
    )
    assert found.lines[-1] == "    limits: 23.0 % of cpu (46) by resource_limits, in force"


def test_max_share_ratio_of_an_operation():
    found = why("o", [Pool("q")], [operation("o", "q", 60.0, max_share_ratio=0.1, resource_limits=limit(46.0))])
    assert found.lines[0].endswith("limited by its max_share_ratio, 10.0 % of cpu (20).")


def test_limits_of_a_pool_above():
    found = why("o", [Pool("q", resource_limits=limit(50.0))], [operation("o", "q", 60.0)])
    assert found.rule == "limit"
    assert found.lines[0].endswith("limited by the resource_limits of q above it, 25.0 % of cpu (50).")


def test_limits_of_a_pool_above_among_rivals():
    rivals = [operation("o", "q", 60.0), operation("p", "q", 60.0)]
    found = why("o", [Pool("q", resource_limits=limit(50.0))], rivals)
    assert found.rule == "weight"
    assert found.lines[0].endswith("still want more; q above it is at its limit, 25.0 % of cpu (50).")


def test_limits_inside_a_pool():
    operations = [operation("small", "q", 1.0), operation("o", "q", 60.0, resource_limits=limit(46.0))]
    for name in ("q", ROOT):
        found = why(name, [Pool("q")], operations)
        assert found.rule == "limit"
        assert found.lines[0].endswith("limited by the resource_limits of o inside it, 23.0 % of cpu (46).")


def test_limits_of_the_root():
    root = Pool(ROOT, "", resource_limits=limit(50.0))
    found = why("o", [Pool("q")], [operation("o", "q", 60.0)], root=root)
    assert found.rule == "limit"
    assert found.lines[0].endswith("limited by the resource_limits of <root> above it, 25.0 % of cpu (50).")


def test_limits_above_the_demand_are_not_mentioned():
    found = why("o", [Pool("q")], [operation("o", "q", 10.0, resource_limits=limit(46.0))])
    assert not any("limits" in line for line in found.lines)


# ---- the cluster


def test_all_that_the_cluster_has():
    found = why("o", [Pool("q")], [operation("o", "q", 300.0)])
    assert found.rule == "cluster"
    assert found.lines[0] == (
        "o gets 100.0 % of the cluster (200 of 200 cpu): it has all that the cluster has left, cpu is used up."
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("poor", "it has no guarantee, and those of others leave nothing"),
        ("o", "poor above it has no guarantee, and those of others leave nothing"),
    ],
)
def test_guarantees_of_others_leave_nothing(name, words):
    pools = [Pool("rich", strong_guarantee_resources=strong(200.0)), Pool("poor")]
    found = why(name, pools, [operation("p", "rich", 300.0), operation("o", "poor", 300.0)])
    assert found.rule == "cluster"
    assert found.lines[0] == f"{name} gets nothing: {words}; cpu is the scarce resource."


# ---- guarantees


def test_a_strong_guarantee_when_nothing_is_left_to_share():
    pools = [
        Pool("q", strong_guarantee_resources=(None, 150.0, None, 2.0**36, None)),
        Pool("r", strong_guarantee_resources=strong(50.0)),
    ]
    found = why("q", pools, [operation("o", "q", 300.0), operation("p", "r", 300.0)])
    assert found.rule == "strong_guarantee"
    assert found.lines[0] == (
        "q gets 75.0 % of the cluster (150 of 200 cpu): limited to its strong guarantee, nothing is left to share out "
        "by weight; cpu is the scarce resource."
    )
    guarantee = "    strong guarantee: 75.0 user_slots (inferred), 75.0 cpu (configured), 25.0 memory (configured)"
    assert guarantee in found.lines


def test_guarantees_of_the_first_level_beyond_the_cluster():
    pools = [
        Pool("q", strong_guarantee_resources=strong(300.0)),
        Pool("r", strong_guarantee_resources=strong(100.0)),
        Pool("below", "q", strong_guarantee_resources=strong(300.0)),
    ]
    found = why("below", pools, [operation("o", "below", 900.0), operation("p", "r", 900.0)])
    reason = "the guarantees of the first level are more than the cluster has"
    assert [line for line in found.lines if line.endswith(reason)] == [
        f"    adjusted down to 75.0 user_slots, 75.0 cpu, 75.0 memory: {reason}"
    ] * 2


def adjustment(name: str, pools: list[Pool]) -> str:
    lines = why(name, pools, [operation("o", name, 900.0)]).lines
    return next(line.partition(": ")[2] for line in reversed(lines) if "adjusted down" in line)


def test_guarantees_beyond_those_of_the_pool_above():
    pools = [
        Pool("q", strong_guarantee_resources=strong(100.0)),
        Pool("a", "q", strong_guarantee_resources=strong(100.0)),
        Pool("b", "q", strong_guarantee_resources=strong(100.0)),
    ]
    assert adjustment("a", pools) == "the guarantees in q are more than its own"


@pytest.mark.parametrize(("name", "whose"), [("q", "its limits"), ("a", "the limits of q above it")])
def test_guarantees_beyond_limits(name, whose):
    pools = [
        Pool("q", strong_guarantee_resources=strong(100.0), resource_limits=limit(50.0)),
        Pool("a", "q", strong_guarantee_resources=strong(100.0)),
    ]
    assert adjustment(name, pools) == f"more than {whose} allow"


def test_priority_pools_come_first():
    pools = [
        Pool(
            "q",
            strong_guarantee_resources=strong(100.0),
            priority_strong_guarantee_adjustment_donorship=True,
        ),
        Pool("first", "q", strong_guarantee_resources=strong(80.0), priority_strong_guarantee_adjustment=True),
        Pool("second", "q", strong_guarantee_resources=strong(60.0)),
    ]
    assert adjustment("second", pools) == ("in q pools with priority_strong_guarantee_adjustment come first")


def integral(kind: str, flow: float, burst: float, seconds: float) -> IntegralGuarantees:
    """A guarantee whose volume is ``seconds`` of the whole cluster."""
    volume = tuple(total * seconds for total in TOTAL)
    resources = tuple(total * burst / 200.0 for total in TOTAL)
    return IntegralGuarantees(kind, cpu(flow), resources, accumulated_volume=volume)


@pytest.mark.parametrize(
    ("guarantee", "rule", "detail"),
    [
        (
            integral("burst", 20.0, 100.0, 600.0),
            "burst",
            (
                "burst: flow 10.0, burst guarantee 50.0, accumulated volume for 1000.0 over one smooth period; gets "
                "50.0, held by its burst guarantee"
            ),
        ),
        (
            integral("relaxed", 40.0, 0.0, 600.0),
            "relaxed",
            (
                "relaxed: flow 20.0, at most 3 x flow = 60.0, accumulated volume for 1000.0 over one smooth period; "
                "gets 50.0, its demand and limits take no more"
            ),
        ),
    ],
)
def test_an_integral_guarantee_when_nothing_is_left_to_share(guarantee, rule, detail):
    pools = [Pool("q", integral_guarantees=guarantee), Pool("r", strong_guarantee_resources=strong(100.0))]
    found = why("q", pools, [operation("o", "q", 300.0), operation("p", "r", 300.0)])
    assert found.rule == rule
    assert f"limited to its {rule} guarantee, nothing is left to share out by weight" in found.lines[0]
    assert f"    {detail}" in found.lines


def test_a_burst_guarantee_whose_volume_runs_out():
    pools = [Pool("q", integral_guarantees=integral("burst", 20.0, 100.0, 12.0)), Pool("r")]
    found = why("q", pools, [operation("o", "q", 300.0), operation("p", "r", 300.0)])
    assert found.rule == "weight"
    assert (
        "    burst: flow 10.0, burst guarantee 50.0, accumulated volume for 20.0 over one smooth period; gets 20.0, "
        "held by its accumulated volume"
    ) in found.lines


def test_a_burst_guarantee_that_an_overcommitted_cluster_scales_down():
    pools = [
        Pool("q", integral_guarantees=integral("burst", 20.0, 150.0, 600.0)),
        Pool("r", strong_guarantee_resources=strong(150.0)),
    ]
    found = why("q", pools, [operation("o", "q", 900.0), operation("p", "r", 900.0)])
    assert any(
        "burst guarantee 50.0 (scaled down from 75.0, guarantees are more than the cluster has)" in line
        for line in found.lines
    )


def test_an_integral_guarantee_without_a_cluster():
    snapshot = Snapshot((0.0,) * 5, (Pool("q", integral_guarantees=integral("burst", 1.0, 1.0, 1.0)),))
    found = explain(snapshot, fair_share_update(snapshot, 0.0, None), "q")
    assert any("accumulated volume for 0.0" in line for line in found.lines)


# ---- fifo


FIFO = [operation(f"o{n}", "q", 150.0, start_time=float(n)) for n in range(6)]


def test_the_place_in_a_fifo_pool():
    found = why("o1", [Pool("q", mode="fifo")], [*reversed(FIFO), operation("idle", "q", 0.0, start_time=-1.0)])
    assert found.rule == "fifo"
    assert found.lines[0] == (
        "o1 gets 25.0 % of the cluster (50 of 200 cpu): limited by its place in fifo order, o0 comes first; cpu is the "
        "scarce resource."
    )
    assert found.lines[-1] == "    place 2 of fifo pool q, from 0: after o0"


def test_many_before_it_in_a_fifo_pool_are_shown_in_part():
    found = why("o5", [Pool("q", mode="fifo")], FIFO)
    assert "o5 gets nothing: limited by its place in fifo order, o0, o1, o2 and 2 more come first;" in found.lines[0]


def test_the_first_of_a_fifo_pool_has_what_its_pool_gets():
    found = why("o0", [Pool("q", mode="fifo"), Pool("r")], [*FIFO, operation("p", "r", 900.0)])
    assert found.rule == "weight"
    assert "limited by the weight of q above it, 1 of 2 among" in found.lines[0]
    assert found.lines[-1] == "    place 0 of fifo pool q, from 0: nothing before it"


def test_a_fifo_pool_that_puts_gangs_back():
    options = Options(step_function_for_gang_operations=True, fifo_reordering=True)
    pool = Pool("q", mode="fifo", fifo_reordering=True, strong_guarantee_resources=strong(100.0))
    operations = [
        operation("gang", "q", 150.0, gang=True, start_time=0.0),
        operation("small", "q", 90.0, start_time=1.0),
    ]
    found = why("gang", [pool], operations, options)
    assert found.lines[-1] == (
        "    place 1 of fifo pool q, from 0 (0 before gangs that do not fit were put back): after small"
    )


# ---- gangs


def test_a_gang_that_does_not_fit():
    found = why("g", [], [operation("g", ROOT, 120.0, gang=True), operation("o", ROOT, 120.0)], GANGS)
    assert found.rule == "gang"
    assert found.lines[0] == (
        "g gets nothing: it is a gang, which gets its whole demand at once or nothing, and 60.0 % of cpu does not fit."
    )
    assert "  g, gang operation: 0.0 of 60.0 cpu demanded" in found.lines


def test_a_gang_for_which_a_resource_is_scarce():
    operations = [operation("g", "q", 120.0, gang=True), operation("o", "q", 120.0), operation("p", "r", 900.0)]
    found = why("g", [Pool("q"), Pool("r")], operations, GANGS)
    assert found.rule == "gang"
    assert found.lines[0].endswith("60.0 % of cpu does not fit; cpu is the scarce resource.")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "g",
            (
                "it is a gang, which gets its whole demand at once or nothing, and 60.0 % of cpu is more than its own "
                "limits allow"
            ),
        ),
        ("q", "the gang g inside it asks for more than its own limits allow"),
    ],
)
def test_a_gang_beyond_its_own_limits(name, words):
    gang = operation("g", "q", 120.0, gang=True, resource_limits=limit(100.0))
    found = why(name, [Pool("q")], [gang], GANGS)
    assert (found.rule, found.lines[0]) == ("gang", f"{name} gets nothing: {words}.")


def test_gangs_that_stop_everybody_before_anything_is_used_up():
    gangs = [operation("a", "p", 120.0, gang=True), operation("b", "q", 120.0, gang=True)]
    found = why("p", [Pool("p"), Pool("q")], gangs, GANGS)
    step = "nothing is used up, but the next step up, a gang or several resources at once, does not fit"
    assert found.lines[0].endswith(step + ".")
    found = why(ROOT, [Pool("p"), Pool("q")], gangs, GANGS)
    assert (found.rule, found.lines[0]) == ("gang", f"<root> gets nothing: {step}.")
    assert "    nothing is used up" in found.lines


@pytest.mark.parametrize(
    ("options", "pool"), [(Options(), Pool("q")), (GANGS, Pool("q", step_function_for_gang_operations=False))]
)
def test_without_the_step_function_a_gang_is_like_any_other(options, pool):
    found = why("g", [pool], [operation("g", "q", 300.0, gang=True)], options)
    assert found.rule == "cluster"
    assert "  g, operation: 100.0 of 150.0 cpu demanded" in found.lines


# ---- size and numbers


def test_a_chain_of_a_thousand_pools():
    pools = [Pool(f"p{n}", f"p{n - 1}" if n else ROOT) for n in range(1000)]
    snapshot = Snapshot(TOTAL, tuple(pools), (operation("o", "p999", 300.0),))
    found = explain(snapshot, fair_share_update(snapshot, 0.0, None), "o")
    assert found.rule == "cluster"
    assert sum(line.startswith("  p") for line in found.lines) == 1000


def test_five_thousand_operations():
    operations = [operation(f"o{n}", "q", 1.0, weight=1.0 + n % 3) for n in range(5000)]
    found = why("o4999", [Pool("q")], operations)
    assert found.rule == "weight"
    assert "limited by its weight, 2 of 9999 among the siblings that still want more" in found.lines[0]


def test_names_are_shown_harmless():
    found = why("o\x1b[2J", [], [operation("o\x1b[2J", ROOT, 1.0)])
    assert "\x1b" not in "".join(found.lines)
    assert found.element == "o\x1b[2J"


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.0, "0.0"),
        (0.23, "23.0"),
        (1.5, "150.0"),
        (0.0005, "0.1"),
        (0.00041, "0.04"),
        (1.2e-6, "0.0001"),
        (1e-12, "0.0"),
    ],
)
def test_percent(fraction, text):
    assert show_percent(fraction) == text


@pytest.mark.parametrize(
    ("resource", "value", "text"),
    [(1, 46.0, "46"), (1, 0.25, "0.25"), (0, 1000.0, "1000"), (3, 3 * 2.0**29, "1.5 GiB"), (3, 0.0, "0 GiB")],
)
def test_amounts(resource, value, text):
    assert show_amount(resource, value) == text


@pytest.mark.parametrize("mode", ["fair_share", "fifo"])
def test_a_limit_of_nothing_above_is_what_holds_an_operation(mode):
    """Not its place or its weight: a pool above allows nothing of a resource that it demands."""
    closed = Pool("team", resource_limits=(UNLIMITED[0], 0.0, *UNLIMITED[2:]))
    pools = (closed, Pool("inner", "team", mode=mode))
    operations = tuple(
        Operation(name, "inner", demand=(0.0, 10.0, 0.0, 0.0, 0.0), start_time=float(n)) for n, name in enumerate("ab")
    )
    snapshot = Snapshot((0.0, 100.0, 0.0, 0.0, 0.0), pools, operations)
    told = explain(snapshot, fair_share_update(snapshot, 0.0, None), "b")
    assert told.rule == "limit"
    assert "team" in told.lines[0]
