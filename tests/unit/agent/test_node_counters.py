"""What dashboards and alerts count of a node: ends of the service, throttled and late CPU, restores that failed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fake_node import QUICK, FakeNode, source

from cpumond.agent.limits.restore import run_restore
from cpumond.agent.state_file import (
    ENDS_FILE,
    SERVICE_RESULTS,
    STATE_FILE,
    ServiceEnds,
    count_service_end,
    read_service_ends,
    save,
)
from cpumond.core.errors import CgroupWriteError, CreateError, StateFileError
from cpumond.host.cgroup import Cgroup
from cpumond.host.cgroup.settings import CpuSettings
from cpumond.testing import v2_cgroup

FOUR = v2_cgroup(quota="400000 100000")


# ---- ends of the service


def ends(place: Path) -> dict[str, int]:
    """Those that are not 0."""
    return {result: count for result, count in read_service_ends(str(place)).items() if count}


def test_ends_of_the_service_are_counted_by_result(tmp_path: Path) -> None:
    for result in ("success", "watchdog", "success", "a word of a later systemd"):
        count_service_end(str(tmp_path), result)
    assert ends(tmp_path) == {"success": 2, "watchdog": 1, "other": 1}


def test_without_a_file_all_are_there_with_zero(tmp_path: Path) -> None:
    assert read_service_ends(str(tmp_path)) == dict.fromkeys(SERVICE_RESULTS, 0)


@pytest.mark.parametrize("damage", [b"", b"rubbish", b"cpumond-state 1 sha256=0\n{}", b"\xff" * 300])
def test_a_damaged_file_is_zeros_and_counts_on(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / ENDS_FILE).write_bytes(damage)
    assert ends(tmp_path) == {}
    count_service_end(str(tmp_path), "signal")
    assert ends(tmp_path) == {"signal": 1}


def test_what_makes_no_sense_in_the_file_is_zero(tmp_path: Path) -> None:
    save(str(tmp_path / ENDS_FILE), ServiceEnds({"signal": -3, "strange": 5, "watchdog": 2}))
    assert ends(tmp_path) == {"watchdog": 2}


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(CreateError, match=ENDS_FILE):
        count_service_end(str(tmp_path / "missing"), "success")


def write_config(place: Path) -> str:
    (place / "state").mkdir(exist_ok=True)
    config = place / "cpumond.toml"
    config.write_text(f'state_dir = "{place}/state"\nruntime_dir = "{place}/run"\n')
    return str(config)


def test_restore_counts_what_systemd_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    monkeypatch.setenv("SERVICE_RESULT", "watchdog")
    assert run_restore(config).report.errors == []
    assert ends(tmp_path / "state") == {"watchdog": 1}


def test_restore_by_hand_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    monkeypatch.delenv("SERVICE_RESULT", raising=False)
    run_restore(config)
    assert os.listdir(tmp_path / "state") == []


def test_an_end_counts_though_nothing_could_be_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    (tmp_path / "state" / STATE_FILE).write_bytes(b"rubbish")
    monkeypatch.setenv("SERVICE_RESULT", "core-dump")
    with pytest.raises(StateFileError):
        run_restore(config)
    assert ends(tmp_path / "state") == {"core-dump": 1}


def test_a_count_that_cannot_be_stored_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    (tmp_path / "state" / f"{ENDS_FILE}.new").mkdir()
    monkeypatch.setenv("SERVICE_RESULT", "signal")
    assert run_restore(config).report.errors == []
    assert ends(tmp_path / "state") == {}


def test_the_next_run_tells_them(make_node) -> None:
    node: FakeNode = make_node({"a": FOUR}).start()
    assert set(node.snapshot().service_ends.values()) == {0}
    count_service_end(str(node.directory / "state"), "watchdog")
    node.kill_and_restart()
    assert node.snapshot().service_ends["watchdog"] == 1


# ---- throttled and late CPU


def test_time_held_back_is_late_where_the_agent_holds_the_limit_down(make_node) -> None:
    node: FakeNode = make_node({"a": FOUR, "b": FOUR}).start()
    node.tick(3.9, {"a": 0.2})  # at its full limit
    assert (node.snapshot().throttled_cpu_s, node.snapshot().late_cpu_s) == pytest.approx((0.2, 0.0))
    node.ticks(8)
    assert node.cores("a") == 0.5
    node.tick(0.4, {"a": 0.1, "b": 0.2})
    assert (node.snapshot().throttled_cpu_s, node.snapshot().late_cpu_s) == pytest.approx((0.5, 0.3))
    assert node.job("a").late_cpu_s == pytest.approx(0.1)


def test_sums_of_the_node_stay_when_a_job_ends(make_node) -> None:
    node: FakeNode = make_node({"a": FOUR, "b": FOUR}).start()
    node.ticks(8)
    node.tick(0.4, {"a": 0.2})
    node.remove("a")
    node.ticks(2)
    assert [job.found.path for job in node.snapshot().jobs] == ["jobs/b"]
    assert (node.snapshot().throttled_cpu_s, node.snapshot().late_cpu_s) == pytest.approx((0.2, 0.2))


def test_in_shadow_mode_nothing_is_late(make_node) -> None:
    node: FakeNode = make_node({"a": FOUR}, config=QUICK.replace("reclaim", "shadow") + source()).start()
    node.ticks(8)
    assert node.job("a").state.limit_cores < 4.0
    node.tick(0.4, {"a": 0.2})
    assert (node.snapshot().throttled_cpu_s, node.snapshot().late_cpu_s) == pytest.approx((0.2, 0.0))


# ---- restores


def test_a_restore_that_cannot_be_written_is_counted_at_each_try(make_node, monkeypatch: pytest.MonkeyPatch) -> None:
    node: FakeNode = make_node({"a": FOUR}).start()
    node.ticks(8)

    def refuse(cgroup: Cgroup, before: CpuSettings, after: CpuSettings) -> bool:
        raise CgroupWriteError(cgroup.directory, str(after), OSError(errno.EIO, "broken"))

    with monkeypatch.context() as patch:
        patch.setattr("cpumond.host.cgroup.v2.V2Cgroup.write_settings", refuse)
        node.tick(0.5, {"a": 0.9})
        node.tick(0.5, {"a": 0.9})
        assert node.snapshot().counters["failed_restores"] == 2
        assert node.snapshot().counters["restores"] == 0
    node.tick(0.5, {"a": 0.9})
    assert node.cores("a") == 4.0
    counters = node.snapshot().counters
    assert (counters["failed_restores"], counters["restores"]) == (2, 1)
