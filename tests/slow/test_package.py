"""The Debian package, built by Debian's tools. One boot of a throw-away Debian installs it as the README says, upgrades
it, removes and purges it (``guest/package.py``) while the agent holds limits of jobs down; each test judges a fact that
it leaves. "The version before" is this one under a lower number: no other was released yet."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from readme_lines import read_blocks, read_installation

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "machine"))
from guest_host import HERE, REPOSITORY, Facts, assert_quiet, of, run_guest, skip_without_means

from cpumond import __version__
from cpumond.agent.config import load_config
from cpumond.scheduler.program.config import load_scheduler_config

LIMIT_S = 500
README = read_installation()
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


def run(*command: str, **environment: str) -> str:
    """What the command prints; it must succeed."""
    env = {**ENVIRONMENT, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        (tree / "etc" / "cpumond" / "cpumond.toml", "# The agent", "# Of the version before.\n# The agent"),
    ):
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
    target = folder / f"cpumond_{BEFORE}-1_all.deb"
    run("dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(target))
    shutil.rmtree(tree)
    return target


@pytest.fixture(scope="module")
def broken_package(package: Path) -> Path:
    """A next version whose first script fails, before any file was unpacked."""
    folder = package.parents[1] / "broken"
    control = folder / "tree" / "DEBIAN"
    control.mkdir(parents=True)
    fields = {"Package": "cpumond", "Version": "999", "Architecture": "all", "Maintainer": "Nobody", "Description": "-"}
    (control / "control").write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    (control / "preinst").write_text("#!/bin/sh\nexit 1\n")
    (control / "preinst").chmod(0o755)
    target = folder / "cpumond_999_all.deb"
    run("dpkg-deb", "--root-owner-group", "-Znone", "--build", str(control.parent), str(target))
    return target


def read_documents() -> dict[str, Any]:
    """What README tells to type: the installation and its configuration; and the steps of a roll-out."""
    (toml,) = (block for block in read_blocks("toml") if "managed_roots" in block)
    text = (REPOSITORY / "docs" / "rollout.md").read_text(encoding="utf-8")
    heads = (r"2\. Guarantee \| `(.*?)`, ", r"3\. Weight \| `(.*?)` \|", r"4\. Quota \| `(.*?)` \|")
    steps = ".*".join(rf"^\| {head}" for head in heads)
    ((mode, weight, quota),) = re.findall(steps, text, re.MULTILINE | re.DOTALL)
    return {"lines": README, "toml": toml, "mode": mode, "weight": weight, "quota": quota}


@pytest.fixture(scope="module")
def facts(package: Path, package_before: Path, broken_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    skip_without_means()
    work = tmp_path_factory.mktemp("machine")
    stage = work / "in"
    shutil.copytree(HERE / "guest", stage)
    # A folder each, as build-deb.sh leaves it.
    for path in (package, package_before, broken_package):
        (stage / path.parent.name / "dist").mkdir(parents=True)
        shutil.copy(path, stage / path.parent.name / "dist")
    (stage / "readme.json").write_text(json.dumps(read_documents()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MACHINE_PACKAGES", "zsh fish bash-completion man-db")
        return run_guest("package.py", stage, work / "out", LIMIT_S)


def test_the_package_has_the_version_of_the_program(package: Path) -> None:
    assert run("dpkg-deb", "--field", str(package), "Version").strip() == f"{__version__}-1"


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


def test_what_dpkg_might_ask_about_has_nothing_to_change(package: Path, tmp_path: Path) -> None:
    """Valid, without a key even in comments, and it says where one's own go."""
    run("dpkg-deb", "--extract", str(package), str(tmp_path))
    etc = tmp_path / "etc" / "cpumond"
    for name, folder in (("cpumond.toml", "conf.d"), ("scheduler.toml", "scheduler.conf.d")):
        text = (etc / name).read_text(encoding="utf-8")
        assert not re.search(r"^#?[\w-]+ = |^#?\[", text, re.MULTILINE)
        assert f"/etc/cpumond/{folder}/*.toml" in text
        assert list((etc / folder).iterdir()) == []
        assert (tmp_path / "usr/share/doc/cpumond/config" / name).is_file()
        assert f"/usr/share/doc/cpumond/config/{name}" in text
    for load, name in ((load_config, "cpumond.toml"), (load_scheduler_config, "scheduler.toml")):
        shipped, full = (
            {**msgspec.structs.asdict(load(str(folder / name))), "path": ""} for folder in (etc, REPOSITORY / "config")
        )
        assert shipped == full


def test_links_in_the_installed_documents_lead_somewhere(package: Path, tmp_path: Path) -> None:
    run("dpkg-deb", "--extract", str(package), str(tmp_path))
    documents = sorted((tmp_path / "usr/share/doc/cpumond").rglob("*.md"))
    assert len(documents) >= 5
    for document in documents:
        text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) + re.findall(r'src="([^"]+)"', text):
            assert "://" in target or (document.parent / target).exists(), (document.name, target)


def test_the_jobs_are_there(facts: Facts) -> None:
    fact = of(facts, "jobs")
    assert_quiet(fact["answer"])
    assert fact["settings"] == ORIGINAL


def test_a_fresh_installation_starts_nothing(facts: Facts) -> None:
    fact = of(facts, "install")
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert (fact["states"], fact["enabled"], fact["settings"]) == (OFF, ["disabled", "disabled"], ORIGINAL)
    assert fact["version"] == f"cpumond, version {BEFORE}\n"
    assert fact["user"].endswith(":/var/lib/cpumond:/usr/sbin/nologin\n")
    assert fact["password"].startswith("!")
    assert_quiet(fact["verify"])
    assert fact["modes"] == {"/etc/cpumond": "0o755", "/etc/cpumond/conf.d": "0o755"}
    assert fact["check"]["code"] == 0, fact["check"]
    assert fact["bytecode"] > 50, "each start would compile the program again"


def test_the_service_comes_up_in_shadow_mode_and_says_so(facts: Facts) -> None:
    fact = of(facts, "enable")
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert_quiet(fact["scheduler"])
    assert (fact["disable"], fact["states"], fact["settings"]) == (0, RUNNING, ORIGINAL)
    assert "shadow" in fact["status_text"] + fact["journal"], fact


def test_shells_load_the_completion(facts: Facts) -> None:
    """What Tab makes of ``cpumond ope`` in a terminal."""
    assert of(facts, "shells")["completed"] == dict.fromkeys(("bash", "zsh", "fish"), "<cpumond><operation>")


def test_man_finds_the_pages(facts: Facts) -> None:
    pages = {name.partition(" ")[2]: text.split("\n") for name, text in of(facts, "shells")["pages"].items()}
    for name, lines in pages.items():
        assert lines[0].startswith(f"{name.upper()}("), lines
        assert len(lines) > 40, name


def test_shadow_mode_decides_and_writes_nothing(facts: Facts) -> None:
    """Built, installed, configured and enabled by the README's lines."""
    fact = of(facts, "shadow")
    editor, enable = fact["answers"]
    assert_quiet(editor)
    assert enable["code"] == 0, enable
    assert fact["decided_s"] is not None, fact
    assert re.search(r"(?ms)\(would be\).*^two\.service +shadow +1\.00 +1\.00 +0\.", fact["status"])
    assert "shadow" in fact["status_text"]
    assert fact["settings"] == ORIGINAL


def test_weight_takes_precedence_and_no_cpu(facts: Facts) -> None:
    fact = of(facts, "weight")
    assert_quiet(fact["answer"])
    assert fact["before"] == [int(ORIGINAL["cpu.shares"]), 1024]
    assert fact["lowered_s"] is not None, fact
    assert {**fact["settings"], "cpu.shares": ORIGINAL["cpu.shares"]} == ORIGINAL


def test_quota_lowers_and_gives_the_weight_back(facts: Facts) -> None:
    fact = of(facts, "quota")
    assert_quiet(fact["answer"])
    assert fact["lowered_s"] is not None
    assert fact["told_s"] is not None, "the rule for polkit lets the agent tell systemd"
    assert fact["shares"] == of(facts, "weight")["before"]


def test_an_upgrade_that_fails_leaves_the_old_version_running(facts: Facts) -> None:
    fact = of(facts, "broken_upgrade")
    assert fact["answer"]["code"] != 0
    assert (fact["states"], fact["version"]) == (RUNNING, f"cpumond, version {BEFORE}\n")
    assert fact["new_pid"] not in ("0", fact["old_pid"]), "it was stopped before any file could change"
    assert fact["lowered_again_s"] is not None
    assert not fact["left_behind"]


def test_an_upgrade_waits_for_an_agent_that_is_about_to_end(facts: Facts) -> None:
    fact = of(facts, "upgrade_while_ending")
    for name in ("died", "stopped"):
        assert fact[name]["is_ending"]
        assert "another agent is running" not in fact[name]["answer"]["output"], fact[name]
    assert fact["died"]["states"] == RUNNING
    assert fact["stopped"]["states"] == {**RUNNING, "cpumond": "loaded inactive"}
    assert_quiet(fact["start"])
    assert fact["lowered_s"] is not None


def test_an_upgrade_with_jobs_running(facts: Facts) -> None:
    """While files are replaced every job has what it ordered; the new agent then goes on. Nothing is asked."""
    fact = of(facts, "upgrade")
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert fact["looks"] > 50
    assert fact["lowered_alone_s"] < 5.0
    assert fact["unpacking_looks"] > 0
    assert fact["while_unpacking"] == [int(ORIGINAL["cpu.cfs_quota_us"])]
    assert "onfiguration file" not in fact["answer"]["output"]
    assert fact["mode"] == "0o700", "as the operator wants it"
    assert (fact["states"], fact["version"]) == (RUNNING, f"cpumond, version {__version__}\n")
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
    assert (fact["states"], fact["settings"]) == (OFF, ORIGINAL)


def test_an_upgrade_with_a_wrong_configuration_is_complete_and_restores(facts: Facts) -> None:
    fact = of(facts, "upgrade_with_wrong_config")
    assert_quiet(fact["start"])
    assert fact["lowered_s"] is not None
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert "cpumond.service did not start again" in fact["answer"]["output"]
    assert "not all limits are back" not in fact["answer"]["output"]
    assert (fact["installed"], fact["states"]["cpumond"]) == ("install ok installed", "loaded failed")
    assert fact["lowered_alone_s"] < 5.0
    assert fact["settings"] == ORIGINAL


def test_an_agent_that_does_not_stop_keeps_its_program(facts: Facts) -> None:
    fact = of(facts, "remove_refused")
    assert_quiet(fact["start"])
    assert fact["answer"]["code"] != 0
    assert "cpumond: the agent still runs" in fact["answer"]["output"]
    assert fact["installed"] == "deinstall ok installed", "wanted off, and complete"
    assert fact["version"] == f"cpumond, version {__version__}\n"
    assert fact["new_pid"] == fact["old_pid"] != "0"


def test_removing_restores_and_keeps_what_the_operator_wrote(facts: Facts) -> None:
    fact = of(facts, "remove")
    assert fact["lowered_s"] is not None
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert fact["lowered_alone_s"] < 5.0
    assert (fact["settings"], fact["states"], fact["program"]) == (ORIGINAL, GONE, [])
    assert fact["configuration"] == [
        *("05-pace.toml", "cpumond.toml", "jobs.toml"),
        *("other-jobs.toml", "rollout.toml", "scheduler.toml"),
    ]
    assert fact["state"]


def test_purging_keeps_what_is_still_needed_and_says_what_to_do(facts: Facts) -> None:
    """One limit cannot go back, which counts more than the configuration that is wrong as well; a job runs."""
    fact = of(facts, "purge_unfinished")
    assert fact["install"]["code"] == 0, fact["install"]
    assert fact["after_install"] == OFF
    assert_quiet(fact["job"])
    assert fact["lowered_s"] is not None
    answer = fact["answer"]
    assert answer["code"] == 0, answer
    for said in ("no_such_option", "not all limits are back", "/var/lib/cpumond stays", "jobs still run"):
        assert said in answer["output"]
    assert int(fact["settings"]["cpu.cfs_quota_us"]) < 100_000
    assert {name: fact["settings"][name] for name in ("unit", "property")} == {"unit": "100000", "property": "1s"}
    assert fact["states"] == [True, True]
    assert fact["marker"]
    assert fact["job_files"]
    assert not fact["left_configuration"]
    assert fact["again"]["code"] == 0, fact["again"]
    assert not fact["marker_again"]
    assert fact["restore"]["code"] == 0, fact["restore"]
    assert fact["settings_again"] == ORIGINAL


def test_purging_restores_what_a_killed_agent_left_and_leaves_nothing(facts: Facts) -> None:
    fact = of(facts, "purge")
    assert fact["jobs_dir"]
    assert fact["lowered_s"] is not None
    assert int(fact["still_lowered"]["cpu.cfs_quota_us"]) < 100_000
    assert int(fact["still_lowered"]["unit"]) < 100_000
    assert fact["still_lowered"]["property"] != ORIGINAL["property"]
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert (fact["settings"], fact["states"], fact["left"]) == (ORIGINAL, GONE, [])
    assert not fact["left_configuration"]
    assert fact["known"] != 0
    assert fact["user"] == 0, "the locked user stays, so that nobody else gets its number"
