"""The Debian package: built by Debian's tools, checked by lintian, and lived through in a throw-away Debian.

One boot installs it, upgrades it from the version before, removes and purges it (``guest/package.py``) while the agent
holds a job's limit down, and leaves facts; each test judges one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from guest_host import HERE, REPOSITORY, Facts, assert_quiet, of, run_guest, skip_without_means

from cpumond import __version__

LIMIT_S = 240
BEFORE = "0.0.9"
ORIGINAL = {
    "cpu.cfs_period_us": "100000",
    "cpu.cfs_quota_us": "100000",
    "cpu.cfs_burst_us": "40000",
    "cpu.shares": "700",
    "unit": "100000",
    "property": "1s",
}
OFF = {"cpumond": "loaded inactive", "cpumond-scheduler": "loaded inactive"}
RUNNING = {"cpumond": "loaded active", "cpumond-scheduler": "loaded active"}
GONE = {"cpumond": "not-found inactive", "cpumond-scheduler": "not-found inactive"}

pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]


# Compressing well takes longer than all the rest of the build.
ENVIRONMENT = {**os.environ, "LC_ALL": "C.UTF-8", "DPKG_DEB_COMPRESSOR_LEVEL": "1"}


def run(*command: str) -> str:
    """What the command prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of this checkout."""
    for tool, name in (("dpkg-buildpackage", "dpkg-dev"), ("dh", "debhelper")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing; Debian's package {name} has it")
    out = tmp_path_factory.mktemp("packages") / "now"
    return Path(run(str(REPOSITORY / "packaging" / "build-deb.sh"), str(out)).strip())


@pytest.fixture(scope="module")
def package_before(package: Path) -> Path:
    """The same with a lower version, in its name and in the program, and another line in a configuration file."""
    folder = package.parents[1] / "before"
    tree = folder / "tree"
    folder.mkdir()
    run("dpkg-deb", "--raw-extract", str(package), str(tree))
    (program,) = tree.glob("usr/lib/cpumond/lib/python*/site-packages/cpumond/__init__.py")
    for path, old, new in (
        (tree / "DEBIAN" / "control", f"Version: {__version__}", f"Version: {BEFORE}"),
        (program, f'__version__ = "{__version__}"', f'__version__ = "{BEFORE}"'),
        (tree / "etc" / "cpumond" / "cpumond.toml", "# cpumond.toml", "# Of the version before.\n# cpumond.toml"),
    ):
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
    target = folder / f"cpumond_{BEFORE}-1_all.deb"
    run("dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(target))
    shutil.rmtree(tree)
    return target


@pytest.fixture(scope="module")
def facts(package: Path, package_before: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """What one boot saw, step by step."""
    skip_without_means()
    work = tmp_path_factory.mktemp("machine")
    stage = work / "in"
    shutil.copytree(HERE / "guest", stage)
    for path in (package, package_before):
        (stage / path.parent.name).mkdir()
        shutil.copy(path, stage / path.parent.name)
    return run_guest("package.py", stage, work / "out", LIMIT_S)


def test_the_package_has_the_version_of_the_program(package: Path) -> None:
    assert run("dpkg-deb", "--field", str(package), "Version").strip() == f"{__version__}-1"


def test_lintian_has_nothing_to_say(package: Path) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("lintian is missing; Debian's package lintian has it")
    assert run("lintian", "--allow-root", "--fail-on", "error,warning", str(package)) == ""


def test_nothing_in_the_package_knows_where_it_was_built(package: Path, tmp_path: Path) -> None:
    """No compiled Python, no path of the build, and programs that start with the interpreter of the package."""
    run("dpkg-deb", "--extract", str(package), str(tmp_path))
    venv = tmp_path / "usr" / "lib" / "cpumond"
    assert [path.name for path in sorted((venv / "bin").iterdir())] == ["cpumond", "python3"]
    assert (venv / "bin" / "cpumond").read_text().startswith("#!/usr/lib/cpumond/bin/python3\n")
    assert os.readlink(tmp_path / "usr" / "bin" / "cpumond") == "../lib/cpumond/bin/cpumond"
    assert not list(venv.rglob("*.pyc"))
    for path in (*tmp_path.glob("usr/lib/cpumond/**/*.dist-info/*"), venv / "pyvenv.cfg"):
        if path.is_file():
            assert "debian/" not in path.read_text(encoding="utf-8"), path


def test_the_jobs_are_there(facts: Facts) -> None:
    fact = of(facts, "jobs")
    assert_quiet(fact["answer"])
    assert fact["settings"] == ORIGINAL


def test_a_fresh_installation_starts_nothing(facts: Facts) -> None:
    fact = of(facts, "install")
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert fact["states"] == OFF
    assert fact["enabled"] == ["disabled", "disabled"]
    assert fact["version"] == f"cpumond, version {BEFORE}\n"
    assert fact["user"].endswith(":/var/lib/cpumond:/usr/sbin/nologin\n")
    assert fact["password"].startswith("!")
    assert_quiet(fact["verify"])
    assert fact["completion"]["output"] == "pool\n"
    assert fact["bytecode"] > 50, "each start would compile the program again"
    assert fact["settings"] == ORIGINAL


def test_the_service_comes_up_in_shadow_mode_and_says_so(facts: Facts) -> None:
    fact = of(facts, "enable")
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert_quiet(fact["scheduler"])
    assert fact["states"] == RUNNING
    assert "shadow" in fact["status_text"] + fact["journal"], fact
    assert fact["settings"] == ORIGINAL


def test_shadow_mode_decides_and_writes_nothing(facts: Facts) -> None:
    fact = of(facts, "shadow")
    assert_quiet(fact["answer"])
    assert fact["decided_s"] is not None, fact
    assert "shadow" in fact["status"]
    assert fact["settings"] == ORIGINAL


def test_reclaim_lowers(facts: Facts) -> None:
    fact = of(facts, "reclaim")
    assert_quiet(fact["answer"])
    assert fact["lowered_s"] is not None


def test_an_upgrade_with_jobs_running(facts: Facts) -> None:
    """While files are replaced every job has what it ordered; the new agent then goes on."""
    fact = of(facts, "upgrade")
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert fact["looks"] > 50
    assert fact["lowered_alone_s"] < 1.0
    assert fact["while_unpacking"] in ([], [int(ORIGINAL["cpu.cfs_quota_us"])])
    assert fact["version"] == f"cpumond, version {__version__}\n"
    assert fact["states"] == RUNNING
    assert fact["new_pid"] not in ("0", fact["old_pid"])
    assert fact["lowered_again_s"] is not None
    assert "Of the version before" not in fact["configuration"]
    assert fact["changed_files"] == ""
    assert fact["scheduler_state"]
    assert not fact["left_behind"]


def test_an_upgrade_starts_nothing_that_was_stopped(facts: Facts) -> None:
    fact = of(facts, "upgrade_stopped")
    assert_quiet(fact["stop"])
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert fact["states"] == OFF
    assert fact["settings"] == ORIGINAL


def test_an_upgrade_with_a_wrong_configuration_is_complete_and_restores(facts: Facts) -> None:
    fact = of(facts, "upgrade_with_wrong_config")
    assert_quiet(fact["start"])
    assert fact["lowered_s"] is not None
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert "cpumond.service did not start again" in fact["answer"]["output"]
    assert "not all limits are back" not in fact["answer"]["output"]
    assert fact["installed"] == "install ok installed"
    assert fact["states"]["cpumond"] == "loaded failed"
    assert fact["lowered_alone_s"] < 1.0
    assert fact["settings"] == ORIGINAL


def test_removing_restores_and_keeps_what_the_operator_wrote(facts: Facts) -> None:
    fact = of(facts, "remove")
    assert_quiet(fact["start"])
    assert fact["lowered_s"] is not None
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert fact["lowered_alone_s"] < 1.0
    assert fact["settings"] == ORIGINAL
    assert fact["states"] == GONE
    assert fact["program"] == []
    assert fact["configuration"] == ["50-jobs.toml", "60-reclaim.toml", "cpumond.toml", "scheduler.toml"]
    assert fact["state"]


def test_purging_restores_what_a_killed_agent_left_and_leaves_nothing(facts: Facts) -> None:
    fact = of(facts, "purge")
    assert fact["install"]["code"] == 0, fact["install"]
    assert fact["after_install"] == OFF
    assert fact["lowered_s"] is not None
    assert int(fact["still_lowered"]["cpu.cfs_quota_us"]) < 100_000
    assert int(fact["still_lowered"]["unit"]) < 100_000
    assert fact["still_lowered"]["property"] != ORIGINAL["property"]
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert fact["settings"] == ORIGINAL
    assert fact["left"] == []
    assert not fact["left_configuration"]
    assert fact["states"] == GONE
    assert fact["known"] != 0
    assert fact["user"] == 0, "the locked user stays, so that nobody else gets its number"
