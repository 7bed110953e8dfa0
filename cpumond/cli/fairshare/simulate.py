"""``cpumond fair-share simulate``: a pool tree over time, as JSON and as the two graphs of YTsaurus' documentation."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import tomllib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final

import click
import msgspec

from cpumond.cli.fairshare.input import InputReader, UpdateForm
from cpumond.cli.options import DurationType, open_input
from cpumond.cli.output import error_width, is_terminal
from cpumond.cli.progress import ProgressLine
from cpumond.cli.render.fair_share import render_html
from cpumond.cli.replacement import Replacement
from cpumond.core.errors import FairShareInputError
from cpumond.core.measures import format_span, parse_duration_s
from cpumond.core.schema import normalise_table
from cpumond.core.toml_text import explain_toml
from cpumond.core.words import did_you_mean, escape_json, quoted
from cpumond.fairshare.resources import RESOURCES
from cpumond.fairshare.simulate import MAX_S, Action, DemandEvent, Scenario, SimulationRow, check_script, simulate
from cpumond.fairshare.update import fair_share_update

MAX_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of a scenario; another kind of file may be endless."""

PROGRESS_S: Final = 0.2
IDLE_KEYS: Final = frozenset({"id", "now", "previous_update_time"})
"""Keys of an update that a simulation does not use."""

KNOWN_KEYS: Final = (*(key for key in UpdateForm.__struct_encode_fields__ if key not in IDLE_KEYS), "script")


class DemandForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``demand`` of an event: absolute amounts, memory in bytes, cpu in cores."""

    user_slots: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    cpu: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    gpu: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    memory: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    network: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class EventForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One ``[[script]]`` entry; a duration is a text with a unit or a number of seconds."""

    operation: str
    at: Annotated[float, msgspec.Meta(ge=0.0)] | str
    action: Action
    demand: DemandForm = DemandForm()
    over: Annotated[float, msgspec.Meta(ge=0.0)] | str = 0.0
    repeat_every: Annotated[float, msgspec.Meta(ge=0.0)] | str = 0.0


KEYS_OF_ACTION: Final[dict[str, frozenset[str]]] = {
    "start": frozenset({"demand"}),
    "stop": frozenset(),
    "ramp": frozenset({"demand", "over"}),
}
"""Action -> the keys that it needs out of ``demand`` and ``over``; the other keys are refused."""


@click.command("simulate")
@click.argument("file")
@click.option("--until", "until_s", type=DurationType(0.0, MAX_S), default="24h", show_default=True,
              help="Length of the simulated time.")  # fmt: skip
@click.option(
    "--step",
    "step_s",
    type=DurationType(0.001, MAX_S),
    default="1s",
    show_default=True,
    help="Time between fair-share updates; more than a minute is too coarse for a volume that runs dry.",
)
@click.option("--every", "every_s", type=DurationType(0.0, MAX_S), default=0.0,
              help="Print only the first step of each such period.  [default: every step]")  # fmt: skip
@click.option(
    "--html",
    "html_path",
    metavar="FILE",
    help="Write two graphs for each pool with an integral guarantee, to one file that needs no network.",
)
def simulate_command(file: str, until_s: float, step_s: float, every_s: float, html_path: str | None) -> None:
    """Simulate a pool tree over time with scripted demand: allocation against guarantee, volume against capacity.

    FILE, or - for standard input, is TOML, or JSON when it begins with {. It contains a tree as for 'cpumond
    fair-share' (total_resources, options, root, pools, operations) and [[script]] entries, which change an operation's
    demand: operation, at, action, demand (for start and ramp), over (for ramp), and repeat_every to repeat it.
    Durations are texts with a unit or numbers of seconds. now, previous_update_time and id are ignored. The source has
    commented files in config/examples.

    Prints a line of JSON per step and pool (not on a terminal with --html): amounts of the resource that options name
    as the main one (cpu: in cores), volumes in amount*seconds. Granted resources are allocated at once, and charged to
    the volume until the next step.

    \b
    Example of an entry:
      [[script]]
      operation = "reports"
      at = "5h"
      action = "ramp"             # start, stop or ramp
      demand = { cpu = 500 }
      over = "30m"
      repeat_every = "1d"

    \b
    Example:
      cpumond fair-share simulate burst-pool.toml --until 24h --step 1s --html burst-pool.html"""
    scenario = read_scenario(file)
    # Errors in the guarantees of a tree do not depend on the demand, so they are reported once.
    for error in fair_share_update(scenario.snapshot, 0.0, None).errors:
        click.echo(f"cpumond: warning: {error.message} (code {error.code})", err=True)
    rows = simulate(scenario, until_s, step_s)
    if not is_terminal() and error_width() is not None:
        rows = _draw_progress(rows, until_s)
    if not is_terminal() or html_path is None:
        rows = print_rows(rows, every_s)
    if html_path is None:
        for _ in rows:
            pass
        return
    with Replacement(html_path, "--html") as page:
        title = "standard input" if file == "-" else os.path.basename(file)
        page.write(render_html(rows, title, until_s, scenario.snapshot.options.main_resource))


def read_scenario(path: str) -> Scenario:
    """Read the scenario of a file, or of standard input for ``-``.

    Raises AccessError for missing rights, UnavailableError if unreadable, ConfigError (file, element, key)."""
    with open_input(path, "a scenario") as file:
        data = file.read(MAX_BYTES + 1)  # one byte more shows that the file is too large
    return parse_scenario(data, "standard input" if path == "-" else path)


def parse_scenario(data: bytes, name: str) -> Scenario:
    """Parse the scenario of TOML text, or of JSON text if its first character that is not blank is ``{``.

    ``name`` stands for the file in messages. Raises ConfigError (file, element, key, what is expected)."""
    try:
        scenario = _make_scenario(_parse_table(data), name)
        check_script(scenario)
    except FairShareInputError as error:
        raise FairShareInputError(f"{name}: {error}") from None
    except RecursionError:
        raise FairShareInputError(f"{name}: is nested too deeply; expected a pool tree and a script") from None
    return scenario


def _make_scenario(table: dict[str, Any], name: str) -> Scenario:
    for key in table:
        if key not in KNOWN_KEYS and key not in IDLE_KEYS:
            hint = did_you_mean(key, KNOWN_KEYS) or f"; known are {', '.join(KNOWN_KEYS)}"
            raise FairShareInputError(f"unknown key {quoted(key)}{hint}")
    _refuse_infinite(table, "")
    script = table.pop("script", [])
    if not isinstance(script, list):
        raise FairShareInputError("script: expected a list of tables ([[script]])")
    # InputReader reads the tree in its documented form, the JSON of one update.
    table = {**{key: value for key, value in table.items() if key not in IDLE_KEYS}, "now": 0}
    snapshot = InputReader().read(json.dumps(table, default=str).encode()).snapshot
    return Scenario(snapshot, tuple(_parse_event(entry, place, name) for place, entry in enumerate(script, 1)))


def _parse_table(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise FairShareInputError("is longer than 64 MiB; expected a pool tree and a script")
    try:
        text = data.decode("utf-8-sig")
        # JSON that begins with { is an object.
        value: dict[str, Any] = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise FairShareInputError(f"byte {error.start} is not UTF-8; expected TOML or JSON") from None
    except json.JSONDecodeError as error:
        raise FairShareInputError(
            f"not valid JSON: {error.msg} (at line {error.lineno}, column {error.colno})"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise FairShareInputError(
            f"not valid TOML, and not JSON, which begins with {{: {explain_toml(text, str(error))}"
        ) from None
    except ValueError:  # the only error left: Python converts 4300 digits at most
        raise FairShareInputError(
            "contains a number with thousands of digits; expected a pool tree and a script"
        ) from None
    if not value:
        raise FairShareInputError("is empty; see 'cpumond fair-share simulate --help' for its contents")
    return value


def _refuse_infinite(value: object, path: str) -> None:
    """Refuse inf and nan, which exist in TOML but not in JSON, the documented form of a tree."""
    if isinstance(value, float) and not math.isfinite(value):
        raise FairShareInputError(f"{path}: {value} is not an amount; leave a missing limit out")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_infinite(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for place, item in enumerate(value, 1):
            _refuse_infinite(item, f"{path} {place}")


def _parse_event(entry: object, place: int, name: str) -> DemandEvent:
    where = f"script {place}"
    table = normalise_table(entry, EventForm, name, where)
    needed = KEYS_OF_ACTION[table["action"]]
    for key in ("demand", "over"):
        if key in table and key not in needed:
            raise FairShareInputError(f"{where}.{key}: an event with action {quoted(table['action'])} must not have it")
        if key in needed and key not in table:
            raise FairShareInputError(f"{where}: {quoted(key)} is missing; action {quoted(table['action'])} needs it")
    seconds = {
        key: _parse_seconds(table[key], f"{where}.{key}") for key in ("at", "over", "repeat_every") if key in table
    }
    a, b, c, d, e = (float(table.get("demand", {}).get(resource, 0.0)) for resource in RESOURCES)
    return DemandEvent(
        operation=table["operation"],
        at_s=seconds["at"],
        action=table["action"],
        demand=(a, b, c, d, e),
        over_s=seconds.get("over", 0.0),
        repeat_every_s=seconds.get("repeat_every"),
    )


def _parse_seconds(value: float | str, where: str) -> float:
    """Parse a duration: a text with a unit or, as in the JSON of a tree, a number of seconds."""
    with contextlib.suppress(ValueError):
        return float(value)
    try:
        return parse_duration_s(value)
    except ValueError as error:
        raise FairShareInputError(f"{where}: {error}, or seconds as a number") from None


def print_rows(rows: Iterable[SimulationRow], every_s: float) -> Iterator[SimulationRow]:
    """Pass all rows on. For every ``every_s`` seconds, print the first step's rows as JSON lines (0: each step's)."""
    next_s = printed_s = 0.0
    for row in rows:
        if row.time_s >= next_s:
            printed_s = next_s = row.time_s
            if every_s > 0:
                # 1e-6: multiples of a step, for example of 0.1, have rounding errors.
                next_s = every_s * (math.floor(printed_s / every_s + 1e-6) + 1 - 1e-6)
        if row.time_s == printed_s:
            click.echo(escape_json(msgspec.json.encode(row)))
        yield row


def _draw_progress(rows: Iterator[SimulationRow], until_s: float) -> Iterator[SimulationRow]:
    """Pass rows on, and show the simulated time in one line on standard error."""
    line, shown_at_s = ProgressLine(), time.monotonic()
    try:
        for number, row in enumerate(rows):
            if number % 256 == 0 and time.monotonic() >= shown_at_s + PROGRESS_S:
                shown_at_s = time.monotonic()
                line.draw(f"simulated {format_span(row.time_s)} of {format_span(until_s)}")
            yield row
    finally:
        line.end()
