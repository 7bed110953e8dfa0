"""The emulated machine with Debian 13 (systemd 257, Linux 6.12, Python 3.13, cgroup v2): units as jobs under real load
(``guest/units.py``), the executor of kind ``systemd``, and what looks at cgroups."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "machine"))
import test_vm
import test_vm_layouts as layouts
from guest_host import PYTHONS
from vm_host import BUILD_S, Machine, limit_of, make_stage, skip_without_means

SUITE = "trixie"
PARTS = (layouts.UNITS, test_vm.TESTS, layouts.CONTRACT_OF_SYSTEMD)
test_every_part_came_to_its_end = test_vm.test_every_part_came_to_its_end
test_the_tests_that_touch_cgroups = test_vm.test_the_tests_that_touch_cgroups
test_units = layouts.test_units
test_a_killed_agent_leaves_the_unit_its_quota = layouts.test_a_killed_agent_leaves_the_unit_its_quota
test_the_executor_of_kind_systemd = layouts.test_the_executor_of_kind_systemd
pytestmark = [pytest.mark.machine, pytest.mark.timeout(BUILD_S + limit_of(PARTS) + 300)]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    skip_without_means()
    work = tmp_path_factory.mktemp("machine")
    make_stage(work / "in", work, test_vm.list_files("v2"), PYTHONS[SUITE])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MACHINE_SUITE", SUITE)
        return test_vm.boot_layout("v2", work / "in", PARTS, settings=layouts.UNITS_SETTINGS)


@pytest.fixture(scope="module")
def v2(machine: Machine) -> Machine:
    return machine
