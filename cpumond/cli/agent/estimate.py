"""``cpumond estimate``: the CPU that cpumond would reclaim here, before it is configured or installed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from typing import Final, Literal

import click

from cpumond.agent.config import parse_assignments
from cpumond.cli.agent.estimate_findings import (
    MODE_OPTIONS,
    Findings,
    hide_names,
    render_config,
    render_json,
    render_text,
)
from cpumond.cli.agent.trace import read_settings_of_rules
from cpumond.cli.ending import ending_as_interrupted, list_ending_signals
from cpumond.cli.options import DurationType, set_option
from cpumond.cli.output import output_options, print_json, terminal_width, use_colour, warn
from cpumond.cli.replacement import Replacement
from cpumond.core.errors import CreateError, UsageError
from cpumond.core.words import count
from cpumond.monitor.model import LimitRule, MonitorSettings
from cpumond.monitor.rules import RULES

Metrics = Literal["auto", "cadvisor", "cpumond"]
METRICS: Final[tuple[Metrics, ...]] = ("auto", "cadvisor", "cpumond")
DAY_S = 86_400.0
UNUSED_OPTIONS: Final = {
    **dict.fromkeys(MODE_OPTIONS, "an estimate, which writes no limit; --write makes a file in shadow mode"),
    **dict.fromkeys(
        ("pressure_restore_ratio", "min_cores_per_thread"),
        "an estimate, which does not watch the cgroups that it affects",
    ),
}


@click.command("estimate", epilog="Example: cpumond estimate --duration 1h --write jobs.toml --html estimate.html")
@click.option("--duration", "duration_s", type=DurationType(1.0, 31 * DAY_S),
              help="How long to watch; Ctrl-C ends early with the findings so far.  [default: 5m]")  # fmt: skip
@click.option("--root", metavar="PATH",
              help="Only cgroups below this one, in the hierarchy of the cpu controller.  [default: all]")  # fmt: skip
@click.option("--prometheus", "url", metavar="URL", help="Read history from this Prometheus instead of watching.")
@click.option("--since", "since_s", type=DurationType(60.0, 366 * DAY_S),
              help="With --prometheus: how far back to read.  [default: 24h]")  # fmt: skip
@click.option(
    "--step",
    "step_s",
    type=DurationType(1.0, 3600.0),
    help="With --prometheus: time between two samples, at least the scrape interval.  [default: 30s]",
)
@click.option("--match", metavar="MATCHERS", help="With --prometheus: only series with these labels, 'cluster=\"a\"'.")
@click.option(
    "--metrics",
    type=click.Choice(METRICS),
    help="With --prometheus: cAdvisor's metrics or those of cpumond's agents.  [default: auto, whichever has more "
    "series]",
)
@click.option(
    "--token-file", metavar="FILE", help="File with a bearer token for Prometheus; only its owner may read it."
)
@set_option
@click.option("--write", "config_path", metavar="FILE",
              help="Write a configuration with sources for these workloads, to use as conf.d/jobs.toml.")  # fmt: skip
@click.option("--force", is_flag=True, help="Let --write replace an existing file.")
@click.option("--html", "html_path", metavar="FILE", help="Write a report in one file, to share with others.")
@click.option(
    "--anonymous", is_flag=True, help="Leave names, ids, paths and addresses out of the output and of --html."
)
@click.option(
    "--top", type=click.IntRange(0), default=20, show_default=True, help="Maximum number of workloads in the table."
)
@output_options("Print everything as JSON.")
def estimate_command(
    duration_s: float | None, root: str | None, url: str | None, since_s: float | None, step_s: float | None,
    match: str | None, metrics: Metrics | None, token_file: str | None, assignments: tuple[str, ...],
    config_path: str | None, force: bool, html_path: str | None, anonymous: bool, top: int, as_json: bool,
) -> None:  # fmt: skip
    """Estimate what cpumond would reclaim here. Needs no configuration, agent or root, and changes nothing.

    Finds the cgroups that look like workloads (containers, pods, Slurm jobs, virtual machines, systemd units, other
    cgroups with processes), watches their usage, and runs each limit rule over it as shadow mode would. Reports the
    cores requested, used and reclaimable, and how often the limit would have held a workload back.

    The report shows ids of cgroups. Their request is their quota; without one, all the CPUs of the host. Bursts shorter
    than 0.2 s are not seen, and five minutes do not represent a day: the report says how certain it is."""
    check_together_given(url, {"--since": since_s, "--step": step_s, "--match": match, "--metrics": metrics,
                               "--token-file": token_file}, {"--duration": duration_s, "--root": root})  # fmt: skip
    if config_path and html_path and os.path.realpath(config_path) == os.path.realpath(html_path):
        raise UsageError("--write and --html name the same file; give each its own")
    if match and not match.isprintable():
        raise UsageError(
            "--match: contains characters that cannot be printed; give label matchers such as 'cluster=\"a\"'"
        )
    if force and not config_path:
        raise UsageError("--force only applies to --write; add --write FILE")
    settings = read_rule_settings(assignments)
    with contextlib.ExitStack() as stack:
        # A signal raises KeyboardInterrupt, so that Replacement removes an unfinished file.
        stack.enter_context(ending_as_interrupted(list_ending_signals()))
        # Refuse a file that cannot be written before watching anything.
        if config_path and os.path.exists(config_path) and not force:
            raise CreateError(f"{config_path}: already exists; give --write another file, or replace it with --force")
        config = stack.enter_context(Replacement(config_path, "--write")) if config_path else None
        page = stack.enter_context(Replacement(html_path, "--html")) if html_path else None
        if url is None:
            from cpumond.cli.agent.estimate_watch import watch_host

            findings, leaves = watch_host(root or "", duration_s or 300.0, settings)
        else:
            findings = _read_prometheus(
                url, since_s or DAY_S, step_s or 30.0, match or "", metrics or "auto", token_file, settings
            )
            leaves = lambda path: [path]  # noqa: E731 - the other branch has a function, too
        findings = dataclasses.replace(findings, assignments=assignments)
        findings.notes.extend(_describe_floor(findings, settings))
        for actuator in sorted({each.actuator for each in settings.values() if not each.is_ceiling}):
            findings.notes.append(
                f"computed as if each limit were a quota. With actuator = {actuator} nothing is held back while the "
                "host has free CPU, and reclaimable CPU is guaranteed to others but still open to the workload"
            )
        if config is not None:
            if text := render_config(findings, leaves):
                config.write(text)
            else:
                warn(f"{config_path} is not written: the cgroup of no workload is known")
                config_path = None
        findings = hide_names(findings) if anonymous else findings
        if page is not None:
            from cpumond.cli.render.estimate import render_page

            page.write(render_page(findings))
    if as_json:
        print_json(render_json(findings).encode(), rows="workloads")
    else:
        click.echo(render_text(findings, top, terminal_width(), use_colour()))
        for path, what in ((config_path, "configuration"), (html_path, "report")):
            if path:
                click.echo(f"the {what} is in {path}", err=True)


def check_together_given(url: str | None, of_prometheus: Mapping[str, object], of_host: Mapping[str, object]) -> None:
    """Refuse options of the source that is not in use. Raises UsageError."""
    for name, value in (of_prometheus if url is None else of_host).items():
        if value is not None:
            need = "for --prometheus only" if url is None else "not for --prometheus, which reads past data"
            raise UsageError(f"{name} is {need}; leave it out")


def read_rule_settings(assignments: tuple[str, ...]) -> dict[LimitRule, MonitorSettings]:
    """Return each rule's settings: its defaults, overridden by ``--set``. Raises ConfigError, UsageError."""
    if "limit_rule" in parse_assignments(assignments):
        raise UsageError("--set limit_rule: the estimate covers every rule; leave it out")
    return dict(zip(RULES, read_settings_of_rules(assignments, RULES, UNUSED_OPTIONS), strict=True))


def _describe_floor(findings: Findings, settings: Mapping[LimitRule, MonitorSettings]) -> Iterator[str]:
    """Yield a note if min_cpu_limit stops limits from going lower: how many limits, and how to try a lower value."""
    floor = next(iter(settings.values())).min_cpu_limit
    at_floor = sum(any(each.limit_cores <= floor for each in row.estimate.rules.values()) for row in findings.rows)
    if at_floor:
        limits = count(at_floor, "limit stays", "limits stay")
        less = f"--set min_cpu_limit={floor / 4:g}"
        unit = "core" if floor == 1.0 else "cores"
        yield f"{limits} at min_cpu_limit, {floor:g} {unit}; {less} estimates a lower floor"


def _read_prometheus(
    url: str, since_s: float, step_s: float, match: str, metrics: Metrics, token_file: str | None,
    settings: Mapping[LimitRule, MonitorSettings],
) -> Findings:  # fmt: skip
    from cpumond.agent.report.token import read_token
    from cpumond.cli.agent.estimate_prometheus import Prometheus, read_history
    from cpumond.cli.progress import ProgressLine

    prometheus = Prometheus(url, read_token(token_file) if token_file else "")
    progress = ProgressLine()
    try:
        return read_history(prometheus, metrics, match, since_s, step_s, time.time(), settings, progress.draw)
    finally:
        progress.end()
