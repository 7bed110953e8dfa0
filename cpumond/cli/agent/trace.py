"""Input of ``simulate``, ``replay`` and ``dry-run``: the settings of ``--set``, and the lines of a trace."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TextIO

import msgspec

from cpumond.agent.config import parse_assignments
from cpumond.cli.options import naming_unreadable
from cpumond.cli.output import warn
from cpumond.monitor.model import LimitRule, MonitorSettings, check_together, list_idle_options
from cpumond.monitor.replay import MAX_LINE_CHARS


def read_settings(assignments: tuple[str, ...]) -> MonitorSettings:
    """The settings of ``--set key=value`` over the defaults. Raises ConfigError, also for contradictory options."""
    return _convert(parse_assignments(assignments))


def read_settings_of_rules(
    assignments: tuple[str, ...], rules: Iterable[LimitRule], unused: Mapping[str, str]
) -> list[MonitorSettings]:
    """Return the settings of ``--set`` for each of ``rules``; if ``rules`` is empty, for the rule of ``--set``.

    Warns of options in ``unused`` (option -> where it has no effect), and options without effect under all settings."""
    layer = parse_assignments(assignments)
    found = [_convert({**layer, "limit_rule": rule}) for rule in rules] or [_convert(layer)]
    for key in layer:
        idle = [list_idle_options(each, [key]) for each in found]
        if key in unused:
            warn(f"{key} has no effect in {unused[key]}")
        elif all(idle):
            warn(idle[0][0])
    return found


def _convert(layer: Mapping[str, object]) -> MonitorSettings:
    settings = msgspec.convert(layer, MonitorSettings)
    check_together(settings, "--set")
    return settings


def read_lines(path: str) -> Iterator[str]:
    """The lines of a text file, or of standard input for ``-``; bytes that are not UTF-8 become U+FFFD.

    A line is split into pieces of at most MAX_LINE_CHARS + 1 characters, so memory stays bounded. Raises AccessError
    for missing rights, UnavailableError for any other failure to read."""
    with naming_unreadable(path, "a trace"):
        if path == "-":
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(encoding="utf-8", errors="replace")
            if sys.stdin is not None:  # None when the caller closed it
                yield from _read_pieces(sys.stdin)
        else:
            with open(path, encoding="utf-8", errors="replace") as file:
                yield from _read_pieces(file)


def _read_pieces(file: TextIO) -> Iterator[str]:
    return iter(lambda: file.readline(MAX_LINE_CHARS + 1), "")
