"""Prometheus metrics of the scheduler; the text is made once per update and cached.

Families of fixed size use prometheus_client. The series of pools, thousands of them, are written here in the same text
formats at a tenth of the cost. Only ``max_pools`` pools have series; those with the least demand are left out and
counted."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from cpumond import __version__
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.answers.idle import idle_reasons
from cpumond.scheduler.elements import PoolElement, Tree, figures
from cpumond.scheduler.events import KINDS
from cpumond.scheduler.model import CLASSES
from cpumond.scheduler.model.budget import HOUR_S
from cpumond.scheduler.program.leading import Leading
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings.incarnations import REASONS
from cpumond.scheduler.state.nodes import list_refused_nodes
from cpumond.scheduler.store.timings import BOUNDS_S, Timings

END = b"# EOF\n"
"""The last line of OpenMetrics; the older format does not have it."""
PREEMPTION_KINDS = ("preempted", "graceful", "limit_violated", "overcommit")
Families = dict[str, tuple[str, str]]
"""Name -> the figure of a pool or a tree (``figures``), and the help text. If a figure is None, it has no series."""

M = TypeVar("M", CounterMetricFamily, GaugeMetricFamily)

MAX_EXEMPLAR = 100
"""Maximum characters of a name in an exemplar; all labels of an exemplar together may have 128."""

TREE_GAUGES: Families = {
    "total_cores": ("capacity_cores", "CPU of the tree's nodes."),
    "usage_cores": ("allotted_cores", "CPU allocated to jobs: the sum of their current limits, not their usage."),
    "ordered_cores": ("ordered_on_nodes_cores", "CPU that the jobs requested."),
    "backfilled_cores": ("backfilled_cores", "CPU allocated to jobs that run on resources reserved for a gang."),
    "overcommitted_nodes": ("overcommitted_nodes", "Nodes whose jobs may use more CPU than there is."),
    "cordoned_nodes": ("cordoned_node_count", "Nodes that get no new jobs because they were cordoned."),
    "held_off_nodes": ("held_off_node_count", "Nodes that get no new jobs for a while because jobs fail on them."),
}
POOL_GAUGES: Families = {
    "fair_share_ratio": ("fair_share_ratio", "Fair share, its largest component as a fraction of the tree."),
    "usage_ratio": ("usage_ratio", "Resources allocated to its jobs, largest component as a fraction of the tree."),
    "demand_ratio": ("demand_ratio", "Demand, its largest component as a fraction of the tree."),
    "strong_guarantee_ratio": ("strong_guarantee_ratio",
        "Strong guarantee after the scaling of an overcommitted cluster, largest component."),
    "fair_share_cores": ("fair_share_cores", "Fair share of the CPU."),
    "usage_cores": ("limit_cores", "CPU allocated to its jobs: the sum of their current limits, not their usage."),
    "demand_cores": ("demand_cores", "CPU that its operations demand."),
    "waiting_cores": ("waiting_cores", "CPU that operations would demand that are not admitted yet."),
    "waiting_ratio": ("waiting_ratio",
        "Demand that operations not admitted yet would add, largest component as a fraction of the tree."),
    "burst_ratio": ("burst_ratio", "Burst guarantee as a fraction of the tree, of burst pools."),
    "resource_flow_ratio": ("flow_ratio", "Resource flow as a fraction of the tree, of integral pools."),
    "accumulated_volume_share_seconds": ("volume", "Accumulated volume of integral pools."),
    "integral_pool_capacity_share_seconds": ("capacity", "Largest possible volume of integral pools."),
    "starvation_status": ("starvation_level", "0 not starving, 1 starving, 2 aggressively starving."),
    "starvation_tolerance_ratio": ("starvation_tolerance_ratio",
        "Fraction of its fair share with which it does not starve."),
    "operations": ("operation_count", "Operations in the subtree, pending ones included."),
    "running_operations": ("running_operation_count", "Running operations of the subtree."),
    "max_operations": ("max_operation_count", "Limit of operations."),
    "max_running_operations": ("max_running_operation_count", "Limit of running operations."),
}  # fmt: skip
POOL_COUNTERS: Families = {
    "cpu_usage_seconds_total": ("cpu_seconds",
        "CPU time that the jobs of the subtree used, since the start of this scheduler."),
    "reclaimed_cpu_seconds_total": ("reclaimed_cpu_seconds",
        "Core-seconds by which limits of jobs of the subtree were lowered, since the start of this scheduler."),
    "ordered_cpu_seconds_total": ("ordered_cpu_seconds",
        "Core-seconds that jobs of the subtree could have used without an agent, since the start of this scheduler."),
    "throttled_cpu_seconds_total": ("throttled_cpu_seconds",
        "Time for which threads of jobs of the subtree were throttled, since the start of this scheduler."),
    "late_cpu_seconds_total": ("late_cpu_seconds",
        "The part of the throttled time in which an agent kept the limit below what the job could have had."),
    "preempted_core_seconds_total": ("lost_core_seconds",
        "Work of jobs of the subtree lost by preemptions, in core-seconds, since the start of this scheduler."),
}  # fmt: skip


class LeadMetrics:
    """Families about leadership, if several schedulers share a store. They exist while the process lives; a standby has
    no other families."""

    def __init__(self, leading: Leading) -> None:
        self._leading = leading
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def encode(self, is_open: bool = False) -> bytes:
        """Return the text of a standby's metrics. ``is_open``: in the format of OpenMetrics."""
        return _generate(self._registry, is_open)

    def collect(self) -> Iterable[Metric]:
        yield _version()
        yield from self.collect_lead()

    def collect_lead(self) -> Iterator[Metric]:
        leading, view = self._leading, self._leading.view()
        for name, text, value in (
            ("leads", "1 while this scheduler leads, 0 while it is a standby.", view.role == "leader"),
            ("lead_term", "The term of the present leader; 0: unknown.", view.term),
            ("lease_seconds", "Seconds for which this scheduler may lead without another renewal.", leading.left_s()),
            (
                "lead_unknown",
                "1 while the leader is unknown because the store's engine does not respond.",
                bool(view.error),
            ),
        ):
            yield GaugeMetricFamily(f"cpumond_scheduler_{name}", text, float(value))
        for name, text, count in (
            ("reigns", "How often this scheduler began to lead.", leading.reigns_total),
            ("lost_leads", "How often it lost the lead and continued as a standby.", leading.lost_total),
            (
                "arbiter_errors",
                "Queries about the lead to which the store's engine did not respond.",
                leading.errors_total,
            ),
        ):
            yield CounterMetricFamily(f"cpumond_scheduler_{name}", text, float(count))


class MetricsText:
    """The metrics as text; ``encode`` makes it again only after an update. ``lead``: families about leadership, if
    several schedulers share a store."""

    def __init__(self, scheduler: Scheduler, max_pools: int, lead: LeadMetrics | None = None) -> None:
        self._scheduler = scheduler
        self._max_pools = max_pools
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(scheduler, lead))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._made: dict[bool, tuple[int, bytes]] = {}

    def encode(self, is_open: bool = False) -> bytes:
        """Return the text of all metrics, made at most once per update. ``is_open``: as OpenMetrics, with exemplars."""
        updates = self._scheduler.timings.updates
        if self._made.get(is_open, (-1, b""))[0] != updates:
            text = _generate(self._registry, is_open).removesuffix(END) + self._pools(is_open).encode()
            self._made[is_open] = updates, text + END * is_open
        return self._made[is_open][1]

    def _pools(self, is_open: bool) -> str:
        lines: list[str] = []
        cut = "_total" if is_open else "\n"  # cut from a counter's name to get its family's
        chosen: list[tuple[str, PoolElement]] = []
        left_out = 0
        for tree in self._scheduler.state.trees.values():
            pools: list[PoolElement] = [tree.root, *tree.pools.values()]
            if len(pools) > self._max_pools:
                left_out += len(pools) - self._max_pools
                pools = heapq.nlargest(self._max_pools, pools, key=figures.POOL["demand_ratio"])
            label = f'{{tree="{escape(tree.name)}",pool="'
            chosen += [(f'{label}{escape(pool.name)}"}}', pool) for pool in pools]
        for kind, families in (("gauge", POOL_GAUGES), ("counter", POOL_COUNTERS)):
            for name, (figure, text) in families.items():
                read = figures.POOL[figure]
                full = f"cpumond_pool_{name}"
                family = full.removesuffix(cut)
                lines.append(f"# HELP {family} {text}\n# TYPE {family} {kind}\n")
                for label, pool in chosen:
                    value = read(pool)
                    if value is not None:
                        lines.append(f"{full}{label} {float(value)!r}\n")
        name = "cpumond_pools_without_series"
        lines.append(f"# HELP {name} Pools left out because of max_pools.\n# TYPE {name} gauge\n{name} {left_out}\n")
        lines += self._preemptions(chosen, cut)
        return "".join(lines)

    def _preemptions(self, shown: list[tuple[str, PoolElement]], cut: str) -> Iterator[str]:
        name = "cpumond_preemptions_total"
        family = name.removesuffix(cut)
        yield f"# HELP {family} Preempted jobs, by pool of the job and kind.\n# TYPE {family} counter\n"
        # Series begin at 0 so that rates show the first preemption. Only pools with operations have series: most have
        # no operations.
        others = dict.fromkeys(itertools.product(self._scheduler.state.trees, PREEMPTION_KINDS), 0)
        counts = {(label, kind): 0 for label, pool in shown if pool.operations for kind in PREEMPTION_KINDS}
        labels = {label for label, _ in shown}
        for (tree, pool, kind), count in self._scheduler.state.preemption_counts.items():
            label = f'{{tree="{escape(tree)}",pool="{escape(pool)}"}}'
            if label in labels and kind in PREEMPTION_KINDS:
                counts[label, kind] = count
            else:
                others[tree, kind] = others.get((tree, kind), 0) + count
        for (label, kind), count in counts.items():
            yield f'{name}{label[:-1]},kind="{kind}"}} {count}\n'
        for (tree, kind), count in others.items():
            yield f'{name}{{tree="{escape(tree)}",pool="",kind="{kind}"}} {count}\n'


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _generate(registry: CollectorRegistry, is_open: bool) -> bytes:
    generate: Callable[[CollectorRegistry], bytes] = generate_openmetrics if is_open else generate_latest
    return generate(registry)


def _fill(family: M, values: Mapping[str, float]) -> M:
    """Set the values of a family that has one label."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _version() -> InfoMetricFamily:
    return InfoMetricFamily("cpumond_scheduler", "Version of the scheduler.", {"version": __version__})


def _histograms(timings: Timings) -> Iterator[Metric]:
    """Yield histograms; exemplars lead from a slow bucket to the node, tree or record of its newest duration."""
    for name, text, taken, label in (
        ("heartbeat", "Time from a heartbeat to its answer.", timings.heartbeat, "node"),
        ("update", "Time of a fair-share update of all trees.", timings.update, "slowest_tree"),
        ("store_write", "Time of a write to the store, until it is durable.", timings.store_write, "record"),
        ("store_commit", "The part of a write in which the store made it durable.", timings.store_commit, "record"),
    ):
        family = HistogramMetricFamily(f"cpumond_scheduler_{name}_duration_seconds", text)
        bounds = (*map(str, BOUNDS_S), "+Inf")
        buckets = [
            (bound, count, Exemplar({label: newest[0][:MAX_EXEMPLAR]}, *newest[1:])) if newest else (bound, count)
            for bound, count, newest in zip(bounds, taken.sum_up(), taken.newest, strict=True)
        ]
        family.add_metric([], buckets, taken.sum_s)
        yield family


class _Collector:
    def __init__(self, scheduler: Scheduler, lead: LeadMetrics | None) -> None:
        self._scheduler = scheduler
        self._lead = lead

    def collect(self) -> Iterable[Metric]:
        yield _version()
        if self._lead is not None:
            yield from self._lead.collect_lead()
        yield from self._trees(self._scheduler.state.trees.values())
        timings = self._scheduler.timings
        for name, text, value in (
            ("updates", "Fair-share updates.", timings.updates),
            ("late_updates", "Updates that took longer than the period.", timings.late_updates),
            ("failed_updates", "Updates of a tree that failed.", timings.failed_updates),
            ("update_seconds", "Time spent in updates.", timings.update.sum_s),
            ("received_heartbeats", "Heartbeats processed.", timings.heartbeat.count),
            ("heartbeat_seconds", "Time from a heartbeat to its answer, summed.", timings.heartbeat.sum_s),
            ("dropped_heartbeats", "Heartbeats of unknown nodes or out of order.", timings.dropped_heartbeats),
            ("commands", "Commands carried out.", timings.commands),
            ("refused_commands", "Commands refused.", timings.refused_commands),
            ("store_writes", "Writes to the store.", timings.store_write.count),
            ("store_write_seconds", "Time spent in writes to the store.", timings.store_write.sum_s),
            ("store_errors", "Writes that the store refused.", timings.store_errors),
            ("store_losses", "How often the store was removed and rewritten.", timings.store_losses),
        ):
            yield CounterMetricFamily(f"cpumond_scheduler_{name}", text, float(value))
        yield from _histograms(timings)
        totals = self._scheduler.event_log.totals
        events = CounterMetricFamily("cpumond_scheduler_events", "Events recorded, by kind.", labels=["kind"])
        yield _fill(events, {kind: float(totals[kind]) for kind in KINDS})
        gangs = self._scheduler.state.gangs
        text = "Operations with gang_options that were started."
        yield CounterMetricFamily("cpumond_scheduler_gangs_started", text, float(gangs.started_count))
        text = "Restarts of operations with gang_options, by the reason why the previous incarnation ended."
        switches = CounterMetricFamily("cpumond_scheduler_incarnation_switches", text, labels=["reason"])
        yield _fill(switches, {reason: float(gangs.switches.get(reason, 0)) for reason in REASONS})
        yield GaugeMetricFamily("cpumond_scheduler_last_update_seconds", "Length of the last update.", timings.update_s)
        state = self._scheduler.state
        text = "Seconds between the heartbeats of a node: the usual period, or a longer one under load."
        yield GaugeMetricFamily("cpumond_scheduler_heartbeat_period_seconds", text, state.period_s)
        pending = sum(operation.record.state == "pending" for operation in state.operations.values())
        operations = GaugeMetricFamily("cpumond_scheduler_operations", "Live operations.", labels=["state"])
        yield _fill(operations, {"pending": pending, "running": len(state.operations) - pending})
        jobs = sum(len(node.jobs) for node in state.nodes.values())
        yield GaugeMetricFamily("cpumond_scheduler_jobs", "Jobs with allocated resources.", jobs)
        text = "Nodes that get no jobs because of their tags."
        idle = GaugeMetricFamily("cpumond_scheduler_nodes_without_work", text, labels=["reason"])
        nodes = state.nodes.values()
        without = sum(node.tree is None and not node.matched_trees for node in nodes)
        refused = len(list_refused_nodes(state, self._scheduler.clock.now()))
        several = sum(bool(node.matched_trees) for node in nodes) + refused
        yield _fill(idle, {"no_tree": without, "several_trees": several})
        yield from self._budgets()
        yield from self._history()

    def _budgets(self) -> Iterator[Metric]:
        state, now, labels = self._scheduler.state, self._scheduler.clock.now(), ["tree", "kind", "name"]
        limit = GaugeMetricFamily("cpumond_budget_core_hours", "Core-hours of a period.", labels=labels)
        text = "Core-hours spent in the present period."
        spent = GaugeMetricFamily("cpumond_budget_spent_core_hours", text, labels=labels)
        for each in state.budgets.values():
            label = [each.tree, each.record.kind, each.name]
            limit.add_metric(label, each.budget.core_hours or 0.0)
            spent.add_metric(label, each.spent_s(now) / HOUR_S)
        yield from (limit, spent) if state.budgets else ()

    def _history(self) -> Iterator[Metric]:
        history = self._scheduler.history
        if history is None:
            return
        status = history.view()
        for name, text, value in (
            ("bytes", "Size of the history's file.", status.bytes),
            ("series", "Series with a point in the history's last tick.", status.series),
            ("left_out_series", "Series beyond the history's limit.", status.left_out),
        ):
            yield GaugeMetricFamily(f"cpumond_history_{name}", text, float(value))
        text = "Failures to write or read the history's file, and lost ticks."
        yield CounterMetricFamily("cpumond_history_write_errors", text, float(status.write_errors))

    def _trees(self, trees: Iterable[Tree]) -> Iterator[Metric]:
        families = {name: GaugeMetricFamily(f"cpumond_tree_{name}", text, labels=["tree"])
                    for name, (_, text) in TREE_GAUGES.items()}  # fmt: skip
        nodes = GaugeMetricFamily("cpumond_tree_nodes", "Nodes of the tree.", labels=["tree", "state"])
        text = "CPU allocated to jobs, by their class."
        by_class = GaugeMetricFamily("cpumond_tree_class_usage_cores", text, labels=["tree", "class"])
        text = "Jobs that use more memory than they reserve."
        above = GaugeMetricFamily("cpumond_tree_jobs_over_memory_reserve", text, labels=["tree"])
        for tree in trees:
            for name, (figure, _) in TREE_GAUGES.items():
                families[name].add_metric([tree.name], figures.TREE[figure](tree))
            online = figures.TREE["online_node_count"](tree)
            nodes.add_metric([tree.name, "online"], online)
            nodes.add_metric([tree.name, "silent"], len(tree.nodes) - online)
            cores, above_count = [0.0, 0.0], 0
            for node in tree.nodes.values():
                for job in node.jobs.values():
                    cores[job.reclaimed] += job.usage[CPU]
                    above_count += job.report.over_reserve
            if tree.config.settings.enable_memory_reserve:
                above.add_metric([tree.name], above_count)
            for name, amount in zip(CLASSES, cores, strict=True):
                by_class.add_metric([tree.name, name], amount)
        yield from (nodes, *families.values(), by_class, above, self._idle(), *self._forecasts())

    def _forecasts(self) -> Iterator[Metric]:
        forecasts = self._scheduler.forecasts
        if forecasts is None:
            return
        if forecasts.as_of is not None:
            age_s = self._scheduler.clock.now() - forecasts.as_of
            text = "Age of the state from which the last forecasts were made."
            yield GaugeMetricFamily("cpumond_forecast_age_seconds", text, age_s)
        inside = forecasts.calibration.inside_ratio
        if inside is not None:
            text = "Fraction of the last starts within the interval first predicted for them; the target is 0.8."
            yield GaugeMetricFamily("cpumond_forecast_inside_ratio", text, inside)
        for name, text, value in (
            ("cpumond_forecast_cpu_seconds_total", "CPU time of forecasts and simulations.", forecasts.cpu_s),
            ("cpumond_forecast_runs_total", "Simulations from which forecasts were made.", forecasts.runs),
            ("cpumond_forecast_failures_total", "Forecasts and simulations that failed.", forecasts.failures),
        ):
            yield CounterMetricFamily(name, text, value)

    def _idle(self) -> Metric:
        """Return idle CPU by the last reports, which are some seconds old."""
        text = "CPU allocated to no job, by reason: no work waits for it, jobs are about to start on it, or an obstacle"
        idle = GaugeMetricFamily("cpumond_tree_idle_cores", text, labels=["tree", "reason"])
        for name, report in self._scheduler.idle.reports.items():
            for reason, cores in idle_reasons(report).items():
                idle.add_metric([name, reason], cores)
        return idle
