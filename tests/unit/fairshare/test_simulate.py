"""A pool tree over time, and the script that drives it.

What the documents say of burst and relaxed pools shows in the shipped examples
(tests/unit/cli/fairshare/test_fair_share_simulate.py)."""

from dataclasses import replace
from typing import Any

import pytest

import cpumond.fairshare.simulate as module
from cpumond.core.errors import FairShareInputError
from cpumond.fairshare import (
    ROOT,
    FairShareUpdater,
    IntegralGuarantees,
    Operation,
    Options,
    Pool,
    Snapshot,
    UpdateResult,
    Vector,
)
from cpumond.fairshare.simulate import DemandEvent, Scenario, SimulationRow, check_script, count_steps, simulate

BURST, FLOW, CAPACITY = 500.0, 100.0, 100.0 * 86400


def cpu(cores: float) -> Vector:
    return (0.0, cores, 0.0, 0.0, 0.0)


def make_scenario(*script: DemandEvent, volume: float = 0.0, demand: float = 0.0) -> Scenario:
    """The documents' pool "p" with operation "o", beside a neighbour that always wants everything and gets its 1400."""
    integral = IntegralGuarantees("burst", cpu(FLOW), cpu(BURST), accumulated_volume=cpu(volume))
    neighbour = Pool("neighbour", weight=1e6, strong_guarantee_resources=(None, 1400.0, None, None, None))
    pools = (neighbour, Pool("p", integral_guarantees=integral))
    operations = (Operation("n", "neighbour", demand=cpu(2000)), Operation("o", "p", demand=cpu(demand)))
    return Scenario(Snapshot(cpu(2000), pools, operations), script)


def start(at_s: float, cores: float, **more: Any) -> DemandEvent:
    return DemandEvent("o", at_s, "start", cpu(cores), **more)


def stop(at_s: float, **more: Any) -> DemandEvent:
    return DemandEvent("o", at_s, "stop", **more)


def ramp(at_s: float, over_s: float, cores: float, **more: Any) -> DemandEvent:
    return DemandEvent("o", at_s, "ramp", cpu(cores), over_s, **more)


def rows_of(scenario: Scenario, until_s: float, step_s: float = 1.0) -> list[SimulationRow]:
    check_script(scenario)
    return [row for row in simulate(scenario, until_s, step_s) if row.pool == "p"]


def test_there_is_a_row_per_step_and_pool_in_the_order_of_the_tree():
    rows = list(simulate(make_scenario(), 1, 0.5))
    expected = [(time_s, pool) for time_s in (0.0, 0.5, 1.0) for pool in ("neighbour", "p")]
    assert [(row.time_s, row.pool) for row in rows] == expected


def test_a_pool_sums_up_what_is_below_it():
    pools = (Pool("top"), Pool("middle", "top"), Pool("low", "middle"), Pool("empty", "top"))
    demands = (("a", "low", 1), ("b", "middle", 2), ("c", "top", 4), ("d", ROOT, 8))
    operations = tuple(Operation(name, pool, demand=cpu(cores)) for name, pool, cores in demands)
    rows = simulate(Scenario(Snapshot(cpu(100), pools, operations)), 0, 1)
    found = {row.pool: (row.demand, row.usage) for row in rows}
    assert found == {"top": (7, pytest.approx(7)), "middle": (3, pytest.approx(3)), "low": (1, 1), "empty": (0, 0)}


def test_amounts_are_of_the_main_resource():
    integral = IntegralGuarantees("burst", (0, 0, 0, 64e9, 0), (0, 0, 0, 256e9, 0))
    pool = Pool("p", integral_guarantees=integral, strong_guarantee_resources=(None, None, None, 32e9, None))
    operation = Operation("o", "p", demand=(0, 5, 0, 16e9, 0))
    options = Options(main_resource="memory", integral_pool_capacity_saturation_period_s=100)
    snapshot = Snapshot((0, 10, 0, 1024e9, 0), (pool,), (operation,), options)
    (row,) = simulate(Scenario(snapshot), 0, 1)
    assert (row.demand, row.strong_guarantee, row.resource_flow, row.burst_guarantee) == (16e9, 32e9, 64e9, 256e9)
    assert row.integral_pool_capacity == 64e9 * 100


def test_a_cluster_without_the_main_resource_gives_zeros():
    snapshot = replace(make_scenario(demand=5).snapshot, total_resources=(1.0, 0.0, 0.0, 0.0, 0.0))
    row = rows_of(Scenario(snapshot), 1)[-1]
    assert (row.demand, row.usage, row.fair_share, row.integral_pool_capacity) == (5.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("until_s", "step_s", "steps"),
    [(0, 1, 1), (0.5, 1, 1), (1, 1, 2), (86400, 1, 86401), (0.3, 0.1, 4), (0.7, 0.1, 8), (1, 0.3, 4), (10, 7, 2)],
)
def test_steps_are_counted_with_both_ends(until_s, step_s, steps):
    assert count_steps(until_s, step_s) == steps


@pytest.mark.parametrize(("script", "step_s", "demands"), [
    # Before its first event an operation asks for what the tree says.
    ((start(2, 30), stop(4)), 1, [8, 8, 30, 30, 0, 0]),
    # An event between two steps is seen at the next.
    ((start(2.5, 30), stop(2.6), start(4.9, 9)), 1, [8, 8, 8, 0, 0, 9, 9]),
    # A ramp is a straight line from the demand of its moment.
    ((start(1, 10), ramp(2, 4, 30)), 1, [8, 10, 10, 15, 20, 25, 30, 30]),
    ((ramp(0, 4, 0),), 1, [8, 6, 4, 2, 0, 0]),
    # One that was over between two steps is where the next event begins.
    ((ramp(0.5, 0.2, 20), ramp(0.8, 2.2, 42)), 1.9, [8, 31]),
    # Events that happen once come before those that repeat, whose period may be shorter than the step.
    ((start(0, 9), stop(1), ramp(2, 2, 8, repeat_every_s=4.0), ramp(4, 2, 0, repeat_every_s=4.0)), 1,
     [9, 0, 0, 4, 8, 4, 0, 4, 8, 4, 0, 4]),
    ((start(0, 5, repeat_every_s=2.0), stop(1, repeat_every_s=2.0)), 5, [5, 0, 5]),
])  # fmt: skip
def test_demand_is_what_the_script_says(script, step_s, demands):
    rows = rows_of(make_scenario(*script, demand=8), (len(demands) - 1) * step_s, step_s)
    assert [row.demand for row in rows] == pytest.approx(demands)


def test_all_resources_of_a_ramp_move_together():
    scenario = make_scenario(DemandEvent("o", 0, "ramp", (10, 20, 0, 400, 0), 4))
    seen = note_updates(scenario, 4)
    demands = [snapshot.operations[1].demand for snapshot, _, _ in seen]
    assert demands == [(10 * part, 20 * part, 0, 400 * part, 0) for part in (0, 0.25, 0.5, 0.75, 1)]


def note_updates(scenario: Scenario, until_s: float, step_s: float = 1.0) -> list[tuple[Snapshot, float, float | None]]:
    seen: list[tuple[Snapshot, float, float | None]] = []

    class Recorder(FairShareUpdater):
        def update(self, snapshot: Snapshot, now: float, previous_update_time: float | None) -> UpdateResult:
            seen.append((snapshot, now, previous_update_time))
            return super().update(snapshot, now, previous_update_time)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FairShareUpdater", Recorder)
        for _ in simulate(scenario, until_s, step_s):
            pass
    return seen


def test_what_does_not_change_stays_the_same_object():
    scenario = make_scenario()
    seen = [snapshot for snapshot, _, _ in note_updates(scenario, 3)]
    assert seen[0] is scenario.snapshot
    volumes = [snapshot.pools[1].integral_guarantees.accumulated_volume for snapshot in seen]
    assert volumes == [cpu(0), cpu(0), cpu(100), cpu(200)]
    for snapshot in seen[1:]:
        assert snapshot.pools[0] is scenario.snapshot.pools[0]
        assert snapshot.operations[1] is scenario.snapshot.operations[1]
        # The neighbour uses what it was granted in the first update, then and later.
        assert snapshot.operations is seen[1].operations
    full = [snapshot for snapshot, _, _ in note_updates(make_scenario(volume=CAPACITY), 5)]
    assert all(snapshot is full[1] for snapshot in full[2:])


def test_usage_is_the_last_grant_and_no_more_than_the_demand():
    seen = note_updates(make_scenario(start(1, 300), stop(3), volume=CAPACITY), 4)
    assert [snapshot.operations[1].demand[1] for snapshot, _, _ in seen] == [0, 300, 300, 0, 0]
    assert [snapshot.operations[1].usage[1] for snapshot, _, _ in seen] == pytest.approx([0, 0, 300, 0, 0])


def test_the_usage_of_the_tree_is_held_to_the_demand_of_the_script():
    scenario = make_scenario(stop(0), demand=50)
    neighbour, operation = scenario.snapshot.operations
    used = replace(scenario.snapshot, operations=(neighbour, replace(operation, usage=cpu(40))))
    seen = note_updates(Scenario(used, scenario.script), 0)
    assert seen[0][0].operations[1].usage == cpu(0)


@pytest.mark.parametrize(("factor", "is_noise"), [(1 + 2**-52, True), (1 - 2**-52, True), (0.999, False)])
def test_a_difference_in_the_last_digits_is_no_change(factor, is_noise):
    assert module._is_noise(cpu(500 * factor), cpu(500), cpu(2000)) is is_noise


@pytest.mark.parametrize(("script", "message"), [
    ([DemandEvent("oo", 0, "stop")], 'script 1.operation: there is no operation "oo"; did you mean "o"?'),
    ([stop(1), DemandEvent("x", 0, "stop")], 'script 2.operation: there is no operation "x"; name one of the '),
    ([start(0, -1)], "script 1.demand.cpu: expected a number in [0, 9.223372036854776e+18], got -1"),
    ([stop(-1)], "script 1.at: expected a duration in [0s, 36500d], got -1s"),
    ([ramp(0, 0, 5)], "script 1.over: a ramp must be longer than 0s; use start or stop for a sudden change"),
    ([start(0, 5, over_s=2.0)], "script 1.over: a ramp must be longer than 0s; "),
    ([stop(0, repeat_every_s=0.5)], "script 1.repeat_every: expected a duration in [1s, 36500d], got 500ms"),
    ([start(60, 5), stop(60)], 'script 2.at: 1m is not after the 1m of script 1; sort the events of "o" by time'),
    ([ramp(0, 60, 5), stop(30)],
     "script 2.at: 30s is within the ramp of script 1 of the same operation, which is over at 1m; begin later"),
    ([start(0, 5, repeat_every_s=60.0), stop(30)],
     'script 2.repeat_every: must be 1m, as in script 1; events of "o" that repeat must come last and '),
    ([start(0, 5, repeat_every_s=60.0), stop(60, repeat_every_s=60.0)],
     "script 2: is over at 1m, but script 1 of the same operation happens again at 1m; use a longer "),
    ([start(0, 5, repeat_every_s=60.0), ramp(30, 31, 0, repeat_every_s=60.0)], "script 2: is over at 61s, but "),
    ([stop(0), ramp(5, 20, 9, repeat_every_s=10.0)], "script 2: is over at 25s, but script 2 of the same "),
])  # fmt: skip
def test_an_event_that_does_not_fit_is_one_sentence(script, message):
    with pytest.raises(FairShareInputError) as error:
        check_script(make_scenario(*script))
    assert str(error.value).startswith(message)
