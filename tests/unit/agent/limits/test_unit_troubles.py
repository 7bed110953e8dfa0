"""Units when something goes wrong: systemd does not answer, cgroups come and go, others write, disks are full.

Two things must never happen: a limit of ours passes for what a unit ordered, and somebody's order is undone for good.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_units import PATH, QUOTA, UNIT, UNITS, ScriptedBus, UnitNode

from cpumond.agent.limits import restore, writer
from cpumond.agent.limits.first_aid import raise_quotas
from cpumond.agent.limits.restore import restore_units
from cpumond.agent.limits.units import UnitLimits
from cpumond.agent.state_file import Originals, save
from cpumond.core.errors import CgroupReadError, CgroupWriteError, CreateError
from cpumond.host.cgroup.settings import CpuSettings
from cpumond.host.cgroup.v2 import V2Cgroup
from cpumond.host.systemd import bus as unit_bus
from cpumond.host.systemd.properties import NO_LIMIT, UnitEvent, UnitProperties

DROP_IN = "/run/systemd/system.control/work.service.d/50-CPUQuota.conf"
WEIGHT_UNITS = UNITS.replace("[monitor]\n", '[monitor]\nactuator = "weight"\n')
OTHER_SLICE = UNITS.replace("batch.slice", "other.slice")


def begin(node: UnitNode, config: str) -> UnitNode:
    node.config_text = config
    node.agent = node.make_agent()
    node.start()
    return node


def begin_in_two_slices(directory: Path) -> UnitNode:
    node = UnitNode(directory)
    node.managed_roots = '["batch.slice", "other.slice"]'
    return begin(node, UNITS.replace('slices = ["batch.slice"]', 'slices = ["batch.slice", "other.slice"]'))


# ---- cgroups that come and go


@pytest.mark.parametrize("half_made", ["the kernel's limit", "no limit file"])
def test_a_cgroup_that_systemd_has_not_written_yet_is_no_order(node: UnitNode, half_made: str) -> None:
    """It is made first, and written a moment later; the agent may look in between."""
    node.lower()
    node.remove(UNIT)
    node.tick()
    node.make(UNIT)
    if half_made == "no limit file":
        node.file.unlink()
    else:
        node.file.write_text("max 100000\n")
    node.tick()
    node.systemd_writes()
    node.ticks(4)
    assert node.status()["cpu_limit"] == 4.0
    assert node.end().cores(UNIT) == 4.0


def test_a_unit_that_moves_to_another_slice_keeps_its_original(tmp_path: Path) -> None:
    node = begin_in_two_slices(tmp_path)
    node.lower()
    shutil.copytree(node.file.parent, node.root / "other.slice" / UNIT)
    node.remove(UNIT)
    node.agent.rescan_now()
    node.tick()
    assert node.status()["cpu_limit"] == 4.0
    assert node.end().cores(f"../other.slice/{UNIT}") == 4.0


def test_a_unit_that_came_again_and_is_no_job_any_more_is_put_back(node: UnitNode) -> None:
    node.lower()
    node.remove(UNIT)
    node.tick()
    node.reload(OTHER_SLICE)
    node.make(UNIT)
    node.systemd_writes()
    node.ticks(12)
    assert node.limit() == 4.0
    assert node.bus.told[UNIT] == ((QUOTA, 4_000_000),)


# ---- systemd does not answer


def test_what_a_run_before_told_systemd_is_no_order_though_systemd_says_so(node: UnitNode) -> None:
    """polkit goes: the file is put back at the end, systemd keeps 0.5, and writes it at a reload in the next run."""
    node.lower()
    node.bus.denies = True
    assert node.end().limits() == (4.0, 0.5)
    assert PATH in node.originals().cgroups
    node.bus.closed, node.bus.told, node.bus.news = 0, {}, [UnitEvent("connected")]
    node.agent = node.make_agent()
    node.run(2)
    node.obey()
    node.systemd_writes()
    node.hear("reloaded")
    node.answer()
    assert node.status()["cpu_limit"] == 4.0
    assert node.end().cores(UNIT) == 4.0


def test_units_of_a_host_without_a_bus_are_forgotten_when_they_end(node: UnitNode) -> None:
    node.hear("away", text="there is no bus")
    for number in range(6):
        unit = f"job{number}.service"
        node.make(unit)
        node.ticks(8)
        node.remove(unit)
        node.ticks(8)
    assert node.agent.writer.returning == {}
    assert list(node.originals().cgroups) == [PATH]


def test_a_library_that_is_missing_is_looked_for_once() -> None:
    looks = []

    def open_bus() -> Any:
        looks.append(1)
        raise ImportError("No module named 'dbus_fast'")

    units = UnitLimits(2, booted=True, open_bus=open_bus)
    assert [units.can_tell, units.can_tell, units.can_ask] == [False, False, False]
    assert len(looks) == 1
    assert units.problem.endswith("(No module named 'dbus_fast'); pip install dbus-fast")


def test_more_cpu_does_not_wait_for_an_answer_for_long(node: UnitNode) -> None:
    node.lower()
    node.ticks(3)
    node.file.write_text("30000 100000\n")
    node.tick()
    assert node.bus.asked
    reached = 0.0
    for _ in range(5):
        node.tick(0.3, {UNIT: 1.0})
        reached = max(reached, node.limit())
    assert reached == 4.0


# ---- others write


def order_unseen(node: UnitNode, cores: float) -> None:
    """``systemctl set-property`` between a tick's look at the file and its write: the file does not tell any more."""
    node.bus.stored[UNIT] = ((QUOTA, round(cores * 1e6)),)


def refuse(*_: object) -> None:
    raise CgroupWriteError("cpu.max", "400000", OSError(22, "Invalid argument"))


def fail_to_read(*_: object) -> None:
    raise CgroupReadError("cpu.max", OSError(24, "Too many open files"))


def go_down(node: UnitNode) -> float:
    """Let systemd do what it was told, then be told of the next step down, which it has not taken yet."""
    node.bus.obey()
    for _ in range(8):
        node.tick()
        if node.bus.told:
            return dict(node.bus.told[UNIT])[QUOTA] / 1e6
    raise AssertionError(node.limit())


def assert_ordered(node: UnitNode, cores: float) -> None:
    assert (node.limit(), node.status()["cpu_limit"], node.bus.quota_cores()) == (cores, cores, cores)
    assert node.originals().cgroups[PATH].settings.cores == cores
    assert node.end().limits() == (cores, cores)


@pytest.mark.parametrize("written", [False, True], ids=["by us", "by systemd"])
@pytest.mark.parametrize("cores", [1.5, 0.8, 6.0])
def test_an_order_of_ours_is_held_back_when_somebody_was_faster(node: UnitNode, cores: float, written: bool) -> None:
    node.lower()
    node.wake()
    assert node.limit() == 4.0
    order_unseen(node, cores)
    if written:
        node.systemd_writes()
    node.obey()
    node.bus.answer()
    node.obey()
    assert_ordered(node, cores)


@pytest.mark.parametrize("is_older", [False, True], ids=["another", "ours a moment ago"])
def test_so_it_is_when_the_limit_goes_down(node: UnitNode, is_older: bool) -> None:
    before = go_down(node)
    go_down(node)
    go_down(node)
    cores = before if is_older else 1.5
    order_unseen(node, cores)
    node.obey(2)
    assert_ordered(node, cores)


def test_the_order_is_taken_once_and_the_limit_moves_on(node: UnitNode) -> None:
    node.lower()
    node.wake()
    order_unseen(node, 1.5)
    node.bus.obey()
    node.bus.set(UNIT, ((QUOTA, 900_000),))
    node.obey(40)
    assert node.agent.context.totals.foreign_writes == {"raise": 0, "lower": 1}
    assert_ordered(node, 1.5)


def test_an_order_while_the_original_is_on_its_way_back_stays(node: UnitNode) -> None:
    node.lower()
    node.reload(OTHER_SLICE)
    node.tick()
    assert node.limit() == 4.0
    order_unseen(node, 2.0)
    node.obey()
    assert node.originals().cgroups[PATH].settings.cores == 2.0
    node.bus.obey()
    assert node.limits() == (2.0, 2.0)
    node.ticks(2)
    assert node.agent.close() == 0
    assert node.originals().cgroups == {}
    assert node.limits() == (2.0, 2.0)


@pytest.mark.parametrize("paused", [False, True])
def test_so_it_does_at_the_end(node: UnitNode, paused: bool) -> None:
    node.lower()
    node.ticks(3)
    if paused:
        (node.directory / "run" / "pause").touch()
    order_unseen(node, 2.0)
    assert node.agent.close() == 0
    assert node.limits() == (2.0, 2.0)
    assert node.originals().cgroups == {}


@pytest.mark.parametrize("ticks", [1, 12])
@pytest.mark.parametrize("gone_since", [0, 1])
def test_so_it_does_for_a_unit_that_is_started_again(node: UnitNode, ticks: int, gone_since: int) -> None:
    node.lower()
    node.wake()
    node.remove(UNIT)
    node.ticks(gone_since)
    order_unseen(node, 2.0)
    node.obey(ticks)
    node.bus.obey()
    node.make(UNIT)
    node.systemd_writes()
    node.ticks(2)
    assert node.status()["cpu_limit"] == 2.0
    assert node.end().cores(UNIT) == 2.0


def test_a_limit_that_cannot_go_back_is_not_lost_for_an_order(node: UnitNode, monkeypatch: pytest.MonkeyPatch) -> None:
    go_down(node)
    go_down(node)
    order_unseen(node, 3.0)
    node.bus.obey()
    with monkeypatch.context() as patch:
        patch.setattr(V2Cgroup, "write_settings", refuse)
        node.reload(OTHER_SLICE)
        node.tick()
    assert node.limit() == 2.0
    node.obey(12)
    assert node.limits() == (3.0, 3.0)


def test_a_read_that_fails_once_does_not_lose_the_order(node: UnitNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node.lower()
    node.wake()
    order_unseen(node, 1.5)
    node.bus.obey()
    with monkeypatch.context() as patch:
        patch.setattr(V2Cgroup, "read_settings", fail_to_read)
        node.tick()
    node.ticks(2)
    assert node.status()["cpu_limit"] == 1.5
    assert node.end().cores(UNIT) == 1.5


def test_an_order_of_what_is_not_moved_any_more_stays(node: UnitNode) -> None:
    """The actuator was changed; the quota goes back to systemd together with the first lower weight."""
    node.bus.stored[UNIT] = ((QUOTA, 4_000_000), ("CPUWeight", NO_LIMIT))
    node.lower()
    node.reload(WEIGHT_UNITS)
    node.ticks(3)
    assert dict(node.bus.told[UNIT])[QUOTA] == 4_000_000
    node.bus.stored[UNIT] = ((QUOTA, 2_000_000), ("CPUWeight", NO_LIMIT))
    node.obey(4)
    assert node.limits() == (2.0, 2.0)
    assert node.end().limits() == (2.0, 2.0)


def test_the_period_of_the_unit_stays_its_own(tmp_path: Path) -> None:
    """Below a millisecond of quota ours is longer."""
    node = UnitNode(tmp_path, "200000 50000")
    begin(node, UNITS.replace("min_cpu_limit = 0.5", "min_cpu_limit = 0.01"))
    for _ in range(30):
        node.obey()
        if dict(node.bus.told.get(UNIT, ())).get("CPUQuotaPeriodUSec", 0) > 50_000:
            break
    assert node.bus.told
    order_unseen(node, 1.5)
    node.obey()
    settings = node.originals().cgroups[PATH].settings
    assert (settings.cores, settings.period_us) == (1.5, 50_000)


def test_a_burst_is_no_larger_than_the_quota_that_was_ordered(node: UnitNode) -> None:
    found = CpuSettings(400_000, 100_000, 300_000, 100)
    read = node.agent.context.units.read_values
    assert read({QUOTA: 2_000_000}, found) == CpuSettings(200_000, 100_000, 200_000, 100)
    assert read({QUOTA: NO_LIMIT}, found) == CpuSettings(None, 100_000, 300_000, 100)


def test_a_drop_in_that_outranks_ours_is_no_order_while_ours_is_on_its_way(node: UnitNode) -> None:
    go_down(node)
    go_down(node)
    low = node.limit()
    order_unseen(node, 4.0)
    node.bus.news.append(UnitEvent("reloaded"))
    node.obey(2)
    assert node.limit() <= low
    assert node.agent.context.totals.foreign_writes == {"raise": 0, "lower": 0}


def test_the_order_of_a_weight_is_respected_as_well(tmp_path: Path) -> None:
    node = UnitNode(tmp_path, "200000 100000")
    node.bus.stored[UNIT] = ((QUOTA, NO_LIMIT), ("CPUWeight", NO_LIMIT))
    begin(node, WEIGHT_UNITS)
    node.ticks(12)
    node.bus.obey()
    for _ in range(3):
        node.tick(4.0)
    assert node.bus.told
    node.bus.stored[UNIT] = (("CPUWeight", 40),)
    node.obey(2)
    assert int((node.file.parent / "cpu.weight").read_text()) == 40
    node.agent.close()
    assert int((node.file.parent / "cpu.weight").read_text()) == 40
    assert dict(node.bus.stored[UNIT])["CPUWeight"] == 40


@pytest.mark.parametrize("ticks", [0, 1], ids=["unseen", "asked for"])
def test_an_order_right_before_the_end_is_respected(node: UnitNode, ticks: int) -> None:
    """``systemctl set-property``, and ``systemctl stop cpumond`` before the next tick or the answer."""
    node.lower()
    node.ticks(3)
    node.bus.answers_when_flushed = True
    node.order(2.0)
    node.ticks(ticks)
    assert node.end().limits() == (2.0, 2.0)


def test_a_copy_that_cannot_be_written_is_removed(node: UnitNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """/run is full while an operator orders less: first aid must not raise to what the old copy says."""
    node.lower()
    node.ticks(3)

    def save_but_copy(path: str, content: Originals, sync: bool = True) -> None:
        if not sync:
            raise CreateError("no space left on the device")
        save(path, content, sync)

    monkeypatch.setattr(writer, "save", save_but_copy)
    node.order(2.0)
    node.tick()
    node.bus.answer()
    node.ticks(3)
    assert node.originals().cgroups[PATH].settings.cores == 2.0
    directories = {"RUNTIME_DIRECTORY": f"{node.directory}/run", "STATE_DIRECTORY": f"{node.directory}/state"}
    raise_quotas({"SERVICE_RESULT": "signal", **directories}, str(node.mountinfo))
    assert node.limit() == 2.0


# ---- restore


class AnsweringBus(ScriptedBus):
    """A systemd that answers at once and takes everything."""

    def __init__(self, drop_ins: list[str] | None) -> None:
        super().__init__()
        self.values: dict[str, object] = {"DropInPaths": drop_ins}
        self.sets: list[tuple[str, UnitProperties]] = []

    def ask(self, unit: str, names: tuple[str, ...]) -> None:
        self.news.append(UnitEvent("answer", unit, values={name: self.values.get(name) for name in names}))

    def set(self, unit: str, properties: UnitProperties, urgent: bool = False, expected: UnitProperties = ()) -> None:
        self.sets.append((unit, properties))
        self.news.append(UnitEvent("done", unit, properties))


def use(bus: AnsweringBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "is_booted", lambda: True)
    monkeypatch.setattr(unit_bus, "UnitBus", lambda _: bus)


def leave_new_unit_of_an_old_name(node: UnitNode) -> None:
    """The agent dies; the unit ends, and another one begins with a quota of its own."""
    node.lower()
    node.drop_agent()
    node.remove(UNIT)
    node.make(UNIT)
    node.order(1.0)


NEW_UNITS = pytest.mark.parametrize(
    ("drop_ins", "cores"), [([], 1.0), ([DROP_IN], 4.0), (None, 4.0)], ids=["new", "lowered by us", "no answer"]
)


@NEW_UNITS
def test_restore_tells_a_new_unit_of_an_old_name_by_its_drop_ins(
    node: UnitNode, monkeypatch: pytest.MonkeyPatch, drop_ins: list[str] | None, cores: float
) -> None:
    """A job named like one before it, with a smaller quota of its own, is not given the old one's."""
    bus = AnsweringBus(drop_ins)
    use(bus, monkeypatch)
    leave_new_unit_of_an_old_name(node)
    place = node.directory
    text = f'state_dir = "{place}/state"\nruntime_dir = "{place}/run"\nmountinfo = "{node.mountinfo}"\n'
    (place / "c.toml").write_text(text)
    done = restore.run_restore(str(place / "c.toml"))
    assert done.report.errors == []
    assert node.limit() == cores
    assert bool(bus.sets) == (cores == 4.0)
    assert node.originals().cgroups == {}


@NEW_UNITS
def test_so_does_the_next_run(
    node: UnitNode, monkeypatch: pytest.MonkeyPatch, drop_ins: list[str] | None, cores: float
) -> None:
    use(AnsweringBus(drop_ins), monkeypatch)
    leave_new_unit_of_an_old_name(node)
    begin(node, UNITS)
    node.tick()
    assert node.status()["cpu_limit"] == cores


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_cgroups_of_a_unit_the_one_that_is_there_counts(monkeypatch: pytest.MonkeyPatch, turned: bool) -> None:
    bus = AnsweringBus([])
    use(bus, monkeypatch)
    units = [("a.slice/x.service", ((QUOTA, 4_000_000),)), ("b.slice/x.service", ((QUOTA, 2_000_000),))]
    assert restore_units(dict(reversed(units) if turned else units), ["b.slice/x.service"]) == {}
    assert bus.sets == [("x.service", ((QUOTA, 2_000_000),))]


def test_a_unit_without_a_quota_that_has_none_again_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = AnsweringBus([])
    bus.values = {QUOTA: NO_LIMIT}
    use(bus, monkeypatch)
    assert restore_units({"a.slice/x.service": ((QUOTA, NO_LIMIT),)}) == {}
    assert bus.sets == []
