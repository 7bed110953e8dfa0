"""The commands that speak with the running agent: ``status``, ``top``, ``explain``, ``job``, ``pin``, ``unpin``.

Functions ``draw_*`` and ``describe_*`` are pure: from the agent's answers to text. With ``width`` None (a pipe) no line
is wrapped or shortened.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, NoReturn

import click
import msgspec

from cpumond.cli.client import (
    AgentClient,
    DecisionAnswer,
    ExplainAnswer,
    JobAnswer,
    Quota,
    RegisteredAnswer,
    RegisteredList,
    StatusAnswer,
    agent_options,
    quote_name,
)
from cpumond.cli.trace import check_cores
from cpumond.config import parse_assignments
from cpumond.errors import AccessError, CpumondError, UsageError
from cpumond.monitor.model import MODES
from cpumond.units import format_duration, parse_duration_s

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

PIPE_WIDTH = 100_000
MIN_INTERVAL_S = 0.1

Sort = Literal["reclaimed", "usage", "limit", "job"]
SORTS: Final[dict[str, Callable[[JobAnswer], tuple[float, str]]]] = {
    "reclaimed": lambda job: (-job.reclaimed, job.job_id),
    "usage": lambda job: (-(job.usage or 0.0), job.job_id),
    "limit": lambda job: (-job.current_cpu_limit, job.job_id),
    "job": lambda job: (0.0, job.job_id),
}

Column = tuple[str, bool, Callable[[JobAnswer], str]]
COLUMNS: Final[dict[str, Column]] = {
    "job": ("job", False, lambda job: show_name(job.job_id)),
    "operation": ("operation", False, lambda job: show_name(job.operation_id)),
    "status": ("status", False, lambda job: job.status),
    "ordered": ("ordered", True, lambda job: f"{job.cpu_limit:.2f}"),
    "limit": ("limit", True, lambda job: f"{job.current_cpu_limit:.2f}"),
    "monitor": ("(would be)", True, lambda job: f"{job.monitor_cpu_limit:.2f}" if is_only_watched(job) else ""),
    "reclaimed": ("reclaimed", True, lambda job: f"{job.reclaimed:.2f}"),
    "usage": ("usage", True, lambda job: show_number(job.usage, ".2f")),
    "smoothed": ("smoothed", True, lambda job: show_number(job.smoothed_cpu_usage, ".2f")),
    "votes": ("votes", True, lambda job: show_votes(job.votes_sum)),
    "throttled": ("throttled", True, lambda job: f"{job.throttled_ratio:.0%}"),
    "result": ("last result", False, lambda job: job.last_result or "-"),
}
"""Name of a column -> heading, whether it is a number, text of a job's cell."""

STATUS_COLUMNS: Final = (
    "job", "operation", "status", "ordered", "limit", "monitor", "usage", "smoothed", "votes", "throttled", "result",
)  # fmt: skip
TOP_COLUMNS: Final = (
    "job", "operation", "status", "ordered", "limit", "monitor", "reclaimed", "usage", "smoothed", "throttled",
)  # fmt: skip
DROP_ORDER: Final = ("operation", "throttled", "votes", "smoothed", "result", "monitor", "usage", "status")
"""Columns that a narrow terminal does without, the first one first; a job's id is always there in full."""

FOLDED_WIDTHS: Final = {"job": 32, "operation": 16}

STYLES: Final = {
    "refused": "yellow",
    "contested": "red",
    "overridden": "yellow",
    "pinned": "cyan",
    "off": "dim",
    "shadow": "dim",
    "failed": "red",
    "paused": "yellow",
}


class DurationType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """A duration of at least ``min_s`` on the command line, in seconds: a bare number, or a text with a unit."""

    name = "duration"

    def __init__(self, min_s: float) -> None:
        self.min_s = min_s

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        try:
            seconds = parse_duration_s(float(text) * 1000.0 if _is_number(text) else text)
        except ValueError as error:
            self.fail(f"{error} (a bare number is seconds here).", param, ctx)
        if seconds < self.min_s:
            self.fail(f"must be at least {format_duration(self.min_s)}, got {text}.", param, ctx)
        return seconds


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_optional_cores(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Callback of an option ``--cpu-limit`` that may be left out."""
    return None if value is None else check_cores(ctx, param, value)


json_option = click.option("--json", "as_json", is_flag=True, help="Print the agent's answer as JSON.")


# ---- commands


@click.command("status", epilog="Example: cpumond status --json | jq .totals")
@agent_options
@json_option
def status_command(client: AgentClient, as_json: bool) -> None:
    """One line per job of the running agent, sums, and what needs an operator.

    Numbers are cores: what the job ordered, its limit now, its use in the last check, and smoothed.
    """
    content = client.status()
    if as_json:
        print_json(content)
        return
    click.echo(draw_status(client.decode(content, StatusAnswer), terminal_width(), use_colour()))


@click.command("top", epilog="Example: cpumond top --sort usage --interval 2s")
@agent_options
@click.option(
    "--interval",
    "interval_s",
    type=DurationType(MIN_INTERVAL_S),
    metavar="DURATION",
    help='Time between two frames, such as "2s"; default: the agent\'s check period.',
)
@click.option(
    "--sort", type=click.Choice(list(SORTS)), default="reclaimed", show_default=True, help="First line: most."
)
@click.option("--once", is_flag=True, help="Print one frame and end.")
@json_option
def top_command(client: AgentClient, interval_s: float | None, sort: Sort, once: bool, as_json: bool) -> None:
    """Live table of the running agent; Ctrl-C ends it.

    It waits for an agent that is restarted. Into a pipe it prints one frame after the other, with --json one line each.
    """
    try:
        content = client.status()
        answer = client.decode(content, StatusAnswer)
        if once and as_json:
            print_json(msgspec.json.encode(sort_answer(content, sort)))
        elif once:
            click.echo(draw_top(answer, sort, terminal_width(), use_colour(), None))
        else:
            follow(client, sort, interval_s or max(answer.check_period_s, MIN_INTERVAL_S), as_json)
    except KeyboardInterrupt:
        return


@click.command("explain", epilog="Example: cpumond explain steady-low --last 20")
@click.argument("job")
@agent_options
@click.option("--last", type=click.IntRange(0), default=10, show_default=True, metavar="N", help="Decisions to show.")
@click.option("--all", "show_all", is_flag=True, help="Show all decisions the agent remembers (up to 100).")
@json_option
def explain_command(client: AgentClient, job: str, last: int, show_all: bool, as_json: bool) -> None:
    """Why JOB's limit is what it is, in words and numbers.

    JOB is a job's id or its cgroup. The first sentences are the answer; below are what it follows from, the votes of
    the last window, what the next check would do, the resulting options and the last decisions.
    """
    content = client.explain(job)
    if as_json:
        print_json(content)
        return
    answer = client.decode(content, ExplainAnswer)
    click.echo(draw_explain(answer, None if show_all else last, terminal_width(), use_colour()))


@click.group("job", epilog="Example: cpumond job add --cgroup jobs/job-1 --cpu-limit 4 --mode reclaim")
def job_command() -> None:
    """Add, remove and list jobs of the running agent; they outlive its restart."""


@job_command.command(
    "add", epilog="Example: cpumond job add --cgroup jobs/job-1 --cpu-limit 4 --set check_period=500ms"
)
@agent_options
@click.option(
    "--cgroup", required=True, metavar="PATH", help="Relative to the hierarchy of the cpu controller, or absolute."
)
@click.option(
    "--cpu-limit",
    type=float,
    metavar="CORES",
    callback=check_optional_cores,
    help="What the job ordered; default: the quota found on the cgroup, else the CPUs it may use.",
)
@click.option("--id", "job_id", metavar="ID", help="Default: the last part of the path.")
@click.option("--operation", metavar="OP", help="The operation the job belongs to.")
@click.option("--mode", type=click.Choice(MODES), help="Default: what the configuration says.")
@click.option(
    "--set", "assignments", metavar="KEY=VALUE", multiple=True, help="An option of job-cpu-monitor; may be repeated."
)
@json_option
def job_add_command(
    client: AgentClient,
    cgroup: str,
    cpu_limit: float | None,
    job_id: str | None,
    operation: str | None,
    mode: str | None,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Follow a cgroup as a job from now on.

    It stays so over restarts of the agent. An id given again replaces what was said before.
    """
    layer = read_layer(assignments, mode)
    given = {"cgroup": cgroup, "cpu_limit": cpu_limit, "job_id": job_id, "operation_id": operation}
    body = {key: value for key, value in given.items() if value is not None}
    content = client.request("POST", "/v1/registered", {**body, "job_cpu_monitor": layer})
    if as_json:
        print_json(content)
        return
    job = client.decode(content, JobAnswer)
    hint = "; nothing is written to it, give --mode reclaim for that" if is_only_watched(job) else ""
    click.echo(
        f"job {show_name(job.job_id)} ({job.cgroup}): mode {job.mode}, {show_cores(job.cpu_limit)} cores ordered, "
        f"limit {show_cores(job.current_cpu_limit)}{hint}"
    )


@job_command.command("remove", epilog="Example: cpumond job remove job-1")
@click.argument("job")
@agent_options
@json_option
def job_remove_command(client: AgentClient, job: str, as_json: bool) -> None:
    """Forget JOB and put its cgroup back as it was found.

    JOB is an id that `cpumond job add` gave; jobs of the configuration's sources stay.
    """
    content = client.request("DELETE", f"/v1/registered/{quote_name(job)}")
    if as_json:
        print_json(content)
    else:
        click.echo(
            f"job {show_name(job)} is removed; its cgroup has its original limit back unless a source names it, too"
        )


@job_command.command("list", epilog="Example: cpumond job list --json")
@agent_options
@json_option
def job_list_command(client: AgentClient, as_json: bool) -> None:
    """The jobs that `cpumond job add` added.

    `cpumond status` shows these and those of the configuration's sources.
    """
    content = client.request("GET", "/v1/registered")
    if as_json:
        print_json(content)
        return
    jobs = client.decode(content, RegisteredList).jobs
    if jobs:
        click.echo(draw_registered(jobs, terminal_width(), use_colour()))
    else:
        click.echo("no job was added over the socket; `cpumond status` shows those of the configuration")


@click.command("pin", epilog="Example: cpumond pin steady-low --cpu-limit 4 --for 1h")
@click.argument("job")
@agent_options
@click.option(
    "--cpu-limit", type=float, metavar="CORES", callback=check_optional_cores, help="Default: all the job may have."
)
@click.option(
    "--for", "ttl_s", type=DurationType(1.0), metavar="DURATION", help='Such as "1h"; default: until `cpumond unpin`.'
)
@json_option
def pin_command(client: AgentClient, job: str, cpu_limit: float | None, ttl_s: float | None, as_json: bool) -> None:
    """Hold the limit of JOB, an id or a cgroup, until unpin or for a time."""
    given = {"cpu_limit": cpu_limit, "ttl_s": ttl_s}
    body = {key: value for key, value in given.items() if value is not None}
    content = client.request("PUT", f"/v1/jobs/{quote_name(job)}/pin", body)
    if as_json:
        print_json(content)
    else:
        click.echo(describe_pin(client.decode(content, JobAnswer), ttl_s))


@click.command("unpin", epilog="Example: cpumond unpin steady-low")
@click.argument("job")
@agent_options
@json_option
def unpin_command(client: AgentClient, job: str, as_json: bool) -> None:
    """Give JOB back to the monitor when it is pinned, overridden by somebody else's write, or contested."""
    content = client.request("DELETE", f"/v1/jobs/{quote_name(job)}/pin")
    if as_json:
        print_json(content)
        return
    answer = client.decode(content, JobAnswer)
    click.echo(
        f"job {show_name(answer.job_id)} is the monitor's again (mode {answer.mode}); "
        f"its limit stands at {show_cores(answer.current_cpu_limit)} cores"
    )


def read_layer(assignments: tuple[str, ...], mode: str | None) -> dict[str, object]:
    """The section ``job-cpu-monitor`` to send: checked here, but in the words of the user.

    The checked values will not do: their durations are in seconds, and the agent reads a bare number as milliseconds.
    """
    checked = parse_assignments(assignments)
    layer: dict[str, object] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        try:
            layer[key.strip()] = msgspec.toml.decode(f"value = {text.strip()}")["value"]
        except (msgspec.DecodeError, ValueError):
            layer[key.strip()] = text.strip()
    if mode is not None:
        if "mode" in checked:
            raise UsageError("--mode and --set mode=... both name the mode; give one of them")
        layer["mode"] = mode
    return layer


# ---- the live table


def follow(client: AgentClient, sort: Sort, interval_s: float, as_json: bool) -> None:
    """A frame every ``interval_s`` until KeyboardInterrupt; SIGTERM is one, so that a terminal gets its cursor back."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if is_terminal() and not as_json:
        follow_on_screen(client, sort, interval_s)
    while True:
        click.echo(read_line(client, sort) if as_json else read_frame(client, sort, None, False, None) + "\n")
        time.sleep(interval_s)


def follow_on_screen(client: AgentClient, sort: Sort, interval_s: float) -> NoReturn:
    """The live table on the whole terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            width, height = shutil.get_terminal_size()
            frame = read_frame(client, sort, width, use_colour(), height)
            live.update(Text.from_ansi(frame, no_wrap=True, end=""), refresh=True)
            time.sleep(interval_s)


def read_frame(client: AgentClient, sort: Sort, width: int | None, colour: bool, height: int | None) -> str:
    """One frame; where no agent answers, the sentence about it. Raises AccessError."""
    try:
        answer = client.decode(client.status(), StatusAnswer)
    except AccessError:
        raise
    except CpumondError as error:
        return f"agent not running, trying again\n{error}"
    return draw_top(answer, sort, width, colour, height)


def read_line(client: AgentClient, sort: Sort) -> str:
    """One frame as a line of JSON; where no agent answers, an object with ``error``. Raises AccessError."""
    try:
        return msgspec.json.encode(sort_answer(client.status(), sort)).decode()
    except AccessError:
        raise
    except CpumondError as error:
        return msgspec.json.encode({"error": str(error), "exit_code": error.exit_code}).decode()


def sort_answer(content: bytes, sort: Sort) -> dict[str, object]:
    """The whole answer of ``/v1/status`` with its jobs in the order of the table."""
    answer = msgspec.json.decode(content, type=dict[str, object])
    jobs = msgspec.convert(answer["jobs"], list[dict[str, object]])
    answer["jobs"] = sorted(jobs, key=lambda job: SORTS[sort](msgspec.convert(job, JobAnswer)))
    return answer


# ---- text


def print_json(content: bytes) -> None:
    """An answer, indented."""
    click.echo(msgspec.json.format(content, indent=2).decode())


def is_terminal() -> bool:
    """Whether the output is read by somebody at a terminal (there is none at all when the caller closed it)."""
    return sys.stdout is not None and sys.stdout.isatty()


def use_colour() -> bool:
    """Whether the output is a terminal whose user did not turn colours off (no-color.org)."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width() -> int | None:
    """Columns of the terminal; None where the output goes into a pipe or file."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def show_name(name: str) -> str:
    """A name that moves no cursor: what cannot be printed is escaped."""
    return name if name.isprintable() else ascii(name)[1:-1]


def show_number(value: float | None, form: str) -> str:
    """A number, or "-" where there is none yet."""
    return "-" if value is None else format(value, form)


def show_votes(votes: int | None) -> str:
    """A vote or a sum of votes with its sign."""
    return "0" if votes == 0 else show_number(votes, "+d")


def show_cores(cores: float | None) -> str:
    """Cores with up to two digits after the point, below one core with three: 3.2, 10, 0.004."""
    if cores is None:
        return "no limit"
    if 0 < abs(cores) < 0.01:
        return f"{cores:.2g}"
    return f"{cores:.{3 if abs(cores) < 1 else 2}f}".rstrip("0").rstrip(".")


def count(number: int, one: str, many: str = "") -> str:
    """A number and its noun: 1 job, 3 jobs."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def show_time(at: float) -> str:
    """Local date and time of seconds since 1970."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def show_left(seconds: float) -> str:
    """A remaining time without fractions: 9m30s."""
    whole = max(round(seconds), 1)
    parts = [(whole // 3600, "h"), (whole % 3600 // 60, "m"), (whole % 60, "s")]
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def is_only_watched(job: JobAnswer) -> bool:
    """Whether the monitor's limit is a mere thought: nothing is written in this mode."""
    return job.mode == "shadow" and not job.refused


def draw(parts: Iterable[RenderableType], width: int | None, colour: bool) -> str:
    """Parts below each other as text without spaces at the ends of lines."""
    import io

    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width or PIPE_WIDTH,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        emoji=False,
        markup=False,
    )
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))


def measure(table: Table) -> int:
    """The columns of the terminal that a table needs when nothing is folded."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=PIPE_WIDTH)
    return Measurement.get(console, console.options, table).maximum


def make_table(jobs: Sequence[JobAnswer], columns: Sequence[str], padding: int, fold: bool) -> Table:
    """A table without lines; names may be folded, ``fold``: the long ones are."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, padding, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        heading, is_number, _ = COLUMNS[name]
        table.add_column(
            heading,
            justify="right" if is_number else "left",
            no_wrap=name not in FOLDED_WIDTHS,
            overflow="fold",
            min_width=8 if name in FOLDED_WIDTHS else None,
            max_width=FOLDED_WIDTHS.get(name) if fold else None,
        )
    for job in jobs:
        cells = [(name, COLUMNS[name][2](job)) for name in columns]
        table.add_row(
            *(Text(cell, STYLES.get(cell, "") if name in ("status", "result") else "") for name, cell in cells)
        )
    return table


def fit_table(jobs: Sequence[JobAnswer], columns: Sequence[str], width: int | None) -> tuple[Table, list[str]]:
    """The table with as many columns as ``width`` has room for, and the headings left out.

    A long name is folded rather than a column left out.
    """
    shown = list(columns)
    if not any(job.operation_id for job in jobs):
        shown.remove("operation")
    if not any(is_only_watched(job) for job in jobs):
        shown.remove("monitor")
    left_out: list[str] = []
    for dropped in ("", *DROP_ORDER):
        if dropped and dropped not in shown:
            continue
        if dropped:
            shown.remove(dropped)
            left_out.append(COLUMNS[dropped][0].strip("()"))
        for padding, fold in ((2, False), (1, False), (2, True), (1, True)):
            table = make_table(jobs, shown, padding, fold)
            if width is None or measure(table) <= width:
                return table, left_out
    return make_table(jobs, shown, 1, True), left_out


def describe_totals(answer: StatusAnswer) -> str:
    """The sums in a sentence."""
    totals = answer.totals
    text = (
        f"{show_cores(totals.cpu_limit)} cores ordered, limit {show_cores(totals.current_cpu_limit)}, "
        f"{show_cores(totals.reclaimed)} reclaimed"
    )
    watched = sum(job.current_cpu_limit - job.monitor_cpu_limit for job in answer.jobs if is_only_watched(job))
    return text + (f" ({show_cores(watched)} more in shadow)" if watched > 0.005 else "")


def list_notices(answer: StatusAnswer) -> list[tuple[str, str]]:
    """What an operator should see, as (style, sentence)."""
    notices: list[tuple[str, str]] = []
    if answer.is_stuck and answer.last_tick_age_s:
        notices.append(
            ("red", f"stuck: the last check was {show_left(answer.last_tick_age_s)} ago; see the agent's log")
        )
    if answer.paused:
        notices.append(("yellow", "paused: no limit is written while the pause file lies in the agent's runtime_dir"))
    raised, lowered = (answer.counters.foreign_writes.get(kind, 0) for kind in ("raise", "lower"))
    if raised or lowered:
        notices.append(
            ("yellow", f"foreign writes: somebody else raised a limit {raised} x and lowered one {lowered} x")
        )
    if answer.counters.write_errors:
        notices.append(("red", f"write errors: {answer.counters.write_errors} limits could not be written"))
    if answer.counters.shed_checks:
        notices.append(("yellow", f"over its CPU budget: {answer.counters.shed_checks} checks were left out ([cost])"))
    notices += [("red", f"problem: {show_name(problem)}") for problem in answer.problems]
    notices += [
        ("red", f"job {show_name(job.job_id)}: {show_name(job.last_error)}") for job in answer.jobs if job.last_error
    ]
    return notices


def draw_status(answer: StatusAnswer, width: int | None, colour: bool) -> str:
    """``cpumond status``."""
    from rich.text import Text

    head = (
        f"{show_name(answer.node_id)}: {count(len(answer.jobs), 'job')}, cgroups {answer.layout}, one check every "
        f"{format_duration(answer.check_period_s)}, the last one took {answer.tick_duration_s * 1000:.1f} ms"
    )
    parts: list[RenderableType] = [Text(head)]
    if answer.jobs:
        table, left_out = fit_table(answer.jobs, STATUS_COLUMNS, width)
        parts.append(table)
        if left_out:
            parts.append(Text(f"no room for: {', '.join(left_out)}; a wider terminal or --json shows all", "dim"))
    else:
        parts.append(Text("no jobs; see `cpumond doctor`, or add one with `cpumond job add`"))
    parts.append(Text(f"total: {describe_totals(answer)}", "bold"))
    parts += [Text(sentence, style) for style, sentence in list_notices(answer)]
    return draw(parts, width, colour)


def draw_top(answer: StatusAnswer, sort: Sort, width: int | None, colour: bool, height: int | None) -> str:
    """One frame of ``cpumond top``; at most ``height`` lines, where that is given."""
    from rich.text import Text

    now = time.strftime("%H:%M:%S")
    head = f"{show_name(answer.node_id)} {now}: {count(len(answer.jobs), 'job')}, {describe_totals(answer)}"
    notices = list_notices(answer)
    if height is not None and len(notices) > 3:
        notices = [*notices[:2], ("red", f"and {len(notices) - 2} more notices: cpumond status")]
    top = draw([Text(head, "bold"), *(Text(text, style) for style, text in notices)], width, colour).split("\n")
    jobs = sorted(answer.jobs, key=SORTS[sort])
    if not jobs:
        return "\n".join([*top, "no jobs"][:height])
    # The same jobs decide about the columns at every frame, whatever the order lets through to the screen.
    table, _ = fit_table(jobs, TOP_COLUMNS, width)
    rows = draw([table], width, colour).split("\n")
    room = len(rows) if height is None else max(height - len(top), 1)
    if len(rows) > room:
        hidden = len(rows) - room + 1
        rows = [*rows[: max(room - 1, 1)], f"... {hidden} more lines, {count(len(jobs), 'job')} by {sort}"]
    return "\n".join([*top, *rows][:height])


def draw_registered(jobs: Sequence[RegisteredAnswer], width: int | None, colour: bool) -> str:
    """``cpumond job list``."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("job", "operation", "cgroup", "ordered", "job-cpu-monitor"):
        table.add_column(heading, overflow="fold", min_width=len(heading))
    for job in jobs:
        layer = ", ".join(f"{key} = {show_option(key, value)}" for key, value in job.job_cpu_monitor.items())
        ordered = "from cgroup" if job.cpu_limit is None else show_cores(job.cpu_limit)
        names = [show_name(text) or "-" for text in (job.job_id, job.operation_id, job.path)]
        table.add_row(*(Text(text) for text in (*names, ordered, layer or "-")))
    return draw([table], width, colour)


def show_option(key: str, value: object) -> str:
    """An option's value as people write it; registered durations are numbers of seconds."""
    durations = ("check_period", "start_delay", "restore_hold", "startup_boost")
    if key in durations and isinstance(value, (int, float)):
        return format_duration(float(value))
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def describe_pin(job: JobAnswer, ttl_s: float | None) -> str:
    """What became of ``cpumond pin``."""
    until = "until `cpumond unpin`" if ttl_s is None else f"until {show_time(time.time() + ttl_s)}"
    name = show_name(job.job_id)
    if job.last_result == "failed" and job.last_error:
        return f"job {name} is pinned {until}, but the limit could not be written: {job.last_error}"
    if job.pinned_cpu_limit is None:
        return f"the pin of job {name} is noted, but writes are paused; it takes effect when the pause file is gone"
    return f"job {name} is pinned at {show_cores(job.current_cpu_limit)} cores {until}"


# ---- explain


class Coefficients(msgspec.Struct, frozen=True):
    """The options of ``job-cpu-monitor`` that a next step follows from."""

    relative_lower_bound: float
    relative_upper_bound: float
    increase_coefficient: float
    decrease_coefficient: float
    min_cpu_limit: float
    min_limit_ratio: float = 0.0
    headroom_ratio: float = 0.0
    vote_mode: str = "document"
    direction: str = "both"
    actuator: str = "quota"


def draw_explain(e: ExplainAnswer, last: int | None, width: int | None, colour: bool) -> str:
    """``cpumond explain``: the answer, the facts behind it, the window, the next step, options, ``last`` decisions."""
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in list_facts(e):
        facts.add_row(Text(name, "bold"), Text(text))
    parts: list[RenderableType] = [Text(describe_why(e), "bold"), "", facts, ""]
    parts += [Text(line) for line in list_votes(e)]
    parts += [Text(f"next check: {describe_next(e)}"), "", Text("job-cpu-monitor in force:", "bold"), draw_options(e)]
    shown = e.decisions if last is None else e.decisions[max(len(e.decisions) - last, 0) :]
    if not e.decisions:
        parts += ["", Text("no decision yet")]
    elif shown:
        parts += ["", Text(f"last {len(shown)} of {count(len(e.decisions), 'decision')}, local time:", "bold")]
        wide = make_decisions(shown, 2)
        parts.append(wide if width is None or measure(wide) <= width else make_decisions(shown, 1))
    return draw(parts, width, colour)


def describe_why(e: ExplainAnswer) -> str:
    """One or two sentences: why the limit is what it is."""
    name, limit = show_name(e.job_id), show_cores(e.current_cpu_limit)
    stands = f"The limit of {name} is {limit} of {show_cores(e.cpu_limit)} ordered cores"
    if e.refused:
        return f"{stands}: nothing is ever written to its cgroup, because {e.refused}."
    if e.status == "contested":
        return (
            f"{stands}, as another program left it: that one changed the limit back {e.contested_losses} times, so the "
            f"agent writes no more. End the other program's writes, then `cpumond unpin {name}`."
        )
    if e.override_left_s is not None:
        return (
            f"{stands}: somebody else raised it, which is respected for {show_left(e.override_left_s)} more. "
            f"`cpumond unpin {name}` gives it back to the monitor now."
        )
    if e.pinned_cpu_limit is not None:
        until = f"until `cpumond unpin {name}`" if e.pinned_until is None else f"until {show_time(e.pinned_until)}"
        return f"{stands}: an operator pinned it {until}."
    if e.mode == "off":
        return f"{stands}: its mode is off, it is neither measured nor changed."
    if e.mode == "shadow":
        return (
            f"{stands}: its mode is shadow, so nothing is written. In mode reclaim it would be "
            f"{show_cores(e.monitor_cpu_limit)} now{_because(e)}."
        )
    paused = " Writes are paused, so it stays there." if e.paused else ""
    if e.current_cpu_limit < e.bounds.cap:
        floor = f" This is its floor ({_floor_reason(e)})." if e.current_cpu_limit <= e.bounds.floor else ""
        return f"{stands}{_because(e)}.{_last_step(e)}{floor}{paused}"
    held = ""
    if e.bounds.cap < e.cpu_limit:
        held = f" {_cap_reason(e)} allows no more."
    if e.bounds.floor >= e.bounds.cap:
        floor = f"its floor is as high ({_floor_reason(e)})"
        return f"{stands}, all it may have, and never goes below: {floor}.{held}{paused}"
    return f"{stands}, all it may have{_last_step(e) or ': it was not lowered so far.'}{held}{paused}"


def _because(e: ExplainAnswer) -> str:
    if e.smoothed_cpu_usage is None:
        return ""
    return f", because it lately used about {show_cores(e.smoothed_cpu_usage)} (smoothed)"


def _last_step(e: ExplainAnswer) -> str:
    """A sentence about the newest change that was written, with a space before it; "" when there was none."""
    step = next((decision for decision in reversed(e.decisions) if decision.result == "applied"), None)
    if step is None:
        return ""
    lead = "." if e.current_cpu_limit >= e.bounds.cap else ""
    change = f"{show_cores(step.old_cores)} -> {show_cores(step.applied_cores)}"
    return f"{lead} The last change, {change} at {show_time(step.at)}: {_tell_reason(step, e)}."


def _tell_reason(step: DecisionAnswer, e: ExplainAnswer) -> str:
    """Why the newest change was made, for somebody who does not know about votes."""
    c = msgspec.convert(e.job_cpu_monitor, Coefficients)
    votes = f"(votes {show_votes(step.votes_sum)}, more than {e.window.threshold} are needed)"
    if step.kind == "shrink":
        return f"use stayed below {c.relative_lower_bound:g} of the limit {votes}"
    if step.kind == "grow":
        return f"use stayed above {c.relative_upper_bound:g} of the limit {votes}"
    return describe_reason(step)


def _cap_reason(e: ExplainAnswer) -> str:
    b = e.bounds
    if b.ancestor_cap is not None and b.ancestor_cap <= b.cap:
        return f"The quota of {show_name(b.ancestor) or '/'} above it, {show_cores(b.ancestor_cap)} cores,"
    if b.quota_found is not None and b.quota_found <= b.cap:
        return f"The quota its cgroup was found with, {show_cores(b.quota_found)} cores,"
    return "What it ordered"


def _floor_reason(e: ExplainAnswer) -> str:
    c, cap = msgspec.convert(e.job_cpu_monitor, Coefficients), e.bounds.cap
    reasons = {
        f"min_cpu_limit = {c.min_cpu_limit:g}": c.min_cpu_limit,
        f"min_limit_ratio = {c.min_limit_ratio:g} of the cap": c.min_limit_ratio * cap,
    }
    reason, cores = max(reasons.items(), key=lambda item: item[1])
    if c.headroom_ratio and e.bounds.floor > min(cores, cap):
        return f"headroom_ratio = {c.headroom_ratio:g} above the use of the window"
    return reason


def list_facts(e: ExplainAnswer) -> list[tuple[str, str]]:
    """(heading, text) of everything the limit follows from."""
    b = e.bounds
    found = "none" if b.quota_found is None else show_cores(b.quota_found)
    above = "none" if b.ancestor_cap is None else f"{show_cores(b.ancestor_cap)}, of {show_name(b.ancestor) or '/'}"
    facts = [
        ("job", f"{show_name(e.job_id)}, operation {show_name(e.operation_id) or '-'}, {_describe_source(e)}"),
        ("cgroup", show_name(e.directory or e.cgroup)),
        (
            "ordered",
            f"{show_cores(e.cpu_limit)} cores" + (", taken from its cgroup" if e.cpu_limit_given is None else ""),
        ),
        ("cap", f"{show_cores(b.cap)} cores: least of the order, the quota found ({found}), the least above ({above})"),
        ("floor", f"{show_cores(b.floor)} cores: {_floor_reason(e)}"),
        ("mode", _describe_mode(e)),
        ("in force", f"{_describe_quota(e.in_force)}; found: {_describe_quota(e.found)}"),
        (
            "use",
            f"{_describe_use(e)}, {e.throttled_ratio:.0%} of the periods throttled",
        ),
        ("pressure", _describe_pressure(e)),
        ("last write", _describe_write(e)),
    ]
    if msgspec.convert(e.job_cpu_monitor, Coefficients).actuator == "weight":
        facts.append(("actuator", "weight: the limit is a share for when CPU is short, it never throttles"))
    if e.notes:
        facts.append(("held by", "; ".join(e.notes)))
    if e.aggregated is not None:
        a = e.aggregated
        facts.append(
            (
                "so far",
                (
                    f"core-seconds: {a.max_cpu_s:.0f} ordered, {a.smoothed_cpu_s:.0f} used (smoothed), "
                    f"{a.preempted_cpu_s:.0f} reclaimed"
                    + (f"; the full limit given back at once {e.fast_restores} x" if e.fast_restores else "")
                ),
            )
        )
    return facts


def _describe_use(e: ExplainAnswer) -> str:
    usage, smoothed = show_number(e.usage, ".2f"), show_number(e.smoothed_cpu_usage, ".2f")
    return f"{usage} cores in the last check, smoothed {smoothed}"


def _describe_source(e: ExplainAnswer) -> str:
    return f"from source {show_name(e.source)}" if e.source else "added by `cpumond job add`"


def _describe_mode(e: ExplainAnswer) -> str:
    words = [e.mode]
    if e.xattr_mode is not None:
        words.append(f"xattr user.cpumond.mode asks for {show_name(e.xattr_mode)}")
    if e.refused:
        words.append(f"refused: {e.refused}")
    if e.paused:
        words.append("all writes paused by the pause file")
    if e.status not in (e.mode, "refused"):
        words.append(e.status)
    if e.contested_losses:
        words.append(f"limit lowered by somebody else {e.contested_losses} x")
    return ", ".join(words)


def _describe_quota(q: Quota) -> str:
    if q.quota_us is None:
        text = f"no quota (period {q.period_us} us)"
    else:
        text = f"{q.quota_us} us of each {q.period_us} us = {show_cores(q.quota_us / q.period_us)} cores"
    if q.burst_us:
        text += f", burst {q.burst_us} us"
    return text if q.weight is None else f"{text}, weight {q.weight}"


def _describe_pressure(e: ExplainAnswer) -> str:
    p = e.pressure
    if p is None:
        return "not known (no PSI for this cgroup)"
    return f"some task waited for CPU {p.some_10s_ratio:.1%} of the last 10 s, {p.some_60s_ratio:.1%} of the last 60 s"


def _describe_write(e: ExplainAnswer) -> str:
    text = e.last_result or "none so far"
    if e.write_errors:
        text += f", {count(e.write_errors, 'error')} so far"
    return f"{text}; {show_name(e.last_error)}" if e.last_error else text


def list_votes(e: ExplainAnswer) -> list[str]:
    """The window: each value and its vote, their sum against the threshold."""
    b, w, c = e.bounds, e.window, msgspec.convert(e.job_cpu_monitor, Coefficients)
    limit = show_cores(e.monitor_cpu_limit)
    lines = [
        (
            f"votes against the limit of {limit}: -1 below {c.relative_lower_bound:g} x {limit} = "
            f"{show_cores(b.lower_bound)}, +1 above {c.relative_upper_bound:g} x {limit} = {show_cores(b.upper_bound)}"
        )
    ]
    for value, vote in zip(w.values, w.votes, strict=False):
        if c.vote_mode == "ytsaurus":
            lines.append(f"  {'vote of its check':>18}  {show_votes(vote):>2}")
        else:
            lines.append(f"  {'throttled' if value is None else f'{value:.3f}':>9}  {show_votes(vote):>2}")
    if not w.votes:
        lines.append("  none yet")
    return lines


def describe_next(e: ExplainAnswer) -> str:
    """What the next check does if its vote is like the others: the sum, the threshold, and the step."""
    b, w, c = e.bounds, e.window, msgspec.convert(e.job_cpu_monitor, Coefficients)
    if e.mode == "off":
        return "none in mode off"
    if e.start_left_s > 0:
        return f"measured after start_delay, in {show_left(e.start_left_s)}"
    limit, total, size = e.monitor_cpu_limit, sum(w.votes), len(w.votes)
    if c.vote_mode == "ytsaurus" and size == w.size - 1:
        return _describe_last_vote(e, c, total)
    if size < w.size:
        return f"decides when the window has {w.size} votes; now {size}, sum {show_votes(total)}"
    low, high = w.votes.count(-1), w.votes.count(1)
    shown = show_cores(limit)
    below = f"{low} of {size} below {c.relative_lower_bound:g} x {shown} = {show_cores(b.lower_bound)} cores"
    above = f"{high} of {size} above {c.relative_upper_bound:g} x {shown} = {show_cores(b.upper_bound)} cores"
    needs = f"needs |sum| > {w.threshold}, has {show_votes(total)}"
    if total > w.threshold:
        return f"{needs}: {above} -> {_describe_grow(e, c)}"
    if total < -w.threshold:
        return f"{needs}: {below} -> {_describe_shrink(e, c)}"
    votes = " and ".join(text for text, number in ((below, low), (above, high)) if number)
    return f"{needs}: {votes or 'all between the bounds'} -> hold"


def _describe_last_vote(e: ExplainAnswer, c: Coefficients, total: int) -> str:
    """The form of ytsaurus keeps one vote less than it needs between two checks."""
    threshold = e.window.threshold
    needs = f"needs |sum| > {threshold}, has {show_votes(total)} and one vote to come"
    if total - 1 < -threshold:
        return f"{needs}: -> {_describe_shrink(e, c)}, if that is {'not +1' if total < -threshold else '-1'}"
    if total + 1 > threshold:
        return f"{needs}: -> {_describe_grow(e, c)}, if that is {'not -1' if total > threshold else '+1'}"
    return f"{needs} -> hold"


def _describe_grow(e: ExplainAnswer, c: Coefficients) -> str:
    limit, cap = e.monitor_cpu_limit, e.bounds.cap
    if limit >= cap:
        return f"would grow, but {show_cores(limit)} is its cap already"
    if c.direction == "down-only":
        return "would grow, but direction is down-only"
    text = f"grow to {show_cores(min(limit * c.increase_coefficient, cap))} (x {c.increase_coefficient:g})"
    return text + _describe_hindrance(e)


def _describe_shrink(e: ExplainAnswer, c: Coefficients) -> str:
    limit, floor = e.monitor_cpu_limit, e.bounds.floor
    if limit <= floor:
        return f"would shrink, but {show_cores(limit)} is its floor ({_floor_reason(e)})"
    if c.direction == "up-only" or e.mode == "up-only":
        return f"would shrink, but its {'direction' if c.direction == 'up-only' else 'mode'} is up-only"
    if e.held_s > 0:
        return f"would shrink, but restore_hold or startup_boost keep it for {show_left(e.held_s)} more"
    to = show_cores(max(limit * c.decrease_coefficient, floor))
    return f"shrink to {to} (x {c.decrease_coefficient:g})" + _describe_hindrance(e)


def _describe_hindrance(e: ExplainAnswer) -> str:
    """Why a step is not written even when it is decided."""
    if e.status in ("refused", "contested", "overridden", "pinned"):
        return f", not written: it is {e.status}"
    if e.mode == "shadow":
        return ", not written in mode shadow"
    return ", not written while writes are paused" if e.paused else ""


def draw_options(e: ExplainAnswer) -> RenderableType:
    """The resulting section, two options a line."""
    from rich.table import Table
    from rich.text import Text

    texts = [f"{key} = {show_option(key, value)}" for key, value in e.job_cpu_monitor.items()]
    half = (len(texts) + 1) // 2
    grid = Table.grid(padding=(0, 3, 0, 0))
    for left, right in zip(texts[:half], [*texts[half:], ""], strict=False):
        grid.add_row(Text(f"  {left}"), Text(right))
    return grid


def make_decisions(decisions: Sequence[DecisionAnswer], padding: int) -> Table:
    """The ring, the newest decision last."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, padding, 0, 0), pad_edge=False, show_header=False)
    for index in range(5):
        table.add_column(justify="right" if index == 2 else "left", no_wrap=index < 3)
    for decision in decisions:
        change = f"{show_number(decision.old_cores, '.2f')} -> {show_number(decision.new_cores, '.2f')}"
        result = decision.result
        if result == "applied" and not _same(decision.applied_cores, decision.new_cores):
            result = f"applied as {show_number(decision.applied_cores, '.2f')}"
        when = datetime.fromtimestamp(decision.at).astimezone().strftime("%b %d %H:%M:%S")
        cells = (when, decision.kind, change, result, describe_reason(decision))
        table.add_row(*(Text(cell, STYLES.get(cell, "")) for cell in cells))
    return table


def _same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) < 0.005)


def describe_reason(decision: DecisionAnswer) -> str:
    """Why a limit moved, in words."""
    if decision.kind in ("grow", "shrink"):
        votes = show_votes(decision.votes_sum)
        usage, smoothed = show_number(decision.usage_cores, ".2f"), show_number(decision.smoothed_cores, ".2f")
        return f"votes {votes}, use {usage}, smoothed {smoothed}"
    if decision.kind == "restore":
        return f"{decision.throttled_ratio or 0.0:.0%} of the periods throttled, so all was given back at once"
    return KIND_REASONS.get(decision.kind, decision.kind)


KIND_REASONS: Final = {
    "foreign-raise": "somebody else raised it",
    "foreign-lower": "somebody else lowered it",
    "reapply": "written again after somebody else's write",
    "adopt": "found as an earlier run of the agent left it",
    "pin": "pinned by an operator",
    "mode": "its mode changed",
}
