"""What ``explain`` prints: the agent's sentences about a job's limit, and its figures.

Every function is pure but for the time zone: from the agent's answer ``e`` to text. With ``width`` None (a pipe) no
line is wrapped. Whatever a node's agent says is shown without anything that moves the cursor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpumond.cli.render.tables import STYLES, draw, measure, show_option
from cpumond.core.answers import DecisionAnswer, ExplainAnswer
from cpumond.core.errors import UnavailableError
from cpumond.core.words import count, show_measured, show_name, show_time, show_votes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def draw_explain(e: ExplainAnswer, last: int | None, width: int | None, colour: bool) -> str:
    """``cpumond explain``: the answer, the facts behind it, the window, the next step, options, ``last`` decisions.

    Raises UnavailableError for the answer of an agent that makes no sentences.
    """
    from rich.table import Table
    from rich.text import Text

    if not e.why:
        raise UnavailableError(
            f"the agent of job {show_name(e.job_id)} is an older cpumond, which gives no reasons; update it, "
            "or read its figures with --json"
        )
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in e.facts.items():
        facts.add_row(Text(show_name(name), "bold"), Text(show_name(text)))
    parts: list[RenderableType] = [Text(show_name(e.why), "bold"), "", facts, ""]
    if e.peak is None:
        parts += [Text(line) for line in list_votes(e)]
    parts += [Text(f"next check: {show_name(e.next)}"), "", Text("job-cpu-monitor in force:", "bold"), draw_options(e)]
    shown = e.decisions if last is None else e.decisions[max(len(e.decisions) - last, 0) :]
    if not e.decisions:
        parts += ["", Text("no decision yet")]
    elif shown:
        parts += ["", Text(f"last {len(shown)} of {count(len(e.decisions), 'decision')}, local time:", "bold")]
        wide = make_decisions(shown, 2)
        parts.append(wide if width is None or measure(wide) <= width else make_decisions(shown, 1))
    return draw(parts, width, colour)


def list_votes(e: ExplainAnswer) -> list[str]:
    """The window: what a vote means, each value and its vote."""
    w = e.window
    lines = [show_name(w.meaning)]
    for value, vote in zip(w.values, w.votes, strict=False):
        if e.job_cpu_monitor["vote_mode"] == "ytsaurus":
            lines.append(f"  {'vote of its check':>18}  {show_votes(vote):>2}")
        else:
            lines.append(f"  {'throttled' if value is None else f'{value:.3f}':>9}  {show_votes(vote):>2}")
    return lines if w.votes else [*lines, "  none yet"]


def draw_options(e: ExplainAnswer) -> RenderableType:
    """The resulting section, two options a line."""
    from rich.table import Table
    from rich.text import Text

    texts = [show_name(f"{key} = {show_option(key, value)}") for key, value in e.job_cpu_monitor.items()]
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
        change = f"{show_measured(decision.old_cores)} -> {show_measured(decision.new_cores)}"
        result = decision.result
        if result == "applied" and not _same(decision.applied_cores, decision.new_cores):
            result = f"applied as {show_measured(decision.applied_cores)}"
        when = show_time(decision.at, "%b %d %H:%M:%S")
        cells = (when, decision.kind, change, result, decision.reason)
        table.add_row(*(Text(show_name(cell), STYLES.get(cell, "")) for cell in cells))
    return table


def _same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) < 0.005)
