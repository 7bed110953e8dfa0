"""The commands ``tree export``, ``tree plan`` and ``tree apply``: a tree with its pools as a file in Git."""

from __future__ import annotations

from typing import Any, Final, get_args

import click
import msgspec

from cpumond.api.pool_views import TreeFile
from cpumond.cli.options import open_input, quote_name
from cpumond.cli.output import can_ask, print_json, print_text
from cpumond.cli.scheduler.client import scheduler_options, tree_option
from cpumond.cli.scheduler.forecast import print_simulation, simulate_option
from cpumond.cli.scheduler.http_client import SchedulerClient, SchedulerRefusedError
from cpumond.cli.scheduler.plans import (
    PlanRefusedError,
    ask,
    describe_plan,
    print_effects,
    print_signed,
    print_warnings,
)
from cpumond.cli.scheduler.tree_from_yt import read_yt_tree
from cpumond.cli.scheduler.tree_text import Form, TreeText, form_of, read_tree_text, write_tree
from cpumond.core.decode import ContentError, decode_text
from cpumond.core.errors import ConfigError, UsageError
from cpumond.core.toml_text import MAX_CHARACTERS
from cpumond.core.words import escape
from cpumond.scheduler.answers.plan import ChangePlan
from cpumond.scheduler.model import ACCESS_DENIED, CommandError
from cpumond.scheduler.settings.tree_file import NO_TREE, ApplyTree, list_changes

EXIT_CHANGES: Final = 2
STDIN: Final = "-"

prune_option = click.option("--prune/--no-prune", help="Remove pools that are not in the file; otherwise they stay.")
file_argument = click.argument("file", metavar="FILE")


@click.command("export", epilog="Example: cpumond tree export default > default.toml")
@click.argument("tree", required=False)
@click.option("--format", "form", type=click.Choice(get_args(Form)), default="toml", show_default=True)
@click.option("--ids", is_flag=True, help="Include the ids of pools, by which a renamed pool is recognized.")
@click.option(
    "--from-yt", "yson", metavar="FILE", help="Convert the output of `yt get //sys/pool_trees/TREE` of another cluster."
)
@scheduler_options
def export_command(client: SchedulerClient, tree: str | None, form: Form, ids: bool, yson: str | None) -> None:
    """Print a tree with its pools as a file to keep in Git, for `cpumond tree plan` and `apply`; access lists
    included."""
    if yson is not None:
        if tree is None or ids:
            raise UsageError("--from-yt: name the tree that the file describes, and leave out --ids")
        text = read_text(yson, "the output of yt get")
        click.echo(write_tree(tree, read_yt_tree(text, yson), form), nl=False)
        return
    found = client.fetch(f"/trees/{quote_name(client.find_tree(tree))}/file", TreeFile)
    tables = found.tables
    if not ids:
        pools = tuple(msgspec.structs.replace(pool, id="") for pool in tables.pools or ())
        tables = msgspec.structs.replace(tables, pools=pools)
    click.echo(write_tree(found.tree, tables, form), nl=False)


@click.command("plan", epilog="Example: cpumond tree plan default.toml --detailed-exitcode")
@file_argument
@prune_option
@click.option(
    "--detailed-exitcode", "is_detailed", is_flag=True, help="Exit code 2 if something would change, otherwise 0."
)
@click.option("--all", "show_all", is_flag=True, help="Include pools and operations that do not change.")
@simulate_option
@tree_option
@scheduler_options
def plan_command(
    client: SchedulerClient, file: str, prune: bool, is_detailed: bool, show_all: bool, simulates: bool,
    tree: str | None,
) -> None:  # fmt: skip
    """Show what `cpumond tree apply FILE` would change, and the effect on every fair share; nothing is changed.

    If the change would be refused, this command ends with its exit code, mostly 78. Users with read access only see the
    changes, not their effect. FILE is TOML, YAML or JSON by its name, - is TOML from standard input."""
    if simulates:
        if is_detailed or show_all:
            raise UsageError("--simulate shows no plan: --detailed-exitcode and --all have no effect; leave them out")
        simulate_file(client, file, tree, prune)
        return
    plan = print_file_plan(client, file, tree, prune, show_all)
    if is_detailed and plan.changes:
        raise click.exceptions.Exit(EXIT_CHANGES)


@click.command("apply", epilog='Example: cpumond tree apply default.toml --yes --why "more for research"')
@file_argument
@prune_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--why", metavar="TEXT", default="", help="A reason for the audit log, for example the commit's subject.")
@tree_option
@scheduler_options
def apply_command(client: SchedulerClient, file: str, prune: bool, yes: bool, why: str, tree: str | None) -> None:
    """Make a tree and its pools match a file: all of it, or nothing.

    The plan is shown, and you are asked; without a terminal it needs --yes. If something changed since the plan,
    nothing is overwritten: the change is refused. `cpumond undo` reverts it in one step."""
    plan, content, body = ask_plan(client, file, tree, prune)
    if not client.as_json or not plan.accepted:
        print_changes(client, plan, content)
    if not yes and plan.changes:
        if client.as_json or not can_ask() or file == STDIN:
            raise UsageError("nothing is changed: give --yes to apply it without a question")
        ask("Apply this?")
    client.plan_shown = describe_plan(plan)
    name = body.pop("tree")
    answer = client.request("POST", f"/trees/{quote_name(name)}/apply", {**body, "why": why})
    if client.as_json:
        print_json(answer)
    elif plan.changes:
        print_text(f"tree {escape(name)} matches the file")


def ask_plan(
    client: SchedulerClient, file: str, tree: str | None, prune: bool = False, show_all: bool = False
) -> tuple[ChangePlan, bytes, dict[str, Any]]:
    """The plan of a file, as a value and as JSON, and the fields of the command that applies it."""
    told = read_file(file)
    name = client.find_tree(tree or told.tree)
    present = _find_present(client, name)
    base = NO_TREE if present is None else present.revision
    body = {"tree": name, "tables": told.tables, "prune": prune, "base": base}
    content = client.request("POST", "/plan", {"type": "ApplyTree", **body}, {"everything": show_all})
    return client.decode(content, ChangePlan), content, body


def simulate_file(client: SchedulerClient, file: str, tree: str | None, prune: bool) -> None:
    """Simulate what would happen if a file were applied, and print the effect on operations."""
    told = read_file(file)
    command = {"tree": client.find_tree(tree or told.tree), "tables": told.tables, "prune": prune}
    print_simulation(client, {"command": {"type": "ApplyTree", **command}})


def print_file_plan(client: SchedulerClient, file: str, tree: str | None, prune: bool, show_all: bool) -> ChangePlan:
    """Print the plan of a file; with read access only, the changes without effects. Raises PlanRefusedError."""
    plan, content, body = ask_plan(client, file, tree, prune, show_all)
    is_whole = plan.code != ACCESS_DENIED
    if not is_whole:
        plan = _compare(client, plan, ApplyTree(body["tree"], body["tables"], prune))
        content = msgspec.json.encode(plan)
    print_changes(client, plan, content, is_whole=is_whole)
    return plan


def _compare(client: SchedulerClient, refused: ChangePlan, command: ApplyTree) -> ChangePlan:
    """The changes of a file, without their effects, which only the scheduler knows. Raises PlanRefusedError."""
    present = _find_present(client, command.tree)
    try:
        changes, warnings = list_changes(None if present is None else present.tables, command)
    except CommandError as error:
        raise PlanRefusedError(f"the change would be refused: {error}", error.code) from None
    note = f"this is the difference alone, without its effect on shares, and you may not apply it: {refused.refusal}"
    return ChangePlan(accepted=True, warnings=[*warnings, *([note] if changes else [])], changes=changes)


def print_changes(client: SchedulerClient, plan: ChangePlan, content: bytes, *, is_whole: bool = True) -> None:
    """Print the plan of a file, or the changes alone. Raises PlanRefusedError."""
    if client.as_json:
        print_json(content, ChangePlan, "effects")
    elif plan.changes:
        print_signed(plan)
        if is_whole:
            print_effects(plan)
    elif plan.accepted:
        print_text("nothing to do: the tree matches the file")
    print_warnings(plan)
    if not plan.accepted:
        raise PlanRefusedError(f"the change would be refused: {plan.refusal}", plan.code)


def _find_present(client: SchedulerClient, tree: str) -> TreeFile | None:
    try:
        return client.get(f"/trees/{quote_name(tree)}/file", TreeFile)
    except SchedulerRefusedError as error:
        if error.status != 404:
            raise
        return None


def read_file(name: str) -> TreeText:
    """Read a tree file; "-" is standard input. Raises ConfigError, AccessError, UnavailableError."""
    form = "toml" if name == STDIN else form_of(name)
    text = read_text(name, "a file of `cpumond tree export`")
    return read_tree_text(text, "standard input" if name == STDIN else name, form)


def read_text(name: str, what: str) -> str:
    """The text of a file, "-" for standard input. Raises ConfigError, AccessError, UnavailableError."""
    try:
        with open_input(name, what) as file:
            text = decode_text(file.read(4 * MAX_CHARACTERS + 1))
    except ContentError as error:
        raise ConfigError(f"{name}: {error}") from None
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{name}: it is longer than {MAX_CHARACTERS // 2**20} MiB; split it")
    return text


COMMANDS: Final[tuple[click.Command, ...]] = (export_command, plan_command, apply_command)
