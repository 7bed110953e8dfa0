"""Boots the guest of ``nspawn.sh`` for a test module: one script of ``guest/`` runs there and leaves its facts."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
NSPAWN = HERE / "nspawn.sh"
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
GUEST_PYTHON = PYTHONS["bookworm"]
"""What is compiled is fetched for it, whichever Python runs the tests."""
SOURCE_ONLY = ("cgroupspy",)
"""Dependencies published as sources alone; they are pure Python, so a wheel made here fits there."""
SHARED_MODULES = ("executor_contract.py", "waiting.py")

Facts = dict[str, Any]


def skip_without_means() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can boot a guest")
    for tool in ("systemd-nspawn", "mmdebstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing; tests/machine/nspawn.sh deps installs it")
    for controller in ("cpu", "cpuacct"):
        if not os.path.exists(f"/sys/fs/cgroup/{controller}/cgroup.procs"):
            pytest.skip(f"the v1 controller {controller} is not mounted at /sys/fs/cgroup/{controller}")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def gather_wheels(folder: Path, extras: Sequence[str] = ()) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    optional = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *(name for extra in extras for name in optional[extra])]
    pip("wheel", "--no-deps", f"--wheel-dir={folder}", *(each for each in wanted if each.startswith(SOURCE_ONLY)))
    guest = [f"--python-version={GUEST_PYTHON}", "--only-binary=:all:", f"--find-links={folder}"]
    pip("download", f"--dest={folder}", *guest, *wanted, *project["build-system"]["requires"], "wheel")


def install_dependencies(extras: Sequence[str], tools: Sequence[str], python: str = GUEST_PYTHON) -> Path:
    """The dependencies for the guest's Python in a directory, fetched once for each list of them."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    wanted = sorted([*project["dependencies"], *(name for extra in extras for name in optional[extra]), *tools])
    key = hashlib.sha256(json.dumps([python, wanted]).encode()).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cpumond-machine"
    site = base / f"site-{key}"
    base.mkdir(parents=True, exist_ok=True)
    # Several processes of a test run may want the same list at the same moment.
    with (base / "lock-site").open("a+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not site.is_dir():
            part = base / f"site-{key}.part"
            shutil.rmtree(part, ignore_errors=True)
            wheels = part / ".wheels"
            pip("wheel", "--no-deps", f"--wheel-dir={wheels}", *(w for w in wanted if w.startswith(SOURCE_ONLY)))
            guest = [f"--python-version={python}", "--only-binary=:all:", f"--find-links={wheels}"]
            pip("install", f"--target={part}", *guest, *wanted)
            part.rename(site)
    return site


def install_package(target: Path, work: Path) -> None:
    """Built once for all modules of a run, from a copy of the sources; ``work`` is a directory that pytest made."""
    room = work.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else work.parent
    package = room / "package-for-guests"
    with (room / "package-for-guests.lock").open("a+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not package.is_dir():
            source, part = work / "source", work / "package"
            skipped = shutil.ignore_patterns(".*", "tests", "build", "dist", "*.egg-info", "__pycache__")
            shutil.copytree(REPOSITORY, source, ignore=skipped)
            pip("install", "--no-deps", f"--target={part}", str(source))
            part.rename(package)
    shutil.copytree(package, target, dirs_exist_ok=True)


def boot(script: str, work: Path, limit_s: int, extras: Sequence[str] = (), tools: Sequence[str] = ()) -> Facts:
    """Run ``guest/SCRIPT`` in a guest; what it left, step by step. Skips the test on a host that cannot boot one.

    ``extras`` are optional dependencies of the package, ``tools`` what the script needs, integration's modules too.
    """
    skip_without_means()
    stage, out = work / "in", work / "out"
    shutil.copytree(HERE / "guest", stage)
    for folder in ("config", "systemd"):
        shutil.copytree(REPOSITORY / folder, stage / folder)
    shutil.copytree(install_dependencies(extras, tools), stage / "site")
    for module in SHARED_MODULES:
        shutil.copy(REPOSITORY / "tests" / "integration" / module, stage)
    install_package(stage / "site", work)
    return run_guest(script, stage, out, limit_s)


def lives(script: str, limit_s: int, *extras: str, tools: Sequence[str] = ()) -> Any:
    """The fixture of a module: what one boot saw that ran ``guest/SCRIPT``, step by step."""

    @pytest.fixture(scope="module")
    def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
        return boot(script, tmp_path_factory.mktemp("machine"), limit_s, extras, tools)

    return facts


def run_guest(script: str, stage: Path, out: Path, limit_s: int) -> Facts:
    """Run ``stage/SCRIPT`` in a guest where ``stage`` is /in and ``out`` is /out; what it left, step by step."""
    stage.chmod(0o755)
    command = [str(NSPAWN), "run", "-i", str(stage), "-o", str(out), "-t", str(limit_s)]
    # The script ends the guest by itself after limit_s; it gets time for the first build of the guest on top.
    with subprocess.Popen(
        [*command, "--", "python3", f"/in/{script}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as guest:
        try:
            output, _ = guest.communicate(timeout=limit_s + 400)
        finally:
            guest.terminate()  # it tidies up at SIGTERM
    path = out / "facts.json"
    assert path.exists(), f"nspawn.sh exited with {guest.returncode}:\n{output}"
    result: Facts = json.loads(path.read_text(encoding="utf-8"))
    assert guest.returncode == 0, f"nspawn.sh exited with {guest.returncode} after {list(result)}:\n{output}"
    journal = out / "journal.txt"
    print(journal.read_text(encoding="utf-8"))  # shown when the first test fails
    return result


def of(facts: Facts, step: str) -> Facts:
    assert step in facts, f"not reached; the last step was {list(facts)[-1]}: {facts[list(facts)[-1]]}"
    fact: Facts = facts[step]
    assert "error" not in fact, fact["error"]
    return fact


def assert_passed(tests: Facts, *also: str) -> None:
    """Tests that ran in the guest: each passed, or its outcome is one of ``also``. Names those that did not."""
    failures = {name: fact["text"] for name, fact in tests.items() if fact["outcome"] not in ("passed", *also)}
    texts = "".join(f"\n\n{name}:\n{text}" for name, text in failures.items())
    assert not failures, f"{len(failures)} of {len(tests)} tests failed in the guest: {', '.join(failures)}{texts}"


def assert_quiet(*answers: Facts) -> None:
    """Commands that succeeded and said nothing."""
    assert [answer for answer in answers if answer != {"code": 0, "output": ""}] == []


def assert_came(fact: Facts, *names: str) -> None:
    """Each of these was waited for, and came in time."""
    assert [name for name in names if fact[name] is None] == [], fact
