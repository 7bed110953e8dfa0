"""The man pages are those of this program: made again they are the same, and the tools of man accept them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
from packaging_script import PACKAGING, load_script

from cpumond.cli import COMMANDS, cli

PAGES = sorted((PACKAGING / "man").iterdir())


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return load_script("man_pages")


def make_pages(program: ModuleType, folder: Path) -> dict[str, str]:
    assert program.main([str(folder)]) is None
    return read(folder)


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def read_page(name: str) -> str:
    (path,) = (PACKAGING / "man").glob(f"cpumond-{name}.[18]")
    text = path.read_text(encoding="utf-8").replace("\\-", "-")
    return re.sub(r"\\f[BIR]", "", text)


def test_the_pages_are_fresh(program: ModuleType, tmp_path: Path) -> None:
    shutil.copytree(PACKAGING / "man", tmp_path / "man")
    assert make_pages(program, tmp_path / "man") == read(PACKAGING / "man"), "run: python packaging/man_pages.py"


def test_a_wrong_call_says_how_to_call_it() -> None:
    done = run(sys.executable, str(PACKAGING / "man_pages.py"), "--help")
    assert done.returncode != 0
    assert done.stderr.startswith("usage: ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_mandoc_has_nothing_to_say(page: Path) -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is missing; Debian's package mandoc has it")
    done = run("mandoc", "-Tlint", str(page))
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_of_each_command_is_in_its_page(name: str) -> None:
    context = click.Context(cli)
    command = cli.get_command(context, name)
    assert command is not None
    below = command.commands.values() if isinstance(command, click.Group) else ()
    page = read_page(name)
    for each in (command, *below):
        for param in each.params:
            if isinstance(param, click.Option) and not param.hidden:
                assert re.search(rf"^(-\w, )?{max(param.opts, key=len)}\b", page, re.MULTILINE), param.opts


def test_an_example_can_be_copied_from_a_page() -> None:
    """What the program's help shows, character by character, when man prints the page for a terminal."""
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is missing; Debian's package mandoc has it")
    text = run("mandoc", "-Tutf8", "-O", "width=200", str(PACKAGING / "man" / "cpumond-operation.1")).stdout
    assert "cpumond operation abort 1a-2b-3c-4d --message 'wrong input'\n" in re.sub(".\x08", "", text)
