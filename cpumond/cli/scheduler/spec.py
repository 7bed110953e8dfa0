"""The specification to start: a file, overridden by the options of ``operation start`` and ``run``."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import click

from cpumond.api.yt.values import YtError
from cpumond.cli.options import CoresType, DurationType, given, open_input
from cpumond.cli.output import combine
from cpumond.cli.scheduler.arguments import read_attributes, read_value, read_yson_text
from cpumond.cli.scheduler.finding import POOL, TREE
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.cli.scheduler.tree_text import read_yaml
from cpumond.core.decode import ContentError, decode_json, decode_toml
from cpumond.core.errors import ConfigError, UsageError

TASK: Final = "main"
_SIZE: Final = re.compile(r"(\d+(?:\.\d*)?)\s*([KMGTP]?)i?B?", re.IGNORECASE)

P = ParamSpec("P")
Result = TypeVar("Result")


class BytesType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """A number of bytes, optionally with K, M, G, T, P (powers of 1024)."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"expected bytes, for example 2G or 536870912, got {value!r}.", param, ctx)
        power = " KMGTP".index(match[2].upper() or " ")
        number = float(match[1]) * 2.0 ** (10 * power)
        if number == math.inf:
            got = f"a number of {len(match[1])} digits"
            self.fail(f"expected bytes, for example 2G or 536870912, got {got}.", param, ctx)
        return int(number)


_options = combine(
    click.option(
        "-f",
        "--file",
        "file",
        metavar="SPEC",
        type=click.Path(),
        help="A specification (TOML, YAML, JSON, YSON), - for standard input; other options override it.",
    ),
    click.option("--pool", metavar="POOL", type=POOL, help="Default: a pool with your user name."),
    click.option(
        "--tree", "trees", metavar="TREE", type=TREE, multiple=True, help="Default: the default tree; may be repeated."
    ),
    click.option("--job-count", type=click.IntRange(1, 100_000),
                 help="[default: 1]; each job finds its number, from 0, in $YT_JOB_COOKIE."),
    click.option("--cpu-limit", type=CoresType(), help="[default: 1.0]"),
    click.option(
        "--memory", "memory_limit", type=BytesType(), help="For example 2G; default: default_memory_limit of the tree."
    ),
    click.option("--weight", type=float, metavar="WEIGHT", help="Among the operations of the pool; default: 1."),
    click.option("--title", metavar="TEXT"),
    click.option("--gang", "is_gang", is_flag=True, default=None,
                 help="All of its jobs start together or none; so does its fair share."),
    click.option("--min-run-time", "min_run_time_s", type=DurationType(0.0, 1e12),
                 help="Do not preempt a job before it has run for this time."),
    click.option("--checkpoints", is_flag=True, default=None,
                 help="Jobs touch $CPUMOND_CHECKPOINT when they have saved their work."),
    click.option(
        "--job-cpu-monitor",
        "monitor",
        metavar="YSON|JSON",
        help="For example '{min_cpu_limit=0.1;enable_cpu_reclaim=%true}' or '{\"mode\": \"shadow\"}'.",
    ),
    click.option("--env", "variables", metavar="NAME=VALUE", multiple=True,
                 help="Environment variable of the jobs; may be repeated."),
    click.option(
        "--working-directory", metavar="DIR", help="Absolute path on the nodes; default: a new directory for each job."
    ),
    click.option("--interruptible", is_flag=True, default=None,
                 help="A job that exits with 0 after an interruption has done its work."),
    click.option(
        "--time-limit", "time_limit_s", type=DurationType(0.001, 1e12), help="The operation fails after this time."
    ),
    click.option(
        "--job-time-limit", "job_time_limit_s", type=DurationType(1.0, 1e12), help="A job that runs longer has failed."
    ),
    click.option(
        "--retry",
        "retry_policy",
        metavar="RULE",
        multiple=True,
        help="For example 'oom:3,memory_growth=1.5', exit=75:5,delay=30s or exit=2:fail; may be repeated.",
    ),
    click.option(
        "--set", "assignments", metavar="KEY=VALUE", multiple=True, help="Any other option of a specification."
    ),
    click.argument("command", nargs=-1, metavar="[-- COMMAND [ARGS]...]"),
)  # fmt: skip


def spec_options(
    command: Callable[Concatenate[SchedulerClient, dict[str, Any], P], Result],
) -> Callable[Concatenate[SchedulerClient, P], Result]:
    """Give a command the options and the file of a specification, and call it with the specification."""

    @_options
    @functools.wraps(command)
    def with_spec(client: SchedulerClient, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        values = {name: kwargs.pop(name) for name in NAMES}
        return command(client, make_spec(values), *args, **kwargs)

    return with_spec


NAMES: Final = (
    "file", "pool", "trees", "job_count", "cpu_limit", "memory_limit", "weight", "title", "is_gang", "monitor",
    "variables", "working_directory", "interruptible", "time_limit_s", "job_time_limit_s", "min_run_time_s",
    "checkpoints", "retry_policy", "assignments", "command",
)  # fmt: skip


def make_spec(values: Mapping[str, Any]) -> dict[str, Any]:
    """Make the specification from options (name -> value). Raises UsageError, ConfigError, AccessError."""

    def milliseconds(name: str) -> float | None:
        return None if values[name] is None else values[name] * 1e3

    spec = {} if values["file"] is None else read_document(values["file"])
    task = {
        **{name: values[name] for name in ("job_count", "cpu_limit", "memory_limit", "working_directory")},
        **{name: values[name] for name in ("interruptible", "checkpoints")},
        "command": list(values["command"]) or None,
        "environment": _read_variables(values["variables"]) or None,
        "job_time_limit": milliseconds("job_time_limit_s"),
    }
    options = {
        **{name: values[name] for name in ("pool", "weight", "title", "is_gang")},
        "pool_trees": list(values["trees"]) or None,
        "min_run_time": milliseconds("min_run_time_s"),
        "time_limit": milliseconds("time_limit_s"),
        "retry_policy": list(values["retry_policy"]) or None,
        "job_cpu_monitor": None if values["monitor"] is None else _read_monitor(values["monitor"]),
    }
    more = read_attributes(values["assignments"])
    if "tasks" in more and values["file"] is None:
        raise UsageError("--set tasks: the only task is made from the other options; send several with -f SPEC")
    return {**_merge(_merge(spec, more), given(options)), "tasks": _make_tasks(_merge(spec, more), given(task))}


def _make_tasks(spec: Mapping[str, Any], task: dict[str, Any]) -> Any:
    tasks = spec.get("tasks")
    if tasks is None:
        if "command" not in task:
            raise UsageError("there is nothing to run; give a command after --, or a specification with -f SPEC")
        return {TASK: {"job_count": 1, "cpu_limit": 1.0, **task}}
    if task:
        if not isinstance(tasks, dict) or len(tasks) != 1 or not all(isinstance(each, dict) for each in tasks.values()):
            raise UsageError(f"{', '.join(task)}: only for a specification with one task; write it into the file")
        return {name: _merge(each, task) for name, each in tasks.items()}
    return tasks


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        known = merged.get(key)
        merged[key] = _merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def read_document(path: str) -> dict[str, Any]:
    """Read a map in TOML, YAML, JSON or YSON, by the ending of its name or, for standard input (-), by its content.

    Raises ConfigError, AccessError or UnavailableError."""
    name = "standard input" if path == "-" else path
    with open_input(path, "a specification") as file:
        content = file.read()
    ending = os.path.splitext(path)[1].lower()
    kinds = [kind for kind, endings in ENDINGS.items() if ending in endings] or list(ENDINGS)
    problems = []
    for kind in kinds:
        try:
            value = READERS[kind](content.decode("utf-8"))
        except (ContentError, YtError, UnicodeDecodeError, ValueError) as error:
            problems.append(f"{kind}: {error}")
            continue
        if isinstance(value, dict):
            return value
        problems.append(f"{kind}: expected a map")
    raise ConfigError(f"{name}: is not a specification: {'; '.join(problems)}")


def _read_yaml(text: str) -> Any:
    try:
        return read_yaml(text, {})
    except UsageError as error:
        raise ContentError(str(error)) from None


READERS: Final[dict[str, Callable[[str], Any]]] = {
    "JSON": lambda text: decode_json(text, dict[str, Any]),
    "TOML": decode_toml,
    "YSON": read_yson_text,
    "YAML": _read_yaml,
}
ENDINGS: Final = {"JSON": (".json",), "TOML": (".toml",), "YSON": (".yson",), "YAML": (".yaml", ".yml")}
"""Format -> endings of file names; in the order in which they are tried if the name does not decide."""


def _read_variables(assignments: tuple[str, ...]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise UsageError(f"--env: expected NAME=VALUE, for example THREADS=4, got {assignment!r}")
        variables[name] = value
    return variables


def _read_monitor(text: str) -> dict[str, Any]:
    """Parse the section ``job_cpu_monitor``: JSON, or YSON as in YTsaurus. Raises UsageError."""
    value = read_value(text)
    if not isinstance(value, dict):
        raise UsageError(
            "--job-cpu-monitor: expected a map in YSON or JSON, for example "
            '{min_cpu_limit=0.1;enable_cpu_reclaim=%true} or {"mode": "shadow"}'
        )
    return value
