"""Output of ``explain``: the agent's sentences about a job's limit, and its figures.

Every function turns an agent's answer ``e`` into text, and is pure except for the time zone. With ``width`` None (a
pipe) no line is wrapped. Control characters in an agent's text are escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cpumond.cli.render.grid import Cell, Column, column, draw_grid, draw_lines, width_of
from cpumond.cli.render.tables import STYLES, format_option
from cpumond.core.answers import DecisionAnswer, ExplainAnswer
from cpumond.core.errors import UnavailableError
from cpumond.core.words import count, escape, format_measured, format_time, format_votes


def draw_explain(e: ExplainAnswer, last: int | None, width: int | None, colour: bool) -> str:
    """Output of ``cpumond explain``: the answer, the facts behind it, the window, the next step, options, decisions.

    Raises UnavailableError for an agent whose answers have no sentences."""
    if not e.why:
        raise UnavailableError(
            f"the agent of job {escape(e.job_id)} is an older version, which gives no reasons; update it, or read "
            "its figures with --json"
        )

    def table(rows: Sequence[Sequence[Cell]]) -> str:
        headings: list[Column[Any]] = [Column("") for _ in rows[0][1:]]
        return draw_grid([*headings, column("")], rows, width, colour)[0]

    def lines(*texts: Cell) -> Iterator[str]:
        return draw_lines(texts, width, colour)

    facts: list[list[Cell]] = [[(escape(name), "bold"), escape(text)] for name, text in e.facts.items()]
    parts = [*lines((escape(e.why), "bold"), ""), table(facts), ""]
    if e.peak is None:
        parts += lines(*list_votes(e))
    parts += lines(f"next check: {escape(e.next)}", "", ("job-cpu-monitor in force:", "bold"))
    parts.append(table(list_options(e, width)))
    shown = e.decisions if last is None else e.decisions[max(len(e.decisions) - last, 0) :]
    if not e.decisions:
        parts += ["", "no decision yet"]
    elif shown:
        parts += lines("", (f"last {len(shown)} of {count(len(e.decisions), 'decision')}:", "bold"))
        parts.append(table(list_decisions(shown)))
    return "\n".join(parts)


def list_votes(e: ExplainAnswer) -> list[str]:
    """Lines about the voting window: the meaning of a vote, each value and its vote."""
    w = e.window
    lines = [escape(w.meaning)]
    for value, vote in zip(w.values, w.votes, strict=False):
        if e.job_cpu_monitor["vote_mode"] == "ytsaurus":
            lines.append(f"  {'vote of its check':>18}  {format_votes(vote):>2}")
        else:
            lines.append(f"  {'throttled' if value is None else f'{value:.3f}':>9}  {format_votes(vote):>2}")
    return lines if w.votes else [*lines, "  none yet"]


def list_options(e: ExplainAnswer, width: int | None) -> list[list[Cell]]:
    """Return rows of two options each, or of one option if two do not fit."""
    texts = [escape(f"{key} = {format_option(key, value)}") for key, value in e.job_cpu_monitor.items()]
    if width is not None and 2 * max(map(width_of, texts), default=0) + 4 > width:
        return [[f"  {text}"] for text in texts]
    half = (len(texts) + 1) // 2
    return [[f"  {left}", right] for left, right in zip(texts[:half], [*texts[half:], ""], strict=False)]


def list_decisions(decisions: Sequence[DecisionAnswer]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for decision in decisions:
        change = f"{format_measured(decision.old_cores)} -> {format_measured(decision.new_cores)}"
        result = decision.result
        if result == "applied" and not _same(decision.applied_cores, decision.new_cores):
            result = f"applied as {format_measured(decision.applied_cores)}"
        cells = (format_time(decision.at, "%b %d %H:%M:%S %Z"), decision.kind, change, result, decision.reason)
        rows.append([(escape(cell), STYLES.get(cell, "")) for cell in cells])
    return rows


def _same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) < 0.005)
