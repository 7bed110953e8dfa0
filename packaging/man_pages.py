"""Write the man pages from the program's own texts: the help of commands, and the commented configuration files.

usage: python packaging/man_pages.py [FOLDER]          (packaging/man; the program must be importable)

cpumond(8) covers the whole program, each command has a page with all its subcommands, and each configuration file one
in section 5. A page whose text does not change keeps its date.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from cpumond.agent.config import DEFAULT_CONFIG_PATH, AgentConfig
from cpumond.cli import COMMAND_GROUPS, COMMANDS, cli
from cpumond.core import errors
from cpumond.scheduler.program.config import DEFAULT_SCHEDULER_CONFIG_PATH, SchedulerConfig

HERE: Final = Path(__file__).resolve().parent
CONFIG: Final = HERE.parent / "config"

FOR_ADMINISTRATORS: Final = {"agent", "restore", "check-config", "scheduler", "init", "doctor"}
"""Commands whose pages are in section 8; all others are in section 1."""
HIDDEN_COMMANDS: Final = {"fair-share": {"simulate": "cpumond.cli.fairshare.simulate"}}
"""Subcommands that click does not know as such, and their modules."""
CONFIG_PAGES: Final = {
    "cpumond.toml": (DEFAULT_CONFIG_PATH, "configuration of the agent of cpumond"),
    "cpumond-scheduler.toml": (DEFAULT_SCHEDULER_CONFIG_PATH, "configuration of the scheduler of cpumond"),
}
"""Name of a page of section 5 -> its file, and the file's purpose."""
CONFIG_FOLDERS: Final = {"cpumond.toml": "conf.d", "cpumond-scheduler.toml": "scheduler.conf.d"}
EVERY_KEY: Final = "Every key is below, with its default"
RELATED_CONFIG: Final = {"agent.service": "cpumond.toml(5)", "scheduler.service": "cpumond-scheduler.toml(5)"}
DURATION: Final = re.compile(r'"[0-9.]+(ms|s|m|h|d)"')
WIDTH: Final = 78
ESCAPES: Final = {"\\": "\\e", "-": "\\-", "~": "\\(ti", "^": "\\(ha", "'": "\\(aq", "`": "\\(ga", '"': "\\(dq"}


# ---- roff


def escape(text: str) -> str:
    """Escape text for roff, so that text copied from the page can be typed."""
    return "".join(ESCAPES.get(character, character) for character in text)


def literal(text: str) -> str:
    """Text in bold, as it is typed."""
    return f"\\fB{escape(text)}\\fR"


def prose(text: str) -> list[str]:
    """Lines of a paragraph; text in backquotes is bold."""
    parts = re.split(r"`([^`]+)`", " ".join(text.split()))
    marked = "".join(literal(part) if number % 2 else escape(part) for number, part in enumerate(parts))
    return fill(marked)


def fill(text: str) -> list[str]:
    """Fill lines of text that is already roff."""
    return [protect(line) for line in textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)]


def protect(line: str) -> str:
    """Protect a line of text whose first character is special to roff."""
    return f"\\&{line}" if line.startswith((".", "'")) else line


def paragraphs(text: str) -> Iterator[str]:
    r"""Yield the paragraphs of a help text; one that begins with ``\b`` keeps its lines."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", inspect.cleandoc(text))):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):
            yield from as_typed(paragraph.removeprefix("\b").strip("\n").splitlines())
        else:
            yield from prose(paragraph)


def as_typed(lines: Iterable[str]) -> Iterator[str]:
    yield ".nf"
    yield from (protect(escape(line)) for line in lines)
    yield ".fi"


def term(name: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield protect(name)
    yield from prose(text)


def option_name(name: str) -> str:
    """``--config FILE``: the option bold, its value in italics."""
    words = [
        literal(word) if word.startswith("-") else f"\\fI{escape(word)}\\fR" for word in re.split(r"(?<=,)? ", name)
    ]
    return " ".join(words)


@dataclass
class Page:
    name: str
    section: int
    summary: str
    lines: list[str] = field(default_factory=list)

    def add(self, title: str, lines: Iterable[str]) -> None:
        """Add a section, unless it is empty."""
        found = list(lines)
        while found and found[0] == ".PP":
            del found[0]
        if found:
            self.lines += [f".SH {title}", *found]

    def render(self, date: str) -> str:
        head = [
            ".\\\" Made by packaging/man_pages.py from the program's own help; a change here would be lost.",
            f'.TH "{escape(self.name.upper())}" "{self.section}" "{date}" "cpumond"',
            ".SH NAME",
            *fill(f"{escape(self.name)} \\- {escape(self.summary)}"),
        ]
        return "\n".join([*head, *self.lines, ""])

    @property
    def reference(self) -> str:
        return f"{self.name}({self.section})"


# ---- commands


@dataclass
class Command:
    """A command for the page."""

    path: str
    command: click.Command
    context: click.Context

    def usage(self) -> list[str]:
        pieces = " ".join(self.command.collect_usage_pieces(self.context))
        return prose(f"`{self.path}` {pieces}")

    def options(self) -> list[tuple[str, str]]:
        """Options with their texts from ``--help``, which is included itself."""
        options = [param for param in self.command.get_params(self.context) if isinstance(param, click.Option)]
        records = [option.get_help_record(self.context) for option in options]
        return [record for record in records if record is not None]

    def examples(self) -> list[str]:
        epilog = " ".join((self.command.epilog or "").split())
        return [epilog.partition(": ")[2]] if epilog else []

    def variables(self) -> dict[str, str]:
        """Environment variables that set options."""
        found = {}
        for param in self.command.get_params(self.context):
            names = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
            found.update({name: max(param.opts, key=len) for name in names})
        return found


def make_root_context() -> click.Context:
    return click.Context(cli, info_name="cpumond", **cli.context_settings)


def list_commands(name: str) -> list[Command]:
    """A command of ``cpumond`` and its subcommands."""
    root = make_root_context()
    command = cli.get_command(root, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=root)
    found = [Command(f"cpumond {name}", command, context)]
    below: dict[str, click.Command | None] = {}
    if isinstance(command, click.Group):
        below = {sub: command.get_command(context, sub) for sub in command.list_commands(context)}
    for sub, module in HIDDEN_COMMANDS.get(name, {}).items():
        below[sub] = getattr(importlib.import_module(module), f"{sub}_command")
    for sub, subcommand in below.items():
        assert subcommand is not None
        found.append(
            Command(f"cpumond {name} {sub}", subcommand, click.Context(subcommand, info_name=sub, parent=context))
        )
    return found


def make_command_page(name: str) -> Page:
    commands = list_commands(name)
    own, below = commands[0], commands[1:]
    is_group = isinstance(own.command, click.Group)
    page = Page(f"cpumond-{name}", section_of(name), COMMANDS[name][1].replace("`", "").rstrip("."))
    synopses = below if is_group else commands
    page.add("SYNOPSIS", (line for command in synopses for line in (".PP", *command.usage())))
    page.add("DESCRIPTION", paragraphs(own.command.help or ""))
    common = find_common_options(below) if is_group else []
    if is_group:
        page.add("COMMANDS", (line for command in below for line in describe_subcommand(command, common)))
        page.add("OPTIONS OF ALL COMMANDS", (line for option in common for line in describe_option(option)))
    else:
        page.add("OPTIONS", (line for option in own.options() for line in describe_option(option)))
        page.add("COMMANDS", (line for command in below for line in describe_subcommand(command, [])))
    variables = {variable: option for command in commands for variable, option in command.variables().items()}
    page.add("ENVIRONMENT", describe_variables(variables))
    page.add("EXIT STATUS", prose("As described in cpumond(8)."))
    examples = [example for command in (commands if not is_group else below) for example in command.examples()]
    page.add("EXAMPLES", as_typed(examples) if examples else ())
    related = [other for other in COMMANDS if COMMANDS[other][0] == COMMANDS[name][0] and other != name]
    see = ["cpumond(8)", *(f"cpumond-{other}({section_of(other)})" for other in related)]
    see += [page for module, page in RELATED_CONFIG.items() if COMMANDS[name][0] == module]
    page.add("SEE ALSO", prose(", ".join(see)))
    return page


def section_of(name: str) -> int:
    return 8 if name in FOR_ADMINISTRATORS else 1


def find_common_options(commands: list[Command]) -> list[tuple[str, str]]:
    """Options that all commands have, with the same text."""
    if len(commands) < 2:
        return []
    first, *others = [command.options() for command in commands]
    return [option for option in first if all(option in other for other in others)]


def describe_option(option: tuple[str, str]) -> Iterator[str]:
    name, text = option
    yield from term(option_name(name), text)


def describe_subcommand(command: Command, common: list[tuple[str, str]]) -> Iterator[str]:
    yield f'.SS "{escape(" ".join(command.path.split()[2:]))}"'
    yield from command.usage()
    yield ".PP"
    yield from paragraphs(command.command.help or "")
    for option in command.options():
        if option not in common:
            yield from describe_option(option)


def describe_variables(variables: dict[str, str]) -> Iterator[str]:
    for variable, option in sorted(variables.items()):
        yield from term(literal(variable), f"Used if `{option}` is not given.")


def describe_command_groups() -> Iterator[str]:
    for title, group in COMMAND_GROUPS.items():
        yield f'.SS "{escape(title)}"'
        for name, (_, text) in group.items():
            yield from term(f"\\fBcpumond\\-{escape(name)}\\fR({section_of(name)})", text)


def describe_exit_codes() -> Iterator[str]:
    """Yield the exit codes of the exceptions that end the program."""
    kinds: tuple[type[errors.CpumondError], ...] = (
        errors.UsageError,
        errors.NoSuchError,
        errors.NotYetError,
        errors.UnavailableError,
        errors.UnknownLimitsError,
        errors.CreateError,
        errors.AccessError,
        errors.RefusedError,
        errors.ConfigError,
    )
    sentences: dict[int, list[str]] = {errors.EXIT_OK: ["Done."]}
    for kind in kinds:
        text = (kind.__doc__ or "").partition(";")[0].strip().rstrip(".")
        sentences.setdefault(kind.exit_code, []).append(f"{text}.")
    for code, texts in sorted(sentences.items()):
        yield from term(literal(str(code)), " ".join(texts))


def make_main_page(pages: list[Page]) -> Page:
    page = Page("cpumond", 8, "CPU limits of jobs follow their usage; fair share of many hosts")
    root = make_root_context()
    own = Command("cpumond", cli, root)
    page.add("SYNOPSIS", own.usage())
    page.add("DESCRIPTION", paragraphs(cli.help or ""))
    page.add("OPTIONS", (line for option in own.options() for line in describe_option(option)))
    page.add("COMMANDS", describe_command_groups())
    agent, scheduler = AgentConfig(), SchedulerConfig()
    files = {
        DEFAULT_CONFIG_PATH: "Configuration of the agent, see cpumond.toml(5); conf.d/*.toml beside it is read too.",
        DEFAULT_SCHEDULER_CONFIG_PATH: "Configuration of the scheduler, see cpumond-scheduler.toml(5).",
        agent.state_dir: "The original limits of changed cgroups, which are restored even if the agent is dead.",
        agent.runtime_dir: "Control socket and lock of the agent. While a file `pause` is in it, no limit is written.",
        scheduler.state_dir: "Databases of the scheduler.",
    }
    page.add("FILES", (line for path, text in files.items() for line in term(literal(path), text)))
    page.add(
        "ENVIRONMENT", term(literal("CPUMOND_DEBUG"), "With any value, an internal error is shown with its traceback.")
    )
    page.add("EXIT STATUS", describe_exit_codes())
    page.add("EXAMPLES", as_typed(own.examples()))
    page.add("SEE ALSO", prose(", ".join(other.reference for other in pages)))
    return page


# ---- configuration files


@dataclass
class Table:
    """One table of a configuration file with its comments."""

    heading: str
    intro: list[str]
    keys: list[tuple[str, str]] = field(default_factory=list)


def read_config(text: str) -> tuple[list[str], list[Table]]:
    """Return the comment at the top, by paragraphs, and the tables; the keys at the top are a table without a
    heading.
    """
    top: list[str] = []
    tables: list[Table] = [Table("", [])]
    comment: list[str] = []
    for line in [*text.splitlines(), ""]:
        heading = re.fullmatch(r"#?(\[.+\])", line)
        if heading is not None:
            tables.append(Table(heading[1], [" ".join(comment)] if comment else []))
            comment = []
        elif re.match(r"#?[A-Za-z_-]+ = ", line):
            tables[-1].keys.append((line.removeprefix("#"), " ".join(comment)))
            comment = []
        elif line.startswith("# "):
            comment.append(line.removeprefix("# "))
        elif line in ("", "#") and comment:
            (top if len(tables) == 1 and not tables[0].keys else tables[-1].intro).append(" ".join(comment))
            comment = []
        else:
            assert line in ("", "#"), f"neither a comment nor a key nor a table: {line!r}"
    return top, tables


def make_config_page(name: str) -> Page:
    path, summary = CONFIG_PAGES[name]
    top, tables = read_config((CONFIG / os.path.basename(path)).read_text(encoding="utf-8"))
    page = Page(name, 5, summary)
    folder = os.path.join(os.path.dirname(path), CONFIG_FOLDERS[name])
    page.add("SYNOPSIS", [literal(path), ".br", literal(f"{folder}/*.toml")])
    page.add("DESCRIPTION", (line for text in top for line in (".PP", *prose(drop_file_name(text)))))
    for table in tables:
        title = f'"THE TABLE {escape(table.heading)}"' if table.heading else "KEYS"
        body = [line for text in table.intro for line in (".PP", *prose(text))]
        body += [line for key, text in table.keys for line in describe_key(key, text)]
        page.add(title, body)
    page.add("SEE ALSO", prose("cpumond(8), cpumond-agent(8), cpumond-check-config(8), cpumond-scheduler(8)"))
    return page


def drop_file_name(text: str) -> str:
    """Remove sentences of a comment about the file itself, which do not apply to the page or to a package's file."""
    text = re.sub(r"^\S+\.toml - ", "", text).replace("Every key is here, commented out, with its default", EVERY_KEY)
    return text[:1].upper() + text[1:]


def describe_key(key: str, text: str) -> Iterator[str]:
    name, _, value = key.partition(" = ")
    if not text:
        text = "A duration." if DURATION.fullmatch(value) else "As above."
    yield from term(f"{literal(name)} = \\fI{escape(value)}\\fR", text)


# ---- all of them


def make_pages() -> list[Page]:
    """All pages, in the order of the program's own list of commands."""
    pages = [*(make_command_page(name) for name in COMMANDS), *(make_config_page(name) for name in CONFIG_PAGES)]
    return [make_main_page(pages), *pages]


def read_date(text: str) -> str:
    found = re.search(r'^\.TH "[^"]*" "[^"]*" "([^"]*)"', text, re.MULTILINE)
    return found[1] if found else ""


def write_pages(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stale = {path.name for path in folder.iterdir()}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for page in make_pages():
        path = folder / f"{page.name}.{page.section}"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before != page.render(read_date(before)):
            path.write_text(page.render(today), encoding="utf-8")
        stale.discard(path.name)
    for name in stale:
        (folder / name).unlink()


def main(arguments: list[str]) -> Any:
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        return (__doc__ or "").partition("\n\n")[2]
    if not arguments:
        importlib.import_module("reference").main()  # docs/commands.md and docs/configuration.md have the same sources
    return write_pages(Path(arguments[0]) if arguments else HERE / "man")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
