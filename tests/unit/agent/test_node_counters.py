"""What dashboards and alerts count of a node: ends of the service, throttled and late CPU, restores that failed."""

from pathlib import Path

import pytest
from fake_node import QUICK, FakeNode, source

from cpumond.agent import state_file
from cpumond.agent.limits.restore import run_restore
from cpumond.core.errors import CreateError, StateFileError
from cpumond.testing import v2_cgroup

FOUR = v2_cgroup(quota="400000 100000")


def ends(place: Path) -> dict[str, int]:
    """Those that are not 0."""
    return {result: count for result, count in state_file.read_service_ends(str(place)).items() if count}


def test_ends_of_the_service_are_counted_by_result(tmp_path: Path) -> None:
    assert state_file.read_service_ends(str(tmp_path)) == dict.fromkeys(state_file.SERVICE_RESULTS, 0)
    with pytest.raises(CreateError, match=state_file.ENDS_FILE):
        state_file.count_service_end(str(tmp_path / "missing"), "success")
    for result in ("success", "watchdog", "success", "a word of a later systemd"):
        state_file.count_service_end(str(tmp_path), result)
    assert ends(tmp_path) == {"success": 2, "watchdog": 1, "other": 1}
    damaged = state_file.ServiceEnds({"signal": -3, "strange": 5, "watchdog": 2})
    state_file.save(str(tmp_path / state_file.ENDS_FILE), damaged)
    assert ends(tmp_path) == {"watchdog": 2}, "a count that makes no sense is zero"


@pytest.mark.parametrize("damage", [b"", b"rubbish", b"cpumond-state 1 sha256=0\n{}", b"\xff" * 300])
def test_a_damaged_file_is_zeros_and_counts_on(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / state_file.ENDS_FILE).write_bytes(damage)
    assert ends(tmp_path) == {}
    state_file.count_service_end(str(tmp_path), "signal")
    assert ends(tmp_path) == {"signal": 1}


@pytest.mark.parametrize(("result", "damage", "counted"), [
    ("watchdog", "", {"watchdog": 1}),
    (None, "", {}),
    ("core-dump", "nothing can be restored", {"core-dump": 1}),
    ("signal", "nothing can be stored", {}),
])  # fmt: skip
def test_restore_counts_the_end_that_systemd_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: str | None, damage: str, counted: dict[str, int]
) -> None:
    """By hand there is none; one is counted though nothing could be restored, and restoring does not depend on it."""
    state, config = tmp_path / "state", tmp_path / "cpumond.toml"
    state.mkdir()
    config.write_text(f'state_dir = "{state}"\nruntime_dir = "{tmp_path}/run"\n')
    monkeypatch.delenv("SERVICE_RESULT", raising=False)
    if result is not None:
        monkeypatch.setenv("SERVICE_RESULT", result)
    if damage == "nothing can be restored":
        (state / state_file.STATE_FILE).write_bytes(b"rubbish")
        with pytest.raises(StateFileError):
            run_restore(str(config))
    else:
        if damage:
            (state / f"{state_file.ENDS_FILE}.new").mkdir()
        assert run_restore(str(config)).report.errors == []
    assert ends(state) == counted


def test_time_held_back_is_late_where_the_agent_holds_the_limit_down(make_node) -> None:
    node: FakeNode = make_node({"a": FOUR, "b": FOUR}).start()
    node.tick(3.9, {"a": 0.2})  # at its full limit
    assert (node.snapshot().throttled_cpu_s, node.snapshot().late_cpu_s) == pytest.approx((0.2, 0.0))
    node.ticks(8)
    assert node.cores("a") == 0.5
    node.tick(0.4, {"a": 0.1, "b": 0.2})
    assert (node.snapshot().throttled_cpu_s, node.snapshot().late_cpu_s) == pytest.approx((0.5, 0.3))
    assert node.job("a").late_cpu_s == pytest.approx(0.1)
    node.remove("a")
    node.ticks(2)
    assert [job.found.path for job in node.snapshot().jobs] == ["jobs/b"]
    assert (node.snapshot().throttled_cpu_s, node.snapshot().late_cpu_s) == pytest.approx((0.5, 0.3))
    node.reload(QUICK.replace("reclaim", "shadow") + source())
    node.ticks(4)
    assert node.job("b").state.limit_cores < 4.0
    node.tick(0.4, {"b": 0.2})
    assert (node.snapshot().throttled_cpu_s, node.snapshot().late_cpu_s) == pytest.approx((0.7, 0.3))
    assert set(node.snapshot().service_ends.values()) == {0}
    state_file.count_service_end(str(node.directory / "state"), "watchdog")
    node.kill_and_restart()
    assert node.snapshot().service_ends["watchdog"] == 1


def test_a_restore_that_cannot_be_written_is_counted_at_each_try(make_node, monkeypatch, refuse_writes) -> None:
    node: FakeNode = make_node({"a": FOUR}).start()
    node.ticks(8)
    refuse_writes()
    node.tick(0.5, {"a": 0.9})
    node.tick(0.5, {"a": 0.9})
    assert (node.snapshot().counters["failed_restores"], node.snapshot().counters["restores"]) == (2, 0)
    monkeypatch.undo()
    node.tick(0.5, {"a": 0.9})
    assert node.cores("a") == 4.0
    counters = node.snapshot().counters
    assert (counters["failed_restores"], counters["restores"]) == (2, 1)
