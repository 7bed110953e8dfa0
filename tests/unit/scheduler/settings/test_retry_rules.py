"""Rules of a retry policy: how they are read, which one fits, what it decides (3.9)."""

import re
from typing import Any

import msgspec
import pytest

from cpumond.scheduler.model import JobRecord, OperationRecord, PreemptionRecord, Retried, Retry, Task
from cpumond.scheduler.model.failures import EndError
from cpumond.scheduler.settings import retries
from cpumond.scheduler.settings.operations import count_job

GIB = 2**30
TASK = Task("t", 3, memory_limit=2 * GIB)
STOPPED = PreemptionRecord("j", "o", "default", "p", "n1", 0.0, "preempted", "why", {})
ENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "exit 1": ("failed", {"exit_code": 1}),
    "exit 66": ("failed", {"exit_code": 66}),
    "SIGKILL": ("failed", {"exit_code": 137}),
    "oom": ("failed", {"exit_code": 137, "failure": EndError("out of memory", 1200)}),
    "time": ("failed", {"exit_code": 137, "failure": EndError("Job time limit exceeded", 1202)}),
    "not started": ("failed", {"not_started": True}),
    "lost": ("lost", {}),
    "preempted": ("aborted", {"preemption": STOPPED}),
    "aborted": ("aborted", {"preemption": msgspec.structs.replace(STOPPED, kind="aborted")}),
    "completed": ("completed", {"exit_code": 0}),
}


def job(end: str, cookie: int = 0, **more: Any) -> JobRecord:
    state, facts = ENDS[end]
    return JobRecord("j", "o", "t", "default", "n1", state, 1.0, 2.0, 1.0, 1.0, cookie=cookie, **{**facts, **more})


def record(**more: Any) -> OperationRecord:
    return OperationRecord(id="o", sequence=1, user="u", start_time=0.0, tasks=(TASK,), trees={}, **more)


def terms(*rules: str, started: int = 3) -> retries.Terms:
    return retries.Terms(tuple(map(retries.parse_rule, rules)), started, 5.0 * GIB, "that is the bound")


@pytest.mark.parametrize(
    ("kinds", "ends"),
    [
        ("exit", {"exit 1", "exit 66"}),
        ("exit=66", {"exit 66"}),
        ("exit=64-70", {"exit 66"}),
        ("exit=137", {"SIGKILL"}),
        ("signal", {"SIGKILL"}),
        ("signal=SIGKILL", {"SIGKILL"}),
        ("signal=9", {"SIGKILL"}),
        ("signal=1-8", set()),
        ("oom", {"oom"}),
        ("time_limit", {"time"}),
        ("not_started", {"not started"}),
        ("node_lost", {"lost"}),
        ("preempted", {"preempted"}),
        ("exit=1+ signal=SIGKILL +oom", {"exit 1", "SIGKILL", "oom"}),
    ],
)
def test_a_rule_fits_its_kinds_and_nothing_else(kinds, ends):
    found = {
        end for end in ENDS if retries.decide(terms(f"{kinds}:1"), record(), TASK, job(end), 5.0) is not retries.NO_NOTE
    }
    assert found == ends
    assert retries.find_kind(job("completed")) == retries.find_kind(job("aborted")) == ("", 0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("oom", "expected a number of restarts, or fail, after a colon"),
        ("oom:0", "times: expected how often a job is started again, 1 to 10000, got '0'"),
        ("exit=1+" * 50 + "oom:1", "at most 200 characters, got 355"),
        ("oom:fail,delay=1s", "expected a number of restarts"),
        ("oon:1", "unknown kind of failure 'oon'; did you mean \"oom\"?"),
        ("exit=0:1", "expected exit=1 to exit=255, or a range such as exit=2-9, got 'exit=0'"),
        ("exit=9-2:1", "expected exit=1 to exit=255"),
        ("signal=SIGNOT:1", "expected signal=1 to signal=64"),
        ("oom=3:1", "oom takes no number"),
        ("oom:1,memory_grow=2", "unknown option 'memory_grow'; did you mean \"memory_growth\"?"),
        ("oom:1,memory_growth=17", "memory_growth: expected a factor from 1 to 16, got '17'"),
        ("oom:1,memory_growth=nan", "memory_growth: expected a factor"),
        ("exit:1,memory_growth=2", "memory_growth is for jobs that ran out of memory"),
        ("exit:1,delay=5", "delay: expected a time with its unit, at most 7 days, such as 30s, got '5'"),
        ("exit:1,delay=8d", "delay: expected a time"),
        ("exit:1,max_delay=5s", "delay_growth and max_delay need a delay"),
        ("exit:1,per_operation=1.5", "per_operation: expected a whole number from 1 to 10000"),
        ("exit:1,delay=1s,delay=2s", "an option is given twice"),
        ("exit:1,times=2", "an option is given twice"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused_with_what_to_write(text, sentence):
    with pytest.raises(ValueError, match="^" + re.escape(f"rule {text[:80]!r}: {sentence}")):
        retries.check_policy([text])


def test_rules_are_bounded_in_number():
    retries.check_policy(["exit:1"] * retries.MAX_RULES)
    with pytest.raises(ValueError, match=r"^at most 20 rules, got 21$"):
        retries.check_policy(["exit:1"] * (retries.MAX_RULES + 1))


def test_the_first_rule_that_fits_decides_even_when_it_is_used_up():
    seen, now = record(retried=Retried({"t": {0: Retry({"exit=1:1": 1})}})), terms("exit=1:1", "exit:9")
    note = retries.decide(now, seen, TASK, job("exit 1"), 5.0)
    assert (note.rule, note.outcome) == ("exit=1:1", "used_up")
    assert note.why == "retry rule exit=1:1 allows no more retries: the job was started again 1 of 1 times"
    other = retries.decide(now, record(), TASK, job("exit 66"), 5.0)
    assert (other.rule, other.left) == ("exit:9", 8)


@pytest.mark.parametrize(("times", "waits"), [(0, 10.0), (1, 20.0), (2, 40.0), (3, 60.0), (5000, 60.0)])
def test_a_wait_grows_up_to_its_bound(times, waits):
    assert retries.find_delay_s(retries.parse_rule("exit:9,delay=10s,delay_growth=2,max_delay=1m"), times) == waits


def test_retries_of_an_operation_are_bounded_besides_those_of_each_job():
    seen, now = record(max_failed_job_count=1), terms("exit:5,per_operation=2")
    for cookie in (0, 1):
        seen = count_job(seen, job("exit 1", cookie), 5.0, now)
    assert (seen.state, seen.retried.notes[-1].left) == ("pending", 0)
    assert seen.retried.counts == {"exit:5,per_operation=2": 2}
    ended = count_job(seen, job("exit 1", 2), 5.0, now)
    assert ended.state == "failed"
    assert ended.error.endswith("allows no more retries: its jobs were started again 2 of 2 times (per_operation)")


def test_an_allowance_of_a_job_is_forgotten_only_once_it_completes():
    policy = terms("oom:5,memory_growth=2,delay=30s")
    seen = count_job(record(), job("oom"), 5.0, policy)
    rule = "oom:5,memory_growth=2,delay=30s"
    assert seen.retried.places == {"t": {0: Retry({rule: 1}, 35.0, 4 * GIB)}}
    assert retries.describe_note(seen.retried.notes[-1]) == (
        'job j (task "t", cookie 0): out of memory; rule oom:5,memory_growth=2,delay=30s started it again at '
        "1970-01-01 00:00:35 UTC with 4 GiB, 4 retries left"
    )
    lost = count_job(seen, job("lost", memory_limit=4 * GIB), 50.0, policy)
    assert lost.retried.places == {"t": {0: Retry({rule: 1}, 0.0, 4 * GIB)}}, "it starts at once, with what it had"
    assert count_job(lost, job("completed"), 60.0, policy).retried.places == {"t": {}}
    assert count_job(lost, job("completed"), 60.0).retried.places == {"t": {}}, "also when the pool's policy is gone"


def test_ends_of_jobs_of_one_run_of_a_gang_are_one_retry():
    """A second job fails while the end of the first one is being written, and nobody has stopped it yet."""
    gang = record(is_gang=True)
    for index, now, count in ((0, 5.0, 1), (1, 5.0, 1), (2, 5.2, 1), (4, 6.0, 2), (3, 6.1, 2)):
        started = 3 if index < 3 else 6
        gang = count_job(gang, job("lost", index % 3, job_index=index), now, terms("node_lost:2", started=started))
        assert gang.retried.counts == {"node_lost:2": count}
    gang = count_job(gang, job("lost", 2, job_index=8), 7.0, terms("node_lost:2", started=9))
    why = gang.retried.notes[-1].why
    assert why == "retry rule node_lost:2 allows no more retries: its gang was started again 2 of 2 times"
    assert retries.decide(terms("preempted:1"), gang, TASK, job("preempted"), 8.0) is retries.NO_NOTE
