"""The steps of the Containerfile that build the program, in directories of the test."""

# ruff: noqa: F811 - fixtures of another file are arguments here

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from test_deploy import REPOSITORY, steps  # noqa: F401 - a fixture


def test_the_steps_of_the_build_give_a_program_that_runs(steps, tmp_path: Path):
    source = tmp_path / "src"
    source.mkdir()
    stage = steps[: [name for name, _ in steps].index("FROM", 2)]
    for name, argument in stage:
        if name == "COPY":
            *sources, target = argument.split()
            for each in sources:
                if (REPOSITORY / each).is_dir():
                    shutil.copytree(REPOSITORY / each, source / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    (source / target).mkdir(exist_ok=True)
                    shutil.copy(REPOSITORY / each, source / target)
    [program] = [argument for name, argument in stage if name == "RUN" and "pip" in argument and "apt" not in argument]
    # In directories of the test. Dependencies are those that the tests have: an image is not built here each time.
    program = re.sub(r"\bpython3 -m venv\b", f"{sys.executable} -m venv", program)
    program = program.replace("--no-cache-dir", "--no-deps")
    [extra] = set(re.findall(r"\[(\w+)\]", program))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extra in project["optional-dependencies"]
    for place in ("/usr/lib/cpumond", "/build", "/built"):
        program = re.sub(rf"(?<!\S){place}\b", str(tmp_path / "image") + place, program)
    build, _, version = program.rpartition("&&")
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["sh", "-ec", build], cwd=source, env=bare, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    program_path = tmp_path / "image" / "usr/lib/cpumond/bin/cpumond"
    assert version.split() == [str(program_path), "--version"]
    assert not any(name.startswith("pip") for name in os.listdir(program_path.parent))
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    for arguments in (["--version"], ["agent", "--help"], ["scheduler", "--help"], ["restore", "--help"]):
        command = [program_path, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    where = [program_path.with_name("python"), "-c", "import cpumond; print(cpumond.__file__)"]
    module = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert module.startswith(str(tmp_path / "image")), "the one in the image, not the one that the tests use"
