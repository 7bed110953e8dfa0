"""Output of ``cpumond estimate``: a table with sentences, JSON, and a first configuration."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from cpumond.agent.config import parse_assignments
from cpumond.agent.discovery.workloads import SourceSketch, Workload, find_roots, list_sources
from cpumond.cli.render.grid import Cell, Column, draw_grid, draw_lines
from cpumond.cli.render.tables import format_title
from cpumond.core.measures import count_cores, format_cores, format_span
from cpumond.core.words import count, escape
from cpumond.monitor.estimate import Confidence, Estimate, RuleEstimate, Timeline, add_up, judge_confidence
from cpumond.monitor.model import LimitRule, MonitorSettings
from cpumond.monitor.reclaimed import USUAL_JOBS
from cpumond.monitor.rules import RULES

VERSION: Final = 1
"""Version of the JSON output."""
MAX_NAME: Final = 48
MIN_NAME: Final = 14
DROP_ORDER: Final = ("kind", "sure", "document: held back", "document: reclaimable", "peak: held back", "used")
"""Columns that a narrow terminal leaves out, in this order."""
MODE_OPTIONS: Final = ("mode", "enable_cpu_reclaim")
"""Keys of ``--set`` that have no effect: an estimate writes no limit and its configuration starts in shadow mode."""


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One workload.

    ``is_limited``: whether the workload has a limit of its own, None if its limits are unknown. ``is_shared``: whether
    the limit is shared with other workloads. ``host``: "" for this host."""

    workload: Workload
    estimate: Estimate
    is_limited: bool | None
    host: str = ""
    is_gone: bool = False
    is_shared: bool = False

    @property
    def label(self) -> str:
        detail = f" ({self.workload.detail})" if self.workload.detail else ""
        return f"{f'{self.host}: ' if self.host else ''}{self.workload.name}{detail}"


@dataclass(frozen=True, slots=True)
class Findings:
    """Facts about all workloads over the watched time.

    ``source``: cgroups or prometheus. ``place``: where the workloads are, by name. ``length_s``: seconds from the first
    to the last sample; ``asked_s``: seconds requested; ``resolution_s``: seconds between two samples. ``host_cores``:
    None for several hosts. ``notes`` contain no names, ``named_notes`` may. ``assignments``: the options of
    ``--set``."""

    source: str
    place: str
    length_s: float
    asked_s: float
    resolution_s: float
    host_cores: float | None
    rows: list[WorkloadRow]
    timeline: Timeline
    notes: list[str] = field(default_factory=list)
    named_notes: list[str] = field(default_factory=list)
    assignments: tuple[str, ...] = ()

    def total(self, is_limited: bool | None = None) -> Estimate:
        """Return the sum of all workloads, or of the workloads with or without a limit."""
        rows = [row for row in self.rows if is_limited is None or (row.is_limited is True) == is_limited]
        return add_up([row.estimate for row in rows], max(self.length_s, 1e-9))

    def confidence(self, row: WorkloadRow | None = None) -> tuple[Confidence, list[str]]:
        """Confidence in the estimate of one workload (None: of all together), with the reasons."""
        if row is not None:
            return judge_confidence(row.estimate.watched_s, row.estimate.missing_s, self.resolution_s)
        total = self.total()
        # Workloads start and end: only gaps between the samples of one workload count as missing time.
        missing = total.missing_s / max(total.watched_s + total.missing_s, 1e-9) * self.length_s
        return judge_confidence(self.length_s - missing, missing, self.resolution_s)


def hide_names(findings: Findings) -> Findings:
    """The findings without names, ids, paths and addresses; workloads and hosts are numbered."""
    hosts = {
        host: f"host {number}" for number, host in enumerate(sorted({row.host for row in findings.rows} - {""}), 1)
    }
    rows = [
        replace(row, workload=Workload("", row.workload.kind, f"workload {number}"), host=hosts.get(row.host, ""))
        for number, row in enumerate(sort_rows(findings.rows), 1)
    ]
    return replace(findings, place="", rows=rows, named_notes=[])


def sort_rows(rows: list[WorkloadRow]) -> list[WorkloadRow]:
    """Sort workloads: those with a limit first, then by reclaimable cores, largest first."""
    return sorted(
        rows,
        key=lambda row: (
            row.is_limited is not True,
            -max((each.reclaimable_cores for each in row.estimate.rules.values()), default=0.0),
            -row.estimate.used_cores,
            row.label,
        ),
    )


def describe(findings: Findings) -> list[str]:
    """The findings in sentences: cores requested, used and reclaimable, the cost, and the confidence."""
    hosts = len({row.host for row in findings.rows})
    place = findings.place or ("one host" if hosts == 1 else f"{hosts} hosts")
    span = f"{format_span(findings.length_s)}, a sample every {format_span(findings.resolution_s)}"
    said = [f"{count(len(findings.rows), 'workload')} of {place}, {span}; nothing was written."]
    limited, free = findings.total(True), findings.total(False)
    numbers = {flag: sum((row.is_limited is True) == flag for row in findings.rows) for flag in (True, False)}
    if numbers[True]:
        share = f" ({limited.used_cores / limited.ordered_cores:.0%})" if limited.ordered_cores > 0.0 else ""
        said.append(
            f"{count(numbers[True], 'workload')} with a limit requested {count_cores(limited.ordered_cores)} and "
            f"used {format_cores(limited.used_cores)}{share}."
        )
        said += [_describe_rule(rule, each) for rule, each in limited.rules.items()]
    if numbers[False]:
        host = f" of {count_cores(findings.host_cores)}" if findings.host_cores else ""
        said.append(
            f"{count(numbers[False], 'workload')} without a limit used {count_cores(free.used_cores)}. Each could "
            f"use the whole host{host}, so their reclaimable CPU cannot be given to others."
        )
        if shared := sum(row.is_shared for row in findings.rows):
            said.append(
                f"{shared} of these {'is' if shared == 1 else 'are'} under a limit that others share: it counts for "
                "none of them, because each could use all of it."
            )
    level, reasons = findings.confidence()
    said.append(f"Confidence: {level} ({'; '.join(reasons)}).")
    return said


def _describe_rule(rule: LimitRule, of: RuleEstimate) -> str:
    return (
        f"Rule {rule}: {count_cores(of.reclaimable_cores)} reclaimable ({of.reclaimable_ratio:.0%}), held back "
        f"{_format_ratio(of.held_back_ratio)} of the time, at most {_format_ratio(of.held_back_most_ratio)}. "
        f"If a scheduler started jobs of {format_span(USUAL_JOBS.length_s)} on it, they would lose "
        f"{_format_ratio(of.lost_work_ratio)} of their work."
    )


def _format_ratio(ratio: float) -> str:
    return "0 %" if ratio <= 0.0 else "<0.01 %" if ratio < 1e-4 else f"{ratio * 100:.2g} %"


EXPLANATION: Final = (
    "reclaimable  mean of the cores requested above the limit that the rule would have set, once it has gone down",
    "held back    each time that usage exceeded that limit, for as long as the rule needs to notice; at most: a check",
    "total        means over the whole time; a row covers the time in which its workload existed",
    "sure         from the time watched, the sampling interval and gaps; bursts between samples are not seen",
)


def render_text(findings: Findings, top: int, width: int | None, colour: bool) -> str:
    rows = sort_rows(findings.rows)
    texts = [*describe(findings), *(f"Note: {note}" for note in (*findings.notes, *findings.named_notes))]
    parts = list(draw_lines(texts, width, colour))
    if rows and top:
        table, left_out = draw_grid(list_columns(), list_rows(findings, rows[:top]), width, colour)
        notes = [f"no room for: {', '.join(left_out)}; a wider terminal or --json shows all"] if left_out else []
        if len(rows) > top:
            notes.append(f"and {count(len(rows) - top, 'workload')} more; --top or --json shows all")
        parts += ["", table, *draw_lines([(text, "dim") for text in (*notes, "", *EXPLANATION)], width, colour)]
    return "\n".join(parts)


def list_columns() -> list[Column[Any]]:
    """Columns of the table; numbers are never shortened, names to MIN_NAME characters at least."""
    first, *others = list_headings()
    columns: list[Column[Any]] = [Column(first, least=MIN_NAME)]
    for heading in others:
        rank = len(DROP_ORDER) - DROP_ORDER.index(heading) if heading in DROP_ORDER else 0
        mark = "" if heading in ("kind", "sure") else ">"
        columns.append(Column(mark + heading.replace(": ", ":\n"), rank))
    return columns


def list_rows(findings: Findings, rows: list[WorkloadRow]) -> list[list[Cell]]:
    lines: list[list[Cell]] = [
        [format_title(row.label, MAX_NAME) + (" (ended)" if row.is_gone else ""), *list_cells(findings, row)]
        for row in rows
    ]
    return lines + [[(text, "bold") for text in (name, *cells)] for name, cells in list_totals(findings)]


def list_headings() -> list[str]:
    of_rules = (f"{rule}: {word}" for rule in RULES for word in ("reclaimable", "held back"))
    return ["workload", "kind", "requested", "used", *of_rules, "sure"]


def list_cells(findings: Findings, row: WorkloadRow) -> Iterator[str]:
    yield row.workload.kind
    yield from _list_numbers(row.estimate, row.is_limited, row.is_shared)
    yield findings.confidence(row)[0]


def list_totals(findings: Findings) -> Iterator[tuple[str, Iterator[str]]]:
    """The totals at the end of the table: the name of each, and its cells."""
    for name, flag in (("total, with a limit", True), ("total, without", False)):
        if any((row.is_limited is True) == flag for row in findings.rows):
            yield name, itertools.chain([""], _list_numbers(findings.total(flag), True), [""])


def _list_numbers(estimate: Estimate, is_limited: bool | None, is_shared: bool = False) -> Iterator[str]:
    yield format_request(estimate, is_limited, is_shared)
    yield format_cores(estimate.used_cores)
    for rule in RULES:
        of = estimate.rules.get(rule)
        yield format_cores(of.reclaimable_cores) if of else "-"
        yield _format_ratio(of.held_back_ratio) if of else "-"


def format_request(estimate: Estimate, is_limited: bool | None, is_shared: bool = False) -> str:
    """Format the requested cores, with a mark if the workload has no limit, or only one shared with others."""
    if is_limited is None:
        return "unknown"
    return format_cores(estimate.ordered_cores) + ("" if is_limited else " (shared)" if is_shared else " (no limit)")


class EstimateSums(msgspec.Struct, frozen=True):
    """Sum of the ``Estimate`` of several workloads, without peaks, which occur at different times."""

    watched_s: float
    missing_s: float
    ordered_cores: float
    used_cores: float
    used_cpu_s: float
    rules: dict[LimitRule, RuleEstimate]


class WorkloadAnswer(Estimate, frozen=True, kw_only=True):
    """The ``Estimate`` of one workload in JSON, with the names and flags of its ``WorkloadRow``."""

    name: str
    kind: str
    detail: str
    cgroup: str
    host: str
    is_limited: bool | None
    is_gone: bool
    is_shared: bool
    confidence: Confidence
    confidence_reasons: list[str]


class EstimateAnswer(msgspec.Struct, frozen=True):
    """The JSON of ``estimate``. Keys are stable; ``version`` grows when a key changes its meaning."""

    version: int
    source: str
    place: str
    watched_s: float
    asked_s: float
    resolution_s: float
    host_cores: float | None
    confidence: Confidence
    confidence_reasons: list[str]
    notes: list[str]
    total: EstimateSums
    total_limited: EstimateSums
    total_unlimited: EstimateSums
    workloads: list[WorkloadAnswer]


def render_json(findings: Findings) -> str:
    level, reasons = findings.confidence()
    total, limited, unlimited = (
        msgspec.convert(findings.total(flag), EstimateSums, from_attributes=True) for flag in (None, True, False)
    )
    workloads = []
    for row in sort_rows(findings.rows):
        own, said = row.workload, findings.confidence(row)
        workloads.append(
            WorkloadAnswer(
                name=own.name, kind=own.kind, detail=own.detail, cgroup=own.path, host=row.host,
                is_limited=row.is_limited, is_gone=row.is_gone, is_shared=row.is_shared, confidence=said[0],
                confidence_reasons=said[1], **msgspec.structs.asdict(row.estimate),
            )
        )  # fmt: skip
    answer = EstimateAnswer(
        VERSION, findings.source, findings.place, findings.length_s, findings.asked_s, findings.resolution_s,
        findings.host_cores, level, reasons, [*findings.notes, *findings.named_notes], total, limited, unlimited,
        workloads,
    )  # fmt: skip
    value = msgspec.to_builtins(answer)
    # Names first.
    order = sorted(WorkloadAnswer.__struct_fields__, key=lambda key: key in Estimate.__struct_fields__)
    value["workloads"] = [{key: each[key] for key in order} for each in value["workloads"]]
    # Names of cgroups may contain bytes that are not UTF-8.
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"


def render_config(findings: Findings, leaves: Callable[[str], list[str]]) -> str:
    """Return a file for ``conf.d`` with shadow mode and sources that find the workloads; "" if no source finds any.

    ``leaves`` is passed to ``list_sources``: it lists the leaf cgroups below a path."""
    # A source cannot name a cgroup whose name is not readable text.
    workloads = [row.workload for row in findings.rows if row.workload.path and row.workload.path.isprintable()]
    unique = list({workload.path: workload for workload in workloads if leaves(workload.path)}.values())
    sketches = list_sources(unique, leaves)
    if not sketches:
        return ""
    roots = find_roots(sketches)
    lines = [
        "# Written by `cpumond estimate`: the cgroups of its workloads. Move it to /etc/cpumond/conf.d, run",
        "# `cpumond check-config` and `systemctl reload cpumond`. To try it first: `cpumond agent --config FILE`.",
        f"# Watched for {format_span(findings.length_s)}, a sample every {format_span(findings.resolution_s)}.",
        *(
            line
            for said in describe(findings)[1:]
            for line in textwrap.wrap(said, 118, initial_indent="# ", subsequent_indent="# ")
        ),
        "",
        "# Subtrees whose leaf cgroups may be changed once a mode below is reclaim. Shadow mode changes nothing.",
        f"managed_roots = {to_toml(roots)}",
        "",
        "[monitor]",
        "# Measured and decided, never written. `cpumond status` shows the limits that would be set.",
        'mode = "shadow"',
        "# This rule reclaims more and throttles less; without this line YTsaurus' rule applies.",
        '#limit_rule = "peak"',
        *_render_options(findings.assignments),
    ]
    for sketch in sketches:
        lines += ["", *_render_source(sketch, leaves)]
    return "\n".join(lines) + "\n"


def _render_options(assignments: tuple[str, ...]) -> Iterator[str]:
    """Yield the options of ``--set`` as lines of ``[monitor]``, without those that would override its mode."""
    durations = {each.encode_name for each in msgspec.structs.fields(MonitorSettings) if each.name.endswith("_s")}
    for key, value in parse_assignments(assignments).items():
        if key not in MODE_OPTIONS:
            # A bare number would be read as milliseconds.
            text = f"{value:.12g}s" if key in durations else value
            yield f"{key} = {json.dumps(text, ensure_ascii=False)}"


def _render_source(sketch: SourceSketch, leaves: Callable[[str], list[str]]) -> Iterator[str]:
    yield f"# {count(len(sketch.paths), 'cgroup')} of kind {sketch.kind}, for example {escape(sketch.paths[0])}"
    is_whole = sketch.kind in ("lxc", "machine")
    if not is_whole and any(leaves(path) != [path] for path in sketch.paths):
        yield "# Some of them have child cgroups. These can be watched, but only leaf cgroups are ever changed."
    yield "[[source]]"
    for key, value in sketch.keys.items():
        yield f"{key} = {to_toml(value)}"
    if is_whole:
        yield "whole = true"
    if sketch.keep_shadow:
        yield "# Services that keep the system running: think twice before lowering their limits."
        yield 'mode = "shadow"'


def to_toml(value: str | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(to_toml, value))}]"
    if "\\" in value and "'" not in value:
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False)
