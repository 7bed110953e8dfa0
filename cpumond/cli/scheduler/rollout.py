"""The commands ``fleet`` and ``rollout``: all agents, and what groups of them may do with limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, get_args

import click
import msgspec

from cpumond.api.rollout_views import AgentView, Fleet, Rollout, StageView, TargetGroup
from cpumond.cli.options import DurationType, given
from cpumond.cli.output import print_items, print_json, print_text
from cpumond.cli.render.grid import Cell, Column, column
from cpumond.cli.scheduler.client import scheduler_options, why_option
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.core.errors import UsageError
from cpumond.core.wire import AgentAbout
from cpumond.core.words import count, escape
from cpumond.scheduler.settings.rollout import EVERY_NODE, NO_CANARY, Budget, Stage, StageLevel, StagePlan, format_level

BUDGET: Final = Budget()


def _format_agent_state(agent: AgentView) -> Cell:
    if agent.about is not None and agent.about.is_paused and agent.is_online:
        return "paused", "cyan"
    return "online" if agent.is_online else ("silent", "red")


def _format_level(agent: AgentView, about: AgentAbout) -> Cell:
    told = format_level(agent.told) + (" (canary)" if agent.is_canary else "")
    return told if about.may_set_mode else ("may not", "dim")


def _format_problem(problems: Sequence[str]) -> Cell:
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return escape(f"{problems[0]}{more}" if problems else ""), "yellow"


def _of_about(heading: str, rank: int, read: Callable[[AgentAbout], Cell], unknown: str = "") -> Column[AgentView]:
    """A column of values that agents report about themselves."""
    return column(heading, rank, lambda agent: unknown if agent.about is None else read(agent.about))


AGENTS: Final[tuple[Column[AgentView], ...]] = (
    column("node", 0, lambda agent: escape(agent.id)),
    _of_about("agent", 3, lambda about: escape(about.version), "unknown"),
    _of_about("does", 1, lambda about: format_level(about.level)),
    _of_about("at most", 4, lambda about: format_level(about.bound)),
    column("told", 2, lambda agent: "" if agent.about is None else _format_level(agent, agent.about)),
    _of_about("rule", 8, lambda about: escape(about.limit_rule)),
    column("state", 5, _format_agent_state),
    _of_about(">late", 9, lambda about: f"{about.late_core_seconds:g} s"),
    _of_about(">foreign", 9, lambda about: str(about.foreign_writes)),
    _of_about(">errors", 9, lambda about: str(about.errors)),
    _of_about("problem", 7, lambda about: _format_problem(about.problems)),
)


@click.command("fleet", epilog="Example: cpumond fleet --tag rack-a --problems")
@click.option("--tag", metavar="TAG", default="", help="Only nodes with this tag.")
@click.option("--problems", "only_problems", is_flag=True, help="Only agents with problems, and silent ones.")
@click.option(
    "--prometheus-sd", is_flag=True, help="Print the targets for file_sd_configs of Prometheus; same as with --json."
)
@click.option(
    "--loopback", is_flag=True, help="With --prometheus-sd: include agents that only their own host can reach."
)
@scheduler_options
def fleet_command(client: SchedulerClient, tag: str, only_problems: bool, prometheus_sd: bool, loopback: bool) -> None:
    """Print one line per agent. Agents of version 0.1 report nothing about themselves and are "unknown"."""
    if loopback and not prometheus_sd:
        raise UsageError("--loopback goes with --prometheus-sd")
    if prometheus_sd:
        if tag or only_problems:
            raise UsageError("--prometheus-sd covers all agents: leave --tag and --problems out; relabel in Prometheus")
        query = {"loopback": "true"} if loopback else None
        print_json(client.request("GET", "/prometheus/targets", query=query), list[TargetGroup])
        return
    chosen = [
        each
        for each in client.get("/fleet", Fleet).agents
        if (not tag or tag in each.tags)
        and (not only_problems or not each.is_online or (each.about is not None and each.about.problems))
    ]
    if client.as_json:
        print_json(msgspec.json.encode(Fleet(chosen)), Fleet, "agents")
        return
    print_items(AGENTS, chosen, "no agent matches")


@click.group("rollout", epilog='Example: cpumond rollout set rack-a guarantee --why "second week"')
def rollout_command() -> None:
    """Set what groups of nodes may do with limits: shadow, up-only, or reclaim by guarantee, by weight or by quota.

    It applies to hosts with `[scheduler] may_set_mode = true`, and only as far as their own configuration allows."""


def _format_stage_state(stage: Stage) -> Cell:
    if stage.state == "canary":
        return f"canary of {count(len(stage.canaries), 'host')}", "yellow"
    return stage.state, "red" if stage.state == "stopped" else ""


def _format_canary(view: StageView) -> str:
    seen = view.canary
    if seen is None:
        return escape(view.stage.stopped or view.stage.why)
    return (
        f"{count(seen.checks, 'check')}: {seen.late_cores:.2f} cores late, {seen.foreign_writes} foreign writes, "
        f"{count(seen.errors, 'error')}"
    )


STAGES: Final[tuple[Column[StageView], ...]] = (
    column("nodes", 0, lambda view: escape(view.stage.nodes_filter)),
    column("level", 1, lambda view: format_level(view.stage.level)),
    column("before", 5, lambda view: format_level(view.stage.previous)),
    column("state", 2, lambda view: _format_stage_state(view.stage)),
    column(">hosts", 3, lambda view: str(view.host_count)),
    column(">as told", 4, lambda view: str(view.reached)),
    column("by", 6, lambda view: escape(view.stage.user)),
    column("seen", 7, _format_canary),
)


@rollout_command.command("show", epilog="Example: cpumond rollout show")
@scheduler_options
def show_command(client: SchedulerClient) -> None:
    """Show all stages, and observations of their canaries."""
    stages = client.fetch("/rollout", Rollout, rows="stages").stages
    print_items(STAGES, stages, "there is no stage: hosts with may_set_mode do nothing to limits (shadow)")


@rollout_command.command("set", epilog='Example: cpumond rollout set "rack-a & !gpu" weight --canary 0.1')
@click.argument("nodes_filter", metavar="FILTER")
@click.argument("level", metavar="LEVEL", type=click.Choice(get_args(StageLevel)))
@click.option(
    "--canary", "canary_ratio", type=click.FloatRange(0.0, 1.0, min_open=True), default=0.1, show_default=True,
    help="Fraction of the hosts that goes first, at least one host; 1: all at once.",
)  # fmt: skip
@click.option("--canary-period", "canary_period_s", type=DurationType(1.0),
              help="Advance automatically when all its hosts have complied for this time.")  # fmt: skip
@click.option("--max-late-cores", type=click.FloatRange(0.0), default=BUDGET.max_late_cores, show_default=True,
              help="Cores of work that a canary's host may delay on average.")  # fmt: skip
@click.option("--max-foreign-writes", type=click.IntRange(0), default=BUDGET.max_foreign_writes, show_default=True)
@click.option("--max-errors", type=click.IntRange(0), default=BUDGET.max_errors, show_default=True)
@click.option("--check-period", "check_period_s", type=DurationType(1.0, 3600.0), default=f"{BUDGET.check_period_s:g}s",
              show_default=True, help="Number of late checks in a row that revert the canary.")  # fmt: skip
@click.option("--plan", "is_plan", is_flag=True, help="Only show what would change.")
@why_option
@scheduler_options
def set_command(client: SchedulerClient, /, is_plan: bool, **stage: Any) -> None:
    """Let nodes whose tags match FILTER (a formula as in nodes_filter, %true for all) do at most LEVEL.

    An increase goes to a canary first. It is reverted automatically if it delays too much work, meets writes of other
    programs or has errors; `cpumond rollout advance` lets all nodes follow."""
    budget = {name: stage.pop(name) for name in Budget.__struct_fields__}
    body = given({**stage, "budget": budget})
    content = client.request("POST", "/rollout/plan", body)
    plan = client.decode(content, StagePlan)
    if is_plan and client.as_json:
        print_json(content, StagePlan)
        return
    if not client.as_json:
        for sentence in plan.sentences:
            if is_plan:
                print_text(sentence)
            elif sentence != NO_CANARY:  # the change itself warns about that
                print_text(sentence.replace("would", "will", 1))
    if not is_plan:
        done = f"nodes {_format(stage['nodes_filter'])}: {format_level(stage['level'])}"
        client.change(done, "POST", "/rollout", body)


def _make_command(verb: str, done: str, text: str) -> None:
    @rollout_command.command(verb, help=text, epilog=f'Example: cpumond rollout {verb} rack-a --why "as planned"')
    @click.argument("nodes_filter", metavar="FILTER")
    @why_option
    @scheduler_options
    def command(client: SchedulerClient, nodes_filter: str, why: str) -> None:
        body = {"nodes_filter": nodes_filter, "why": why}
        client.change(f"nodes {_format(nodes_filter)}: {done}", "POST", f"/rollout/{verb}", body)


def _format(nodes_filter: str) -> str:
    return escape(nodes_filter.strip() or EVERY_NODE)


_make_command("advance", "all of them follow the canary", "Let all nodes of a stage follow its canary.")
_make_command("stop", "reverted to the state before", "Revert all nodes of a stage to the state before it.")
_make_command(
    "remove",
    "the stage is removed",
    "Remove a stage; its nodes follow other stages, without one they change no limit (shadow).",
)
