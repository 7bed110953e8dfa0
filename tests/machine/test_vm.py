"""What touches cgroups, on a kernel of its own: a Debian under qemu with cgroup v2, from an image made at first use.

``tests/slow/test_vm_layouts.py`` has what takes longer, and other layouts. The processor is emulated, ten to twenty
times slower: tests of many processes, and what shows nothing of cgroup v2, are left out, as the summary says.
``CPUMOND_MACHINE=full`` runs all that can run there. Without qemu the tests are skipped.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from guest_host import REPOSITORY, Facts, assert_passed
from vm_host import BUILD_S, SLOWNESS, Machine, Part, boot, limit_of, make_stage, skip_without_means

FULL = os.environ.get("CPUMOND_MACHINE") == "full"
NOT_HERE = {"browser": "needs a browser", "prometheus": "needs Prometheus"}
"""By marker: what the guest does not have."""
LEFT_OUT = {
    "test_try_it_commands.py::test_demo_tells": "the demo's story is told in seconds that an emulated processor misses"
}
"""By the beginning of the name."""
TOO_SLOW = "too slow on an emulated processor, or shown by others there; CPUMOND_MACHINE=full runs it"
IMPORTED = ("cpumond.cli", "cpumond.agent.main", "cpumond.agent.limits.restore")

QUICK: dict[str, tuple[str, ...]] = {
    "v2": (
        "test_cgroup_contract.py",
        "test_agent_pressure.py::test_a_job_whose",
        "test_cgroup_executor.py::TestCgroupExecutor",
        "test_agent_v1.py::test_a_load_that_wakes",
        "test_agent_v1.py::test_a_quota_follows",
        "test_agent_v1.py::test_every_file_is_left",
        "test_agent_v1.py::test_the_weight_actuator",
        "test_agent_v1_life.py::test_a_cgroup_that_goes",
        "test_agent_v1_policy.py::test_foreign_raises_above",
        "test_agent_v1_policy.py::test_a_quota_above_a_job",
        "test_control_commands.py::test_doctor_sees",
        "test_try_it_commands.py::test_dry_run_prints",
    ),
    "engines": (
        "test_container_sources.py::test_an_update_of_the_engine_is_the_new_order_at_once[Podman-1.5-0.5]",
        "test_container_sources.py::test_names",
        "test_slurm_source.py::test_a_job_that_ends",
        "test_slurm_source.py::test_one_row",
    ),
    "v1": (
        "test_cgroup_contract.py",
        "test_agent_v1.py::test_every_file_is_left_as_it_was_found[SIGTERM]",
        "test_slurm_source.py::test_a_job_that_ends",
        "test_slurm_source.py::test_one_row",
    ),
    "hybrid": ("test_cgroup_contract.py", "test_agent_v1.py::test_every_file_is_left_as_it_was_found[SIGTERM]"),
}
"""By layout, beginnings of the names of tests that are run always; ``engines`` are for v2, too, and take long."""
SLOW = (
    "test_agent_v1.py::test_every_file_is_left_as_it_was_found[SIGINT]",
    "test_cgroup_executor.py::TestCgroupExecutor::test_many",
    "test_cgroup_executor.py::TestCgroupExecutor::test_a_flood",
    "test_cgroup_executor.py::TestCgroupExecutor::test_a_job_on_reclaimed_cpu_yields",
    "test_cgroup_executor.py::TestCgroupExecutor::test_its_weight_follows_its_order_and_a_quota_is_for_a_ceiling_alone[ceiling",
)
"""Beginnings of the names of those among them that are not."""
INTEGRATION = REPOSITORY / "tests" / "integration"
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(INTEGRATION.glob("test_*.py"))}
FILES = {name for name, text in TEXTS.items() if "mark.cgroup" in text}
"""Of tests that touch cgroups."""
TESTS = Part("vm_tests", 7200 if FULL else 900)
"""It has a time of its own: three times what it takes where other tests run beside it, and more."""
pytestmark = [pytest.mark.machine, pytest.mark.timeout(BUILD_S + limit_of([TESTS]) + 300)]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_means()
    work = tmp_path_factory.mktemp("machine")
    make_stage(work / "in", work, list_files("v2"))
    return work / "in"


def list_files(layout: str) -> list[str]:
    """Those that are opened in the guest."""
    if FULL:
        return sorted(name for name in FILES if not why_not_opened(name))
    return sorted({name.partition("::")[0] for name in QUICK[layout]})


def why_not_opened(name: str) -> str:
    """What a whole file needs that is not there, "" for nothing."""
    first_lines = TEXTS[name].partition("\ndef ")[0]
    return next((reason for marker, reason in NOT_HERE.items() if f"mark.{marker}" in first_lines), "")


def boot_layout(
    layout: str, stage: Path, parts: Sequence[Part], quick: str = "", settings: Mapping[str, str] | None = None
) -> Machine:
    """What a machine with these cgroups left after these parts; ``quick``: other tests than those of the layout."""
    plan: dict[str, Any] = {
        "files": list_files(quick or layout),
        "quick": QUICK[quick or layout],
        "slow": SLOW,
        "full": FULL,
        "not_here": NOT_HERE,
        "left_out": LEFT_OUT,
        "too_slow": TOO_SLOW,
        "timeout_s": 60 * SLOWNESS,
        "options": [],
        "imported": IMPORTED,
    }
    return boot(layout, stage, stage.parent / f"out-{layout}", parts, plan, settings or {})


@pytest.fixture(scope="module")
def machine(stage: Path) -> Machine:
    return boot_layout("v2", stage, [TESTS])


def describe(machine: Machine, facts: Facts) -> str:
    """How it went, in a line for the summary and one for each reason why tests were left out."""
    outcomes = Counter(fact["outcome"] for fact in facts["tests"].values())
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    lines = [f"{machine.layout}: {machine.took_s:.0f} s in all ({machine.times()}); tests that touch cgroups: {counts}"]
    skipped = {fact["text"] for fact in facts["tests"].values() if fact["outcome"] == "skipped"}
    lines += [f"  skipped there: {reason.removeprefix('Skipped: ')}" for reason in sorted(skipped)]
    by_reason: dict[str, Counter[str]] = {}
    for name, reason in facts["left_out"].items():
        by_reason.setdefault(reason, Counter())[name.partition("::")[0]] += 1
    for name in FILES - set(list_files(machine.layout)):
        by_reason.setdefault(why_not_opened(name) or TOO_SLOW, Counter())[name] = 0
    for reason, files in sorted(by_reason.items()):
        names = ", ".join(f"{name} ({count or 'all'})" for name, count in sorted(files.items()))
        lines.append(f"  left out, {reason}: {names}")
    return "\n".join(lines)


def test_every_part_came_to_its_end(machine: Machine) -> None:
    assert machine.code == 0, machine.output
    assert "ended after its limit" not in machine.output, machine.output


def test_the_tests_that_touch_cgroups(machine: Machine, record_property: Callable[[str, object], None]) -> None:
    facts = machine.of("vm_tests")
    record_property("machine", describe(machine, facts))
    assert_passed(facts["tests"], "skipped")
    assert facts["finished"], f"not done in time, {len(facts['tests'])} tests:\n{machine.outputs['vm_tests'][-3000:]}"
    assert facts["unused"] == [], "no such tests; QUICK is out of date"
    assert "passed" in {fact["outcome"] for fact in facts["tests"].values()}, machine.outputs["vm_tests"][-3000:]
