"""What a snapshot may hold: each refusal is one sentence that names the element, and everything else passes
(fair_share_update.md 1, 16)."""

import difflib
import math
from dataclasses import replace

import pytest

from cpumond.core.errors import EXIT_CONFIG, ConfigError, FairShareInputError
from cpumond.core.words import MAX_COMPARED, MAX_NAME, nearest, printable
from cpumond.fairshare import ROOT, IntegralGuarantees, Operation, Options, Pool, Snapshot, Vector
from cpumond.fairshare.validate import check_times, check_total_resources, order_pools, validate

TOTAL: Vector = (1000.0, 100.0, 8.0, 2.0**40, 0.0)
NAN, INF = math.nan, math.inf


def cpu(value: float) -> Vector:
    return (0.0, value, 0.0, 0.0, 0.0)


def limit(value: float) -> Vector:
    return (INF, value, INF, INF, INF)


BURST = IntegralGuarantees(guarantee_type="burst", resource_flow=cpu(1.0))


def tree(*elements: Pool | Operation) -> Snapshot:
    pools = tuple(element for element in elements if isinstance(element, Pool))
    return Snapshot(TOTAL, pools, tuple(element for element in elements if isinstance(element, Operation)))


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


@pytest.mark.parametrize("snapshot", [
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
    tree(Pool("outer", integral_guarantees=BURST), Pool("inner", "outer", integral_guarantees=BURST)),
    one_pool(strong_guarantee_resources=(None, 1e6, None, None, None)),  # for the update to scale
    tree(Pool("q", mode="fifo"), Operation("o", "q", weight=1e-30)),  # where weights only order
    Snapshot(TOTAL, options=Options(main_resource="gpu", integral_smooth_period_s=1e-6)),
])  # fmt: skip
def test_a_legal_tree_passes(snapshot):
    validate(snapshot)


TAKEN = "have this name; give each element one of its own"
OF_ROOT = "this name is the root's; give it another name"
EMPTY = "has an empty name; every pool and operation needs one of its own"
AN_OPERATION = "is an operation; the parent must be a pool"
CYCLE = "its ancestors lead back to itself"
FIFO = "has mode fifo, where only operations can be; give it another parent, or the parent mode fair_share"


@pytest.mark.parametrize(("snapshot", "message"), [
    (tree(Pool("q"), Pool("q")), f'pool "q": two pools {TAKEN}'),
    (tree(Pool("q"), Operation("o", "q"), Operation("o", ROOT)), f'operation "o": two operations {TAKEN}'),
    (tree(Pool("q"), Operation("q", "q")), f'operation "q": a pool and an operation {TAKEN}'),
    (tree(Pool(ROOT)), f'pool "<root>": {OF_ROOT}'),
    (tree(Operation(ROOT, ROOT)), f'operation "<root>": {OF_ROOT}'),
    (tree(Pool("")), f"some pool {EMPTY}"),
    (tree(Operation("", ROOT)), f"some operation {EMPTY}"),
    (tree(Pool("production"), Pool("q", "prodution")),
     'pool "q": its parent "prodution" does not exist; did you mean "production"?'),
    (tree(Pool("q"), Operation("o", "root")),
     'operation "o": its parent "root" does not exist; did you mean "<root>"?'),
    (tree(Pool("q"), Operation("o", "zzz")),
     'operation "o": its parent "zzz" does not exist; "<root>" is the parent of the first level'),
    (tree(Pool("q"), Operation("o", "q"), Operation("p", "o")), f'operation "p": its parent "o" {AN_OPERATION}'),
    (tree(Pool("b", "a"), Pool("a")), 'pool "b": its parent "a" comes after it; put parents before their children'),
    (tree(Pool("a", "a")), f'pool "a": {CYCLE} ("a" -> "a"); give one of them another parent'),
    (tree(Pool("x", "a"), Pool("a", "b"), Pool("b", "a")),
     f'pool "a": {CYCLE} ("a" -> "b" -> "a"); give one of them another parent'),
    (tree(Pool("f", mode="fifo"), Pool("q", "f")), f'pool "q": its parent "f" {FIFO}'),
    (replace(tree(Pool("q")), root=Pool(ROOT, "", mode="fifo")), f'pool "q": its parent "<root>" {FIFO}'),
    (Snapshot(TOTAL, root=Pool("top", "")), 'root: name: expected "<root>", got "top"'),
])  # fmt: skip
def test_a_wrong_name_or_place_is_said_with_its_element(snapshot, message):
    assert refusal(snapshot) == message


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


WEIGHT = "weight: expected a finite number > 0 (at most 9.22e+18), got"
AMOUNT = "expected a finite number in [0, 9.22e+18], got"
LIMIT = "expected a number >= 0, infinite for no limit, got"


@pytest.mark.parametrize(("snapshot", "message"), [
    (one_pool(weight=0.0), f'pool "q": {WEIGHT} 0'),
    (one_pool(mode="lifo"), 'pool "q": mode: expected fair_share or fifo, got "lifo"'),
    (one_pool(resource_limits=limit(-1.0)), f'pool "q": resource_limits: cpu: {LIMIT} -1'),
    (one_pool(strong_guarantee_resources=(None, None, -1.0, None, None)),
     f'pool "q": strong_guarantee_resources: gpu: {AMOUNT} -1'),
    (with_integral(guarantee_type="strong"), 'pool "q": integral.type: expected none, burst or relaxed, got "strong"'),
    (with_integral(resource_flow=cpu(NAN)), f'pool "q": integral.resource_flow: cpu: {AMOUNT} nan'),
    (with_integral(relaxed_share_multiplier_limit=-1.0),
     f'pool "q": integral.relaxed_share_multiplier_limit: {AMOUNT} -1'),
    (with_integral(last_share_ratio=-0.5), f'pool "q": integral.last_share_ratio: {AMOUNT} -0.5'),
    (with_integral(accumulated_volume=cpu(-1.0)),
     'pool "q": integral.accumulated_volume: cpu: expected a finite number in [0, 1e+100], got -1'),
    (one_pool(weight=1e-12), 'pool "q": weight: expected a number > 1e-09, got 1e-12'),
    (tree(Operation("o", ROOT), Operation("p", ROOT, weight=0.0)), f'operation "p": {WEIGHT} 0'),
    (one_operation(max_share_ratio=1.5), 'operation "o": max_share_ratio: expected a number in [0, 1], got 1.5'),
    (one_operation(start_time=INF),
     'operation "o": start_time: expected a finite number of seconds within +-9.22e+12, got inf'),
    (one_operation(demand=cpu(INF)), f'operation "o": demand: cpu: {AMOUNT} inf'),
    (one_operation(usage=cpu(-1.0)), f'operation "o": usage: cpu: {AMOUNT} -1'),
    (one_operation(resource_limits=limit(-1.0)), f'operation "o": resource_limits: cpu: {LIMIT} -1'),
    (one_operation(demand=(1.0, 2.0, 0.0, 0.0, 0.0), usage=(1.0, 2.5, 0.0, 0.0, 0.0)),
     'operation "o": demand: cpu is 2, below its usage of 2.5; demand must cover usage'),
])  # fmt: skip
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
    assert "is 0, below its usage of 1; demand must cover usage" in refusal(one_operation(usage=usage))


@pytest.mark.parametrize(("options", "message"), [
    (Options(main_resource="cpus"),
     'options: main_resource: expected user_slots, cpu, gpu, memory or network, got "cpus"'),
    (Options(integral_smooth_period_s=0.0),
     "options: integral_smooth_period_s: expected a finite number of seconds > 0 (at least 1e-06), got 0"),
    (Options(integral_pool_capacity_saturation_period_s=NAN),
     ("options: integral_pool_capacity_saturation_period_s: expected a finite number of seconds > 0 "
      "(at least 1e-06), got nan")),
])  # fmt: skip
def test_wrong_options_are_said_with_their_key(options, message):
    assert refusal(Snapshot(TOTAL, options=options)) == message


@pytest.mark.parametrize(("total", "message"), [
    (cpu(-1.0), f"total_resources: cpu: {AMOUNT} -1"),
    (cpu(INF), f"total_resources: cpu: {AMOUNT} inf"),
    (cpu(1e-300), "total_resources: cpu: expected 0 or at least 0.01, got 1e-300"),
])  # fmt: skip
def test_wrong_totals(total, message):
    with pytest.raises(FairShareInputError) as error:
        check_total_resources(total)
    assert str(error.value) == refusal(Snapshot(total)) == message


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


def names(pools: tuple[Pool, ...]) -> list[str]:
    return [pool.name for pool in pools]


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


@pytest.mark.parametrize("previous", [None, 0.0, -1e12])
def test_times_may_be_any_that_fit(previous):
    check_times(1.7e9, previous)


@pytest.mark.parametrize(
    ("now", "previous", "key"), [(NAN, None, "now"), (INF, None, "now"), (0.0, 1e13, "previous_update_time")]
)
def test_times_are_finite(now, previous, key):
    with pytest.raises(FairShareInputError, match=f"^{key}: expected a finite number of seconds within"):
        check_times(now, previous)


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
