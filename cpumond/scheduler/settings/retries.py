"""Retries by kind of failure: the rules of a policy, and which of them the end of a job meets; pure (semantics.md 3.9).

A rule is a text, in specifications, options of pools and on the command line: ``KINDS:TIMES[,OPTION=VALUE...]`` or
``KINDS:fail``. The first rule that fits decides. What it allowed is kept in the operation's record, by the rule's text.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from cpumond.core.words import nearest, quoted, show_utc
from cpumond.fairshare.resources import MEMORY, show_amount
from cpumond.scheduler.model import CommandError, JobRecord, OperationRecord, Retried, Retry, RetryNote, Task
from cpumond.scheduler.model.failures import JOB_TIME_LIMIT_EXCEEDED, MEMORY_LIMIT_EXCEEDED
from cpumond.scheduler.settings import failures
from cpumond.scheduler.settings.values import FIELD, to_milliseconds

RETRY_POLICY: Final = "retry_policy"
MAX_RULES: Final = 20
MAX_TEXT: Final = 200
MAX_TIMES: Final = 10_000
PER_OPERATION: Final = 1000
"""Retries of one rule in one operation where the rule does not say it; each that is under way is in the record."""
MAX_DELAY_S: Final = 7 * 86_400.0
MAX_GROWTH: Final = 16.0
MAX_NOTES: Final = 10
"""Failures of an operation of which it is shown what rule they met."""
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
PREEMPTED: Final = "preempted"
SIGNAL_BASE: Final = 128
"""A job that a signal ended has an exit code above it, as in shells."""
_RANGES: Final = {"exit": (0, 255), "signal": (SIGNAL_BASE, 64)}
"""What is added to a number for its exit code, and the greatest number."""
_PREEMPTED: Final = frozenset(failures.ABORT_REASONS.values())
NO_RETRY: Final = Retry()


class Rule(NamedTuple):
    """One rule. ``kinds``: name, least and greatest exit code. Times in seconds."""

    text: str
    kinds: tuple[tuple[str, int, int], ...]
    fails: bool = False
    """Whether the operation fails at once."""
    times: int = 0
    """Retries of one job, of a gang of all its jobs together."""
    per_operation: int = PER_OPERATION
    delay_s: float = 0.0
    delay_growth: float = 1.0
    max_delay_s: float = MAX_DELAY_S
    memory_growth: float = 1.0


class Terms(NamedTuple):
    """The policy that holds for a job that ended; and how many bytes a job may order after it, and which bound that is,
    in words."""

    rules: tuple[Rule, ...]
    most_memory: float = 0.0
    bound: str = ""


@lru_cache(maxsize=1024)
def parse_rule(text: str) -> Rule:
    """A rule. Raises ValueError, with a sentence."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"at most {MAX_TEXT} characters, got {len(text)}")
    kinds_text, colon, rest = text.replace(" ", "").partition(":")
    first, *options = rest.split(",")
    kinds = tuple(_parse_kind(kind) for kind in kinds_text.split("+"))
    if first == "fail" and not options:
        return Rule(text, kinds, fails=True)
    if not colon or first == "fail":
        raise ValueError(f"expected how often a job is started again, or fail, after a colon, such as {EXAMPLE}")
    if len({option.partition("=")[0] for option in options}) < len(options):
        raise ValueError("an option is given twice; keep one")
    given = {"times": _parse_number("times", first)}
    given["per_operation"] = max(PER_OPERATION, given["times"])
    for name, _, value in (option.partition("=") for option in options):
        if name not in _OPTIONS:
            raise ValueError(f"unknown option {name!r}; {_tell_known(name, [*_OPTIONS][1:])}")
        given[_OPTIONS[name].field] = _parse_number(name, value)
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
_OPTIONS: Final = {
    "times": _Option("times", 1, MAX_TIMES, f"how often a job is started again, 1 to {MAX_TIMES}"),
    "per_operation": _Option("per_operation", 1, MAX_TIMES, f"a whole number from 1 to {MAX_TIMES}"),
    "delay": _Option("delay_s", 0, MAX_DELAY_S, _TIME),
    "max_delay": _Option("max_delay_s", 0, MAX_DELAY_S, _TIME),
    "delay_growth": _Option("delay_growth", 1, MAX_GROWTH, f"a factor from 1 to {MAX_GROWTH:g}"),
    "memory_growth": _Option("memory_growth", 1, MAX_GROWTH, f"a factor from 1 to {MAX_GROWTH:g}"),
}


def _tell_known(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"did you mean {near}?" if near else f"known: {', '.join(known)}"


def _parse_kind(text: str) -> tuple[str, int, int]:
    name, given, value = text.partition("=")
    if name not in KINDS:
        raise ValueError(f"unknown kind of failure {name!r}; {_tell_known(name, KINDS)}")
    if not given:
        # A signal is no exit code that a program chose.
        return (name, 1, SIGNAL_BASE) if name == "exit" else (name, SIGNAL_BASE + 1, SIGNAL_BASE + 64)
    if name not in _RANGES:
        raise ValueError(f"{name} takes no number; write {name}")
    base, most = _RANGES[name]
    ends = value.split("-")
    numbers = [
        named.value if (named := signal.Signals.__members__.get(each)) else int(each) if each.isdecimal() else 0
        for each in ends
    ]
    if len(ends) > 2 or not 1 <= numbers[0] <= numbers[-1] <= most:
        raise ValueError(f"expected {name}=1 to {name}={most}, or a range such as {name}=2-9, got {text!r}")
    return name, base + numbers[0], base + numbers[-1]


def _parse_number(name: str, text: str) -> Any:
    option = _OPTIONS[name]
    number: float | None = None
    if option.words is _TIME:
        milliseconds = to_milliseconds(text)
        number = None if milliseconds is None else milliseconds / 1e3
    elif re.fullmatch(r"[0-9]{1,9}" if option.most == MAX_TIMES else r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        number = int(text) if option.most == MAX_TIMES else float(text)
    if number is None or not option.least <= number <= option.most:
        raise ValueError(f"{name}: expected {option.words}, got {text!r}")
    return number


def check_policy(policy: Iterable[str], where: str) -> None:
    """Refuse a policy of which a rule cannot be read. Raises CommandError."""
    rules = list(policy)
    if len(rules) > MAX_RULES:
        raise CommandError(f"{where}: at most {MAX_RULES} rules, got {len(rules)}", attributes={FIELD: where})
    for text in rules:
        try:
            parse_rule(text)
        except ValueError as error:
            raise CommandError(f"{where}: rule {text[:80]!r}: {error}", attributes={FIELD: where}) from None


def find_kind(job: JobRecord) -> tuple[str, int]:
    """What kind of failure ended a job, "" for none that a rule can name, and its exit code."""
    if job.state == "lost":
        return "node_lost", 0
    if job.not_started:
        return "not_started", 0
    if job.state == "aborted":
        return (PREEMPTED if failures.tell_abort_reason(job) in _PREEMPTED else ""), 0
    if job.state != "failed":
        return "", 0
    code = 0 if job.failure is None else job.failure.code
    if code in _CODES:
        return _CODES[code], 0
    return ("exit", job.exit_code) if job.exit_code else ("", 0)


_CODES: Final = {MEMORY_LIMIT_EXCEEDED: "oom", JOB_TIME_LIMIT_EXCEEDED: "time_limit"}


def find_rule(rules: Iterable[Rule], kind: str, code: int) -> Rule | None:
    """The first rule that fits."""
    for rule in rules:
        for name, least, most in rule.kinds:
            if name == kind if kind != "exit" else name in _RANGES and least <= code <= most:
                return rule
    return None


def is_for_preempted(policy: Iterable[str]) -> bool:
    """Whether a policy has a rule for jobs that were preempted."""
    return any(name == PREEMPTED for text in policy for name, _, _ in parse_rule(text).kinds)


def find_delay_s(rule: Rule, times: int) -> float:
    """How long the replacement waits of a job that was started again ``times`` times by the rule before."""
    try:
        return min(rule.delay_s * rule.delay_growth**times, rule.max_delay_s)
    except OverflowError:
        return rule.max_delay_s


def decide(terms: Terms, record: OperationRecord, task: Task, job: JobRecord, now: float) -> RetryNote | None:
    """What the policy makes of the end of a job; None where no rule fits, and all is as without one."""
    kind, code = find_kind(job)
    is_gang = record.is_gang or bool(record.incarnations)
    rule = find_rule(terms.rules, kind, code) if kind and not (is_gang and kind == PREEMPTED) else None
    if rule is None:
        return None
    told = f"{KINDS[kind]} {code}" if code else KINDS[kind]
    note = RetryNote(job.id, task.name, job.cookie, now, rule.text, told, "failed")
    if rule.fails:
        return note
    before = record.retried.places.get(task.name, {}).get(job.cookie, NO_RETRY)
    total = record.retried.counts.get(rule.text, 0)
    times = total if is_gang else before.used.get(rule.text, 0)
    memory, why, is_counted = job.memory_limit or task.memory_limit, "", True
    if is_gang and any(
        each.at == now and each.outcome == "retried" and each.rule == rule.text for each in record.retried.notes
    ):
        is_counted, times = False, times - 1  # its jobs that end at once are started again at once
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
        return msgspec.structs.replace(note, outcome="used_up", why=why)
    return msgspec.structs.replace(
        note,
        outcome="retried",
        due=now + find_delay_s(rule, times),
        memory=memory if memory > task.memory_limit else 0,
        left=max(min(rule.times - times - 1, rule.per_operation - total - is_counted), 0),
        is_counted=is_counted,
    )


def follow_end(
    record: OperationRecord, task: Task | None, job: JobRecord, terms: Terms | None, now: float, *, is_done: bool
) -> tuple[OperationRecord, RetryNote | None]:
    """The record after the end of a job, and what its policy made of that. ``is_done``: its work is."""
    if task is None or (terms is None and not record.retried.places):
        return record, None
    note = None if terms is None else decide(terms, record, task, job, now)
    return _note_end(record, task, job, note, is_done), note


def _note_end(
    record: OperationRecord, task: Task, job: JobRecord, note: RetryNote | None, is_done: bool
) -> OperationRecord:
    places = record.retried.places.get(task.name, {})
    before = places.get(job.cookie)
    if note is None and before is None:
        return record
    old, after = before or NO_RETRY, dict(places)
    if is_done:
        after.pop(job.cookie, None)
    elif note is not None and note.outcome == "retried":
        others = {rule: times for rule, times in old.used.items() if rule != note.rule}
        used = {**others, note.rule: old.used.get(note.rule, 0) + note.is_counted}
        after[job.cookie] = Retry(used, note.due, note.memory)
    elif before is not None:
        after[job.cookie] = msgspec.structs.replace(old, due=0.0)
    counts, notes = record.retried.counts, record.retried.notes
    if note is not None:
        counts = {**counts, note.rule: counts.get(note.rule, 0) + (note.outcome == "retried" and note.is_counted)}
        notes = (*notes[-(MAX_NOTES - 1) :], note)
    retried = Retried({**record.retried.places, task.name: after}, counts, notes)
    return msgspec.structs.replace(record, retried=retried)


def is_retried(note: RetryNote | None) -> bool:
    """Whether a rule allowed to start a job again."""
    return note is not None and note.outcome == "retried"


def tell_note(note: RetryNote) -> str:
    """What a rule made of the end of a job, in a sentence."""
    text = f"job {note.job_id} (task {quoted(note.task)}, cookie {note.cookie}): {note.kind}; "
    if note.outcome == "failed":
        return f"{text}rule {note.rule} failed the operation"
    if note.outcome == "used_up":
        return text + tell_used_up(note)
    memory = f" with {show_amount(MEMORY, note.memory)}" if note.memory else ""
    when = f"at {show_utc(note.due)}" if note.due > note.at else "at once"
    left = f"{note.left or 'no'} {'retry' if note.left == 1 else 'retries'} left"
    return f"{text}rule {note.rule} started it again {when}{memory}, {left}"


def tell_used_up(note: RetryNote | None) -> str:
    """Why the rule that fits did not start a job again, in a sentence; "" where none fits."""
    return "" if note is None else f"retry rule {note.rule} is used up: {note.why}"
