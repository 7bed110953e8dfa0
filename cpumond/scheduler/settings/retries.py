"""Retry policies: rules by kind of failure, and the choice of the rule when a job ends; pure (semantics.md 3.9).

A rule is text in specifications, in options of pools and on the command line: ``KINDS:TIMES[,OPTION=VALUE...]`` or
``KINDS:fail``. The first rule that fits decides. The operation's record counts the retries by the text of the rule."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from cpumond.core.words import did_you_mean, format_utc, quoted
from cpumond.fairshare.resources import MEMORY, format_amount
from cpumond.scheduler.model import JobRecord, OperationRecord, Retried, Retry, RetryNote, Task
from cpumond.scheduler.model.failures import JOB_TIME_LIMIT_EXCEEDED, MEMORY_LIMIT_EXCEEDED
from cpumond.scheduler.settings import failures
from cpumond.scheduler.settings.values import to_milliseconds

RETRY_POLICY: Final = "retry_policy"
MAX_RULES: Final = 20
MAX_TEXT: Final = 200
MAX_TIMES: Final = 10_000
PER_OPERATION: Final = 1000
"""Default maximum number of a rule's retries in one operation; the record contains each retry in progress."""
MAX_DELAY_S: Final = 7 * 86_400.0
MAX_GROWTH: Final = 16.0
MAX_NOTES: Final = 10
"""Maximum number of failures of an operation that are shown with the rule that decided."""
EXAMPLE: Final = "oom:3,memory_growth=1.5"
KINDS: Final = {
    "exit": "exit code",
    "signal": "signal",
    "oom": "out of memory",
    "node_lost": "its node was lost",
    "preempted": "preempted",
    "not_started": "failed before it had a process",
    "time_limit": "job_time_limit exceeded",
}
_NUMBERED: Final = {"exit": (0, 255, "1-128"), "signal": (128, 64, "1-64")}
"""Kind -> (exit code minus number, highest number, numbers of a rule without any). Exit codes above 128 are signals."""
_KIND_OF_CODE: Final = {MEMORY_LIMIT_EXCEEDED: "oom", JOB_TIME_LIMIT_EXCEEDED: "time_limit"}
_PREEMPTED: Final = frozenset(failures.ABORT_REASONS.values())
NO_RETRY: Final = Retry()
NO_NOTE: Final = RetryNote("", "", -1, 0.0, "", "", "none")
"""Result of ``decide`` if no rule fits."""


class Rule(NamedTuple):
    """One rule. ``kinds``: each is a kind of ``find_kind`` with its lowest and highest exit code. Times are seconds."""

    text: str
    kinds: tuple[tuple[str, int, int], ...]
    fails: bool = False
    """Whether the rule makes the operation fail at once."""
    times: int = 0
    """Maximum number of retries of one job or, for a gang, of all its jobs together."""
    per_operation: int = PER_OPERATION
    delay_s: float = 0.0
    delay_growth: float = 1.0
    max_delay_s: float = MAX_DELAY_S
    memory_growth: float = 1.0


class Terms(NamedTuple):
    """Policy for a job that ended. ``started``: number of jobs of its operation that were started so far.
    ``most_memory``: maximum bytes that its replacement may request; ``bound``: what sets that maximum."""

    rules: tuple[Rule, ...] = ()
    started: int = 0
    most_memory: float = 0.0
    bound: str = ""


NO_TERMS: Final = Terms()


@lru_cache(maxsize=1024)
def parse_rule(text: str) -> Rule:
    """Parse a rule. Raises ValueError with a sentence."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"at most {MAX_TEXT} characters, got {len(text)}")
    kinds_text, colon, rest = text.replace(" ", "").partition(":")
    first, *options = rest.split(",")
    kinds = tuple(map(_parse_kind, kinds_text.split("+")))
    if first == "fail" and not options:
        return Rule(text, kinds, fails=True)
    if not colon or first == "fail":
        raise ValueError(f"expected a number of restarts, or fail, after a colon, such as {EXAMPLE}")
    given: dict[str, Any] = {}
    for name, _, value in (option.partition("=") for option in (f"times={first}", *options)):
        if name not in _OPTIONS:
            raise ValueError(f"unknown option {name!r}{_describe_known(name, [*_OPTIONS][1:])}")
        if _OPTIONS[name].field in given:
            raise ValueError("an option is given twice; keep one")
        given[_OPTIONS[name].field] = _parse_number(name, value)
    given.setdefault("per_operation", max(PER_OPERATION, given["times"]))
    if "memory_growth" in given and not any(name == "oom" for name, _, _ in kinds):
        raise ValueError("memory_growth is for jobs that ran out of memory; add the kind oom, or leave it out")
    if given.keys() & {"delay_growth", "max_delay_s"} and not given.get("delay_s"):
        raise ValueError("delay_growth and max_delay need a delay to grow from, such as delay=30s")
    return Rule(text, kinds, **given)


class _Option(NamedTuple):
    field: str
    least: float
    most: float
    words: str


_TIME: Final = "a time with its unit, at most 7 days, such as 30s"
_FACTOR: Final = f"a factor from 1 to {MAX_GROWTH:g}"
_OPTIONS: Final = {
    "times": _Option("times", 1, MAX_TIMES, f"how often a job is started again, 1 to {MAX_TIMES}"),
    "per_operation": _Option("per_operation", 1, MAX_TIMES, f"a whole number from 1 to {MAX_TIMES}"),
    "delay": _Option("delay_s", 0, MAX_DELAY_S, _TIME),
    "max_delay": _Option("max_delay_s", 0, MAX_DELAY_S, _TIME),
    "delay_growth": _Option("delay_growth", 1, MAX_GROWTH, _FACTOR),
    "memory_growth": _Option("memory_growth", 1, MAX_GROWTH, _FACTOR),
}


def _describe_known(name: str, known: list[str]) -> str:
    return did_you_mean(name, known) or f"; known: {', '.join(known)}"


def _parse_kind(text: str) -> tuple[str, int, int]:
    name, given, value = text.partition("=")
    if name not in KINDS:
        raise ValueError(f"unknown kind of failure {name!r}{_describe_known(name, [*KINDS])}")
    if name not in _NUMBERED:
        if given:
            raise ValueError(f"{name} takes no number; write {name}")
        return name, 0, 0
    base, most, every = _NUMBERED[name]
    ends = (value if given else every).split("-")
    numbers = [
        named.value if (named := signal.Signals.__members__.get(each)) else int(each) if each.isdecimal() else 0
        for each in ends
    ]
    if len(ends) > 2 or not 1 <= numbers[0] <= numbers[-1] <= most:
        raise ValueError(f"expected {name}=1 to {name}={most}, or a range such as {name}=2-9, got {text!r}")
    return "exit", base + numbers[0], base + numbers[-1]


def _parse_number(name: str, text: str) -> float:
    option, number = _OPTIONS[name], None
    if option.words is _TIME:
        milliseconds = to_milliseconds(text)
        number = None if milliseconds is None else milliseconds / 1e3
    elif option.words is _FACTOR:
        number = float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) else None
    elif re.fullmatch("[0-9]{1,9}", text):
        number = int(text)
    if number is None or not option.least <= number <= option.most:
        raise ValueError(f"{name}: expected {option.words}, got {text!r}")
    return number


def check_policy(policy: Iterable[str]) -> None:
    """Check that all rules of a policy can be parsed. Raises ValueError with a sentence."""
    rules = list(policy)
    if len(rules) > MAX_RULES:
        raise ValueError(f"at most {MAX_RULES} rules, got {len(rules)}")
    for text in rules:
        try:
            parse_rule(text)
        except ValueError as error:
            raise ValueError(f"rule {text[:80]!r}: {error}") from None


def find_kind(job: JobRecord) -> tuple[str, int]:
    """The kind of failure that ended a job ("" if rules cannot name it), and the exit code, if it is the only cause."""
    if job.state == "lost":
        return "node_lost", 0
    if job.not_started:
        return "not_started", 0
    if job.state == "aborted":
        return "preempted" if failures.find_abort_reason(job) in _PREEMPTED else "", 0
    if job.state != "failed":
        return "", 0
    kind = "" if job.failure is None else _KIND_OF_CODE.get(job.failure.code, "")
    return (kind, 0) if kind else ("exit", job.exit_code or 0)


def is_for_preempted(policy: Iterable[str]) -> bool:
    """Return whether a policy has a rule for preempted jobs."""
    return any(name == "preempted" for text in policy for name, _, _ in parse_rule(text).kinds)


def find_delay_s(rule: Rule, times: int) -> float:
    """Return how many seconds a job's replacement waits. ``times``: how often the rule started the job again before."""
    try:
        return min(rule.delay_s * rule.delay_growth**times, rule.max_delay_s)
    except OverflowError:
        return rule.max_delay_s


def decide(terms: Terms, record: OperationRecord, task: Task, job: JobRecord, now: float) -> RetryNote:
    """Return the policy's decision about the end of a job. NO_NOTE: no rule fits, as if there were no policy."""
    kind, code = find_kind(job)
    is_gang = record.starts_whole
    fitting = (each for each in terms.rules for name, low, high in each.kinds if name == kind and low <= code <= high)
    rule = None if is_gang and kind == "preempted" else next(fitting, None)
    if rule is None:
        return NO_NOTE
    told = f"{KINDS[kind]} {code}" if code else KINDS[kind]
    note = RetryNote(job.id, task.name, job.cookie, now, rule.text, told, "failed", started=terms.started)
    if rule.fails:
        return note
    before = record.retried.places.get(task.name, {}).get(job.cookie, NO_RETRY)
    total = record.retried.counts.get(rule.text, 0)
    times = total if is_gang else before.used.get(rule.text, 0)
    memory, why, is_counted = job.memory_limit or task.memory_limit, "", True
    if is_gang and any(
        0 <= job.job_index < each.started and each.outcome == "retried" and each.rule == rule.text
        for each in record.retried.notes
    ):
        is_counted, times = False, times - 1  # its gang was to start again already
    elif times >= rule.times:
        why = f"{'its gang' if is_gang else 'the job'} was started again {times} of {rule.times} times"
    elif total >= rule.per_operation:
        why = f"its jobs were started again {total} of {rule.per_operation} times (per_operation)"
    if not why and kind == "oom" and rule.memory_growth > 1.0:
        grown = int(min(memory * rule.memory_growth, terms.most_memory))
        if grown <= memory:
            why = f"a job cannot get more memory than {memory} bytes: {terms.bound}"
        memory = max(grown, memory)
    if why:
        why = f"retry rule {rule.text} allows no more retries: {why}"
        return msgspec.structs.replace(note, outcome="used_up", why=why)
    return msgspec.structs.replace(
        note, outcome="retried", due=now + find_delay_s(rule, times),
        memory=memory if memory > task.memory_limit else 0,
        left=max(min(rule.times - times - 1, rule.per_operation - total - is_counted), 0), is_counted=is_counted,
    )  # fmt: skip


def follow_end(
    record: OperationRecord, task: Task | None, job: JobRecord, terms: Terms, now: float, *, is_done: bool
) -> tuple[OperationRecord, RetryNote]:
    """Return the record after the end of a job, and the policy's decision. ``is_done``: the job's work is done."""
    retried = record.retried
    if task is None or not (terms.rules or retried.places):
        return record, NO_NOTE
    note = decide(terms, record, task, job, now)
    after, counts = dict(retried.places.get(task.name, {})), retried.counts
    before = after.get(job.cookie)
    if note is NO_NOTE and before is None:
        return record, note
    if is_done:
        after.pop(job.cookie, None)
    elif note.outcome == "retried":
        used = {} if before is None else {**before.used}
        used[note.rule] = used.pop(note.rule, 0) + note.is_counted  # the last key is the latest rule
        after[job.cookie] = Retry(used, note.due, note.memory)
        counts = {**counts, note.rule: counts.get(note.rule, 0) + note.is_counted}
    elif before is not None:
        after[job.cookie] = msgspec.structs.replace(before, due=0.0)
    notes = retried.notes if note is NO_NOTE else (*retried.notes, note)[-MAX_NOTES:]
    return msgspec.structs.replace(record, retried=Retried({**retried.places, task.name: after}, counts, notes)), note


def describe_note(note: RetryNote) -> str:
    """Describe a rule's decision about the end of a job."""
    if note.outcome == "retried":
        when = f"at {format_utc(note.due)}" if note.due > note.at else "at once"
        memory = f" with {format_amount(MEMORY, note.memory)}" if note.memory else ""
        left = f"{note.left or 'no'} {'retry' if note.left == 1 else 'retries'} left"
        what = f"rule {note.rule} started it again {when}{memory}, {left}"
    else:
        what = note.why or f"rule {note.rule} failed the operation"
    return f"job {note.job_id} (task {quoted(note.task)}, cookie {note.cookie}): {note.kind}; {what}"
