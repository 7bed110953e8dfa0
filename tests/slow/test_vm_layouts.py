"""The emulated machine: what takes longer than ``tests/machine/test_vm.py`` may, and the other layouts of cgroups.

On v2 the executor of kind ``systemd`` and two reboots; two machines more for ``v1``, with cpu and cpuacct mounted
together, and ``hybrid``: what looks at mounts, limits and discovery.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "machine"))
import test_vm
from guest_host import assert_passed, of
from judge_units import FLOOR_US, QUOTA_US, assert_same
from vm_host import BUILD_S, Machine, Part, limit_of

CONTRACT_OF_SYSTEMD = Part("systemd_contract", 450)
REBOOT = Part("reboot", 300)
PARTS = (CONTRACT_OF_SYSTEMD, REBOOT)
stage = test_vm.stage
test_every_part_came_to_its_end = test_vm.test_every_part_came_to_its_end
test_the_tests_that_touch_cgroups = test_vm.test_the_tests_that_touch_cgroups
pytestmark = [pytest.mark.machine, pytest.mark.timeout(BUILD_S + max(limit_of(PARTS), limit_of([test_vm.TESTS])) + 300)]


@pytest.fixture(scope="module")
def v2(stage: Path) -> Machine:
    """What the machine with the unified hierarchy left."""
    return test_vm.boot_layout("v2", stage, PARTS)


@pytest.fixture(scope="module", params=["v1", "hybrid"])
def machine(request: pytest.FixtureRequest, stage: Path) -> Machine:
    """What the machines with another layout left."""
    return test_vm.boot_layout(request.param, stage, (test_vm.TESTS,))


def test_the_executor_of_kind_systemd(v2: Machine) -> None:
    """The contract, where systemd counts memory and CPU time itself."""
    facts = v2.of("systemd_contract")
    assert_passed(facts)
    assert len(facts) > 20, sorted(facts)


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
