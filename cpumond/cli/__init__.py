"""The command line: a folder for each family of commands. A module is imported when one of its commands is called.

Errors that a user can cause become one sentence on stderr and an exit code of ``core.errors``, never a traceback."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, Final

import click

from cpumond import __version__
from cpumond.cli.help import Formatter
from cpumond.cli.render.grid import fold
from cpumond.core.errors import EXIT_UNAVAILABLE, EXIT_USAGE, AccessError, CpumondError, describe

COMMAND_GROUPS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "The agent of this host": {
        "init": ("agent.init", "Find Docker, Podman, Slurm, Kubernetes here, and follow their jobs in shadow mode."),
        "doctor": ("doctor.command", "Report what this host supports, and how to add what is missing."),
        "agent": ("agent.service", "Run the agent: measure, decide, write, report, once per check_period."),
        "check-config": ("agent.service", "Check a configuration and print the resulting values."),
        "status": ("agent.control", "Print one line for each job of the running agent."),
        "top": ("agent.top", "Show a live table of the running agent."),
        "explain": ("agent.control", "Explain why a job's limit has its value."),
        "job": ("agent.control", "Add, remove and list jobs of the running agent."),
        "pin": ("agent.control", "Hold a job's limit until `cpumond unpin`."),
        "unpin": ("agent.control", "Return a pinned or contested job to the monitor."),
        "restore": ("agent.service", "Restore the original limits after the agent died (ExecStopPost)."),
    },
    "Jobs and operations": {
        "run": ("scheduler.running",
            "Run a command as an operation, with its output and exit code here; Ctrl-C aborts it."),
        "operation": ("scheduler.operations",
            "Operations: start, wait, list, show, why, jobs, log, set, patch, abort, suspend, resume, complete."),
        "why": ("scheduler.why", "Explain why CPU is idle while operations wait, and what to change."),
    },
    "Pools and trees": {
        "pool": ("scheduler.pools", "Pools of the running scheduler: list, show, create, set, move, remove, plan."),
        "tree": ("scheduler.pools",
            "Pool trees of the scheduler: list, show, create, set, remove, export, import, plan, apply."),
        "undo": ("scheduler.events", "Undo a change of pools or trees."),
    },
    "Nodes and roll-out": {
        "node": ("scheduler.nodes", "Nodes of the running scheduler: list, show, cordon, uncordon, drain, tag."),
        "fleet": ("scheduler.rollout", "The agents of all nodes: version, what they do with limits, problems."),
        "rollout": ("scheduler.rollout",
            "What the agents of groups of nodes may do with limits; a canary group first."),
        "kubernetes": ("kubernetes.publish", "Offer reclaimed CPU to pods as a resource of their node: publish."),
    },
    "The scheduler": {
        "scheduler": ("scheduler.service", "Run the scheduler: pools, fair share, preemption, the `yt` protocol."),
        "store": ("scheduler.store",
            "Copy the scheduler's state between SQLite and PostgreSQL while no scheduler runs."),
        "token": ("scheduler.tokens", "Tokens of users, nodes and proxies: create, list, revoke."),
        "can": ("scheduler.rights",
            "Whether a user may do something on the running scheduler, and which rule decides it."),
        "events": ("scheduler.events", "Events of pools, nodes and operations; --follow prints new ones."),
        "audit": ("scheduler.events", "Who did what, and which requests were refused: a table, or lines of JSON."),
    },
    "Reports and trials": {
        "report": ("scheduler.report",
            "Core-hours of pools and operations from the scheduler's history: text, CSV, JSON."),
        "estimate": ("agent.estimate",
            "Estimate what would be reclaimed on this host, or from a Prometheus; never writes."),
        "dry-run": ("agent.watch", "Watch one real cgroup and print what would be reclaimed; never writes."),
        "record": ("agent.watch", "Record a trace of a live cgroup for `cpumond replay`."),
        "replay": ("agent.simulate", "Run the monitor over a recorded trace."),
        "simulate": ("agent.simulate",
            "What a rule would free under a given load, and how often it would hold the job back."),
        "fair-share": ("fairshare.command", "Shares of a pool tree: compute, explain, simulate."),
        "demo": ("demo.command", "A scheduler, an agent and real jobs on this machine, live."),
        "cluster": ("scheduler.cluster",
            "A scheduler and some agents with real jobs on this machine, for experiments."),
        "stub-scheduler": ("agent.receiver", "A small receiver of heartbeats, for testing reports."),
    },
    "Shells and programs": {
        "completion": ("completion", "Print the shell code that completes commands and names: bash, zsh, fish."),
        "schema": ("schema", "Print the JSON Schema of a message, or of a command's --json output."),
    },
}  # fmt: skip
"""Commands grouped by their users: command -> (module of this package, line of help). The function of a command in its
module is ``<name>_command``."""

COMMANDS: Final = {name: entry for group in COMMAND_GROUPS.values() for name, entry in group.items()}


REMOVED_OPTIONS: Final[dict[str, str]] = {
    "operation when --shorter": "Removed; 'cpumond why POOL' says what to change so that more operations start.",
    "report --html": "Removed; the scheduler's web page has the graphs, --format csv or json the numbers.",
    "fair-share simulate --csv": "Removed; the rows are JSON lines on standard output.",
}
"""Removed options, by command and option -> replacement."""

NO_ARGUMENTS: Final[tuple[type[click.UsageError], ...]] = (
    (click.exceptions.NoArgsIsHelpError,) if hasattr(click.exceptions, "NoArgsIsHelpError") else ()
)
"""Errors that click raises if a group is called without a command; before 8.2 it prints the help instead."""


click.Context.formatter_class = Formatter


class OutputClosed(Exception):  # noqa: N818 - nothing went wrong
    """The reader of the output closed it (`cpumond status | head`)."""


@contextlib.contextmanager
def _noticing_closed_output() -> Iterator[None]:
    """Raise OutputClosed for a broken pipe, also outside standalone mode; click itself would exit with code 1."""
    try:
        yield
    except BrokenPipeError:
        raise OutputClosed from None


class LazyGroup(click.Group):
    """A click group that imports a command's module only when the command is called."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _noticing_closed_output():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _noticing_closed_output():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"cpumond.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        column = max(map(len, COMMANDS))
        for title, group in COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(column), text) for name, (_, text) in group.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Try it: cpumond demo",
)
@click.version_option(__version__, prog_name="cpumond")
def cli() -> None:
    """Measure the CPU that jobs really use, adapt their cgroup limits to it, and report the CPU that is free."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``cpumond``: run the command line and exit with a code of ``cpumond.core.errors``."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are printed to stderr as one sentence."""
    try:
        result = cli.main(arguments, prog_name="cpumond", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except NO_ARGUMENTS as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.UsageError as error:
        if isinstance(error, click.NoSuchOption) and error.ctx is not None:
            command = error.ctx.command_path.partition(" ")[2]
            if instead := REMOVED_OPTIONS.get(f"{command} {error.option_name}"):
                return _fail(f"{_sentence(error.message)} {instead}", EXIT_USAGE)
        hint = f" See '{error.ctx.command_path} --help'." if error.ctx is not None else ""
        return _fail(_sentence(error.format_message()) + _suggest(error) + hint, EXIT_USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except CpumondError as error:
        return _fail(str(error), error.exit_code, getattr(error, "details", ""), getattr(error, "others", ()))
    except (OutputClosed, BrokenPipeError):
        # Standard output becomes /dev/null, so that the flush at exit does not fail on the broken pipe, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PermissionError as error:
        return _fail(f"{error.filename or 'this'}: {describe(error)}; run as root", AccessError.exit_code)
    except OSError as error:
        return _fail(f"{error.filename or 'the system'}: {describe(error)}", EXIT_UNAVAILABLE)
    except Exception as error:
        # An internal error: the traceback is for developers, the sentence for users.
        if os.environ.get("CPUMOND_DEBUG"):
            traceback.print_exc()
        text = f"internal error: {type(error).__name__}: {error}; run with CPUMOND_DEBUG=1 for the traceback"
        return _fail(text, EXIT_UNAVAILABLE)
    return result if isinstance(result, int) else 0


def _suggest(error: click.UsageError) -> str:
    """Suggest commands similar to a mistyped one; "" if there is none, or if click (8.2 and later) names them."""
    group, match = error.ctx and error.ctx.command, re.match(r"No such command '(.*)'", error.message)
    if error.ctx is None or not isinstance(group, click.Group) or match is None or "ean" in error.format_message():
        return ""
    near = difflib.get_close_matches(match[1], group.list_commands(error.ctx), n=2)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _sentence(text: str) -> str:
    """``text`` with a full stop; click leaves it out after a list of choices."""
    return text.rstrip() + ("" if text.rstrip().endswith((".", "?", "!", ")")) else ".")


def _fail(message: str, code: int, details: str = "", others: Iterable[str] = ()) -> int:
    from cpumond.cli.output import error_width
    from cpumond.core.words import escape

    # The text may contain names that other users or nodes wrote.
    sentences = [escape(" ".join(each.split())) for each in (message, *others)]
    with contextlib.suppress(OSError):  # the terminal may be gone
        for sentence in sentences:
            click.echo(fold(f"cpumond: {sentence}", error_width()), err=True)
        if details:
            click.echo(details, err=True)
    return code
