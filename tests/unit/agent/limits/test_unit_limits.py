"""Limits of units: what systemd is told and when, what it writes by itself, and what an operator sets through it."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_units import PATH, QUOTA, UNIT, UNITS, ScriptedBus, UnitNode

from cpumond.agent.limits.restore import restore_all
from cpumond.agent.limits.units import UnitLimits, read_labels
from cpumond.agent.service import Agent
from cpumond.agent.state_file import Originals, save
from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.host.systemd.properties import NO_LIMIT, UnitEvent
from cpumond.testing.tree import FAKE_CPUS


def test_systemd_lowers_a_limit_and_a_raise_holds_before_it_knows(node: UnitNode) -> None:
    node.ticks(2)
    assert node.limit() == 4.0
    assert node.status()["current_cpu_limit"] == 4.0, "what is in force is told"
    assert node.bus.told[UNIT] == ((QUOTA, 2_000_000),)
    assert node.originals().cgroups[PATH].unit == UNIT
    node.obey()
    assert (node.limit(), node.status()["current_cpu_limit"]) == (2.0, 2.0)
    assert node.agent.context.totals.foreign_writes == {"raise": 0, "lower": 0}
    node.wake()
    assert node.limits() == (4.0, 2.0)
    assert node.bus.told[UNIT] == ((QUOTA, 4_000_000),)


@pytest.mark.parametrize("kind", ["away", "denied", "refused"])
def test_a_lower_limit_that_systemd_does_not_take_is_written(node: UnitNode, kind: str) -> None:
    node.ticks(2)
    node.hear(kind, "" if kind == "away" else UNIT, node.bus.told[UNIT], text="no")
    assert node.limit() <= 2.0
    node.ticks(4)
    assert node.limit() == 0.5


def test_a_burst_is_lowered_before_systemd_lowers_the_quota(node: UnitNode) -> None:
    """The kernel takes no quota below it."""
    node.write(UNIT, "cpu.max.burst", "300000\n")
    node.ticks(2)
    assert (node.read(UNIT, "cpu.max.burst"), node.limit()) == ("200000", 4.0)
    assert node.end().read(UNIT, "cpu.max.burst") == "300000"


def test_an_order_of_ours_that_systemd_writes_late_is_written_over_at_once(node: UnitNode) -> None:
    """Its file is lower than the newest limit for a moment; no other program wrote it."""
    node.lower()
    node.tick(0.5, {UNIT: 1.0})
    assert node.limit() == 4.0
    node.systemd_writes()  # 0.5, before it obeyed
    snapshot = node.tick(0.4)
    assert node.limit() == 4.0
    assert snapshot.foreign_writes == {"raise": 0, "lower": 0}
    assert node.bus.told[UNIT] == ((QUOTA, 4_000_000),)


@pytest.mark.parametrize("cores", [1.5, 8.0, 0.2, 4.0])
def test_an_order_through_systemd_is_respected_up_and_down(node: UnitNode, cores: float) -> None:
    node.lower()
    node.order(cores)
    node.tick()
    assert (UNIT, (QUOTA, "CPUWeight")) in node.bus.asked
    assert node.limit() == cores, "nothing is written before the answer"
    node.answer()
    job = node.status()
    assert (job["status"], job["override_by"]) == ("overridden", "systemctl set-property")
    assert (job["cpu_limit"], job["current_cpu_limit"]) == (cores, cores)
    assert node.originals().cgroups[PATH].settings.cores == cores
    node.ticks(5)
    assert node.limit() == cores
    assert node.end().limits() == (cores, cores)


def test_without_an_answer_a_raise_is_respected_and_the_original_stays(node: UnitNode) -> None:
    node.lower()
    node.file.write_text("150000 100000\n")
    node.tick()
    snapshot = node.hear("away", text="the bus is away")
    job = node.status()
    assert (job["status"], job["override_by"], job["cpu_limit"], node.limit()) == ("overridden", "", 4.0, 1.5)
    assert "the bus is away" in snapshot.problems[-1]
    assert node.end().cores(UNIT) == 4.0


def test_what_a_reload_gives_back_that_outranks_us_is_taken_again_at_once(node: UnitNode) -> None:
    """A drop-in named override.conf wins over the one of our property."""
    node.lower()
    node.order(4.0)
    node.hear("reloaded")
    node.bus.answer()
    snapshot = node.tick(0.4)
    node.bus.obey()
    assert node.limit() == 0.5
    assert (node.status()["status"], snapshot.foreign_writes) == ("reclaim", {"raise": 0, "lower": 0})


@pytest.mark.parametrize(("cores", "kind"), [(4.0, "raise"), (0.1, "lower")])
def test_as_found_or_less_while_nobody_can_be_asked_is_drift(node: UnitNode, cores: float, kind: str) -> None:
    node.lower()
    node.hear("away", text="the bus is away")
    node.order(cores)
    assert node.tick().foreign_writes == {"raise": 0, "lower": 0, kind: 1}
    assert (node.status()["override_by"], node.originals().cgroups[PATH].settings.cores) == ("", 4.0)
    node.ticks(6)
    job = node.status()
    assert (node.limit(), job["cpu_limit"], job["status"]) == (0.5, 4.0, "reclaim")


def test_by_file_alone_what_a_reload_gave_back_is_taken_again(node: UnitNode, logs) -> None:
    node.bus.denies = True
    node.ticks(8)
    node.bus.obey()
    snapshot = node.tick()
    assert "does not let this user set properties of units (not you)" in snapshot.problems[-1]
    node.systemd_writes()
    node.tick()
    node.answer()
    assert (node.limit(), node.status()["override_by"]) == (4.0, "")
    node.ticks(7)
    assert (node.limit(), node.status()["cpu_limit"]) == (0.5, 4.0)


def test_a_restarted_unit_keeps_its_limit_and_its_original(node: UnitNode) -> None:
    node.lower()
    inode = node.originals().cgroups[PATH].inode
    node.restart_unit()
    node.tick()
    job = node.status()
    assert (job["cpu_limit"], job["current_cpu_limit"], job["status"]) == (4.0, 0.5, "reclaim")
    assert node.originals().cgroups[PATH].inode != inode
    assert node.end().limits() == (4.0, 4.0)


@pytest.mark.parametrize("said", [True, False], ids=["unit removed", "time is over"])
def test_a_unit_that_was_stopped_gets_its_property_back(node: UnitNode, said: bool) -> None:
    node.lower()
    node.remove(UNIT)
    node.tick()
    assert UNIT not in node.bus.told
    if said:
        node.hear("removed", UNIT)
    else:
        node.ticks(7)
    assert node.bus.told[UNIT] == ((QUOTA, 4_000_000),)
    assert PATH in node.originals().cgroups, "until systemd has taken it"
    node.obey()
    node.agent.close()
    assert (node.originals().cgroups, node.bus.quota_cores()) == ({}, 4.0)


def test_a_unit_that_is_gone_for_good_is_forgotten(node: UnitNode) -> None:
    node.lower()
    node.remove(UNIT)
    node.ticks(8)
    node.hear("no-unit", UNIT, node.bus.told.pop(UNIT))
    assert node.end().originals().cgroups == {}


@pytest.mark.parametrize("first", ["agent", "unit"])
def test_an_agent_and_a_unit_that_were_restarted_at_once(node: UnitNode, first: str) -> None:
    """The lowered limit of the new cgroup counts as the dead agent's: nothing says otherwise."""
    node.lower()
    node.remove(UNIT)
    if first == "agent":
        node.kill_and_restart()
    node.make(UNIT)
    node.systemd_writes()
    if first == "unit":
        node.kill_and_restart()
    node.tick()
    assert (node.status()["cpu_limit"], node.limit()) == (4.0, 0.5)


def test_labels_of_a_unit_come_when_they_come(node: UnitNode) -> None:
    assert node.status()["labels"] == {}
    assert (UNIT, ("User",)) in node.bus.asked
    node.hear("answer", UNIT, values={"User": "alice"})
    assert node.status()["labels"] == {"User": "alice"}


def test_labels_are_short_and_printable() -> None:
    values = {"A": True, "B": ["x", "y"], "C": None, "D": "a\nb" + 500 * "c", "E": NO_LIMIT, "F": 7}
    labels = read_labels(values)
    assert (labels["A"], labels["B"], labels["C"], labels["E"], labels["F"]) == ("yes", "x y", "", "", "7")
    assert labels["D"].startswith("a b")
    assert len(labels["D"]) == 200


@pytest.mark.parametrize("gone", [False, True])
def test_restore_gives_the_file_back_and_says_what_systemd_must_be_told(node: UnitNode, gone: bool) -> None:
    node.lower()
    if gone:
        node.remove(UNIT)
    report = restore_all(node.agent.context.hierarchies, node.originals().cgroups)
    assert (report.restored, report.gone) == (([], [PATH]) if gone else ([PATH], []))
    assert gone or node.limit() == 4.0
    assert report.units == {PATH: ((QUOTA, 4_000_000),)}


def test_a_unit_without_a_limit_file_is_lowered_through_systemd(tmp_path: Path) -> None:
    """As on v2 before its first CPU setting; then the file is there, and watched."""
    node = UnitNode(tmp_path, "max 100000")
    node.bus.stored[UNIT] = ((QUOTA, NO_LIMIT),)
    node.unmake_limit_files()
    node.run(3)
    told = dict(node.bus.told[UNIT])[QUOTA]
    assert told < 1e6 * FAKE_CPUS
    assert (node.status()["status"], node.status()["write_errors"]) == ("reclaim", 0)
    node.bus.obey()
    node.systemd_writes()
    node.tick()
    assert node.agent.table.by_unit[UNIT].watches
    assert node.end().bus.stored[UNIT] == ((QUOTA, NO_LIMIT),)


def lose_limit_file(node: UnitNode) -> None:
    """No limit file, nor can one be made but by systemd, as in cgroupfs."""
    node.unmake_limit_files()
    node.file.symlink_to(node.directory / "not there" / "cpu.max")


def start_with_unseen_limit(node: UnitNode) -> None:
    """On v2 a unit's cgroup comes first and the limit file a moment later, which nothing tells of."""
    node.bus.stored[UNIT] = ((QUOTA, 1_500_000),)
    lose_limit_file(node)
    node.start()
    node.file.unlink()
    node.systemd_writes()


def test_a_limit_that_a_unit_got_unseen_is_what_it_ordered(tmp_path: Path) -> None:
    node = UnitNode(tmp_path, "max 100000")
    start_with_unseen_limit(node)
    for _ in range(8):
        snapshot = node.tick()
        node.bus.answer()
        node.bus.obey()
    assert snapshot.foreign_writes == {"raise": 0, "lower": 0}
    assert (node.status()["cpu_limit"], node.status()["status"], node.limit()) == (1.5, "reclaim", 0.5)
    assert node.originals().cgroups[PATH].settings.cores == 1.5
    assert node.end().limits() == (1.5, 1.5)


@pytest.mark.parametrize("restarted", [True, False], ids=["restart", "daemon-reload"])
def test_what_systemd_took_last_is_ours_however_many_orders_ago(node: UnitNode, restarted: bool) -> None:
    node.reload(UNITS.replace("decrease_coefficient = 0.5", "decrease_coefficient = 0.9"))
    node.ticks(4)
    node.bus.obey()
    if not restarted:
        node.bus.news.append(UnitEvent("away", text="the bus is away"))
    node.ticks(20)
    if restarted:
        node.restart_unit()
    else:
        assert node.limit() < node.bus.quota_cores()
        node.bus.news.append(UnitEvent("connected"))
        node.systemd_writes()
        node.bus.news.append(UnitEvent("reloaded"))
    node.tick()
    node.bus.answer()
    assert node.tick().foreign_writes == {"raise": 0, "lower": 0}
    assert (node.status()["cpu_limit"], node.status()["status"]) == (4.0, "reclaim")
    assert node.originals().cgroups[PATH].settings.cores == 4.0
    assert node.end().limits() == (4.0, 4.0)


@pytest.mark.parametrize("kind", ["denied", "refused", "away", ""])
def test_a_unit_that_starts_before_its_original_was_taken_back_keeps_it(node: UnitNode, kind: str) -> None:
    node.lower()
    node.remove(UNIT)
    node.ticks(7)
    told = node.bus.told.pop(UNIT)
    if kind:
        node.hear(kind, "" if kind == "away" else UNIT, told, text="no")
    node.make(UNIT)
    node.systemd_writes()
    node.tick()
    assert (node.status()["cpu_limit"], node.limit()) == (4.0, 0.5)
    node.ticks(5)
    assert node.originals().cgroups[PATH].settings.cores == 4.0
    left = node.agent.close()
    assert node.limit() == 4.0
    assert (left == 0 and node.bus.quota_cores() == 4.0) or (kind == "denied" and PATH in node.originals().cgroups)


def test_a_denied_restore_is_sent_each_minute_and_to_a_new_bus(node: UnitNode) -> None:
    node.lower()
    node.remove(UNIT)
    node.bus.denies = True
    node.ticks(7)
    node.bus.obey()
    node.bus.told = {}
    node.ticks(3)
    assert node.bus.told == {}
    node.tick(seconds=60.0)
    assert node.bus.told == {UNIT: ((QUOTA, 4_000_000),)}
    node.bus.told = {}
    node.hear("connected")
    assert node.bus.told == {UNIT: ((QUOTA, 4_000_000),)}
    assert list(node.originals().cgroups) == [PATH]
    node.bus.denies = False
    node.obey()
    node.agent.close()
    assert (node.originals().cgroups, node.bus.quota_cores()) == ({}, 4.0)


def test_an_original_of_an_older_version_is_noted_before_systemd_is_asked(node: UnitNode) -> None:
    node.lower()
    content = node.originals()
    older = Originals(content.boot_id, {PATH: msgspec.structs.replace(content.cgroups[PATH], unit="")})
    for name in ("state", "run"):
        save(str(node.directory / name / "originals.state"), older)
    node.bus.stored[UNIT] = ((QUOTA, 4_000_000),)
    seen: list[str] = []
    tell = node.bus.set

    def told(*arguments: Any, **more: Any) -> None:
        seen.append(node.originals().cgroups[PATH].unit)
        tell(*arguments, **more)

    node.bus.set = told  # type: ignore[method-assign]
    node.kill_and_restart()
    assert seen == [UNIT]
    node.bus.obey()
    assert node.bus.quota_cores() == 0.5
    assert node.end().limits() == (4.0, 4.0)


@pytest.mark.parametrize("cores", [1.0, 1.5, 8.0])
@pytest.mark.parametrize("settled", [False, True], ids=["just before the old one's time is over", "long after"])
def test_another_job_of_the_name_is_not_sent_the_old_ones_limit(node: UnitNode, settled: bool, cores: float) -> None:
    """Nor is its order taken for one of ours that comes late, though we once gave the old one as much."""
    node.lower()
    node.remove(UNIT)
    node.ticks(7 if settled else 5)
    assert (UNIT in node.bus.told) == settled
    node.make(UNIT)
    node.order(cores)
    if not settled:
        node.bus.news.append(UnitEvent("removed", UNIT))
    node.ticks(2)
    assert UNIT not in node.bus.told
    assert node.status()["cpu_limit"] == cores


def test_a_cgroup_that_is_not_yet_whole_is_not_taken_for_gone(node: UnitNode) -> None:
    node.lower()
    node.remove(UNIT)
    node.tick()
    node.file.parent.mkdir()
    node.bus.news.append(UnitEvent("removed", UNIT))
    node.ticks(8)
    assert UNIT not in node.bus.told
    node.file.parent.rmdir()
    node.tick()
    assert node.bus.told[UNIT] == ((QUOTA, 4_000_000),)


def test_a_raise_by_hand_of_a_unit_that_no_source_names_now_is_kept(node: UnitNode) -> None:
    node.lower()
    node.order(8.0)
    node.config_text = UNITS.replace("batch.slice", "other.slice")
    node.kill_and_restart()
    assert node.limit() == 8.0
    assert node.bus.told[UNIT] == ((QUOTA, 8_000_000),)


def test_a_contested_unit_is_told_to_systemd_though_the_bus_is_away(node: UnitNode) -> None:
    """Another program writes its file; systemd must keep neither that limit nor the agent's once it is gone."""
    node.lower()
    for back_off_s in (6, 12, 24, 48, 0):
        node.file.write_text("10000 100000\n")
        node.tick()
        node.bus.answer()
        node.ticks(back_off_s + 1)
    assert (node.status()["status"], node.limit()) == ("contested", 0.1)
    assert node.bus.told[UNIT] == ((QUOTA, 4_000_000),)
    [original] = node.originals().cgroups.values()
    assert (original.unit, original.settings.cores) == (UNIT, 4.0)
    node.bus.reachable = False
    assert node.agent.close() == 1
    assert list(node.originals().cgroups) == [PATH]


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[UnitNode]:
    made = UnitNode(tmp_path, "max 100000")
    made.bus.stored[UNIT] = ((QUOTA, NO_LIMIT),)
    lose_limit_file(made)
    made.start()
    yield made
    made.agent.close()


def test_a_unit_that_systemd_does_not_know_has_no_limit_of_ours(bare: UnitNode) -> None:
    """A cgroup made by hand with the name of a unit."""
    bare.ticks(3)
    bare.bus.news.append(UnitEvent("no-unit", UNIT, bare.bus.told.pop(UNIT)))
    bare.ticks(2)
    assert bare.status()["current_cpu_limit"] == FAKE_CPUS


@pytest.mark.parametrize("kind", ["denied", "refused", "away"])
def test_a_unit_that_gets_no_limit_file_is_not_lowered(bare: UnitNode, kind: str, logs: list[dict[str, Any]]) -> None:
    whole = FAKE_CPUS
    bare.ticks(3)
    assert dict(bare.bus.told[UNIT])[QUOTA] < 1e6 * whole
    bare.hear(kind, "" if kind == "away" else UNIT, bare.bus.told[UNIT], text="no")
    assert bare.status()["current_cpu_limit"] == whole
    assert bare.status()["last_error"] == "systemd created no limit file for it: no"
    bare.bus.told = {}
    tries = 0
    for _ in range(100):
        tries += UNIT in bare.bus.told
        if kind == "refused" and UNIT in bare.bus.told:
            bare.bus.news.append(UnitEvent(kind, UNIT, bare.bus.told.pop(UNIT), text="no"))
        snapshot = bare.tick()
        assert not bare.agent.context.due.rescan
        assert bare.status()["current_cpu_limit"] == whole
    assert tries == (kind == "refused"), "tried again after a minute"
    assert [record["event"] for record in logs].count("unit_refused") == (kind == "refused")
    if kind != "refused":
        assert bare.status()["current_cpu_limit"] == whole
        assert "there is no limit file" in str(bare.status()["last_error"])
        assert [record["event"] for record in logs].count("limit_write_failed") == 1
        assert "are only set by" in snapshot.problems[-1]


class SlowBus(ScriptedBus):
    def flush(self, timeout_s: float) -> bool:
        for unit in list(self.told)[:1]:
            self.stored[unit] = self.told.pop(unit)
            self.news.append(UnitEvent("done", unit, self.stored[unit]))
        return not self.told


@pytest.mark.parametrize(("units", "left"), [(4, 0), (10, 4)])
def test_the_end_waits_while_limits_go_back(node: UnitNode, units: int, left: int, logs: list[dict[str, Any]]) -> None:
    for number in range(units - 1):
        node.make(f"work{number}.service")
    node.ticks(8)
    node.bus.obey()
    node.bus.told.clear()
    node.tick()
    node.bus.__class__ = SlowBus
    assert node.agent.close() == left
    failed = [record for record in logs if record["event"] == "restore_failed"]
    assert [record["units"] for record in failed] == ([left] if left else [])
    assert len(node.originals().cgroups) == left


def test_no_unit_no_thread_and_no_library(tmp_path: Path) -> None:
    """Where systemd is not PID 1 a path is a path, whatever it looks like."""
    threads = threading.active_count()
    loaded = set(sys.modules)
    node = UnitNode(tmp_path)
    node.agent = Agent(
        node.read_config(), open_hierarchies(node.mountinfo), node.reports, clock=node.clock,
        units=UnitLimits(2, booted=False),
    )  # fmt: skip
    node.run(6)
    assert (node.limit(), node.status()["unit"]) == (0.5, "")
    assert node.end().cores(UNIT) == 4.0
    assert threading.active_count() == threads
    assert not [name for name in set(sys.modules) - loaded if name.startswith("dbus_fast")]
