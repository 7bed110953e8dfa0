"""The emulated machine, what takes longer than ``tests/machine/test_vm.py`` may: on v2 units as jobs under real load
(``guest/units.py``), the executor of kind ``systemd``, two reboots, and names of engines' jobs; what looks at mounts,
limits and discovery on ``v1``, with cpu and cpuacct mounted together, and on ``hybrid``."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "machine"))
import test_vm
from guest_host import Facts, assert_passed, of
from judge_units import CHECKS, FLOOR_US, QUOTA_US, assert_same
from vm_host import BUILD_S, Machine, Part, limit_of

from cpumond.core.job_cgroups import IDLE_SLICE

UNITS_SLOW = 5.0
"""How many times longer the guest's periods are."""
UNITS_PATIENCE = 3 * UNITS_SLOW
"""What its times are judged by: the host may let an emulated processor wait. ``test_units_as_jobs.py`` is exact."""
UNITS = Part("units", 900)
CONTRACT_OF_SYSTEMD = Part("systemd_contract", 750)
REBOOT = Part("reboot", 300)
QUOTA_DEBT = Part("quota_debt", 120)
PARTS = (UNITS, test_vm.TESTS, CONTRACT_OF_SYSTEMD, QUOTA_DEBT, REBOOT)
STEPS = (
    "install", "lowers", "reloads", "wakes", "restarts", "stops", "orders", "back_to_normal", "kill", "weighs",
    "unlimited", "leaves",
)  # fmt: skip
"""Of ``guest/units.py``."""
UNITS_SETTINGS = {"UNITS_SLOW": f"{UNITS_SLOW:g}", "MACHINE_STEPS": ",".join(STEPS)}
SLOW_CHECKS = {"check_without_polkit"}
"""Of their facts; ``test_units_as_jobs.py`` has them all on this host."""
stage = test_vm.stage
test_every_part_came_to_its_end = test_vm.test_every_part_came_to_its_end
test_the_tests_that_touch_cgroups = test_vm.test_the_tests_that_touch_cgroups
pytestmark = [pytest.mark.machine, pytest.mark.timeout(BUILD_S + limit_of(PARTS) + 300)]


@pytest.fixture(scope="module")
def v2(stage: Path) -> Machine:
    return test_vm.boot_layout("v2", stage, PARTS, "engines", UNITS_SETTINGS)


@pytest.fixture(scope="module", params=["v1", "hybrid"])
def machine(request: pytest.FixtureRequest, stage: Path) -> Machine:
    return test_vm.boot_layout(request.param, stage, (test_vm.TESTS,))


def test_names_of_engines(v2: Machine) -> None:
    assert_passed(v2.of("vm_tests")["tests"])


@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if check.__name__ not in SLOW_CHECKS],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_units(v2: Machine, check: Callable[[Facts, float], None]) -> None:
    check(v2.of("units"), UNITS_PATIENCE)


def test_a_killed_agent_leaves_the_unit_its_quota(v2: Machine, record_property: Callable[[str, object], None]) -> None:
    """File and property, and the next agent begins with what the unit ordered."""
    fact = of(v2.of("units"), "kill")
    assert None not in (fact["full_s"], fact["property_s"], fact["up_s"], fact["lowered_s"]), fact
    assert fact["job"]["cpu_limit"] == 2.0
    record_property("machine", f"v2: original quota {fact['full_s']:.1f} s after SIGKILL of the agent, emulated")


def test_the_executor_of_kind_systemd(v2: Machine) -> None:
    """The contract, where systemd counts memory and CPU time itself."""
    facts = v2.of("systemd_contract")
    assert_passed(facts)
    assert len(facts) > 20, sorted(facts)


def test_a_quota_stops_a_long_system_call_before_linux_6_18(v2: Machine) -> None:
    """By counts alone: later kernels let it use far more than the quotas of the periods so far."""
    facts = v2.of("quota_debt")
    assert facts["code"] == 0, facts
    release = tuple(map(int, facts["release"].split(".")[:2]))
    assert (facts["beyond_us"] < facts["used_us"] / 4) == (release < (6, 18)), facts


@pytest.mark.parametrize(("boot", "boot_before"), [("rebooted", "before"), ("cut", "rebooted")])
def test_a_reboot(v2: Machine, boot: str, boot_before: str) -> None:
    """Orderly, and as if the plug was pulled: the unit comes up with what it orders, and that is lowered anew."""
    facts = v2.of("reboot")
    before, fact = of(facts, boot_before), of(facts, boot)
    assert before["settled_s"] is not None, before
    assert fact["boot_id"] != before["boot_id"]
    went_down = {"down": f"{QUOTA_US} 100000", "down_property": "2s"} if boot == "rebooted" else {}
    assert fact["witness"] == {"up": f"{QUOTA_US} 100000", **went_down}
    assert fact["settled_s"] is not None, fact
    assert_same(fact, FLOOR_US)
    assert fact["job"]["cpu_limit"] == 2.0
    state = json.loads(fact["state"])
    assert state["boot_id"] == fact["boot_id"]
    assert state["cgroups"]["batch.slice/work.service"]["settings"]["quota_us"] == QUOTA_US
    assert fact["failed_units"] == ""


@pytest.mark.parametrize("boot", ["before", "rebooted", "cut"])
def test_a_job_on_reclaimed_cpu_and_a_reboot(v2: Machine, boot: str) -> None:
    """Nothing is left of it after each boot, and the class is made anew for the next one."""
    fact = of(v2.of("reboot"), boot)["reclaimed"]
    assert (fact["was_idle"], fact["left"], fact["recovered"]) == (False, {"units": [], "cgroups": []}, {})
    assert fact["started"] is not None, fact
    assert fact["is_idle"]
    assert [f"/{IDLE_SLICE}/" in cgroup for cgroup in fact["cgroups"]] == [True], fact
