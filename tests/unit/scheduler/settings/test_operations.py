"""What specifications of operations say, commands on operations, and how jobs move them on (semantics.md 2.5, 3)."""

import math
from functools import reduce
from typing import Any

import pytest
from scheduler_world import World, describe, make_task, refused_with

from cpumond.scheduler.decide.placement import find_stuck_tasks
from cpumond.scheduler.model import NO_SUCH_OPERATION, CommandError, JobRecord, OperationRecord, Task
from cpumond.scheduler.model.failures import EndError
from cpumond.scheduler.rights.entries import AccessEntry
from cpumond.scheduler.settings import operations

ONE = {"t": {"command": "true", "job_count": 1}}


def wish(**spec: Any):
    return operations.read_spec({"tasks": ONE, **spec}, dict)


def task(**given: Any) -> Task:
    return operations.read_spec({"tasks": {"t": {"command": "true", "job_count": 1, **given}}}, dict).tasks[0]


def refusal(**spec: Any) -> str:
    """The sentence, whose path is the field, too."""
    with pytest.raises(CommandError) as caught:
        wish(**spec)
    path = str(caught.value).partition(": ")[0]
    assert path == "spec" or caught.value.attributes == {"field": path.removeprefix("spec/")}
    return str(caught.value)


def task_refusal(**given: Any) -> str:
    return refusal(tasks={"t": {**ONE["t"], **given}})


# --- specifications


def test_a_task_has_defaults():
    assert task() == Task("t", 1, cpu_limit=1.0, memory_limit=0, user_slots=1, command="true")
    assert task().resources == (1.0, 1.0, 0.0, 0.0, 0.0)


def test_a_task_says_what_its_jobs_order_where_and_how_they_run():
    found = task(cpu_limit=2, memory_limit=5, user_slots=0, gpu_limit=1, network=3, command=["a", "b"], custom="kept")
    assert (found.resources, found.command) == ((0.0, 2.0, 1.0, 5.0, 3.0), ("a", "b"))
    assert found.spec == {"custom": "kept"}
    found = task(**{"working-directory": "/srv/data", "environment": {"A": "x=y"}, "interruptible": True})
    assert (found.working_directory, found.environment, found.interruptible) == ("/srv/data", {"A": "x=y"}, True)
    found = task(interruption_signal="SIGUSR1", restart_exit_code=17)
    assert (found.interruptible, found.interruption_signal, found.restart_exit_code) == (True, "SIGUSR1", 17)
    assert not task(interruption_signal=None).interruptible


@pytest.mark.parametrize("name", ["job_time_limit", "job-time-limit", "exec_time_limit"])
def test_time_limits_are_milliseconds(name):
    assert task(**{name: 1500}).job_time_limit == task(**{name: "1.5s"}).job_time_limit == 1500.0
    assert task(**{name: 1000}).job_time_limit == 1000.0
    assert wish(**{"time-limit": 2000.5}).time_limit == 2000.5
    assert (task().job_time_limit, wish().time_limit, wish(time_limit=None).time_limit) == (None, None, None)
    for wrong in (0, -1, 999, 1e16, "soon", "", "0s", "-1s", True, [1]):
        assert task_refusal(**{name: wrong}).startswith("spec/tasks/t/job_time_limit: expected milliseconds, or text")
        if wrong != 999:
            assert refusal(time_limit=wrong).startswith("spec/time_limit: expected milliseconds, or text with a unit")


def test_durations_are_milliseconds_or_text_with_a_unit():
    """TIME-1. Text of digits alone is seconds in YTsaurus, where a number is milliseconds: it is refused."""
    assert wish(time_limit="1h").time_limit == wish(time_limit=3_600_000).time_limit == 3_600_000.0
    assert task(min_run_time="250ms").min_run_time == 250.0
    trees = {"default": {"min_share_preemption_timeout": "1h30m"}}
    found = wish(fair_share_starvation_timeout="30s", scheduling_options_per_pool_tree=trees).options
    assert found[""] == {"fair_share_starvation_timeout": 30_000}
    assert found["default"] == {"min_share_preemption_timeout": 5_400_000}
    assert operations.read_parameters({"min_run_time": "2m"})[""] == {"min_run_time": 120_000}
    for wrong in ("3600", "1e3", "1s!", "s", "nan", "inf"):
        text = f'expected milliseconds, or text with a unit such as "30s" or "1h", in [1, 1e+15], got "{wrong}"'
        assert refusal(time_limit=wrong) == f"spec/time_limit: {text}"
        assert 'or text with a unit such as "30s"' in refusal(fair_share_starvation_timeout=wrong)


@pytest.mark.parametrize(
    "spec",
    [
        {"tasks": {str(number): ONE["t"] for number in range(100)}},
        {"max_failed_job_count": 10_000},
        {"max_failed_job_count": 0},
        {"alias": "*a"},
        {"annotations": {"a": "x" * 10_231}},  # and eight of {"a"="";}
        {"tasks": {"t": {**ONE["t"], "memory_limit": 16 * 2**40}}},
        {"tasks": {"t": {**ONE["t"], "working_directory": ""}}},
        {"tasks": {"t": {**ONE["t"], "environment": {"A_b9": "", "9": "", "x" * 65_536: ""}}}},
        {"tasks": {"t": {**ONE["t"], "command": ["x" * 65_536] * 4}}},
        {"tasks": {"t": {"command": "\u20ac" * 65_536, "environment": {"A": "\u20ac" * 21_844, "B": "x"},
                         "job_count": 1, "working_directory": "/"}}},
    ],
    ids=lambda spec: str(spec)[:60],
)  # fmt: skip
def test_as_much_as_is_allowed_is_taken(spec):
    wish(**spec)


@pytest.mark.parametrize("name", ["owners", "aco_name"])
def test_rights_of_an_operation_that_nothing_enforces_are_refused(name):
    assert refusal(**{name: ["ann"]}).startswith(f"spec/{name}: would not be enforced")
    with pytest.raises(CommandError, match=f"parameters/{name}: would not be enforced"):
        operations.read_parameters({name: ["ann"]})
    assert wish(**{name: []}) == wish()  # gives nobody anything
    assert operations.read_parameters({name: []}) == {"": {}}


def test_12_2_the_access_list_of_an_operation_is_read():
    entry = {"action": "allow", "subjects": ["ann"], "permissions": ["manage"]}
    expected = (AccessEntry("allow", ("ann",), ("manage",)),)
    assert wish(acl=[entry]).acl == operations.read_changed_acl({"acl": [entry]}) == expected
    assert wish().acl == ()
    assert operations.read_changed_acl({"weight": 1}) is None
    assert operations.read_changed_acl({"acl": []}) == ()
    refused = {**entry, "permissions": ["use"]}
    assert refusal(acl=[refused]) == 'spec/acl/0/permissions: "use" is unknown; known: read, manage, read_secrets'


def test_unknown_keys_are_told_of_and_kept():
    world = World()
    tasks = {
        "t": {"command": "true", "job_count": 1, "cpu-limit": 2, "memory": 5, "comand": "true"},
        "u": {"command": "true", "job_count": 1, "x/y": {"z": 1}},
    }
    trees = {"default": {"wait": 1}}
    spec = {"tasks": tasks, "nonsense": {"a": 1}, "wieght": 5, "fair_share_options_per_pool_tree": trees}
    change = world.do(operations.StartOperation(spec))
    assert change.warnings == (
        'spec option "nonsense" is not recognized',
        'spec option "wieght" is not recognized; did you mean "weight"?',
        'spec option "fair_share_options_per_pool_tree/default/wait" is not recognized',
        'spec option "tasks/t/comand" is not recognized; did you mean "command"?',
        'spec option "tasks/u/x/y" is not recognized',
    )
    assert operations.find_unrecognized(world.record(change.id).spec) == {
        "nonsense": {"a": 1}, "wieght": 5, "tasks": {"t": {"comand": "true"}, "u": {"x/y": {"z": 1}}},
        "fair_share_options_per_pool_tree": trees,
    }  # fmt: skip


@pytest.mark.parametrize(("tasks", "rest"), [(1, "80 more"), (20, "at least 980 more")])
def test_many_unknown_keys_are_counted(tasks, rest):
    given = {str(number): {**ONE["t"], **{f"x{key:02}": 1 for key in range(100)}} for number in range(tasks)}
    told = operations.unrecognized_warnings({"tasks": given})
    assert told[0] == 'spec option "tasks/0/x00" is not recognized'
    assert told[20:] == [f"{rest} spec options are not recognized"]


def test_a_job_that_no_node_can_hold_is_told_of():
    world = World()
    world.create_tree("other", nodes_filter="x")
    world.set_tree(nodes_filter="!x")
    assert started(world, cpu=1000.0) == ()  # nothing is known of nodes yet
    world.node("small", cpu=4, memory=100)
    world.node("large", cpu=16, memory=10)
    world.node("elsewhere", cpu=99, tags=("x",))
    assert started(world, cpu=16.0, memory=10) == ()
    assert started(world, cpu=17.0) == ('no job of task "t" can start: 17 cores, largest node 16',)
    [together] = started(world, cpu=16.0, memory=100)
    told = 'no job of task "t" can start: 16 cores and 0 GiB memory on one node, no node has enough of each'
    assert together == told
    assert started(world, cpu=17.0, pool_trees=["default", "other"]) == ()
    stuck = [live for live in world.state.operations.values() if find_stuck_tasks(live)]
    assert len(stuck) == 3
    world.node("huge", cpu=1000, memory=1000)
    assert not any(find_stuck_tasks(live) for live in stuck)


def test_2_4_a_task_that_says_no_memory_limit_has_the_one_of_its_tree():
    """Of several trees the largest; 0 is none, in trees that exist and for a task that says so."""
    world = World(nodes_filter="!b")
    spec = {"tasks": {"t": {"command": "true", "job_count": 1}, "own": {**ONE["t"], "memory_limit": 5}}}
    before = world.do(operations.StartOperation(spec), "u").id
    world.set_tree(default_memory_limit=7)
    world.create_tree("b", nodes_filter="b", default_memory_limit=9)
    one, two = (
        world.do(operations.StartOperation({**spec, **trees}), "u").id
        for trees in ({}, {"pool_trees": ["default", "b"]})
    )
    none = world.do(operations.StartOperation({"tasks": {"t": {**ONE["t"], "memory_limit": 0}}}), "u").id
    limits = [[task.memory_limit for task in world.record(each).tasks] for each in (before, one, two, none)]
    assert limits == [[0, 5], [7, 5], [9, 5], [0]]


def started(world: World, **task_and_spec: Any) -> tuple[str, ...]:
    """The warnings at the start of an operation of a pool."""
    if "p" not in world.tree().pools:
        world.create_pool("p")
        if "other" in world.state.trees:
            world.create_pool("p", tree="other")
    task = make_task(cpu_limit=task_and_spec.pop("cpu", 1.0), memory_limit=task_and_spec.pop("memory", 0))
    return world.do(operations.StartOperation({"pool": "p", "tasks": {"t": task}, **task_and_spec})).warnings


def test_a_pool_that_does_not_exist_is_named_with_the_likely_one():
    world = World(pools=["research"])
    world.create_pool("many", create_ephemeral_subpools=True)
    sentence = (
        'pool "reserch" did not exist in pool tree "default": an ephemeral one was made under <Root>; did you mean '
        '"research"?'
    )
    change = world.do(operations.StartOperation({"pool": "reserch", "tasks": ONE}))
    assert change.warnings == (sentence,)
    for known in ("reserch", "research", "many"):
        assert world.do(operations.StartOperation({"pool": known, "tasks": ONE})).warnings == ()
    assert world.do(operations.StartOperation({"tasks": ONE}), "somebody").warnings == ()  # a pool of the user's name
    world.abort(change.id)
    moved = world.do(operations.UpdateOperation(world.start("research", user="x"), {"pool": "reserhc"}))
    assert 'did you mean "research"' in moved.warnings[0]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"working_directory": "data"}, "working_directory: expected an absolute path such as /srv/data, got 'data'"),
        ({"working_directory": 1}, "working_directory: expected text"),
        ({"working_directory": "/" + "x" * 4095}, "at most 4095 characters"),
        ({"working_directory": "/a\0b"}, "working_directory: a character with the code 0"),
        ({"command": "a\0b"}, "command: a character with the code 0"),
        ({"command": ["a", "b\0"]}, "command: a character with the code 0"),
        ({"command": " \n"}, "command: "),
        ({"command": []}, "command: "),
        ({"command": ["", "x"]}, "command: "),
        ({"command": 5}, "command: "),
        ({"command": [5]}, "command: "),
        ({"environment": {"A": "\0"}}, "environment/A: a character with the code 0"),
        ({"environment": {"A": 1}}, "environment/A: "),
        ({"environment": {"A=B": "x"}}, 'a variable must consist of letters, digits and _ (ASCII), got "A=B"'),
        *(({"environment": {name: ""}}, "environment: ")
          for name in ("a-b", "a.b", "a b", "", "\u00e4", "a\n", "x" * 65_537)),
        ({"interruptible": 1}, "interruptible: "),
        *(({"interruption_signal": name}, "_signal: expected the name of a signal that a process can handle")
          for name in ("SIGFOO", "SIGKILL", "INT", 2, "")),
        ({"restart_exit_code": 0}, "restart_exit_code: "),
        ({"restart_exit_code": 256}, "restart_exit_code: "),
        ({"max_stderr_size": 0}, "max_stderr_size: "),
        ({"max_stderr_size": 2**30 + 1}, "max_stderr_size: "),
        ({"signal_root_process_only": 1}, "signal_root_process_only: "),
        *(({"job_count": count}, "job_count: ") for count in (0, 1.5, True, 100_001)),
        *(({"cpu_limit": cores}, "cpu_limit: ") for cores in (-1, math.nan, math.inf, "1")),
        ({"memory_limit": 16 * 2**40 + 1}, "memory_limit: expected a whole number in"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_a_task_may_not_say(given, sentence):
    told = task_refusal(**given)
    assert told.startswith("spec/tasks/t/")
    assert sentence in told


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"command": ["x" * 65_536] * 4 + ["y"]}, 262_145),
        ({"command": "\u20ac" * 65_536, "environment": {"A": "\u20ac" * 21_846}}, 262_147),
        ({"environment": {f"{n:04}": "x" * 252 for n in range(1024)}, "working_directory": "/d"}, 262_150),
        ({"environment": {f"V{n:063}": "" for n in range(4097)}}, 262_212),
    ],
)
def test_what_a_task_sends_with_each_job_is_bounded_in_bytes(given, size):
    with pytest.raises(CommandError) as caught:
        task(**given)
    assert str(caught.value) == (
        "spec/tasks/t: command, environment and working_directory together may take at most 262144 bytes (UTF-8), got "
        f"{size}; put long texts into a file that the job reads"
    )


@pytest.mark.parametrize(("read_with", "where"), [(wish, "spec: 501"), (task, "spec/tasks/t: 502")])
def test_options_are_bounded_in_number(read_with, where):
    with pytest.raises(CommandError, match=f"^{where} options, at most 500 are allowed"):
        read_with(**{f"x{number}": 1 for number in range(500)})


def test_0_2_hyphens_are_underscores_and_aliases_are_folded():
    assert task(**{"cpu-limit": 3}).cpu_limit == 3
    assert task(cpu=3, memory=7).resources == (1.0, 3.0, 0.0, 7.0, 0.0)
    found = wish(**{"fair_share_preemption_timeout": 5, "max-unpreemptable-running-job-count": 3})
    assert found.options[""] == {"fair_share_starvation_timeout": 5, "max_unpreemptible_running_job_count": 3}


def test_0_2_two_spellings_of_one_option_are_refused():
    assert "two spellings" in refusal(fair_share_preemption_timeout=5, fair_share_starvation_timeout=5)
    with pytest.raises(CommandError, match="two spellings"):
        task(cpu=1, cpu_limit=1)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"tasks": {}}, "spec/tasks"),
        ({"tasks": None}, "spec/tasks"),
        ({"tasks": []}, "spec/tasks"),
        ({"tasks": {"": ONE["t"]}}, "spec/tasks: "),
        ({"tasks": {str(number): ONE["t"] for number in range(101)}}, "spec/tasks: "),
        ({"tasks": {name: {"command": "true", "job_count": 60_000} for name in "ab"}}, "spec/tasks"),
        ({"tasks": {"t": 1}}, "spec/tasks/t"),
        ({"tasks": {"t": {}}}, "spec/tasks/t/job_count"),
        ({"tasks": {"t": {"job_count": 1}}}, "spec/tasks/t/command"),
        ({"pool": 5}, "spec/pool"),
        ({"pool_trees": "default"}, "spec/pool_trees"),
        ({"pool_trees": []}, "spec/pool_trees"),
        ({"pool_trees": ["a", "a"]}, "spec/pool_trees"),
        ({"title": 5}, "spec/title"),
        ({"preemption_mode": "gentle"}, "spec/preemption_mode"),
        ({"weight": -1}, "spec"),
        ({"weight": 2.0**27}, "spec"),
        ({"weight": math.nan}, "spec"),
        ({"weight": math.inf}, "spec"),
        ({"max_share_ratio": 1.5}, "spec"),
        ({"resource_limits": {"cpus": 1}}, "spec/resource_limits/cpus"),
        ({"resource_limits": {"cpu": -1}}, "spec"),
        ({"resource_limits": {"cpu": math.nan}}, "spec"),
        ({"resource_limits": 5}, "spec/resource_limits"),
        ({"resource-limits": {"cpu": "x"}}, "spec/resource_limits/cpu: "),
        ({"is_gang": 1}, "spec/is_gang: "),
        ({"scheduling_options_per_pool_tree": {"x": {"weight": -1}}},
         "spec/scheduling_options_per_pool_tree/x/weight: "),
        ({"fair_share_starvation_timeout": "soon"}, "spec"),
        ({"fair_share_starvation_tolerance": 2}, "spec"),
        ({"pool_trees": ["a"], "scheduling_options_per_pool_tree": {"b": {}}}, "'b' is not among pool_trees"),
        ({"max_failed_job_count": -1}, "spec/max_failed_job_count: "),
        ({"max_failed_job_count": 10_001}, "spec/max_failed_job_count: "),
        ({"alias": "nightly"}, 'unlike an id; write "*nightly"'),
        ({"annotations": {"a": "x" * 10_232}}, "spec/annotations: at most 10240 bytes of text YSON"),
        ({"annotations": {"a": "\u00e4" * 1280}}, "got 10249; put long texts into a file"),
        ({"annotations": []}, "spec/annotations: expected a map, got a list"),
        ({"annotations": reduce(lambda inner, _: {"a": inner}, range(5000), {})}, "annotations: are nested too deep"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)  # fmt: skip
def test_what_a_specification_may_not_say(given, where):
    assert where in refusal(**given)


def test_2_5_options_may_be_given_for_each_tree(world):
    world.create_tree("other", nodes_filter="x")
    given = {"other": {"weight": 5.0, "pool": "there"}, "default": {}}
    operation = world.start("here", weight=2.0, max_share_ratio=0.5, scheduling_options_per_pool_tree=given)
    trees = world.record(operation).trees
    assert (trees["default"].pool, trees["default"].weight, trees["default"].max_share_ratio) == ("here", 2.0, 0.5)
    assert (trees["other"].pool, trees["other"].weight, trees["other"].max_share_ratio) == ("there", 5.0, 0.5)


def test_only_vanilla_operations_are_started(world):
    with pytest.raises(CommandError, match='"map" is not supported'):
        world.do(operations.StartOperation({"tasks": ONE}, type="map"))


# --- parameters of live operations


def test_parameters_are_read_like_a_specification():
    assert operations.read_parameters({"weight": 2})[""] == {"weight": 2.0}
    given = {"scheduling_options_per_pool_tree": {"a": {"max-share-ratio": 0.5}}}
    assert operations.read_parameters(given) == {"": {}, "a": {"max_share_ratio": 0.5}}
    for wrong in ({"wieght": 1}, {"weight": -1}, {"scheduling_options_per_pool_tree": {"a": {"wieght": 1}}}):
        with pytest.raises(CommandError, match=r"parameters"):
            operations.read_parameters(wrong)


def test_none_takes_an_option_back(world):
    operation = world.start("p", weight=2.0)
    world.set_operation(operation, weight=None)
    assert world.record(operation).trees["default"].weight is None


def test_parameters_for_a_tree_that_it_is_not_in_are_refused(world):
    operation = world.start("p")
    with pytest.raises(CommandError, match='does not run in tree "other"'):
        world.set_operation(operation, scheduling_options_per_pool_tree={"other": {"weight": 1}})


# --- commands


@pytest.fixture
def world(world):
    world.node("n1")
    return world


@pytest.mark.parametrize("command", ["abort", "complete", "suspend", "resume", "set_operation"])
def test_commands_on_unknown_and_finished_operations_are_refused(world, command):
    operation = world.start("p")
    with refused_with(NO_SUCH_OPERATION):
        getattr(world, command)("nobody")
    world.abort(operation)
    before = describe(world.state)
    with pytest.raises(CommandError, match="is in state aborted"):
        getattr(world, command)(operation)
    assert describe(world.state) == before


@pytest.mark.parametrize(
    ("command", "state", "error"),
    [
        (lambda name: operations.AbortOperation(name, "no longer needed"), "aborted", "no longer needed"),
        (operations.AbortOperation, "aborted", "Operation aborted by user eve"),
        (operations.CompleteOperation, "completed", ""),
    ],
    ids=["abort with a reason", "abort", "complete"],
)
def test_it_is_ended_with_its_jobs(world, command, state, error):
    operation = world.run("p", jobs=3)
    world.do(command(operation), user="eve")
    record = world.record(operation)
    assert (record.state, record.error, record.finish_time) == (state, error, world.now)
    assert world.cores("p") == 0
    assert world.counts("p") == (0, 0)
    world.settle_down()
    assert world.nodes["n1"].jobs == {}


def test_suspend_starts_no_more_jobs_and_keeps_those_that_run(world):
    operation = world.run("p", jobs=12)
    world.suspend(operation)
    world.nodes["n1"].finish(world.jobs_of(operation)[0].id, steps=3)
    assert len(world.jobs_of(operation)) == 9
    world.resume(operation)
    world.settle_down()
    assert len(world.jobs_of(operation)) == 10


def test_resume_of_an_operation_that_is_not_suspended_is_refused(world):
    operation = world.start("p")
    with pytest.raises(CommandError, match="is not suspended"):
        world.resume(operation)


def test_an_operation_is_found_by_its_alias(world):
    operation = world.start("p", alias="*nightly")
    assert world.record("*nightly").id == operation
    with pytest.raises(CommandError, match="already used"):
        world.start("p", alias="*nightly")
    world.abort("*nightly")
    again = world.start("p", alias="*nightly")
    assert world.record("*nightly").id == again
    world.abort(again)
    assert world.record("*nightly").id == again


# --- how jobs move it on


def record_of(*tasks: Task, most_failed: int = 10) -> OperationRecord:
    return OperationRecord(
        id="o", sequence=1, user="u", start_time=0.0, tasks=tasks, trees={}, max_failed_job_count=most_failed
    )


def ended(task: str, state: Any, reason: str = "", **more: Any) -> JobRecord:
    """The record of a job that ended."""
    more = {"exit_code": 1 if state == "failed" else None, "cpu_limit": 1.0, "current_cpu_limit": 1.0, **more}
    return JobRecord("j", "o", task, "default", "n1", state, 1.0, 2.0, reason=reason, **more)


def test_all_jobs_of_all_tasks_completed_is_completed():
    record = record_of(Task("a", 1), Task("b", 2))
    for now, name in ((5.0, "b"), (5.0, "a"), (7.0, "b")):
        assert not record.is_finished
        record = operations.count_job(record, ended(name, "completed"), now)
    assert (record.state, record.finish_time) == ("completed", 7.0)
    assert operations.count_job(record, ended("b", "failed"), 9.0) is record


def test_as_many_failed_jobs_as_allowed_is_failed():
    record = record_of(Task("a", 5), Task("b", 5), most_failed=3)
    for name in ("a", "b"):
        record = operations.count_job(record, ended(name, "failed", "boom"), 5.0)
    assert not record.is_finished
    record = operations.count_job(record, ended("a", "failed", "bang"), 6.0)
    assert record.state == "failed"
    told = '3 jobs failed, max_failed_job_count is 3; all 3 failures were on node "n1"; last: bang'
    assert record.error == f"Failed jobs limit exceeded: {told}"
    exit_error = EndError("bang", 10_000, {"exit_code": 1})
    job_error = EndError("User job failed", 1205, inner=(exit_error,))
    assert record.failure == EndError("Failed jobs limit exceeded", 215, {"max_failed_job_count": 3}, (job_error,))


@pytest.mark.parametrize("most_failed", [0, 1])
def test_no_failed_job_allowed_is_as_one(most_failed):
    record = operations.count_job(record_of(Task("a", 5), most_failed=most_failed), ended("a", "failed"), 1.0)
    assert (record.state, record.failure and record.failure.code) == ("failed", 215)


@pytest.mark.parametrize("state", ["aborted", "lost"])
def test_jobs_that_are_aborted_or_lost_fail_nothing(state):
    record = record_of(Task("a", 1), most_failed=1)
    for _ in range(20):
        record = operations.count_job(record, ended("a", state, ""), 5.0)
    assert not record.is_finished
    assert getattr(record.counts["a"], state) == 20


def test_needed_jobs_are_those_neither_completed_nor_active():
    record = record_of(Task("a", 5), Task("b", 2))
    for state in ("completed", "failed"):
        record = operations.count_job(record, ended("a", state), 1.0)
    assert operations.needed_jobs(record, {"a": 1, "b": 2}) == {"a": 3}


def test_an_order_says_what_the_job_needs(world):
    spec = {
        "pool": "p",
        "tasks": {"t": {"job_count": 1, "cpu_limit": 2, "command": "true", "environment": {"A": "b"}}},
        "job_cpu_monitor": {"smoothing_factor": 0.2},
    }
    world.do(operations.StartOperation(spec), user="ann")
    node = world.nodes["n1"]
    node.deaf = True
    world.step()
    (order,) = node.heard.start
    assert (order.user, order.pool, order.task, order.command) == ("ann", "p", "t", "true")
    assert (order.cpu_limit, order.memory_limit, order.user_slots) == (2.0, 0, 1)
    assert (order.environment, order.job_cpu_monitor, order.wait_s) == ({"A": "b"}, {"smoothing_factor": 0.2}, 30.0)
