"""Shared parts of commands: options, the types of their values, and reading of input files."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO
from urllib.parse import quote

import click

from cpumond.agent.config import DEFAULT_CONFIG_PATH
from cpumond.cli.output import output_options
from cpumond.core.errors import AccessError, UnavailableError, describe
from cpumond.core.measures import format_duration, parse_duration_s


class DurationType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """A duration in [``min_s``, ``max_s``] on the command line, in seconds: a bare number, or a text with a unit."""

    name = "duration"

    def __init__(self, min_s: float = 0.0, max_s: float = math.inf) -> None:
        self.min_s = min_s
        self.max_s = max_s

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        try:
            seconds = _read_seconds(text)
        except ValueError as error:
            self.fail(f"{error} (a bare number is seconds here).", param, ctx)
        if seconds < self.min_s:
            self.fail(f"must be at least {format_duration(self.min_s)}, got {text}.", param, ctx)
        if seconds > self.max_s:
            self.fail(f"must be at most {format_duration(self.max_s)}, got {text}.", param, ctx)
        return seconds


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return parse_duration_s(text)
    # The duration must also be finite in milliseconds: everywhere else, a bare number is in that unit.
    if not 0 <= seconds * 1000.0 < math.inf:
        raise ValueError(f"expected a duration that is finite and not negative, got {text}")
    return seconds


class CoresType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """A finite number of cores above 0."""

    name = "cores"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        cores: float = click.FLOAT.convert(value, param, ctx)
        if not 0.0 < cores < math.inf:
            self.fail(f"expected a finite number of cores > 0, got {cores!r}.", param, ctx)
        return cores


def check_assignments(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Callback of ``--set``: require an equals sign in each. Raises click.BadParameter (exit code 64)."""
    for assignment in value:
        if "=" not in assignment:
            raise click.BadParameter(f"expected key=value, for example --set vote_window_size=7, got {assignment!r}.")
    return value


class ChoiceType(click.Choice):  # type: ignore[type-arg]  # generic only in newer click
    """One of ``choices``; ``removed``: choice of earlier versions -> its replacement."""

    def __init__(self, choices: Sequence[str], removed: dict[str, str]) -> None:
        super().__init__(choices)
        self._removed = removed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self._removed:
            self.fail(f"{value!r} was removed; {self._removed[value]}.", param, ctx)
        return super().convert(value, param, ctx)


cpu_limit_option = click.option("--cpu-limit", type=CoresType(), required=True, help="CPU that the job requested.")

set_option = click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", callback=check_assignments,
    help="An option of job-cpu-monitor; durations in ms or with a unit; may be repeated.",
)  # fmt: skip

config_option = click.option(
    "--config", "config_path", metavar="FILE", envvar="CPUMOND_CONFIG", default=DEFAULT_CONFIG_PATH, show_default=True,
    help="TOML file; conf.d/*.toml beside it is read too.",
)  # fmt: skip

json_option = output_options("Print the agent's answer as JSON.")


def quote_name(name: str) -> str:
    """A name as one segment of a URL path, regardless of its characters."""
    # An HTTP client would resolve "." and ".." as dot segments.
    return quote(name, safe="", errors="surrogateescape").replace(".", "%2E")


def given(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` without the keys whose value is None."""
    return {key: value for key, value in values.items() if value is not None}


@contextlib.contextmanager
def naming_unreadable(name: str, what: str) -> Iterator[None]:
    """Context for reading the file ``name``; ``what`` describes the expected file in messages. Raises AccessError for
    missing rights, UnavailableError for every other OSError."""
    try:
        yield
    except PermissionError as error:
        raise AccessError(f"{name}: cannot be read: {describe(error)}; run as root or fix its rights") from error
    except OSError as error:
        raise UnavailableError(f"{name}: cannot be read: {describe(error)}; give the path of {what}") from error


@contextlib.contextmanager
def open_input(path: str, what: str) -> Iterator[BinaryIO]:
    """Open the file ``path``, or standard input for "-", which is empty if the caller closed it. Raises the errors of
    ``naming_unreadable``."""
    with naming_unreadable("standard input" if path == "-" else path, what):
        if path != "-":
            with open(path, "rb") as file:
                yield file
        elif sys.stdin is None or not hasattr(sys.stdin, "buffer"):
            yield io.BytesIO(b"" if sys.stdin is None else sys.stdin.read().encode())
        else:
            yield sys.stdin.buffer
