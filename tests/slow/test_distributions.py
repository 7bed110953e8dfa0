"""Wheel and source distribution: what is in them, that both ways and each build give the same bytes, and that the wheel
runs in an environment of its own. Needs the network."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

import pytest

from cpumond import __version__

REPOSITORY = Path(__file__).resolve().parents[2]
LEFT_BY_TOOLS = (".git", ".venv", ".*cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info")


def build(source: Path, out: Path, *what: str, tools: Path | None = None) -> Path:
    """The one file that was made: with what ``pyproject.toml`` asks for, and nothing else, or with ``tools``."""
    command = [sys.executable, "-m", "build", "--outdir", str(out), *what, str(source)]
    environment = dict(os.environ)
    if tools is not None:
        command.append("--no-isolation")
        environment["PYTHONPATH"] = str(tools)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, without what tests and tools leave in it."""
    copy = tmp_path_factory.mktemp("tree") / "cpumond"
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(*LEFT_BY_TOOLS))
    return copy


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``pyproject.toml`` asks for, installed once for both wheels."""
    target = tmp_path_factory.mktemp("tools")
    wanted = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(target), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tree, tmp_path_factory.mktemp("sdist"), "--sdist")


@pytest.fixture(scope="module")
def wheel(tree: Path, sdist: Path, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tree, tmp_path_factory.mktemp("wheel"), "--wheel", tools=tools)


def list_source(folder: str) -> set[str]:
    found = (path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob("*") if path.is_file())
    return {str(path) for path in found if not any(fnmatch(part, out) for part in path.parts for out in LEFT_BY_TOOLS)}


def read_wheel(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_version_is_that_of_the_program(sdist: Path, wheel: Path) -> None:
    assert sdist.name == f"cpumond-{__version__}.tar.gz"
    assert wheel.name == f"cpumond-{__version__}-py3-none-any.whl"


def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: Path) -> None:
    """Pages, scripts and the mark for type checkers, too."""
    names = {name for name in read_wheel(wheel) if ".dist-info/" not in name}
    assert names == {name for name in list_source("cpumond") if not name.endswith(".md")}


def test_the_source_distribution_has_what_belongs_to_the_program(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    for folder in ("cpumond", "config", "docs", "packaging", "systemd", "tests"):
        assert list_source(folder) <= names, folder
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", ".ci/run"} <= names
    assert not [name for name in names if name.endswith(".pyc")]


def test_two_builds_give_the_same_bytes(
    tree: Path, sdist: Path, wheel: Path, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, by somebody with other rights, locale and time zone; the wheel from the source distribution."""
    other = tmp_path / "elsewhere" / "sources"
    shutil.copytree(tree, other)
    for path in other.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (1e9, 1e9))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "C")
    umask = os.umask(0o077)
    try:
        again = build(other, tmp_path / "sdist", "--sdist", tools=tools)
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path / "unpacked", filter="data")
        (source,) = (tmp_path / "unpacked").iterdir()
        wheel_again = build(source, tmp_path / "wheel", "--wheel", tools=tools)
    finally:
        os.umask(umask)
    assert sha256(again.read_bytes()).hexdigest() == sha256(sdist.read_bytes()).hexdigest()
    assert sha256(wheel_again.read_bytes()).hexdigest() == sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """What a line of shell prints where ``dist/`` is, pipx, uvx, and the wheels that they would fetch."""
    home = tmp_path_factory.mktemp("home")
    tools, wheels, own = (home / name for name in ("tools", "wheels", "dist"))
    for folder in (wheels, own):
        folder.mkdir()
    shutil.copy(wheel, own)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    for command in (
        [*pip, "install", "--no-compile", "--target", str(tools), "pipx", "uv"],
        [*pip, "wheel", "--wheel-dir", str(wheels), str(wheel), "pip"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
    (tools / "bin" / "pipx").write_text(f'#!/bin/sh\nPYTHONPATH={tools} exec {sys.executable} -m pipx "$@"\n')
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PIP", "UV_", "PYTHON"))}
    settings = bare | {
        "HOME": str(home),
        "XDG_CACHE_HOME": f"{home}/.cache",
        "XDG_DATA_HOME": f"{home}/.local/share",
        "PATH": f"{home}/.local/bin:{tools}/bin:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": str(wheels),
        "UV_PYTHON": sys.executable,
    }

    def run(line: str) -> str:
        command = ["bash", "-c", line]
        done = subprocess.run(command, cwd=home, env=settings, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield run
    shutil.rmtree(home)


def find_documented(tool: str) -> str:
    """The line of docs/install.md that begins so, without its comment."""
    text = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^{tool} .*? cpumond demo(?= |$)", text, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize("tool", ["uvx", "pipx"])
def test_the_wheel_alone_runs_the_demo(run: Callable[[str], str], tool: str) -> None:
    """By the lines of docs/install.md: nothing but the wheel and what it names."""
    line = find_documented(tool)
    assert json.loads(run(f"{line} --duration 2 --json").splitlines()[-1])["removed"]
    version = line.replace("cpumond demo", "cpumond --version") if tool == "uvx" else "cpumond --version"
    assert run(version) == f"cpumond, version {__version__}\n"
