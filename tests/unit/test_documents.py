"""README, CONTRIBUTING.md and docs/: links, commands, configuration keys and metrics that they name exist."""

import re
import tomllib
from collections.abc import Callable
from types import ModuleType
from typing import get_args

import click
import pytest
from documents import DOCUMENTS, FENCED, ROOT, expand, list_commands
from packaging_script import load_script

from cpumond.agent.config import parse_config_text
from cpumond.cli import cli
from cpumond.core.errors import ConfigError
from cpumond.scheduler.answers.causes import CauseKind
from cpumond.scheduler.answers.idle import KINDS
from cpumond.scheduler.events import EventKind
from cpumond.scheduler.program.config import parse_scheduler_config_text


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("reference")


def list_anchors(text: str) -> set[str]:
    """Ids of a document's headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "", each)).lower().replace(" ", "-") for each in headings}


def test_links_lead_to_files_and_headings_and_do_not_break_across_lines() -> None:
    broken, count = [], 0
    for document in [*DOCUMENTS, ROOT / "CHANGELOG.md"]:
        text = FENCED.sub("", document.read_text(encoding="utf-8"))
        for path, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
            count += 1
            target = document.parent / path if path else document
            if "\n" in path or ("://" not in path and not target.exists()):
                broken.append((document.name, path))
            elif anchor and "://" not in path and anchor not in list_anchors(target.read_text(encoding="utf-8")):
                broken.append((document.name, f"{path}#{anchor}"))
    assert broken == []
    assert count > 250


def test_each_page_is_in_the_table_of_contents() -> None:
    contents = ROOT / "docs" / "README.md"
    linked = {(contents.parent / path).resolve() for path in re.findall(r"\]\(([^)#:]+)", contents.read_text())}
    pages = {path for path in DOCUMENTS if "docs" in path.parts and path != contents}
    assert [str(page.relative_to(ROOT)) for page in sorted(pages - linked)] == []


def test_files_of_the_repository_that_documents_name_exist() -> None:
    named = re.compile(r"`(?:python |sh )?((?:cpumond|tests|packaging|config|docs|systemd)/[\w./-]+\w)(?=[` ])")
    found = {(path.name, name) for path in DOCUMENTS for name in named.findall(path.read_text(encoding="utf-8"))}
    assert len(found) > 60
    assert sorted(each for each in found if not (ROOT / each[1]).exists()) == []


def test_paragraphs_are_short() -> None:
    """At most four lines and a few words; lists, tables, and the specification are not bound."""
    long = []
    for document in DOCUMENTS:
        text = FENCED.sub("", document.read_text(encoding="utf-8"))
        for paragraph in re.split(r"\n\s*\n", re.sub(r"<!-- made by.*?<!-- end -->", "", text, flags=re.DOTALL)):
            is_prose = not re.match(r"\s*(?:[-|#>!<]|\d+\. )", paragraph)
            if is_prose and "specification" not in document.parts and len(" ".join(paragraph.split())) > 4.5 * 125:
                long.append((document.name, paragraph[:60]))
    assert long == []


def test_the_newest_section_of_the_changelog_is_read_at_one_sitting() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert len(newest.splitlines()) <= 150


def test_documents_that_the_program_names_exist() -> None:
    patterns = ("cpumond/**/*.py", "config/*.toml", "systemd/*", "packaging/etc/*")
    places = [path for pattern in patterns for path in ROOT.glob(pattern)]
    texts = [path.read_text(encoding="utf-8") for path in places if path.is_file()]
    named = {name for text in texts for name in re.findall(r"\bdocs/[\w./-]+\.md", text)}
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def parse(words: list[str], hidden: dict[str, dict[str, str]]) -> None:
    """Parse the words after ``cpumond`` as the program does. Raises click.UsageError."""
    command: click.Command | None = cli
    context = click.Context(cli, info_name="cpumond", **cli.context_settings)
    name = ""
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, words = words[0], words[1:]
        command = command.get_command(context, name)
        if command is None:
            raise click.UsageError(f"no command {name!r}")
        context = click.Context(command, info_name=name, parent=context)
    if words and words[0] in hidden.get(name, {}):
        return
    assert command is not None
    if isinstance(command, click.Group) and not words:
        return  # a group by its name
    try:
        command.make_context(name, list(words), parent=context.parent)
    except click.exceptions.Exit:
        return  # --help, --version
    except click.MissingParameter:
        raise
    except click.BadParameter as error:
        if not re.search(r"does not exist|No such file", error.format_message()) and not has_placeholder(words):
            raise


def has_placeholder(words: list[str]) -> bool:
    return any(re.fullmatch(r"[A-Z]+", word) for word in words)


def test_commands_that_documents_name_are_those_of_the_program() -> None:
    hidden = load_script("man_pages").HIDDEN_COMMANDS
    wrong, count = [], 0
    for document in DOCUMENTS:
        if document.name == "commands.md":
            continue  # usage lines, generated
        for words, is_fenced in list_commands(document.read_text(encoding="utf-8")):
            count += 1
            try:
                parse(words, hidden)
            except (click.MissingParameter, click.BadOptionUsage) as error:
                if is_fenced or isinstance(error, click.NoSuchOption):
                    wrong.append((str(document.relative_to(ROOT)), " ".join(words), error.format_message()))
            except click.UsageError as error:
                wrong.append((str(document.relative_to(ROOT)), " ".join(words), error.format_message()))
    assert wrong == []
    assert count > 300


@pytest.mark.parametrize("words", ["nosuch", "why --nosuch", "pool nosuch", "undo x --plan", "node drain --plan"])
def test_a_wrong_command_is_found(words: str) -> None:
    with pytest.raises(click.UsageError):
        parse(words.split(), {})


@pytest.mark.parametrize(
    ("page", "kinds"), [("why-waits", get_args(CauseKind)), ("why-idle", KINDS), ("events", get_args(EventKind))]
)
def test_pages_list_every_kind(page: str, kinds: tuple[str, ...]) -> None:
    cells = re.findall(r"^\| (`.*?) \|", (ROOT / f"docs/{page}.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(set(kinds) - set(re.findall(r"`([^`]+)`", " ".join(cells)))) == []


def test_the_generated_references_are_fresh(script: ModuleType) -> None:
    text = script.DOCUMENT.read_text(encoding="utf-8")
    assert script.make_document(text) == text, "run: python packaging/reference.py"
    assert script.make_commands() == script.COMMANDS.read_text(encoding="utf-8"), "run: python packaging/reference.py"


def test_keys_that_documents_name_with_their_table_exist(script: ModuleType) -> None:
    known = {key for _, key, _ in script.read_versions(script.DOCUMENT.read_text(encoding="utf-8"))}
    texts = {path.name: " ".join(path.read_text(encoding="utf-8").split()) for path in DOCUMENTS}
    named = {(name, key) for name, text in texts.items() for key in re.findall(r"`(\[\w+\] [\w-]+)", text)}
    assert len(named) > 40
    assert sorted(each for each in named if each[1] not in known) == []


def test_configurations_that_documents_show_have_known_keys_and_values() -> None:
    wrong, count = [], 0
    for document in DOCUMENTS:
        for language, block in FENCED.findall(document.read_text(encoding="utf-8")):
            if language == "toml" and "pools" not in tomllib.loads(block):
                count += 1
                said = [find_problem(parse, block) for parse in (parse_config_text, parse_scheduler_config_text)]
                if all(said):
                    wrong.append((document.name, said))
    assert wrong == []
    assert count > 15


def find_problem(parse_text: Callable[[str, str], object], text: str) -> str:
    try:
        parse_text(text, "x.toml")
    except ConfigError as error:
        return str(error)
    return ""


def test_the_settings_that_matter_are_keys_of_the_configuration(script: ModuleType) -> None:
    table = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    known = {key.split()[-1] for _, key, _ in script.read_versions(script.DOCUMENT.read_text(encoding="utf-8"))}
    first_cells = "".join(re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE))
    keys = {key for name in re.findall(r"`(?:\[\w+\] )?([\w{},]+)`", first_cells) for key in expand(name)}
    assert len(keys) > 25
    assert keys <= known


# ---- metrics: test_dashboards.py looks for them
