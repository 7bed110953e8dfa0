"""The rule that holds an element's share, and the words for it. Shares come from real updates."""

from dataclasses import replace

import pytest

from cpumond.core.words import format_percent
from cpumond.fairshare import ROOT, IntegralGuarantees, Operation, Options, Pool, Snapshot, Vector, fair_share_update
from cpumond.fairshare.explain import Explanation, explain
from cpumond.fairshare.resources import UNLIMITED, format_amount, format_dominant
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
    name: str, pools: list[Pool], operations: list[Operation], options: Options = NORMAL, root: Pool = PLAIN_ROOT
) -> Explanation:
    snapshot = Snapshot(TOTAL, tuple(pools), tuple(operations), options, root)
    validate(snapshot)
    return explain(snapshot, fair_share_update(snapshot, 1000.0, None), name)


def operation(name: str, parent: str, cores: float, **fields: object) -> Operation:
    return Operation(name, parent, demand=cpu(cores), **fields)


def test_an_element_that_has_all_it_asks_for():
    found = why("o", [Pool("q")], [operation("o", "q", 46.0)])
    assert (found.element, found.rule) == ("o", "demand")
    assert found.lines == (
        "o gets 23.0 % of the cluster (46 of 200 cpu): its whole demand.",
        "from the root down, in percent of the cluster:",
        "  <root>, fair_share pool: 23.0 of 23.0 cpu demanded = 0.0 strong + 0.0 integral + 23.0 by weight",
        "    no resource is fully distributed",
        "  q, fair_share pool: 23.0 of 23.0 cpu demanded = 0.0 strong + 0.0 integral + 23.0 by weight",
        "    no siblings to share with",
        "  o, operation: 23.0 of 23.0 cpu demanded",
        "    no siblings to share with",
    )


def test_an_unknown_name_is_a_key_error():
    with pytest.raises(KeyError):
        why("nobody", [Pool("q")], [operation("o", "q", 1.0)])


WEIGHTED = [operation("a", "q", 100.0, weight=1.0), operation("b", "q", 900.0, weight=3.0), operation("c", "q", 1.0)]


LIMITED = operation("o", "q", 60.0, resource_limits=limit(46.0))
RIVALS = [operation("o", "q", 60.0), operation("p", "q", 60.0)]
GREEDY = [operation("o", "q", 300.0), operation("p", "r", 300.0)]
RICH = Pool("r", strong_guarantee_resources=strong(200.0))
BIG_GANG = operation("g", "q", 120.0, gang=True, resource_limits=limit(100.0))
FIFO = [
    *(operation(f"o{n}", "q", 150.0, start_time=float(n)) for n in reversed(range(6))),
    operation("idle", "q", 0.0, start_time=-1.0),
]
TWO_GANGS = [operation("a", "p", 120.0, gang=True), operation("b", "q", 120.0, gang=True)]
SCARCE = "cpu is the scarce resource."
WANT_MORE = "among the siblings that still want more; cpu is the scarce resource."
ALL_CPU = "all cpu is distributed"
NEXT_STEP = "no resource is fully distributed, but the next step (a gang, or several resources at once) does not fit."
NOTHING_LEFT = "has no guarantee, and the guarantees of others leave nothing; cpu is the scarce resource."
AT_ONCE = "it is a gang, which gets its whole demand at once or nothing, and 60.0 % of cpu"


def closed(mode: str) -> list[Pool]:
    """A pool inside one that may have no cpu."""
    return [Pool("team", resource_limits=limit(0.0)), Pool("q", "team", mode=mode)]


@pytest.mark.parametrize(("name", "pools", "operations", "more", "rule", "words"), [
    ("o", [], [Operation("o", ROOT)], {}, "demand", "o gets nothing: it demands nothing."),
    ("q", [Pool("q")], [], {}, "demand", "q gets nothing: it demands nothing."),
    ("o", [], [Operation("o", ROOT, demand=(0.0, 0.0, 3.0, 0.0, 0.0))], {}, "demand",
     "o gets nothing: the cluster has none of the resources it demands."),
    ("a", [Pool("q")], WEIGHTED, {}, "weight",
     f"a gets 24.9 % of the cluster (49.75 of 200 cpu): limited by its weight, 1 of 4 {WANT_MORE}"),
    ("o", [Pool("q", weight=2.0), Pool("r")], GREEDY, {}, "weight",
     f"limited by the weight of q above it, 2 of 3 {WANT_MORE}"),
    ("o", [Pool("q")], [LIMITED], {}, "limit",
     "o gets 23.0 % of the cluster (46 of 200 cpu): limited by its resource_limits, 23.0 % of cpu (46)."),
    ("o", [Pool("q")], [replace(LIMITED, max_share_ratio=0.1)], {}, "limit",
     "limited by its max_share_ratio, 10.0 % of cpu (20)."),
    ("o", [Pool("q", resource_limits=limit(50.0))], RIVALS[:1], {}, "limit",
     "limited by the resource_limits of q above it, 25.0 % of cpu (50)."),
    ("o", [Pool("q", resource_limits=limit(50.0))], RIVALS, {}, "weight",
     "still want more; q above it is at its limit, 25.0 % of cpu (50)."),
    ("q", [Pool("q")], [operation("small", "q", 1.0), LIMITED], {}, "limit",
     "limited by the resource_limits of o inside it, 23.0 % of cpu (46)."),
    ("o", [Pool("q")], RIVALS[:1], {"root": Pool(ROOT, "", resource_limits=limit(50.0))}, "limit",
     "limited by the resource_limits of <root> above it, 25.0 % of cpu (50)."),
    # not its weight or its place
    ("p", closed("fair_share"), RIVALS, {}, "limit", "the resource_limits of team above it, 0.0 % of cpu (0)."),
    ("o", [Pool("q")], GREEDY[:1], {}, "cluster",
     f"o gets 100.0 % of the cluster (200 of 200 cpu): it has the rest of the cluster: {ALL_CPU}."),
    ("o", [RICH, Pool("q")], GREEDY, {}, "cluster", f"o gets nothing: q above it {NOTHING_LEFT}"),
    ("o0", [Pool("q", mode="fifo"), Pool("r")],
     [*(operation(f"o{n}", "q", 150.0, start_time=float(n)) for n in range(2)), operation("p", "r", 900.0)],
     {}, "weight",
     f"limited by the weight of q above it, 1 of 2 {WANT_MORE}"),
    ("o1", [Pool("q", mode="fifo")], FIFO, {}, "fifo",
     f"(50 of 200 cpu): limited by its place in fifo order, o0 comes first; {SCARCE}"),
    ("o5", [Pool("q", mode="fifo")], FIFO, {}, "fifo",
     f"o5 gets nothing: limited by its place in fifo order, o0, o1, o2 and 2 more come first; {SCARCE}"),
    ("p", [Pool("p"), Pool("q")], TWO_GANGS, {"options": GANGS}, "cluster", NEXT_STEP),
    (ROOT, [Pool("p"), Pool("q")], TWO_GANGS, {"options": GANGS}, "gang", f"<root> gets nothing: {NEXT_STEP}"),
    ("g", [], [operation("g", ROOT, 120.0, gang=True), operation("o", ROOT, 120.0)], {"options": GANGS}, "gang",
     f"g gets nothing: {AT_ONCE} does not fit."),
    ("g", [Pool("q"), Pool("r")],
     [operation("g", "q", 120.0, gang=True), operation("o", "q", 120.0), operation("p", "r", 900.0)],
     {"options": GANGS}, "gang", "60.0 % of cpu does not fit; cpu is the scarce resource."),
    ("g", [Pool("q")], [BIG_GANG], {"options": GANGS}, "gang",
     f"g gets nothing: {AT_ONCE} is more than its own limits allow."),
])  # fmt: skip
def test_the_rule_and_its_sentence(name, pools, operations, more, rule, words):
    found = why(name, pools, operations, **more)
    assert found.rule == rule
    assert found.lines[0].endswith(words)


@pytest.mark.parametrize(("name", "pool", "operations", "options", "line"), [
    ("o", Pool("q"), [LIMITED], NORMAL, "    limits: 23.0 % of cpu (46) by resource_limits, in force"),
    ("o0", Pool("q", mode="fifo"), [operation("o0", "q", 300.0)], NORMAL,
     "    place 0 of fifo pool q, from 0: nothing before it"),
    ("a", Pool("q"), WEIGHTED, NORMAL, "    all cpu is distributed"),
    ("a", Pool("q"), WEIGHTED, NORMAL, "    weight 1 of 5 among all siblings, 1 of 4 with those that want more"),
    ("o1", Pool("q", mode="fifo"), FIFO, NORMAL, "    place 2 of fifo pool q, from 0: after o0"),
    (ROOT, Pool("q"), TWO_GANGS[1:], GANGS, "    no resource is fully distributed"),
    ("g", Pool("q"), [BIG_GANG], GANGS, "  g, gang operation: 0.0 of 60.0 cpu demanded"),
    ("g", Pool("q", step_function_for_gang_operations=False), [BIG_GANG], GANGS,
     "  g, operation: 50.0 of 60.0 cpu demanded"),
])  # fmt: skip
def test_a_line_of_the_path(name, pool, operations, options, line):
    assert line in why(name, [pool], operations, options).lines


def test_limits_above_the_demand_are_not_mentioned():
    found = why("o", [Pool("q")], [operation("o", "q", 10.0, resource_limits=limit(46.0))])
    assert not any("limits" in line for line in found.lines)


def test_a_strong_guarantee_when_nothing_is_left_to_share():
    pools = [Pool("q", strong_guarantee_resources=(None, 150.0, None, 2.0**36, None)), guaranteed("r", ROOT, 50.0)]
    found = why("q", pools, [operation("o", "q", 300.0), operation("p", "r", 300.0)])
    assert found.rule == "strong_guarantee"
    assert found.lines[0] == (
        "q gets 75.0 % of the cluster (150 of 200 cpu): limited to its strong guarantee, nothing is left to distribute "
        "by weight; cpu is the scarce resource."
    )
    guarantee = "    strong guarantee: 75.0 user_slots (inferred), 75.0 cpu (configured), 25.0 memory (configured)"
    assert guarantee in found.lines


def test_guarantees_of_the_first_level_beyond_the_cluster():
    pools = [guaranteed("q", ROOT, 300.0), guaranteed("r", ROOT, 100.0), guaranteed("below", "q", 300.0)]
    found = why("below", pools, [operation("o", "below", 900.0), operation("p", "r", 900.0)])
    reason = "the guarantees of the first level exceed the cluster"
    adjusted = [line for line in found.lines if line.endswith(reason)]
    assert adjusted == [f"    adjusted down to 75.0 user_slots, 75.0 cpu, 75.0 memory: {reason}"] * 2


def guaranteed(name: str, parent: str, cores: float, **fields: object) -> Pool:
    return Pool(name, parent, strong_guarantee_resources=strong(cores), **fields)


HUNDRED = guaranteed("q", ROOT, 100.0)
LIMITED_HUNDRED = replace(HUNDRED, resource_limits=limit(50.0))
DONOR = replace(HUNDRED, priority_strong_guarantee_adjustment_donorship=True)
FIRST = guaranteed("first", "q", 80.0, priority_strong_guarantee_adjustment=True)


@pytest.mark.parametrize(("name", "pools", "reason"), [
    ("a", [HUNDRED, *(guaranteed(name, "q", 100.0) for name in "ab")], "the guarantees in q exceed its own"),
    ("q", [LIMITED_HUNDRED], "more than its limits allow"),
    ("a", [LIMITED_HUNDRED, guaranteed("a", "q", 100.0)], "more than the limits of q above it allow"),
    ("second", [DONOR, FIRST, guaranteed("second", "q", 60.0)],
     "in q pools with priority_strong_guarantee_adjustment come first"),
])  # fmt: skip
def test_why_a_guarantee_was_adjusted(name, pools, reason):
    lines = why(name, pools, [operation("o", name, 900.0)]).lines
    assert next(line.partition(": ")[2] for line in reversed(lines) if "adjusted down" in line) == reason


def integral(kind: str, flow: float, burst: float, seconds: float) -> IntegralGuarantees:
    """A guarantee whose volume is ``seconds`` of the whole cluster."""
    volume = tuple(total * seconds for total in TOTAL)
    resources = tuple(total * burst / 200.0 for total in TOTAL)
    return IntegralGuarantees(kind, cpu(flow), resources, accumulated_volume=volume)


@pytest.mark.parametrize(("guarantee", "rule", "detail"), [
    (integral("burst", 20.0, 100.0, 600.0),
     "burst",
     ("burst: flow 10.0, burst guarantee 50.0, accumulated volume for 1000.0 over one smooth period; gets "
      "50.0, limited by its burst guarantee")),
    (integral("relaxed", 40.0, 0.0, 600.0),
     "relaxed",
     ("relaxed: flow 20.0, at most 3 x flow = 60.0, accumulated volume for 1000.0 over one smooth period; "
      "gets 50.0, its demand and limits take no more")),
])  # fmt: skip
def test_an_integral_guarantee_when_nothing_is_left_to_share(guarantee, rule, detail):
    pools = [Pool("q", integral_guarantees=guarantee), Pool("r", strong_guarantee_resources=strong(100.0))]
    found = why("q", pools, [operation("o", "q", 300.0), operation("p", "r", 300.0)])
    assert found.rule == rule
    assert f"limited to its {rule} guarantee, nothing is left to distribute by weight" in found.lines[0]
    assert f"    {detail}" in found.lines


@pytest.mark.parametrize(("guarantee", "others", "detail"), [
    pytest.param(
        integral("burst", 20.0, 100.0, 12.0), 0.0,
        "burst guarantee 50.0, accumulated volume for 20.0 over one smooth period; gets 20.0, limited by its "
        "accumulated volume\n", id="volume runs out",
    ),
    pytest.param(
        integral("burst", 20.0, 150.0, 600.0), 150.0,
        "burst guarantee 50.0 (scaled down from 75.0 since guarantees exceed the cluster)",
        id="overcommitted",
    ),
])  # fmt: skip
def test_what_holds_a_burst_guarantee_down(guarantee, others, detail):
    pools = [Pool("q", integral_guarantees=guarantee), guaranteed("r", ROOT, others)]
    found = why("q", pools, [operation("o", "q", 300.0), operation("p", "r", 300.0)])
    assert f"\n    burst: flow 10.0, {detail}" in "\n".join([*found.lines, ""])


def test_a_fifo_pool_that_puts_gangs_back():
    options = Options(step_function_for_gang_operations=True, fifo_reordering=True)
    pool = Pool("q", mode="fifo", fifo_reordering=True, strong_guarantee_resources=strong(100.0))
    operations = [
        operation("gang", "q", 150.0, gang=True, start_time=0.0),
        operation("small", "q", 90.0, start_time=1.0),
    ]
    found = why("gang", [pool], operations, options)
    said = "    place 1 of fifo pool q, from 0 (0 before gangs that do not fit were put back): after small"
    assert found.lines[-1] == said


@pytest.mark.parametrize(("name", "pools", "operations", "cuts"), [
    pytest.param("o", [], [operation("o", ROOT, 100.0)], ["", ""], id="all it asks for"),
    pytest.param(
        "o", [Pool("q", resource_limits=limit(50.0))], [operation("o", "q", 100.0)],
        ["", "limited by its resource_limits, 25.0 % of cpu (50)", ""], id="a limit above it",
    ),
    pytest.param(
        "o", [], [operation("o", ROOT, 300.0, weight=1.0), operation("p", ROOT, 300.0, weight=3.0)],
        ["all cpu is distributed",
         "limited by its weight, 1 of 4 among the siblings that still want more; cpu is the scarce resource"],
        id="a weight",
    ),
])  # fmt: skip
def test_the_path_says_where_a_share_is_cut(name, pools, operations, cuts):
    assert [step.cut for step in why(name, pools, operations).path] == cuts


def test_a_chain_of_a_thousand_pools():
    pools = [Pool(f"p{n}", f"p{n - 1}" if n else ROOT) for n in range(1000)]
    snapshot = Snapshot(TOTAL, tuple(pools), (operation("o", "p999", 300.0),))
    found = explain(snapshot, fair_share_update(snapshot, 0.0, None), "o")
    assert found.rule == "cluster"
    assert sum(line.startswith("  p") for line in found.lines) == 1000


def test_names_are_shown_harmless():
    found = why("o\x1b[2J", [], [operation("o\x1b[2J", ROOT, 1.0)])
    assert "\x1b" not in "".join(found.lines)
    assert found.element == "o\x1b[2J"


@pytest.mark.parametrize(("fraction", "text"), [
    (0.0, "0.0"), (0.23, "23.0"), (1.5, "150.0"), (0.0005, "0.1"), (0.00041, "0.04"), (1.2e-6, "0.0001"),
    (1e-12, "0.0"),
])  # fmt: skip
def test_percent(fraction, text):
    assert format_percent(fraction) == text


@pytest.mark.parametrize(
    ("resource", "value", "text"),
    [(1, 46.0, "46"), (1, 0.25, "0.25"), (0, 1000.0, "1000"), (3, 3 * 2.0**29, "1.5 GiB"), (3, 0.0, "0 GiB")],
)
def test_amounts(resource, value, text):
    assert format_amount(resource, value) == text


@pytest.mark.parametrize(("shares", "told"), [
    ((0.01, 0.25, 0.0, 0.1, 0.0), "25.0%"),
    ((0.033, 0.01, 0.0, 0.0, 0.0), "3.3% (by job slots)"),
    ((0.0, 0.1, 0.0, 0.5, 0.0), "50.0% (by memory)"),
    ((0.2, 0.2, 0.0, 0.2, 0.0), "20.0%"),
])  # fmt: skip
def test_a_share_names_its_resource_where_that_is_not_cpu(shares: Vector, told: str) -> None:
    assert format_dominant(shares) == told
