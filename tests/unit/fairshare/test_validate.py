"""What a snapshot may hold: each refusal is one sentence that names the element, and everything else passes
(fair_share_update.md 1, 16)."""

from __future__ import annotations

import difflib
import math
from dataclasses import replace

import pytest

from cpumond.core.errors import EXIT_CONFIG, ConfigError, FairShareInputError
from cpumond.fairshare import ROOT, IntegralGuarantees, Operation, Options, Pool, Snapshot, Vector
from cpumond.fairshare.resources import UNLIMITED
from cpumond.fairshare.validate import (
    MAX_COMPARED,
    MAX_NAME,
    check_max_share_ratio,
    check_times,
    check_total_resources,
    check_volume,
    did_you_mean,
    nearest,
    number,
    one_of,
    order_pools,
    printable,
    validate,
)

TOTAL: Vector = (1000.0, 100.0, 8.0, 2.0**40, 0.0)
NAN, INF = math.nan, math.inf


def cpu(value: float) -> Vector:
    return (0.0, value, 0.0, 0.0, 0.0)


def limit(value: float) -> Vector:
    return (INF, value, INF, INF, INF)


def one_pool(**fields: object) -> Snapshot:
    return Snapshot(TOTAL, (Pool("q", **fields),))


def one_operation(**fields: object) -> Snapshot:
    return Snapshot(TOTAL, (Pool("q"),), (Operation("o", "q", **fields),))


def with_integral(**fields: object) -> Snapshot:
    return one_pool(integral_guarantees=IntegralGuarantees(**fields))


def refusal(snapshot: Snapshot) -> str:
    with pytest.raises(FairShareInputError) as error:
        validate(snapshot)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_error_is_one_of_input_files():
    assert issubclass(FairShareInputError, ConfigError)
    assert FairShareInputError.exit_code == EXIT_CONFIG == 78


# ---- what passes


@pytest.mark.parametrize(
    "snapshot",
    [
        Snapshot(TOTAL),
        Snapshot((0.0,) * 5),
        Snapshot((0.0, 0.01, 0.0, 0.0, 0.0)),
        Snapshot(TOTAL, operations=(Operation("o", ROOT),)),
        one_operation(demand=cpu(5.0), usage=cpu(5.0), resource_limits=limit(0.0), max_share_ratio=0.0),
        one_operation(weight=2.0**-26, start_time=-1e12, max_share_ratio=1.0, gang=True),
        one_operation(demand=(1, 2, 3, 4, 5)),  # whole numbers are numbers
        one_pool(mode="fifo", strong_guarantee_resources=(None, 0.0, None, 1e300 / 1e290, None)),
        with_integral(guarantee_type="burst", accumulated_volume=cpu(1e60), relaxed_share_multiplier_limit=0.0),
        Snapshot(TOTAL, root=Pool(ROOT, "", mode="fifo"), operations=(Operation("o", ROOT),)),
        Snapshot(TOTAL, options=Options(main_resource="gpu", integral_smooth_period_s=1e-6)),
    ],
)
def test_a_legal_tree_passes(snapshot):
    validate(snapshot)


def test_integral_pools_may_be_nested():
    integral = IntegralGuarantees(guarantee_type="burst", resource_flow=cpu(1.0))
    outer = Pool("outer", integral_guarantees=integral)
    validate(Snapshot(TOTAL, (outer, Pool("inner", "outer", integral_guarantees=integral))))


def test_guarantees_beyond_the_cluster_are_for_the_update_to_scale():
    validate(one_pool(strong_guarantee_resources=(None, 1e6, None, None, None)))


# ---- names and places


@pytest.mark.parametrize(
    ("pools", "operations", "message"),
    [
        ([Pool("q"), Pool("q")], [], 'pool "q": two pools have this name; give each element one of its own'),
        (
            [Pool("q")],
            [Operation("o", "q"), Operation("o", ROOT)],
            'operation "o": two operations have this name; give each element one of its own',
        ),
        (
            [Pool("q")],
            [Operation("q", "q")],
            'operation "q": a pool and an operation have this name; give each element one of its own',
        ),
        ([Pool(ROOT)], [], 'pool "<root>": this name is the root\'s; give it another name'),
        ([], [Operation(ROOT, ROOT)], 'operation "<root>": this name is the root\'s; give it another name'),
        ([Pool("")], [], "some pool has an empty name; every pool and operation needs one of its own"),
        ([], [Operation("", ROOT)], "some operation has an empty name; every pool and operation needs one of its own"),
        (
            [Pool("production"), Pool("q", "prodution")],
            [],
            'pool "q": its parent "prodution" does not exist; did you mean "production"?',
        ),
        (
            [Pool("q")],
            [Operation("o", "root")],
            'operation "o": its parent "root" does not exist; did you mean "<root>"?',
        ),
        (
            [Pool("q")],
            [Operation("o", "zzz")],
            'operation "o": its parent "zzz" does not exist; "<root>" is the parent of the first level',
        ),
        (
            [Pool("q")],
            [Operation("o", "q"), Operation("p", "o")],
            'operation "p": its parent "o" is an operation; the parent must be a pool',
        ),
        (
            [Pool("q", "o")],
            [Operation("o", ROOT)],
            'pool "q": its parent "o" is an operation; the parent must be a pool',
        ),
        ([Pool("b", "a"), Pool("a")], [], 'pool "b": its parent "a" comes after it; put parents before their children'),
        (
            [Pool("a", "a")],
            [],
            'pool "a": its ancestors lead back to itself ("a" -> "a"); give one of them another parent',
        ),
        (
            [Pool("x", "a"), Pool("a", "b"), Pool("b", "a")],
            [],
            'pool "a": its ancestors lead back to itself ("a" -> "b" -> "a"); give one of them another parent',
        ),
        (
            [Pool("f", mode="fifo"), Pool("q", "f")],
            [],
            (
                'pool "q": its parent "f" has mode fifo, where only operations can be; give it another parent, or the '
                "parent mode fair_share"
            ),
        ),
    ],
)
def test_a_wrong_name_or_place_is_said_with_its_element(pools, operations, message):
    assert refusal(Snapshot(TOTAL, tuple(pools), tuple(operations))) == message


def test_the_root_can_be_fifo_only_without_pools():
    snapshot = Snapshot(TOTAL, (Pool("q"),), root=Pool(ROOT, "", mode="fifo"))
    assert refusal(snapshot).startswith('pool "q": its parent "<root>" has mode fifo')


def test_the_root_has_its_name():
    assert refusal(Snapshot(TOTAL, root=Pool("top", ""))) == 'root: name: expected "<root>", got "top"'


def test_a_long_cycle_is_shown_in_part():
    pools = [Pool(f"p{n}", f"p{(n + 1) % 1000}") for n in range(1000)]
    message = refusal(Snapshot(TOTAL, tuple(pools)))
    assert message == (
        'pool "p0": its ancestors lead back to itself '
        '("p0" -> "p1" -> "p2" -> "p3" -> "p4" -> "p5" -> "p6" -> ... -> "p0"); give one of them another parent'
    )


def test_names_may_be_of_any_script_and_are_shown_harmless():
    validate(Snapshot(TOTAL, (Pool("пул ✓"),), (Operation("操作", "пул ✓"),)))
    assert refusal(Snapshot(TOTAL, (Pool("пул", "нет"),))).startswith('pool "пул": its parent "нет" does not exist')
    assert refusal(Snapshot(TOTAL, (Pool("a\n\x1b[2J", "x"),))).startswith('pool "a\\n\\x1b[2J": its parent')
    assert len(refusal(Snapshot(TOTAL, (Pool("n" * 10**6), Pool("n" * 10**6))))) < 200


# ---- numbers

WEIGHT = "weight: expected a finite number > 0 (at most 9.22e+18), got"
AMOUNT = "expected a finite number in [0, 9.22e+18], got"
LIMIT = "expected a number >= 0, infinite for no limit, got"


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        (one_pool(weight=0.0), f'pool "q": {WEIGHT} 0'),
        (one_pool(weight=-2.5), f'pool "q": {WEIGHT} -2.5'),
        (one_pool(weight=NAN), f'pool "q": {WEIGHT} nan'),
        (one_pool(weight=INF), f'pool "q": {WEIGHT} inf'),
        (one_pool(mode="lifo"), 'pool "q": mode: expected fair_share or fifo, got "lifo"'),
        (one_pool(resource_limits=limit(-1.0)), f'pool "q": resource_limits: cpu: {LIMIT} -1'),
        (one_pool(resource_limits=limit(NAN)), f'pool "q": resource_limits: cpu: {LIMIT} nan'),
        (
            one_pool(strong_guarantee_resources=(None, None, -1.0, None, None)),
            f'pool "q": strong_guarantee_resources: gpu: {AMOUNT} -1',
        ),
        (
            one_pool(strong_guarantee_resources=(None, None, None, INF, None)),
            f'pool "q": strong_guarantee_resources: memory: {AMOUNT} inf',
        ),
        (
            with_integral(guarantee_type="strong"),
            'pool "q": integral.type: expected none, burst or relaxed, got "strong"',
        ),
        (with_integral(resource_flow=cpu(NAN)), f'pool "q": integral.resource_flow: cpu: {AMOUNT} nan'),
        (
            with_integral(burst_guarantee_resources=(0.0, 0.0, 0.0, 0.0, 1e19)),
            f'pool "q": integral.burst_guarantee_resources: network: {AMOUNT} 1e+19',
        ),
        (
            with_integral(relaxed_share_multiplier_limit=-1.0),
            f'pool "q": integral.relaxed_share_multiplier_limit: {AMOUNT} -1',
        ),
        (with_integral(last_share_ratio=-0.5), f'pool "q": integral.last_share_ratio: {AMOUNT} -0.5'),
        (
            with_integral(accumulated_volume=cpu(-1.0)),
            'pool "q": integral.accumulated_volume: cpu: expected a finite number in [0, 1e+100], got -1',
        ),
        (Snapshot(TOTAL, root=Pool(ROOT, "", resource_limits=limit(-1.0))), f"root: resource_limits: cpu: {LIMIT} -1"),
        (one_operation(weight=0.0), f'operation "o": {WEIGHT} 0'),
        (one_operation(weight=NAN), f'operation "o": {WEIGHT} nan'),
        (one_operation(max_share_ratio=1.5), 'operation "o": max_share_ratio: expected a number in [0, 1], got 1.5'),
        (one_operation(max_share_ratio=NAN), 'operation "o": max_share_ratio: expected a number in [0, 1], got nan'),
        (
            one_operation(start_time=INF),
            'operation "o": start_time: expected a finite number of seconds within +-9.22e+12, got inf',
        ),
        (one_operation(demand=cpu(NAN)), f'operation "o": demand: cpu: {AMOUNT} nan'),
        (one_operation(demand=cpu(INF)), f'operation "o": demand: cpu: {AMOUNT} inf'),
        (one_operation(usage=cpu(-1.0)), f'operation "o": usage: cpu: {AMOUNT} -1'),
        (one_operation(resource_limits=limit(-1.0)), f'operation "o": resource_limits: cpu: {LIMIT} -1'),
        (one_operation(resource_limits=limit(NAN)), f'operation "o": resource_limits: cpu: {LIMIT} nan'),
        (
            one_operation(demand=(1.0, 2.0, 0.0, 0.0, 0.0), usage=(1.0, 2.5, 0.0, 0.0, 0.0)),
            'operation "o": demand: cpu is 2, below its usage of 2.5; demand includes usage',
        ),
    ],
)
def test_a_wrong_number_is_said_with_its_element_and_key(snapshot, message):
    assert refusal(snapshot) == message


@pytest.mark.parametrize("r", range(5))
@pytest.mark.parametrize("bad", [NAN, -1.0])
@pytest.mark.parametrize("field", ["demand", "usage", "resource_limits"])
def test_no_component_of_an_operation_is_overlooked(r, bad, field):
    vector = [INF if field == "resource_limits" else 0.0] * 5
    vector[r] = bad
    assert "expected a" in refusal(one_operation(**{field: tuple(vector)}))


@pytest.mark.parametrize("r", range(5))
def test_demand_covers_usage_in_every_resource(r):
    usage = tuple(float(n == r) for n in range(5))
    assert "is 0, below its usage of 1; demand includes usage" in refusal(one_operation(usage=usage))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            Options(main_resource="cpus"),
            'options: main_resource: expected user_slots, cpu, gpu, memory or network, got "cpus"',
        ),
        (
            Options(integral_smooth_period_s=0.0),
            "options: integral_smooth_period_s: expected a finite number of seconds > 0 (at least 1e-06), got 0",
        ),
        (
            Options(integral_pool_capacity_saturation_period_s=NAN),
            (
                "options: integral_pool_capacity_saturation_period_s: expected a finite number of seconds > 0 "
                "(at least 1e-06), got nan"
            ),
        ),
    ],
)
def test_wrong_options_are_said_with_their_key(options, message):
    assert refusal(Snapshot(TOTAL, options=options)) == message


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (cpu(-1.0), f"total_resources: cpu: {AMOUNT} -1"),
        (cpu(INF), f"total_resources: cpu: {AMOUNT} inf"),
        (cpu(1e-300), "total_resources: cpu: expected 0 or at least 0.01, got 1e-300"),
    ],
)
def test_wrong_totals(total, message):
    assert refusal(Snapshot(total)) == message
    with pytest.raises(FairShareInputError):
        check_total_resources(total)


# ---- weights that are too light (16)


@pytest.mark.parametrize("improved", [False, True])
def test_some_child_of_a_fair_share_pool_is_heavier_than_epsilon(improved):
    options = Options(improved_fair_share_by_fit_factor=improved)
    light = Operation("light", "q", weight=1e-9)
    alone = Snapshot(TOTAL, (Pool("q"),), (light,), options)
    assert refusal(alone) == 'operation "light": weight: expected a number > 1e-09, got 1e-09'
    accompanied = replace(alone, operations=(light, Operation("heavy", "q")))
    if improved:
        assert refusal(accompanied) == refusal(alone)
    else:
        validate(accompanied)


def test_a_light_pool_is_named_as_a_pool():
    assert refusal(one_pool(weight=1e-12)).startswith('pool "q": weight: expected a number > 1e-09')


def test_in_a_fifo_pool_weights_only_order():
    validate(Snapshot(TOTAL, (Pool("q", mode="fifo"),), (Operation("o", "q", weight=1e-30),)))


# ---- order


def names(pools: tuple[Pool, ...]) -> list[str]:
    return [pool.name for pool in pools]


def test_pools_in_order_stay_as_they_are():
    pools = (Pool("b"), Pool("a"), Pool("d", "a"), Pool("c", "b"), Pool("e", "d"))
    assert order_pools(pools) == pools


def test_children_wait_for_their_parents_and_siblings_keep_their_order():
    pools = [Pool("c2", "b"), Pool("g", "c1"), Pool("x"), Pool("c1", "b"), Pool("b", "a"), Pool("c3", "b"), Pool("a")]
    assert names(order_pools(pools)) == ["x", "a", "b", "c2", "c1", "g", "c3"]
    validate(Snapshot(TOTAL, order_pools(pools)))


def test_an_unknown_parent_is_left_for_validate():
    pools = order_pools([Pool("b", "a"), Pool("a", "nowhere")])
    assert names(pools) == ["a", "b"]
    assert refusal(Snapshot(TOTAL, pools)).startswith('pool "a": its parent "nowhere" does not exist')


def test_pools_of_one_name_are_left_for_validate():
    pools = order_pools([Pool("c", "a"), Pool("a"), Pool("a"), Pool("d", "a")])
    assert refusal(Snapshot(TOTAL, pools)).startswith('pool "a": two pools have this name')


def test_a_cycle_cannot_be_ordered():
    with pytest.raises(FairShareInputError, match=r'^pool "a": its ancestors lead back to itself'):
        order_pools([Pool("ok"), Pool("below", "a"), Pool("a", "b"), Pool("b", "a")])


@pytest.mark.parametrize("step", [1, -1])
def test_a_chain_of_a_thousand_pools_needs_no_recursion(step):
    chain = [Pool(f"p{n}", f"p{n - 1}" if n else ROOT) for n in range(1000)][::step]
    ordered = order_pools(chain)
    assert names(ordered) == [f"p{n}" for n in range(1000)]
    validate(Snapshot(TOTAL, ordered, (Operation("o", "p999"),)))


# ---- single values and words


@pytest.mark.parametrize("previous", [None, 0.0, -1e12])
def test_times_may_be_any_that_fit(previous):
    check_times(1.7e9, previous)


@pytest.mark.parametrize(
    ("now", "previous", "key"), [(NAN, None, "now"), (INF, None, "now"), (0.0, 1e13, "previous_update_time")]
)
def test_times_are_finite(now, previous, key):
    with pytest.raises(FairShareInputError, match=f"^{key}: expected a finite number of seconds within"):
        check_times(now, previous)


def test_single_values_are_checked_alike():
    check_max_share_ratio("x", 0.5)
    check_volume("x", cpu(1e30))
    with pytest.raises(FairShareInputError, match=r"^x: max_share_ratio: expected a number in \[0, 1\], got -0.1$"):
        check_max_share_ratio("x", -0.1)
    with pytest.raises(FairShareInputError, match=r"^x: cpu: expected a finite number in \[0, 1e\+100\], got inf$"):
        check_volume("x", UNLIMITED[:0] + cpu(INF))


def test_words():
    assert one_of(["a"]) == "a"
    assert one_of(["a", "b", "c"]) == "a, b or c"
    assert [number(x) for x in (1.0, 0.1, 1e300, 2)] == ["1", "0.1", "1e+300", "2"]
    assert did_you_mean("weigth", ["mode", "weight"]) == '; did you mean "weight"?'
    assert did_you_mean("zzz", ["mode", "weight"]) == ""


@pytest.mark.parametrize("typed", ["team-4711", "tem-4711-x", "steam-4711-x", "team-4711-xy", "taem-4711-x"])
def test_the_nearest_of_very_many_names_is_found_without_comparing_all(typed, monkeypatch):
    names = [f"team-{number}-x" for number in range(3000)] + ["team-4711-x", "other"]
    compared = []
    closely = difflib.get_close_matches

    def compare(name, known, **more):
        compared.append(len(known))
        return closely(name, known, **more)

    monkeypatch.setattr(difflib, "get_close_matches", compare)
    assert nearest(typed, names) == "team-4711-x"
    assert compared == [MAX_COMPARED]
    assert printable("a" * MAX_NAME) == "a" * MAX_NAME
    assert len(printable("a" * 1000)) == MAX_NAME
    assert printable("tab\t") == "tab\\t"


def test_five_thousand_operations_are_checked_and_the_last_is_not_overlooked():
    operations = [Operation(f"o{n}", "q", demand=cpu(1.0)) for n in range(5000)]
    validate(Snapshot(TOTAL, (Pool("q"),), tuple(operations)))
    operations[-1] = replace(operations[-1], demand=cpu(NAN))
    assert refusal(Snapshot(TOTAL, (Pool("q"),), tuple(operations))).startswith('operation "o4999": demand: cpu')
