"""The commands of ``operation`` about its jobs: a list, what they wrote, why their limits are what they are, pins."""

from __future__ import annotations

import time
from typing import Final

import click

from cpumond.api.finding import NEWEST
from cpumond.api.json.requests import DEFAULT_TAIL_BYTES, TOTAL_BYTES
from cpumond.api.views import JobList, JobView
from cpumond.cli.agent.explain import draw_explain
from cpumond.cli.options import CoresType, DurationType, given, quote_name
from cpumond.cli.output import print_items, terminal_width, use_colour, warn
from cpumond.cli.render.grid import Column, column
from cpumond.cli.scheduler.client import SchedulerClient, connection_options, scheduler_options
from cpumond.cli.scheduler.finding import JOB, find_name, job_argument, operation_argument, operation_path
from cpumond.cli.scheduler.follow import follow_log, write_output
from cpumond.cli.scheduler.spec import BytesType
from cpumond.core.answers import ExplainAnswer
from cpumond.core.errors import UsageError
from cpumond.core.measures import count_cores, format_span
from cpumond.core.wire import MAX_LOG_BYTES, LogStream
from cpumond.core.words import show_cores, show_name, show_number, show_time

JOB_STATES: Final = ("starting", "running", "stopping", "completed", "failed", "aborted", "lost")
STYLES: Final = {
    "failed": "red", "aborted": "yellow", "lost": "red", "pending": "yellow", "completed": "dim", "waiting": "yellow",
    "cannot start": "red",
}  # fmt: skip
JOBS: Final[tuple[Column[JobView], ...]] = (
    column("job", 0, lambda job: show_name(job.id)),
    column("operation", 1, lambda job: show_name(job.operation_id)),
    column("task", 6, lambda job: show_name(job.task)),
    column("node", 1, lambda job: show_name(job.node_id)),
    column("state", 0, lambda job: (job.state, STYLES.get(job.state, ""))),
    column("class", 9, lambda job: job.job_class),
    column(">ordered", 7, lambda job: show_cores(job.cpu_limit)),
    column(">limit", 5, lambda job: show_cores(job.current_cpu_limit)),
    column(">used", 4, lambda job: show_number(job.smoothed_cpu_usage, ".2f")),
    column(">time", 2, lambda job: format_span((job.finish_time or time.time()) - job.start_time)),
    column("preemptibility", 8, lambda job: job.preemptibility.replace("_", " ")),
    column(">exit code", 8, lambda job: "" if job.exit_code is None else str(job.exit_code)),
    column("", 3, lambda job: show_name(job.reason)),
)
"""What lists of jobs show."""


@click.command("jobs", epilog="Example: cpumond operation jobs 1a-2b-3c-4d --state failed")
@operation_argument
@click.option("--state", type=click.Choice(JOB_STATES))
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@scheduler_options
def jobs_command(client: SchedulerClient, operation: str, state: str | None, limit: int) -> None:
    """The jobs of an operation, the last started first: what each ordered, may use now, and uses, in cores."""
    query = given({"state": state, "limit": limit})
    answer = client.show(operation_path(operation, "jobs"), JobList, query)
    nothing = "no job fits; see `cpumond operation why` for the reason that none is started"
    print_items([each for each in JOBS if each.name not in ("operation", "preemptibility")], answer.jobs, nothing)
    if answer.total > len(answer.jobs):
        warn(f"{answer.total - len(answer.jobs)} jobs that started earlier are not shown; raise --limit")


@click.command("log", epilog="Example: cpumond operation log 1a-2b-3c-4d --stderr")
@operation_argument
@click.argument("job", type=JOB, required=False)
@click.option("--stderr", is_flag=True, help="What it wrote to standard error; default: to standard output.")
@click.option(
    "--tail", "tail_bytes", type=BytesType(), default=DEFAULT_TAIL_BYTES, show_default=True,
    help=f"How much of the end, such as 1K; at most {MAX_LOG_BYTES}.",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Go on with what it writes, until it ends.")
@connection_options
def log_command(
    client: SchedulerClient, operation: str, job: str | None, stderr: bool, tail_bytes: int, follow: bool
) -> None:
    """The end of what a job wrote, as it is.

    JOB is the id of a living or ended job; default: the one that started last, with --follow all jobs, those that are
    started later, too. A node keeps logs for a day unless it
    is configured otherwise. On a terminal control characters are made visible.
    """
    if not 1 <= tail_bytes <= MAX_LOG_BYTES:
        raise UsageError(f"--tail: expected 1 to {MAX_LOG_BYTES} bytes, got {tail_bytes}")
    stream: LogStream = "stderr" if stderr else "stdout"
    if follow:
        follow_log(client, operation, job, stream, tail_bytes)
        return
    path = operation_path(operation, f"jobs/{quote_name(job or find_name(client, 'job', NEWEST, operation))}/log")
    content, headers = client.exchange("GET", path, query={"stream": stream, "tail": tail_bytes})
    write_output(content)
    total = headers.get(TOTAL_BYTES, "")
    if total.isdecimal() and int(total) > len(content):
        warn(f"{int(total) - len(content)} bytes before these are not shown; raise --tail")


@click.command("explain", epilog="Example: cpumond operation explain 1a-2b-3c-4d 5e-6f-7a-8b --last 20")
@operation_argument
@job_argument
@click.option("--last", type=click.IntRange(0), default=10, show_default=True, metavar="N", help="Decisions to show.")
@click.option("--all", "show_all", is_flag=True, help="Show all decisions the agent remembers (up to 100).")
@scheduler_options
def explain_command(client: SchedulerClient, operation: str, job: str, last: int, show_all: bool) -> None:
    """Why the limit of a living job is what it is, told by the agent of its node.

    It is what `cpumond explain JOB` prints on that node; the answer comes with the node's next heartbeat.
    """
    answer = client.show(operation_path(operation, f"jobs/{quote_name(job)}/explain"), ExplainAnswer)
    click.echo(draw_explain(answer, None if show_all else last, terminal_width(), use_colour()))


@click.command("pin", epilog="Example: cpumond operation pin 1a-2b-3c-4d 5e-6f-7a-8b --cpu-limit 4 --for 10m")
@operation_argument
@job_argument
@click.option("--cpu-limit", type=CoresType(), help="Default: all that the job ordered.")
@click.option(
    "--for", "ttl_s", type=DurationType(1.0),
    help='Such as "1h"; default: until `cpumond operation unpin`, or the job\'s end.',
)  # fmt: skip
@scheduler_options
def pin_command(
    client: SchedulerClient, operation: str, job: str, cpu_limit: float | None, ttl_s: float | None
) -> None:
    """Hold the limit of a living job until it is unpinned, or for a time.

    When the command ends well the pin is on the disk of the job's node and outlives a restart of its agent.
    """
    body = given({"cpu_limit": cpu_limit, "ttl_s": ttl_s})
    held = "all the cores it may have" if cpu_limit is None else count_cores(cpu_limit)
    until = "until `cpumond operation unpin`" if ttl_s is None else f"until {show_time(time.time() + ttl_s)}"
    done = f"job {show_name(job)} is pinned at {held} {until}"
    client.change(done, "POST", operation_path(operation, f"jobs/{quote_name(job)}/pin"), body)


@click.command("unpin", epilog="Example: cpumond operation unpin 1a-2b-3c-4d 5e-6f-7a-8b")
@operation_argument
@job_argument
@scheduler_options
def unpin_command(client: SchedulerClient, operation: str, job: str) -> None:
    """Give a job back to the monitor when it is pinned, overridden by somebody else's write, or contested."""
    path = operation_path(operation, f"jobs/{quote_name(job)}/unpin")
    client.change(f"job {show_name(job)} is the monitor's again", "POST", path)
