"""README's first lines in a checkout on a bare Debian, the package that is built there, and lintian's word on it."""

import json
import re
import shutil
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from readme_lines import find_line, read_installation

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "machine"))
import test_package
from guest_host import HERE, REPOSITORY, Facts, gather_wheels, of, run_guest, skip_without_means
from test_distributions import LEFT_BY_TOOLS

BUILD = read_installation()["build"]
LIMIT_S = 400
package = test_package.package

pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    skip_without_means()
    work = tmp_path_factory.mktemp("machine")
    stage = work / "in"
    shutil.copytree(HERE / "guest", stage)
    # The checkout, without what tests and tools leave in it.
    shutil.copytree(REPOSITORY, stage / "checkout", ignore=shutil.ignore_patterns(*LEFT_BY_TOOLS))
    gather_wheels(stage / "wheels", ("postgresql",))
    (stage / "readme.json").write_text(json.dumps([find_line("demo"), find_line("estimate"), BUILD]))
    with pytest.MonkeyPatch.context() as patch:
        (named,) = re.findall(r"apt-get install -y (.*?) &&", BUILD)
        patch.setenv("MACHINE_PACKAGES", f"{named} build-essential")
        return run_guest("first_minutes.py", stage, work / "out", LIMIT_S)


def test_lintian_has_nothing_to_say(package: Path) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("lintian is missing; Debian's package lintian has it")
    assert test_package.run("lintian", "--allow-root", "--fail-on", "error,warning", str(package)) == ""


def test_two_builds_give_the_same_bytes(package: Path, facts: Facts) -> None:
    """The second on a bare Debian by README's line, by somebody with other rights, locale and time zone."""
    fact = of(facts, "build")
    assert fact["code"] == 0, fact["output"]
    assert fact["sha256"] == [sha256(package.read_bytes()).hexdigest()]


# The limits in seconds of these three are README's promises. What pip would fetch lies on the guest's disk.
def test_the_demo_runs_within_half_a_minute_of_the_first_line(facts: Facts) -> None:
    """On a bare Debian with README's line alone, as it stands and without a terminal."""
    fact = of(facts, "demo")
    assert fact["first_s"] < 3.0, fact
    assert fact["word_s"]["simulation started"] < 30.0
    assert "render-1 started" in fact["word_s"], fact
    assert fact["megabytes"] <= 130
    end = of(facts, "ends")["demo"]
    assert end["code"] == 0, end["output"]
    assert end["took_s"] < 200.0
    assert "Everything that the demo made is removed." in end["output"]


def test_the_estimate_is_there_within_two_minutes(facts: Facts) -> None:
    fact = of(facts, "ends")["estimate"]
    assert fact["code"] == 0, fact["output"]
    assert fact["took_s"] < 120.0
    table = re.findall(r"^(?:workload |total,).*", fact["output"], re.MULTILINE)
    assert len(table) >= 2
    assert max(map(len, table)) <= 80
