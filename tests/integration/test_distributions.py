"""Wheel and source distribution: what is in them, that both ways and each build give the same bytes, and that the wheel
runs in an environment of its own. Needs the network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

import pytest

from cpumond import __version__

REPOSITORY = Path(__file__).resolve().parents[2]
LEFT_BY_TOOLS = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info")


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
    left = shutil.ignore_patterns(
        ".git", ".venv", ".*cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info"
    )
    shutil.copytree(REPOSITORY, copy, ignore=left)
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
    """The files of a folder of the checkout."""
    found = (path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob("*") if path.is_file())
    return {
        str(path) for path in found if not any(fnmatch(part, left) for part in path.parts for left in LEFT_BY_TOOLS)
    }


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


def test_the_wheel_alone_runs_the_demo(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pipx and uvx install it: nothing but the wheel and what it names."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr

    def run(*arguments: str) -> str:
        command = [python.with_name("cpumond"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version") == f"cpumond, version {__version__}\n"
    assert json.loads(run("demo", "--duration", "2", "--json"))["removed"]
