"""Commands that talk to the running agent: ``status``, ``explain``, ``job``, ``pin``, ``unpin``.

Their output is made in ``tables`` and ``explain``."""

from __future__ import annotations

import click

from cpumond.agent.config import parse_layer, read_assignments
from cpumond.cli.agent.client import AgentClient, agent_options
from cpumond.cli.agent.explain import draw_explain
from cpumond.cli.options import CoresType, DurationType, given, json_option, quote_name, set_option
from cpumond.cli.output import print_text, terminal_width, use_colour, warn
from cpumond.cli.render.tables import describe_pin, draw_registered, draw_status, is_only_watched
from cpumond.core.answers import AddedJob, ExplainAnswer, JobAnswer, RegisteredList, StatusAnswer
from cpumond.core.errors import UsageError
from cpumond.core.measures import count_cores, format_cores
from cpumond.core.words import escape
from cpumond.monitor.model import MODES


@click.command("status", epilog="Example: cpumond status --json | jq .totals")
@agent_options
@json_option
def status_command(client: AgentClient) -> None:
    """Print one line for each job of the running agent, sums, and anything that needs an operator.

    Numbers are cores: the job's request, its limit now, its usage in the last check, and its smoothed usage."""
    click.echo(draw_status(client.fetch(client.status(), StatusAnswer, "jobs"), terminal_width(), use_colour()))


@click.command("explain", epilog="Example: cpumond explain steady-low --last 20")
@click.argument("job")
@agent_options
@click.option(
    "--last", type=click.IntRange(0), default=10, show_default=True, metavar="N", help="Number of decisions to show."
)
@click.option("--all", "show_all", is_flag=True, help="Show all decisions that the agent remembers (up to 100).")
@json_option
def explain_command(client: AgentClient, job: str, last: int, show_all: bool) -> None:
    """Explain in words and numbers why the limit of JOB has its value.

    JOB is a job's id or its cgroup. The first sentences are the answer. Below them are the reasons: the votes of the
    last window, the result of the next check, the options in force and the last decisions."""
    answer = client.fetch(client.request("GET", f"/v1/jobs/{quote_name(job)}/explain"), ExplainAnswer)
    click.echo(draw_explain(answer, None if show_all else last, terminal_width(), use_colour()))


@click.group("job", epilog="Example: cpumond job add --cgroup jobs/job-1 --cpu-limit 4 --mode reclaim")
def job_command() -> None:
    """Add, remove and list jobs of the running agent. These jobs survive its restart."""


@job_command.command(
    "add", epilog="Example: cpumond job add --cgroup jobs/job-1 --cpu-limit 4 --set check_period=500ms"
)
@agent_options
@click.option(
    "--cgroup", required=True, metavar="PATH", help="Path relative to the hierarchy of the cpu controller, or absolute."
)
@click.option(
    "--cpu-limit",
    type=CoresType(),
    help="The job's CPU request; default: the quota found on the cgroup, else the CPUs it may use.",
)
@click.option("--id", "job_id", metavar="ID", help="Default: the last component of the path.")
@click.option("--operation", metavar="OP", help="The operation the job belongs to.")
@click.option("--mode", type=click.Choice(MODES), help="Default: the mode in the configuration.")
@set_option
@json_option
def job_add_command(
    client: AgentClient, cgroup: str, cpu_limit: float | None, job_id: str | None, operation: str | None,
    mode: str | None, assignments: tuple[str, ...],
) -> None:  # fmt: skip
    """Manage a cgroup as a job from now on.

    The job is kept when the agent restarts. If its id was added before, its settings are replaced."""
    layer = read_layer(assignments, mode)
    body = given({"cgroup": cgroup, "cpu_limit": cpu_limit, "job_id": job_id, "operation_id": operation})
    job = client.fetch(client.request("POST", "/v1/registered", {**body, "job_cpu_monitor": layer}), AddedJob)
    hint = "; its limit is not changed; --mode reclaim changes that" if is_only_watched(job) else ""
    print_text(
        f"job {escape(job.job_id)} ({job.cgroup}): mode {job.mode}, {count_cores(job.cpu_limit)} requested, "
        f"limit {format_cores(job.current_cpu_limit)}{hint}"
    )
    for warning in job.warnings:
        warn(warning)


@job_command.command("remove", epilog="Example: cpumond job remove job-1")
@click.argument("job")
@agent_options
@json_option
def job_remove_command(client: AgentClient, job: str) -> None:
    """Stop managing JOB and restore the cgroup's original limit.

    JOB must be an id that was added with `cpumond job add`; jobs of the configuration's sources stay."""
    client.fetch(client.request("DELETE", f"/v1/registered/{quote_name(job)}"), dict[str, object])
    print_text(
        f"job {escape(job)} is removed; its cgroup has its original limit again, unless a source of the "
        "configuration also finds it"
    )


@job_command.command("list", epilog="Example: cpumond job list --json")
@agent_options
@json_option
def job_list_command(client: AgentClient) -> None:
    """List the jobs that were added with `cpumond job add`.

    `cpumond status` shows these and the jobs of the configuration's sources."""
    if jobs := client.fetch(client.request("GET", "/v1/registered"), RegisteredList).jobs:
        click.echo(draw_registered(jobs, terminal_width(), use_colour()))
    else:
        print_text("no job was added over the socket; `cpumond status` shows those of the configuration")


@click.command("pin", epilog="Example: cpumond pin steady-low --cpu-limit 4 --for 1h")
@click.argument("job")
@agent_options
@click.option("--cpu-limit", type=CoresType(), help="Default: the job's whole request.")
@click.option("--for", "ttl_s", type=DurationType(1.0), help='For example "1h"; default: until `cpumond unpin`.')
@json_option
def pin_command(client: AgentClient, job: str, cpu_limit: float | None, ttl_s: float | None) -> None:
    """Hold the limit of JOB, an id or a cgroup, until `cpumond unpin` or for a given time."""
    body = given({"cpu_limit": cpu_limit, "ttl_s": ttl_s})
    content = client.request("PUT", f"/v1/jobs/{quote_name(job)}/pin", body)
    print_text(describe_pin(client.fetch(content, JobAnswer), ttl_s))


@click.command("unpin", epilog="Example: cpumond unpin steady-low")
@click.argument("job")
@agent_options
@json_option
def unpin_command(client: AgentClient, job: str) -> None:
    """Return JOB to the monitor when it is pinned, contested, or overridden by another program's write."""
    answer = client.fetch(client.request("DELETE", f"/v1/jobs/{quote_name(job)}/pin"), JobAnswer)
    print_text(
        f"job {escape(answer.job_id)} is managed by the monitor again (mode {answer.mode}); "
        f"its limit is {count_cores(answer.current_cpu_limit)}"
    )


def read_layer(assignments: tuple[str, ...], mode: str | None) -> dict[str, object]:
    """Return the ``job-cpu-monitor`` section to send. It is checked here, but sent unparsed, as the user wrote it.

    The agent would read parsed durations, which are in seconds, as milliseconds. Raises ConfigError, UsageError."""
    layer = read_assignments(assignments)
    checked = parse_layer(layer, "--set", "")
    if mode is not None:
        if "mode" in checked:
            raise UsageError("--mode and --set mode=... both set the mode; use one of them")
        layer["mode"] = mode
    return layer
