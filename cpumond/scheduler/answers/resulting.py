"""The resulting specification of an operation: the specification of its user, completed by all defaults. Pure.

YTsaurus shows it on an operation's page under Specification -> Resulting specification (semantics.md 1.1, 2.5, 2.8)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from cpumond.fairshare.resources import RESOURCES, UNLIMITED
from cpumond.monitor.model import DEFAULT_SETTINGS, RULE_DEFAULTS, MonitorSettings
from cpumond.scheduler.decide.snapshot import operation_weight
from cpumond.scheduler.decide.victims import unpreemptible_job_count
from cpumond.scheduler.elements import Operation, OperationElement
from cpumond.scheduler.model import OperationRecord, OperationTreeOptions, Task
from cpumond.scheduler.settings.operations import ROOT_OPTIONS, TREE_OPTIONS
from cpumond.scheduler.settings.spec_options import canonical

Source = Literal["default", "specification"]

MONITOR_DURATIONS: Final = frozenset(
    field.encode_name for field in msgspec.structs.fields(MonitorSettings) if field.name.endswith("_s")
)
"""Time options of ``job-cpu-monitor``: seconds in ``MonitorSettings``, milliseconds in specifications."""

NOTE: Final = (
    "A node's own configuration ([monitor]) can set other defaults of job_cpu_monitor for the jobs that it runs; "
    "values in the specification override them. The page of a job shows the values in effect for it."
)

_MONITOR_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    rule: {
        name: value * 1e3 if name in MONITOR_DURATIONS else value
        for name, value in msgspec.to_builtins(MonitorSettings(limit_rule=rule)).items()
    }
    for rule in RULE_DEFAULTS
}
"""Defaults by ``limit_rule``."""


def resulting_monitor(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of ``job_cpu_monitor`` under YTsaurus' names, durations in milliseconds; null: the option has
    no default. ``given``: the checked section of the specification (``OperationRecord.job_cpu_monitor``)."""
    return {**_MONITOR_DEFAULTS[given.get("limit_rule", DEFAULT_SETTINGS.limit_rule)], **given}


def monitor_sources(given: Mapping[str, Any]) -> dict[str, Source]:
    """Return the source of the value of each option of ``job_cpu_monitor``."""
    return {name: "specification" if name in given else "default" for name in resulting_monitor(given)}


def resulting_specification(record: OperationRecord, live: Operation | None) -> dict[str, Any]:
    """Return all options of an operation that have an effect, with defaults and later changes of parameters. Starvation
    times are milliseconds. For a ``live`` operation they are those that its pool and tree allow (6.2); for a finished
    one only times that were set are known. Keys without an effect are returned as given."""
    return {
        **{name: value for name, value in _given(record).items() if name not in _READ},
        "type": record.type,
        "title": record.title,
        "alias": record.alias,
        "pool_trees": list(record.trees),
        "scheduling_options_per_pool_tree": {
            name: _options(options, None if live is None else live.elements.get(name))
            for name, options in record.trees.items()
        },
        "preemption_mode": record.preemption_mode,
        "is_gang": record.is_gang,
        "suspend_on_job_failure": record.suspend_on_job_failure,
        "enable_limiting_ancestor_check": record.enable_limiting_ancestor_check,
        "max_failed_job_count": record.max_failed_job_count,
        "allow_reclaimed": record.allow_reclaimed,
        "require_reclaimed": record.require_reclaimed,
        **({} if record.time_limit is None else {"time_limit": record.time_limit}),
        "tasks": {task.name: _task(task) for task in record.tasks},
        "job_cpu_monitor": resulting_monitor(record.job_cpu_monitor),
    }


def full_spec(record: OperationRecord, live: Operation | None) -> dict[str, Any]:
    """Return the resulting specification as ``get_operation`` returns it: options for all trees stay at the root, where
    the user put them."""
    for_all_trees = {name: value for name, value in _given(record).items() if name == "pool" or name in TREE_OPTIONS}
    return {**for_all_trees, **resulting_specification(record, live)}


_READ: Final = ROOT_OPTIONS - {"annotations", "description", "started_by", "schedule_in_single_tree"}
"""Options whose values are stored as fields of the record."""


def _given(record: OperationRecord) -> dict[str, Any]:
    """Return the root of the specification, with canonical names."""
    return {canonical(key): value for key, value in record.spec.items()}


def _options(options: OperationTreeOptions, element: OperationElement | None) -> dict[str, Any]:
    shown = {name: getattr(options, name) for name in options.__struct_fields__}
    if shown["max_share_ratio"] is None:
        shown["max_share_ratio"] = 1.0
    if element is None:
        return shown
    shown["weight"] = operation_weight(element)
    rules = element.rules
    if rules is not None:
        shown["fair_share_starvation_timeout"] = rules.fair_share_timeout_s * 1e3
        shown["fair_share_starvation_tolerance"] = rules.tolerance
        shown["min_share_preemption_timeout"] = rules.min_share_timeout_s * 1e3
        threshold = rules.non_preemptible_threshold or UNLIMITED
        shown["non_preemptible_resource_usage_threshold"] = {
            name: amount for name, amount in zip(RESOURCES, threshold, strict=True) if math.isfinite(amount)
        }
    shown["max_unpreemptible_running_job_count"] = unpreemptible_job_count(element)
    return shown


_NO_OPTIONS: Final = frozenset({"name", "spec", "memory_reserve"})
"""Fields of a task that its table in a specification does not contain."""


def _task(task: Task) -> dict[str, Any]:
    given = {name: msgspec.to_builtins(getattr(task, name)) for name in task.__struct_fields__}
    shown = {name: value for name, value in given.items() if value is not None and name not in _NO_OPTIONS}
    return {**task.spec, **shown, "command": task.command if isinstance(task.command, str) else list(task.command)}
