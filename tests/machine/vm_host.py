"""Boots the machine of ``vm.sh`` for a test module: scripts of ``guest/`` run there one after the other."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from guest_host import GUEST_PYTHON, HERE, REPOSITORY, Facts, install_dependencies, install_package
from turns import stopped_clock

VM = HERE / "vm.sh"
EXTRAS = ("scheduler", "postgresql")
TOOLS = ("pytest>=8.2", "pytest-timeout>=2.3", "pyyaml>=6.0")
SLOWNESS = 6.0
"""What is waited for is waited for so many times as long, where the processor is emulated."""

BUILD_S = 900
"""For the image, where there is none yet."""

RUN_PART = """
if [ ! -e /out/{name}/done ]; then
    [ -e /var/begun-{name} ] || rm -rf /out/{name}
    mkdir -p /out/{name}
    touch /var/begun-{name}
    echo "{name}: begins"
    began=$(date +%s)
    timeout --kill-after=10 {limit_s} python3 /in/{script} >>/out/{name}/output.txt 2>&1
    code=$?
    for file in facts.json journal.txt; do if [ -e /out/$file ]; then mv /out/$file /out/{name}/; fi; done
    case $code in 124 | 137) echo "{name}: ended after its limit of {limit_s} s" ;; esac
    echo "{name}: exit code $code after $(($(date +%s) - began)) s"
    [ $code = 0 ] || tail -n {tail} /out/{name}/output.txt
    [ ! -e /machine/again ] || exit 0
    touch /out/{name}/done
fi
"""
"""A part that wants a reboot is run again after it, those before it are not. One that was under way when the guest was
lost begins anew, on a system that knows nothing of it."""
TAIL = 60
"""Lines of a part's output that are shown when it fails."""


@dataclass(frozen=True)
class Part:
    """A script of ``guest/``, and how long it may take."""

    name: str
    limit_s: int

    @property
    def script(self) -> str:
        return f"{self.name}.py"


@dataclass
class Machine:
    """What a machine left: the facts of each part, its output, how long all took, and the exit code of ``vm.sh``."""

    layout: str
    took_s: float
    output: str
    code: int
    facts: dict[str, Facts] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)

    def of(self, part: str) -> Facts:
        assert part in self.facts, f"{part} left nothing: {self.outputs.get(part, '')[-3000:]}\n{self.output[-5000:]}"
        return self.facts[part]

    def times(self) -> str:
        ends = re.findall(r"^(\w+: (?:exit code|ended after) .*)$", self.output, re.MULTILINE)
        return "; ".join(end.replace("exit code 0 after ", "") for end in ends)


def skip_without_means() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make the machine's image")
    for tool in ("qemu-system-x86_64", "mmdebstrap", "mke2fs", "debugfs", "zstd"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing; tests/machine/vm.sh deps installs it")


def make_stage(stage: Path, work: Path, tests: Iterable[str], python: str = GUEST_PYTHON) -> None:
    """What the guest gets as /in: scripts, the package with all it needs, tests; of integration those it may open."""
    shutil.copytree(HERE / "guest", stage)
    shutil.copytree(REPOSITORY / "systemd", stage / "systemd")
    shutil.copytree(install_dependencies(EXTRAS, TOOLS, python), stage / "site")
    install_package(stage / "site", work)
    repository = stage / "repository"
    ignored = shutil.ignore_patterns("__pycache__", "machine", "unit", "property", "bench", "data")
    shutil.copytree(REPOSITORY / "tests", repository / "tests", ignore=ignored)
    for name in ("config", "docs/deploy", "pyproject.toml", "README.md"):
        source = REPOSITORY / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, repository / name)
    # It is for many tests at once, and loads Hypothesis, which takes long there.
    (repository / "tests" / "conftest.py").unlink()
    for module in ("executor_contract.py", "waiting.py"):
        shutil.copy(REPOSITORY / "tests" / "integration" / module, stage)
    compile_ahead(stage, tests)
    for path in (stage, *stage.rglob("*")):  # jobs of other users read it, too
        path.chmod(path.stat().st_mode | 0o444 | (0o111 if path.is_dir() else 0))


def compile_ahead(stage: Path, tests: Iterable[str]) -> None:
    """What the guest would compile at each import, as it cannot write into /in; another Python does it itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment.update(PYTHONPATH=str(stage / "site"), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    settings = ["-p", "pytest_timeout", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers"]
    repository = stage / "repository"
    files = [str(repository / "tests" / "integration" / name) for name in sorted(tests)]
    for command in (
        ["compileall", "-q", str(stage)],
        ["pytest", "--collect-only", "-q", *settings, "-c", str(repository / "pyproject.toml"), *files],
        ["pytest", "--collect-only", "-q", *settings, "--rootdir", str(stage), str(stage / "systemd_contract.py")],
    ):
        subprocess.run(
            [sys.executable, "-m", *command], cwd=stage, env=environment, capture_output=True, timeout=300, check=False
        )


@contextlib.contextmanager
def only_machine() -> Iterator[None]:
    """Two at once would each be half as fast."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cpumond-machine"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock-run").open("a+") as lock:
        with stopped_clock():
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def limit_of(parts: Sequence[Part]) -> int:
    """Seconds for a machine that runs these parts, with its boots."""
    return sum(part.limit_s for part in parts) + 300


def boot(
    layout: str, stage: Path, out: Path, parts: Sequence[Part], plan: dict[str, Any], settings: Mapping[str, str]
) -> Machine:
    """Boot once, when no other machine runs, and run parts with ``settings`` in their environment; what they left."""
    (stage / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    values = {"PYTHONPATH": "/in/site", "CPUMOND_SLOWNESS": f"{SLOWNESS:g}", **settings}
    environment = "export " + " ".join(f"{name}={value}" for name, value in values.items())
    lines = [RUN_PART.format(name=part.name, script=part.script, limit_s=part.limit_s, tail=TAIL) for part in parts]
    limit_s = limit_of(parts)
    command = [str(VM), "run", "-c", layout, "-i", str(stage), "-o", str(out), "-t", str(limit_s), "--"]
    command += ["bash", "-c", "\n".join((environment, *lines))]
    with only_machine():
        subprocess.run([str(VM), "build"], check=True, timeout=BUILD_S, stdout=subprocess.DEVNULL)
        begin_s = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as guest:
            try:
                output, _ = guest.communicate(timeout=limit_s + 60)
            finally:
                guest.terminate()  # it tidies up at SIGTERM
        machine = Machine(layout, time.monotonic() - begin_s, output, guest.returncode)
    for part in parts:
        place = out / part.name
        if (place / "facts.json").exists():
            machine.facts[part.name] = json.loads((place / "facts.json").read_text(encoding="utf-8"))
        if (place / "output.txt").exists():
            machine.outputs[part.name] = (place / "output.txt").read_text(encoding="utf-8", errors="replace")
    return machine
