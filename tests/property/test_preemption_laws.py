"""Laws of preemption on small random trees: each plan checked by brute force, and many steps without ping-pong."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from examples import WHOLE, examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from scheduler_builders import World, amount, give, starve

from cpumond.core.wire import JobReport
from cpumond.fairshare.resources import ZERO, Vector, add, subtract, sum_vectors
from cpumond.scheduler.decide.cost import lost_core_seconds
from cpumond.scheduler.decide.placement import ServiceOrder, satisfaction_of
from cpumond.scheduler.decide.preemption import PreemptionPlan, Targets, plan_preemption
from cpumond.scheduler.decide.starvation import TargetPriority, is_below_guarantee, list_priorities, starving_operations
from cpumond.scheduler.decide.swap import Swap, SwapStage
from cpumond.scheduler.decide.victims import find_limit_violators, find_overcommit_victims, is_protected_by_count
from cpumond.scheduler.elements import (
    AGGRESSIVELY_PREEMPTIBLE,
    NON_PREEMPTIBLE,
    PREEMPTIBLE,
    Element,
    Job,
    Node,
    OperationElement,
    PoolElement,
    Tree,
    change_usage,
)
from cpumond.scheduler.model import ROOT_POOL, Task

NOW = 200.0
EPS = 1e-6
INF = float("inf")
quick = examples(300, suppress_health_check=[HealthCheck.too_slow])
long = examples(40 if WHOLE else 24, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)


# --- random worlds


def make_world(seed: int) -> World:
    """One or two nodes, up to four pools and seven operations with jobs; shares by an update or by hand."""
    rng = random.Random(seed)
    world = World(
        max_unpreemptible_running_job_count=rng.choice([None, None, 2, 4]),
        strict_unpreemptible_running_job_count=rng.random() < 0.5,
        enable_conditional_preemption=rng.random() < 0.8,
        preemption_check_starvation=rng.random() < 0.9,
        preemption_check_satisfaction=rng.random() < 0.9,
        preempt_cpu_gap_first=rng.random() < 0.3,
        allow_aggressive_preemption=rng.random() < 0.8,
        preempt_cheapest_first=rng.random() < 0.4,
        guarantee_tolerance=rng.choice([None, None, 0.9, 1.0]),
    )
    nodes = [
        world.node(f"n{i}", float(rng.choice([4, 8, 10])), float(rng.choice([8, 16])))
        for i in range(rng.choice([1, 1, 2]))
    ]
    names = [ROOT_POOL]
    for i in range(rng.randint(0, 4)):
        amounts = {"cpu": float(rng.randint(1, 8))} if rng.random() < 0.3 else {}
        world.pool(
            f"p{i}",
            rng.choice(names),
            resource_limits=amounts,
            resource_limits_overcommit_tolerance={"cpu": 1.0} if rng.random() < 0.2 else {},
            enable_aggressive_starvation=rng.random() < 0.4,
            allow_aggressive_preemption=rng.choice([None, None, True, False]),
            min_run_time=195_000.0 if rng.random() < 0.2 else None,
        )
        names.append(f"p{i}")
    elements = [make_operation(world, rng, f"o{i}", rng.choice(names)) for i in range(rng.randint(2, 7))]
    for _ in range(rng.randint(0, 16)):
        node, element = rng.choice(nodes), rng.choice(elements)
        cpu, memory = rng.choice([0.5, 1.0, 1.0, 2.0, 3.0]), float(rng.choice([0, 1, 1, 2, 4]))
        if min(subtract(node.free, amount(cpu, memory))) < 0.0 and rng.random() < 0.95:
            continue
        job = world.job(element, node, cpu, memory)
        if rng.random() < 0.2:
            change_usage(job, amount(cpu / 2, memory))
        checkpoint = rng.choice([None, None, rng.uniform(0.0, NOW)])
        job.report = JobReport(job.id, element.name, cpu, cpu, checkpoint_at=checkpoint)
    if rng.random() < 0.5:
        for now in (0.0, 100.0):
            world.update(now)
    else:
        set_states(world, rng)
    set_classes(world, random.Random(f"classes of {seed}"))
    return world


def set_classes(world: World, rng: random.Random) -> None:
    for element in world.elements():
        if not any(element.strong_guarantee_share):
            element.strong_guarantee_share = amount(rng.choice([0.0, 0.2, 0.4]))
        if isinstance(element, PoolElement):
            element.last_integral_ratio = rng.choice([0.0, 0.0, 0.2])
        else:
            assert isinstance(element, OperationElement)
            operation = element.operation
            operation.record = msgspec.structs.replace(operation.record, allow_reclaimed=rng.random() < 0.8)
            for job in element.jobs.values():
                job.node.ordinary_cores -= job.ordinary_cores
                job.reclaimed = rng.random() < 0.3
                job.node.ordinary_cores += job.ordinary_cores


def make_operation(world: World, rng: random.Random, name: str, pool: str) -> OperationElement:
    tasks = tuple(
        Task(
            f"t{i}", rng.randint(1, 4), user_slots=0, cpu_limit=rng.choice([0.5, 1.0, 2.0, 4.0]),
            memory_limit=rng.choice([0, 1, 2, 5]),
        )
        for i in range(rng.choice([1, 1, 2]))
    )  # fmt: skip
    mode = "graceful" if rng.random() < 0.1 else "normal"
    element = world.operation(name, pool, tasks=tasks, preemption_mode=mode)  # type: ignore[arg-type]
    if rng.random() < 0.1:
        element.operation.needed = {}
    return element


def set_states(world: World, rng: random.Random) -> None:
    for element in world.elements():
        fair = rng.choice([0.0, 0.1, 0.2, 0.3, 0.5])
        give(element, fair, demand=rng.choice([fair, 1.0, 1.0]))
        element.fair_share = amount(fair, rng.choice([fair, 0.5]))
        element.demand_share = amount(element.demand_share[1], rng.choice([0.5, 1.0]))
        if rng.random() < 0.15:
            element.limits = (INF, float(rng.randint(0, 6)), INF, float(rng.randint(2, 9)), INF)
        if element is not world.tree.root and rng.random() < 0.4:
            starve(element, rng.choice(["starving", "aggressively_starving"]))  # type: ignore[arg-type]


def targets_of(world: World) -> list[tuple[OperationElement, TargetPriority]]:
    ranked = ServiceOrder(world.tree).rank(starving_operations(world.tree))
    return [(element, priority) for element in ranked for priority in list_priorities(element)]


def plans(world: World) -> Iterator[tuple[Node, PreemptionPlan]]:
    for node in world.tree.nodes.values():
        plan = plan_preemption(node, Targets(targets_of(world)), NOW, ZERO)
        if plan is not None:
            yield node, plan


# --- the rules once more, in other words


def parts(usage: Vector, tree: Tree) -> Vector:
    """Of each resource of the cluster; 0 of what it lacks."""
    slots, cpu, gpu, memory, network = (u / t if t else 0.0 for u, t in zip(usage, tree.total, strict=True))
    return slots, cpu, gpu, memory, network


def find_list(job: Job) -> int:
    """6.4 from its text, for one job."""
    element = job.element
    options, total = element.tree.config.settings, element.tree.total

    def place(of: Job) -> tuple[float, int]:
        if not options.preempt_cheapest_first:
            return (0.0, of.sequence)
        size = max(parts(of.usage, element.tree))
        lost = lost_core_seconds(of, element.tree.updated_at)
        return (-lost / size if size else -lost, of.sequence)

    before = sum_vectors([other.usage for other in element.jobs.values() if place(other) < place(job)])
    used = parts(before, element.tree)
    open_ones = [k for k in range(5) if total[k] and element.demand_share[k] > element.fair_share[k] + 1e-9]

    def is_below(factor: float) -> bool:
        if open_ones:
            return all(used[k] < element.fair_share[k] * factor - 1e-9 for k in open_ones)
        return any(used[k] < element.fair_share[k] * factor - 1e-9 for k in range(5) if total[k])

    if is_below(options.aggressive_preemption_satisfaction_threshold):
        return NON_PREEMPTIBLE
    if is_below(options.preemption_satisfaction_threshold) or (not open_ones and any(element.demand_share)):
        return AGGRESSIVELY_PREEMPTIBLE
    return PREEMPTIBLE


def path(element: Element) -> list[Element]:
    return [element, *element.ancestors()]


def sides(victim: OperationElement, target: OperationElement) -> tuple[list[Element], Element, Element]:
    """The victim's path below the lowest common pool, and the two sides below it."""
    ours = path(target)
    below = [element for element in path(victim) if element not in ours]
    common = next(element for element in path(victim) if element in ours)
    return below, below[-1], ours[ours.index(common) - 1]


def satisfied(element: Element, usage: Vector) -> float:
    return satisfaction_of(parts(usage, element.tree), element.fair_share, element.demand_share)


def fits(node: Node, plan: PreemptionPlan, gone: list[Job]) -> bool:
    """Whether the node and all pools above the target have room once these jobs are gone."""
    order = plan.task.resources
    staying = [job.usage for job in node.jobs.values() if job not in gone]
    used = add(sum_vectors([order, *staying]), node.foreign_usage)
    if not plan.element.operation.record.allow_reclaimed:
        ordered = sum(job.limits[1] for job in node.jobs.values() if job not in gone and not job.reclaimed)
        if ordered + order[1] > node.capacity[1] * (1 + 1e-8):
            return False
    if any(u > c * (1 + 1e-8) for u, c in zip(used, node.capacity, strict=True)):
        return False
    return not any(is_above(element, gone, order) for element in path(plan.element) if element.parent is not None)


def is_above(element: Element, gone: list[Job], more: Vector = ZERO) -> bool:
    """Whether an element uses more than its limits and their tolerance, with ``more`` and without these jobs."""
    freed = sum_vectors([job.usage for job in gone if element in path(job.element)])
    usage, extra = add(subtract(element.usage, freed), more), amount()
    if isinstance(element, PoolElement):
        extra = amount(element.settings.resource_limits_overcommit_tolerance.get("cpu", 0.0))
    return any(u > (m + x) * (1 + 1e-8) for u, m, x in zip(usage, element.limits, extra, strict=True))


# --- laws of one plan


@quick
@given(seeds)
def test_a_kill_makes_the_room_that_it_was_for_and_none_is_needless(seed):
    for node, plan in plans(make_world(seed)):
        victims = [job for job, _ in plan.victims]
        assert len(set(victims)) == len(victims)
        assert fits(node, plan, victims)
        for spared in victims:
            assert not fits(node, plan, [job for job in victims if job is not spared])
        assert plan.element.operation.needed[plan.task.name] > 0


@quick
@given(seeds)
def test_the_plan_is_what_asking_each_target_in_turn_finds(seed):
    world = make_world(seed)
    targets, before = targets_of(world), describe(world)
    for node in world.tree.nodes.values():
        plan = plan_preemption(node, Targets(targets), NOW, ZERO)
        in_turn = sorted(targets, key=lambda target: ("aggressive", "normal", "guarantee").index(target[1]))
        alone = (plan_preemption(node, Targets([target]), NOW, ZERO) for target in in_turn)
        assert plan == next((each for each in alone if each is not None), None)
    assert describe(world) == before


def describe(world: World) -> list[tuple[Any, ...]]:
    """What planning must leave as it is."""
    return [
        (element.name, element.usage, element.starvation_status, [job.is_active for job in list_jobs(element)])
        for element in world.elements()
    ]


def list_jobs(element: Element) -> list[Job]:
    operations = element.tree.operations.values()
    return [job for each in operations for job in each.jobs.values() if element in path(job.element)]


def keeps_what_is_guaranteed(plan: PreemptionPlan, victim: OperationElement) -> None:
    """No side of a victim ends below its guarantee; who claims one was below it, and stays within its share."""
    below, _, ours = sides(victim, plan.element)
    for above in below:
        gone = sum_vectors([job.usage for job, _ in plan.victims if above in path(job.element)])
        left = max(parts(subtract(above.usage, gone), above.tree))
        assert left > max(above.strong_guarantee_share) - 2 * EPS or not any(above.strong_guarantee_share)
    if plan.priority == "guarantee":
        assert is_below_guarantee(ours)
        assert max(parts(add(ours.usage, plan.task.resources), ours.tree)) < max(ours.fair_share) + EPS


@quick
@given(seeds)
def test_victims_are_what_the_rules_allow(seed):
    world = make_world(seed)
    options = world.tree.config.settings
    for node, plan in plans(world):
        aggressive, claimed = plan.priority == "aggressive", plan.priority == "guarantee"
        taken: dict[OperationElement, int] = {}
        for job, why in plan.victims:
            element = job.element
            assert job.is_active
            assert job.node is node
            assert element is not plan.element
            assert element.operation.record.preemption_mode == "normal"
            assert job.preemptibility == find_list(job)
            assert element.rules is not None
            assert job.began_at is not None
            assert NOW - job.began_at >= element.rules.min_run_time_s
            if options.guarantee_tolerance is not None:
                keeps_what_is_guaranteed(plan, element)
            if claimed:
                pass
            elif aggressive and element.rules.aggressive_preemption:
                assert job.preemptibility != NON_PREEMPTIBLE
            else:
                assert job.preemptibility == PREEMPTIBLE
            taken[element] = taken.get(element, 0) + 1
            assert why
        for element, count in taken.items() if not claimed else ():
            assert not is_protected_by_count(element, len(element.jobs) - count + 1)
            below, _, _ = sides(element, plan.element)
            if not options.enable_conditional_preemption:
                below = path(element)[:-1]
            for above in below:
                if options.preemption_check_starvation:
                    assert above.starvation_status == "non_starving"
                if options.preemption_check_satisfaction:
                    assert above.rules is not None
                    assert element.rules is not None
                    half = aggressive and above.rules.aggressive_preemption and element.rules.aggressive_preemption
                    assert satisfied(above, above.usage) >= (0.5 if half else 1.0) + EPS


@quick
@given(seeds)
def test_a_swap_raises_the_lesser_of_the_two_satisfactions(seed):
    for _, plan in plans(with_tree(make_world(seed), guarantee_tolerance=None)):
        for job, _ in plan.victims:
            _, theirs, ours = sides(job.element, plan.element)
            lost = sum_vectors([other.usage for other, _ in plan.victims if theirs in path(other.element)])
            assert satisfied(theirs, subtract(theirs.usage, lost)) > satisfied(ours, ours.usage)


def with_tree(world: World, **settings: Any) -> World:
    config = world.tree.config
    world.tree.config = replace(config, settings=msgspec.structs.replace(config.settings, **settings))
    return world


@quick
@given(seeds)
def test_no_other_victims_that_would_do_lose_less(seed):
    """With preempt_cheapest_first, against all sets of jobs of the node, from as little protected lists."""
    world = with_tree(make_world(seed), preempt_cheapest_first=True, preempt_cpu_gap_first=False)
    targets = targets_of(world)
    for node in world.tree.nodes.values():
        for target, priority in targets:
            plan = plan_preemption(node, Targets([(target, priority)]), NOW, ZERO)
            if plan is None or not plan.victims:
                continue
            stage = SwapStage(node, world.tree, priority, NOW)
            found = {job for job, _ in plan.victims}
            cost = sum(lost_core_seconds(job, NOW) for job in found)
            worst = max(each.rank for each in stage.candidates if each.jobs[0] in found)
            pools = (None, *target.ancestors())  # another pool that blocks lets the target take nothing
            candidates = [each for each in stage.candidates if each.rank <= worst and each.blocker in pools]
            for size in range(1, 4):
                for others in itertools.combinations(candidates, size):
                    if sum(each.lost_core_seconds for each in others) < cost - 1e-6:
                        swap = Swap(stage, target, plan.task.resources)
                        assert swap._walk(sorted(others, key=lambda each: each.lost_core_seconds)) is None


def test_random_worlds_are_worth_trying():
    worlds = 400 if WHOLE else 60
    found = [(plan.priority, len(plan.victims)) for seed in range(worlds) for _, plan in plans(make_world(seed))]
    assert sum(count > 0 for _, count in found) > worlds / 10
    assert sum(count > 1 for _, count in found) > worlds / 100
    assert {priority for priority, count in found if count} == {"normal", "aggressive", "guarantee"}


# --- limits and overcommit


@quick
@given(seeds)
def test_limits_take_away_no_more_than_they_must(seed):
    for node in make_world(seed).tree.nodes.values():
        found = find_limit_violators(node)
        victims = [job for job, _, _ in found]
        assert [job.sequence for job in victims] == sorted((job.sequence for job in victims), reverse=True)
        for job, violated, _ in found:
            assert violated in path(job.element)
            assert is_above(violated, [])
            spared = [other for other in victims if other is not job]
            assert any(is_above(element, spared) for element in path(job.element)[:-1])


def list_beyond(node: Node) -> list[Job]:
    """1.9 from its text: the jobs whose end, after those of all that are less protected, leaves neither their
    operation nor a pool above it below its guarantee."""
    found: list[Job] = []
    for job in sorted(node.jobs.values(), key=protection, reverse=True):
        is_beyond = True
        for element in path(job.element)[:-1]:
            left = [other.usage for other in list_jobs(element) if other not in found]
            used = max(parts(sum_vectors(left), element.tree))
            integral = element.last_integral_ratio if isinstance(element, PoolElement) else 0.0
            is_beyond = is_beyond and used > max(element.strong_guarantee_share) + integral + 1e-6
        if is_beyond:
            found.append(job)
    return found


def protection(job: Job) -> tuple[int, bool, int]:
    """Greater is less protected, among jobs within their guarantees, or beyond them."""
    has_gap = job.element.tree.config.settings.preempt_cpu_gap_first and job.has_cpu_gap
    level = 3 if job.reclaimed else job.preemptibility
    return (level, has_gap and job.preemptibility < 2 and not job.reclaimed, job.sequence)


@quick
@given(seeds)
def test_an_overcommitted_node_fits_afterwards(seed):
    world = make_world(seed)
    rng = random.Random(seed)
    for node in world.tree.nodes.values():
        for job in node.jobs.values():
            change_usage(job, add(job.usage, amount(rng.choice([0.0, 0.5, 1.0]))))
        node.overcommitted_since = 0.0
        victims = [job for job, _ in find_overcommit_victims(node, 16.0, 15.0)]
        assert [job.sequence for job in victims] == sorted((job.sequence for job in victims), reverse=True)
        if min(node.free) >= 0.0:
            assert victims == []
        staying = [job for job in node.jobs.values() if job not in victims]
        used = sum_vectors([job.usage for job in staying]) if staying else ZERO
        assert all(u <= c * (1 + 1e-8) for u, c in zip(used, node.capacity, strict=True))
        beyond = list_beyond(node)

        def place(job: Job, beyond: list[Job] = beyond) -> tuple[Any, ...]:
            return (job.reclaimed, job in beyond, *protection(job))

        for job in victims:
            before = [each for each in staying if place(each) < place(job)]
            if not world.tree.config.settings.preempt_cpu_gap_first:
                with_it = add(sum_vectors([each.usage for each in before]) if before else ZERO, job.usage)
                assert any(u > c * (1 + 1e-10) for u, c in zip(with_it, node.capacity, strict=True))


# --- many steps


def run(world: World, steps: int, step_s: float = 2.0) -> list[tuple[int, str, list[str]]]:
    """Updates, regular stages and preemptive attempts; (step, operation that got a job, operations that lost one)."""
    told: list[tuple[int, str, list[str]]] = []
    attempts: dict[str, float] = {}
    for step in range(steps):
        now = step * step_s
        world.update(now)
        for node in world.tree.nodes.values():
            world.place(node)
            if now - attempts.get(node.id, -INF) < 5.0:
                continue
            attempts[node.id] = now
            plan = plan_preemption(node, Targets(targets_of(world)), now, ZERO)
            if plan is not None:
                told.append((step, plan.element.name, [job.element.name for job, _ in plan.victims]))
                world.apply(plan, node)
    return told


def fill(world: World, *times: float) -> None:
    """An update at each of these times, and the regular stages after it."""
    for now in times:
        world.update(now)
        for node in world.tree.nodes.values():
            world.place(node)


def make_rivals(seed: int) -> World:
    """Two to four operations in none, one or two levels of pools that all want more than the nodes have."""
    rng = random.Random(seed)
    world = World(
        fair_share_starvation_timeout=rng.choice([0.0, 5000.0, 30_000.0]),
        fair_share_starvation_tolerance=rng.choice([0.8, 0.8, 1.0]),
        enable_conditional_preemption=rng.random() < 0.8,
        enable_aggressive_starvation=rng.random() < 0.5,
        preempt_cpu_gap_first=rng.random() < 0.2,
        preempt_cheapest_first=rng.random() < 0.4,
        min_run_time=rng.choice([0.0, 0.0, 7000.0]),
        guarantee_tolerance=rng.choice([None, 1.0]),
    )
    for i in range(rng.choice([1, 1, 2])):
        world.node(f"n{i}", float(rng.choice([4, 7, 10])), 16.0)
    names = [ROOT_POOL]
    for i in range(rng.choice([0, 2, 3])):
        fifo = rng.random() < 0.15
        world.pool(
            f"p{i}",
            rng.choice([name for name in names if world.find_pool(name).mode != "fifo"]),
            weight=rng.choice([1.0, 1.0, 2.0, 5.0]),
            mode="fifo" if fifo else "fair_share",
            resource_limits={"cpu": float(rng.choice([3, 5]))} if rng.random() < 0.2 else {},
            strong_guarantee_resources={"cpu": float(rng.choice([1, 3]))} if rng.random() < 0.2 else {},
        )
        names.append(f"p{i}")
    sizes = rng.choice([[1.0], [1.0, 2.0], [0.7, 1.3, 3.0], [1.0, 4.0]])
    for i in range(rng.randint(2, 4)):
        world.operation(
            f"o{i}", rng.choice(names), needs=rng.choice([3, 20]), cpu=rng.choice(sizes),
            memory=rng.choice([0, 0, 1, 3]), weight=rng.choice([1.0, 1.0, 3.0]),
        )  # fmt: skip
    # The first ones have everything when the others arrive.
    late = list(world.tree.operations.values())[1:]
    for element in late:
        element.is_running = False
    fill(world, -2.0, -1.0)
    for element in late:
        element.is_running = True
        element.entry = None
    return world


STEPS = 200
SIZES = [(1.0, 4.0), (4.0, 1.0), (1.0, 1.0), (3.0, 4.0), (5.0, 5.0)][: None if WHOLE else 1]


@long
@given(seeds)
def test_rivals_come_to_rest(seed):
    world = make_rivals(seed)
    told = run(world, STEPS)
    assert sum(len(losers) for _, _, losers in told) <= 60, told
    assert all(step < STEPS // 2 for step, _, _ in told), told


@long
@given(seeds)
def test_guarantees_hold_and_it_comes_to_rest(seed):
    """Pools that want all, with operations of a few jobs of one core: whoever came first, each has its guarantee."""
    rng = random.Random(seed)
    world = World(
        fair_share_starvation_timeout=rng.choice([0.0, 5000.0]),
        max_unpreemptible_running_job_count=rng.choice([None, 3, 10]),
        enable_aggressive_starvation=rng.random() < 0.5,
        enable_conditional_preemption=rng.random() < 0.8,
        preempt_cheapest_first=rng.random() < 0.3,
        guarantee_tolerance=1.0,
    )
    for i in range(rng.choice([1, 2])):
        world.node(f"n{i}", 6.0, 16.0)
    left, inner = int(world.tree.total[1]), []
    for i in range(rng.randint(2, 4)):
        amount_of = rng.randint(0, left)
        left -= amount_of
        world.pool(f"p{i}", weight=rng.choice([0.1, 1.0, 5.0]), strong_guarantee_resources={"cpu": float(amount_of)})
        if rng.random() < 0.4:
            part = float(rng.randint(0, amount_of))
            world.pool(f"p{i}a", f"p{i}", strong_guarantee_resources={"cpu": part})
            world.pool(f"p{i}b", f"p{i}", weight=rng.choice([0.1, 5.0]))
        inner += [name for name in world.tree.pools if name.startswith(f"p{i}") and not world.tree.pools[name].children]
    rng.shuffle(inner)
    for pool in inner:
        for i in range(rng.choice([1, 4, 12])):
            world.operation(f"{pool}o{i}", pool, needs=12 if i == 0 else 1)
        fill(world, -1.0)
    told = run(world, STEPS)
    assert all(step < STEPS * 3 // 4 for step, _, _ in told), told
    for pool in world.tree.pools.values():
        assert pool.usage[1] >= pool.settings.strong_guarantee_resources.get("cpu", 0.0) - 1e-6, (pool.name, told)


def test_a_fair_share_that_follows_usage_starts_no_loop():
    """Who loses a job has another fair share afterwards: by the old one either of two swaps would be a small gain."""
    world = World(enable_aggressive_starvation=True)
    world.node(cpu=10.0, memory=16.0)
    world.operation("wide", needs=3, cpu=1.3, memory=3)
    fill(world, 0.0)
    for name in ("endless", "large"):
        world.operation(name, needs=20 if name == "endless" else 3, cpu=3.0)
    world.operation("small", needs=3, cpu=0.7, memory=1, weight=3.0)
    told = run(world, STEPS)
    assert told
    assert all(step < STEPS // 4 for step, _, _ in told), told


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("timeout_ms", [0.0, 30_000.0])
@pytest.mark.parametrize("aggressive", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_two_operations_share_and_then_leave_each_other_alone(nodes, timeout_ms, aggressive, sizes):
    world = World(fair_share_starvation_timeout=timeout_ms, enable_aggressive_starvation=aggressive)
    for i in range(nodes):
        world.node(f"n{i}", 10.0, 1.0)
    first = world.operation("first", needs=30, cpu=sizes[0])
    fill(world, -2.0, -1.0)
    second = world.operation("second", needs=30, cpu=sizes[1])
    told = run(world, STEPS)
    assert all(gets == "second" for _, gets, _ in told)
    assert all(step < STEPS // 2 for step, _, _ in told)
    # Each has its half but for what whole jobs, and the job that crosses the border of a list, make of it.
    half = nodes * 5.0
    assert second.usage[1] >= half - sum(sizes)
    assert first.usage[1] >= half * (0.5 if aggressive else 1.0)
