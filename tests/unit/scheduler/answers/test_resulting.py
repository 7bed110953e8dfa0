"""What holds of a specification, from the documents' defaults to later changes (semantics.md 1.1, 2.5)."""

from typing import Any

import msgspec
import pytest
from scheduler_world import World

from cpumond.agent.config import parse_layer
from cpumond.monitor.model import MonitorSettings
from cpumond.scheduler.answers.resulting import full_spec, monitor_sources, resulting_monitor, resulting_specification
from cpumond.scheduler.model import OperationRecord, OperationTreeOptions, Task
from cpumond.scheduler.program.main import MONITOR_DURATIONS, read_monitor
from cpumond.scheduler.settings.operations import AbortOperation, UpdateOperation


def test_1_1_all_options_of_the_monitor_have_the_documents_defaults():
    monitor = resulting_monitor({})
    assert set(monitor) == {field.encode_name for field in msgspec.structs.fields(MonitorSettings)}
    assert (monitor["check_period"], monitor["start_delay"], monitor["smoothing_factor"]) == (1000.0, 0.0, 0.1)
    assert (monitor["relative_upper_bound"], monitor["relative_lower_bound"]) == (0.9, 0.6)
    assert (monitor["vote_window_size"], monitor["vote_decision_threshold"], monitor["min_cpu_limit"]) == (5, 3, 1.0)
    assert (monitor["mode"], monitor["enable_cpu_reclaim"], monitor["burst_ratio"]) == (None, None, None)
    assert set(monitor_sources({}).values()) == {"default"}


def test_1_1_what_the_specification_says_wins_and_says_so():
    given = read_monitor({"check-period": "2s", "restore_hold": 500, "enable_cpu_reclaim": True, "min-cpu-limit": 0.5})
    monitor = resulting_monitor(given)
    assert (monitor["check_period"], monitor["restore_hold"]) == (2000.0, 500.0)
    assert (monitor["enable_cpu_reclaim"], monitor["min_cpu_limit"]) == (True, 0.5)
    named = {name for name, source in monitor_sources(given).items() if source == "specification"}
    assert named == {"check_period", "restore_hold", "enable_cpu_reclaim", "min_cpu_limit"}


def test_the_merged_section_means_the_same_when_it_is_given_back():
    given = read_monitor({"check_period": 250, "vote_window_size": 7, "start_delay": "3s"})
    whole = {name: value for name, value in resulting_monitor(given).items() if value is not None}
    settings = msgspec.convert(parse_layer(whole, "spec"), MonitorSettings)
    assert settings == MonitorSettings(check_period_s=0.25, vote_window_size=7, start_delay_s=3.0)
    assert "check_period" in MONITOR_DURATIONS


def resulting(world: World, operation: str) -> dict[str, Any]:
    return resulting_specification(world.state.find_record(operation), world.state.operations.get(operation))


def test_tasks_and_trees_have_their_defaults_filled_in(world):
    world.create_pool("a", fair_share_starvation_timeout=60_000)
    shown = resulting(world, world.start("a"))
    (task,) = shown["tasks"].values()
    named = {"job_count", "cpu_limit", "memory_limit", "user_slots", "command", "environment", "interruptible"}
    assert named <= set(task)
    options = shown["scheduling_options_per_pool_tree"]["default"]
    assert (options["pool"], options["weight"], options["max_share_ratio"]) == ("a", 1.0, 1.0)
    assert options["max_unpreemptible_running_job_count"] == 10
    assert (shown["preemption_mode"], shown["is_gang"], shown["max_failed_job_count"]) == ("normal", False, 10)
    assert shown["pool_trees"] == ["default"]
    assert msgspec.json.decode(msgspec.json.encode(shown)) == shown


def test_changed_parameters_show_and_a_finished_operation_keeps_its_own():
    world = World(pools=["a"])
    operation = world.start("a")
    world.do(UpdateOperation(operation, {"weight": 5, "resource_limits": {"cpu": 2}}))
    options = resulting(world, operation)["scheduling_options_per_pool_tree"]["default"]
    assert (options["weight"], options["resource_limits"]) == (5.0, {"cpu": 2.0})
    world.do(AbortOperation(operation))
    options = resulting(world, operation)["scheduling_options_per_pool_tree"]["default"]
    assert (options["pool"], options["weight"], options["fair_share_starvation_timeout"]) == ("a", 5.0, None)


def record(**spec: Any) -> OperationRecord:
    trees = {"default": OperationTreeOptions("a", weight=2.0)}
    task = Task("t", 1, spec={"note": 1}, command=("a", "b"))
    return OperationRecord("1-2-3-4", 1, "me", 0.0, (task,), trees, spec=spec)


def test_what_means_nothing_here_stays_as_it_was_given():
    shown = resulting_specification(record(description="mine", strange=[1]), None)
    assert (shown["description"], shown["strange"]) == ("mine", [1])
    assert (shown["tasks"]["t"]["note"], shown["tasks"]["t"]["command"]) == (1, ["a", "b"])


@pytest.mark.parametrize("name", ["max-share-ratio", "max_share_ratio"])
def test_the_full_spec_has_the_options_for_all_trees_at_its_root_too(name):
    spec = {"pool": "a", name: 0.5, "job-cpu-monitor": {}}
    shown = full_spec(record(**spec), None)
    assert (shown["pool"], shown["max_share_ratio"]) == ("a", 0.5)
    assert shown["job_cpu_monitor"] == resulting_monitor({})
    assert not [key for key in shown if "-" in key]
    assert "max_share_ratio" not in resulting_specification(record(**spec), None)
