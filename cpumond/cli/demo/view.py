"""Output of ``cpumond demo``: a live table on a terminal, a line for each event elsewhere, and the summary."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec

from cpumond.cli.demo.jobs import CHECK_PERIOD_S, QUICKER, WORDS, Lever
from cpumond.cli.demo.story import JobFacts, Story, count_rounded
from cpumond.core.words import count

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

SHOWN_EVENTS = 12
BAR = 24
BUSY = 1.5


class PoolSummary(msgspec.Struct, frozen=True):
    """Core-seconds of a pool's jobs, and of its fair share over the same time."""

    weight: float
    used_cpu_s: float
    fair_share_cpu_s: float


class StoppedJob(msgspec.Struct, frozen=True):
    """A job that the scheduler stopped, with the scheduler's reason."""

    job: str
    kind: str
    reason: str


class DemoSummary(msgspec.Struct, frozen=True):
    """The summary of the demo; core-seconds (from the kernel's counters) and seconds.

    ``given_cpu_s``: usage of jobs that were started on freed CPU. ``give_back_s``: from each wake-up of the simulation
    until its limit is full; ``full_use_s``: from the wake-up until it uses its whole request. ``start_s``: from a
    heartbeat until the process runs. ``restored``: every limit was as requested after the agent had ended. ``removed``:
    no process, cgroup or file is left. ``not_reached``: events that were not seen. ``machine_load``: processes of the
    whole machine that wanted to run, per CPU, over the last minute.
    """

    kernel: str
    actuator: Lever
    duration_s: float
    capacity_cores: float
    ordered_cpu_s: float
    used_cpu_s: float
    reclaimed_cpu_s: float
    given_cpu_s: float
    wake_ups: int
    give_back_s: list[float]
    full_use_s: list[float]
    overcommits: int
    jobs_started: dict[str, int]
    started_on_freed_cpu: dict[str, int]
    start_s: list[float]
    stopped: list[StoppedJob]
    pools: dict[str, PoolSummary]
    heartbeats: int
    not_reached: list[str]
    machine_load: float
    restored: bool
    removed: bool


class Display:
    """Shows events and the state. ``is_quiet``: show nothing, print only the summary."""

    def __init__(self, is_quiet: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self.is_quiet = is_quiet
        self.events: deque[tuple[float, str]] = deque(maxlen=SHOWN_EVENTS)
        console = Console()
        self.live: Live | None = None
        if console.is_terminal and not is_quiet:
            self.live = Live(console=console, auto_refresh=False)

    def announce(self, text: str) -> None:
        """Print a text that stays above the live table."""
        if not self.is_quiet:
            click.echo(text)

    def report(self, at_s: float, text: str) -> None:
        self.events.append((at_s, text))
        if self.live is None and not self.is_quiet:
            click.echo(f"{at_s:6.1f} s  {text}")

    def draw(self, story: Story, now_s: float, duration_s: float) -> None:
        """Draw the present state over the previous one; draw nothing if the output is no terminal."""
        if self.live is not None:
            self.live.update(draw_state(story, now_s, duration_s, list(self.events)), refresh=True)

    def __enter__(self) -> Display:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            # The terminal may be gone.
            with contextlib.suppress(OSError):
                self.live.stop()


def draw_state(story: Story, now_s: float, duration_s: float, events: list[tuple[float, str]]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{now_s:.0f} of {duration_s:.0f} s", title_justify="left", box=None, padding=(0, 2, 0, 0))
    noun = story.words.noun
    for name in ("pool", "job", "requested", noun, "usage", "state", ""):
        table.add_column(name, justify="right" if name in ("requested", noun, "usage") else "left", no_wrap=True)
    for job in story.jobs.values():
        if job.lives:
            usage = "" if job.usage is None else f"{job.usage:.2f}"
            table.add_row(
                job.pool, job.name, f"{job.ordered:.2f}", f"{job.limit:.2f}", usage, job.state,
                draw_bar(job, story.plan.capacity),
            )  # fmt: skip
    capacity = story.plan.capacity
    ledger = f"node: {noun}s of {count_rounded(story.limits)} together, it has {count_rounded(capacity)}"
    over = story.limits - capacity
    style = "bold yellow" if over > 0.01 else ""
    ledger += f": overcommitted by {count_rounded(over)}" if over > 0.01 else ""
    lines = [Text(f"{at_s:6.1f} s  {text}", overflow="fold") for at_s, text in events]
    return Group(table, Text(""), Text(ledger, style=style), Text(""), *lines)


def draw_bar(job: JobFacts, capacity: float) -> str:
    """Draw a bar of the cores that a job uses, may use and requested, on the scale of the node."""
    used, allowed, ordered = (
        min(round(BAR * cores / capacity), BAR) for cores in (job.usage or 0.0, job.limit, job.ordered)
    )
    used = min(used, ordered)
    return "█" * used + "░" * max(allowed - used, 0) + "·" * (ordered - max(allowed, used))


def list_sentences(summary: DemoSummary) -> Iterator[str]:
    yield ""
    yield (
        f"After {summary.duration_s:.0f} s on a node of {count_rounded(summary.capacity_cores)} ({summary.kernel} "
        "kernel), core-seconds by its counters:"
    )
    yield (
        f"  requested {summary.ordered_cpu_s:.1f}, used {summary.used_cpu_s:.1f}, reclaimed "
        f"{summary.reclaimed_cpu_s:.1f}, used by jobs that were started on freed CPU {summary.given_cpu_s:.1f}"
    )
    for name, pool in summary.pools.items():
        yield (
            f"  pool {name} (weight {pool.weight:g}): used {pool.used_cpu_s:.1f}, fair share "
            f"{pool.fair_share_cpu_s:.1f}"
        )
    back, full = (", ".join(map("{:.2f}".format, times)) for times in (summary.give_back_s, summary.full_use_s))
    if back:
        yield (
            f"simulation had {WORDS[summary.actuator].whole} back {count(len(summary.give_back_s), 'time')}, {back} s "
            f"after it woke up (a check every {CHECK_PERIOD_S:g} s)."
        )
    if full:
        yield f"It used its whole request {full} s after it woke up."
    started = ", ".join(f"{number} {name}" for name, number in summary.jobs_started.items())
    middle = sorted(summary.start_s)[len(summary.start_s) // 2] * 1e3 if summary.start_s else 0.0
    yield (
        f"Jobs started: {started or 'none'}; from heartbeat to process {middle:.0f} ms (median). "
        f"{summary.heartbeats} heartbeats."
    )
    yield from (f"Not seen: {sentence}." for sentence in summary.not_reached)
    if summary.machine_load > BUSY:
        yield (
            f"The machine is also busy with other work: {summary.machine_load:.1f} processes wanted each CPU. "
            "A job that cannot use its limit is not throttled by it, and gets no more."
        )
    yield QUICKER
    yield ("Every limit is back at the request." if summary.restored else "Some limits are NOT back at the request.")
    yield (
        "Everything that the demo made is removed."
        if summary.removed
        else "NOT everything that the demo made is removed; see `cpumond doctor`."
    )
