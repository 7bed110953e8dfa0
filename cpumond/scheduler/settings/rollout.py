"""Roll-out by groups of nodes: what agents may do to limits, first on canaries, and when that is taken back. Pure.

A stage applies to the nodes that its filter fits. If several stages fit a node, the lowest level applies. In state
``canary``, only the hosts in ``canaries`` have the stage's level; its other hosts have ``previous``. ``check`` compares
the counters of the canaries' agents with the stage's budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Annotated, Final, Literal, NamedTuple
from zlib import crc32

import msgspec

from cpumond.core.levels import ACTUATORS, LEVELS, SAFE, Level, is_above, lowest
from cpumond.core.wire import AgentAbout
from cpumond.core.words import count
from cpumond.scheduler.model import Why

LATE_CHECKS: Final = 2
"""Number of consecutive late checks after which a canary is taken back; a single late check may be a burst."""

EVERY_NODE: Final = "%true"

StageLevel = Literal["shadow", "up-only", "guarantee", "weight", "quota"]
Ratio = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
NodesFilterText = Annotated[str, msgspec.Meta(max_length=10_000)]
CanaryPeriod = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Maximum cost of a canary; above this it is taken back. ``max_late_cores``: core-seconds per second, on average
    over its hosts, that jobs could have used but for throttling. ``max_foreign_writes`` and ``max_errors``: sums over
    all hosts since the canary began."""

    max_late_cores: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.05
    max_foreign_writes: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    max_errors: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    check_period_s: Annotated[float, msgspec.Meta(ge=1.0, le=3600.0)] = 5.0


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Level of the nodes of one group. ``at``: seconds since 1970. ``why``: the user's reason. ``stopped``: why it was
    taken back. ``previous``: the level before; None if the group had no stage. ``canary_period_s``: time without a
    problem after which the level applies to all nodes; None if only a user may advance the stage."""

    nodes_filter: str
    level: StageLevel
    previous: Level | None
    state: Literal["canary", "everywhere", "stopped"]
    user: str
    at: float
    why: str = ""
    canaries: list[str] = []
    canary_period_s: float | None = None
    budget: Budget = Budget()
    stopped: str = ""

    def find_level(self, node_id: str) -> Level | None:
        """Return the stage's level for one of its nodes; None if it sets none."""
        if self.state == "everywhere" or (self.state == "canary" and node_id in self.canaries):
            return self.level
        return self.previous

    @property
    def rest(self) -> Level | None:
        """Return the stage's level for its nodes that are no canaries; None if it sets none."""
        return self.level if self.state == "everywhere" else self.previous


class _Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of the commands: the name of the type is the tag ``type`` in JSON."""

    nodes_filter: NodesFilterText
    why: Why = ""


class SetStage(_Command, frozen=True):
    """Let the nodes of a group do at most ``level``. If this is more than before, ``canary_ratio`` of them begin."""

    level: StageLevel
    canary_ratio: Ratio = 0.1
    canary_period_s: CanaryPeriod | None = None
    budget: Budget = Budget()


class _OfOne(_Command, frozen=True):
    """Base of commands on one stage. ``set_at``: refused if the stage was set at another time; None: never."""

    set_at: float | None = None


class AdvanceStage(_OfOne, frozen=True):
    """Advance the stage: all nodes of the group get the level."""


class StopStage(_OfOne, frozen=True):
    """Take the stage back: all nodes of the group get the level that they had before the stage."""


class RemoveStage(_Command, frozen=True):
    """Remove the stage: its nodes get the level of other stages; without any, they change no limits (shadow)."""


RolloutCommand = SetStage | AdvanceStage | StopStage | RemoveStage


def describe_rollout(command: RolloutCommand) -> str:
    """Return a command as text: ``set the stage of nodes "rack-a" to weight: second week``."""
    nodes = f'nodes "{command.nodes_filter or EVERY_NODE}"'
    if isinstance(command, SetStage):
        text = f"set the stage of {nodes} to {command.level}"
    elif isinstance(command, AdvanceStage):
        text = f"advanced the stage of {nodes} from its canary to all of them"
    elif isinstance(command, StopStage):
        text = f"stopped the stage of {nodes}, which return to the level before it"
    else:
        text = f"removed the stage of {nodes}"
    return f"{text}: {command.why}" if command.why else text


class Host(NamedTuple):
    """A node of a group. ``about``: None if the agent does not describe itself. ``told``: the node's level by all
    stages now. ``others``: its level by the stages of other groups; None if there are none."""

    node_id: str
    about: AgentAbout | None
    is_online: bool
    told: Level
    others: Level | None = None

    def find_level(self, said: Level | None) -> Level:
        """Return the level that the node has if the stage of its group sets the level ``said``."""
        return find_level((said, self.others))

    def find_effect(self, said: Level | None) -> Level | None:
        """Return ``find_level`` as the node's configuration bounds it; None if unknown or without stages."""
        about = self.about
        return None if about is None or not about.may_set_mode else _find_obeyed(self.find_level(said), about)


def _find_obeyed(level: Level, about: AgentAbout) -> Level:
    return lowest(SAFE if level == "guarantee" and not about.knows_guarantee else level, about.bound)


def find_level(levels: Iterable[Level | None]) -> Level:
    """Return the level of a node: the lowest of the ``levels`` of its stages, or ``SAFE`` if it has none."""
    return find_least(levels) or SAFE


def find_least(levels: Iterable[Level | None]) -> Level | None:
    return min((level for level in levels if level is not None), key=LEVELS.index, default=None)


def follows_stage(stage: Stage, about: AgentAbout) -> bool:
    """Return whether an agent writes limits as its stage sets, and thus does more than before. It does not if a
    different stage or its own configuration restricts it, if it is paused, or if it has not received the level yet."""
    obeys = about.may_set_mode and not about.is_paused and about.level == _find_obeyed(stage.level, about)
    return obeys and is_above(about.level, stage.previous or SAFE) and is_above(about.level, SAFE)


def choose_canaries(
    nodes_filter: str, hosts: Iterable[Host], level: Level, previous: Level | None, ratio: float
) -> tuple[str, ...]:
    """Return the canaries of a group, which are always the same: at least one host for each level that hosts can reach
    by their own configurations, and only hosts that do more at the new level."""
    able: dict[Level, list[str]] = {}
    for host in hosts:
        after = host.find_effect(level)
        if after is not None and host.is_online and is_above(after, host.find_effect(previous) or SAFE):
            able.setdefault(after, []).append(host.node_id)
    chosen: list[str] = []
    for _, names in sorted(able.items()):
        names.sort(key=lambda node_id: (crc32(f"{nodes_filter}\0{node_id}".encode("utf-8", "replace")), node_id))
        chosen += names[: ceil(ratio * len(names))]
    return tuple(chosen)


def make_stage(command: SetStage, before: Stage | None, hosts: Sequence[Host], user: str, now: float) -> Stage:
    """Return the stage that a command sets. If it lets no host do more than before, it applies to all nodes at once."""
    previous = None if before is None else before.rest
    changes = ((each.find_level(command.level), each.find_level(previous)) for each in hosts)
    raised = any(is_above(*change) for change in changes) if hosts else is_above(command.level, previous or SAFE)
    is_canary = raised and command.canary_ratio < 1.0
    canaries: tuple[str, ...] = ()
    if is_canary:
        canaries = choose_canaries(command.nodes_filter, hosts, command.level, previous, command.canary_ratio)
    return Stage(
        nodes_filter=command.nodes_filter, level=command.level, previous=previous,
        state="canary" if is_canary else "everywhere", user=user, at=now, why=command.why,
        canaries=list(canaries), canary_period_s=command.canary_period_s if is_canary else None, budget=command.budget,
    )  # fmt: skip


def warn_of_raised(
    stage: Stage | None, hosts: Iterable[Host], proven: Collection[Level] = frozenset()
) -> tuple[str, ...]:
    """Describe hosts that, without a canary, will do more once ``stage`` is in force (None: once the stage is removed).
    ``proven``: levels that its canaries have."""
    raised = unknown = 0
    canaries = stage.canaries if stage is not None and stage.state == "canary" else ()
    for host in hosts:
        said = _find_said(stage, host)
        if host.node_id in canaries or not is_above(host.find_level(said), host.told):
            continue
        effect = host.find_effect(said)
        if host.about is None:
            unknown += not proven
        elif effect is not None and effect not in proven and is_above(effect, _find_obeyed(host.told, host.about)):
            raised += 1
    sentences = [f"{count(raised, 'host')} may now do more, without a canary"] if raised else []
    if unknown:
        sentences.append(f"{count(unknown, 'host')} without a report may do more, too, without a canary")
    return tuple(sentences)


def _find_said(stage: Stage | None, host: Host) -> Level | None:
    return None if stage is None else stage.find_level(host.node_id)


NO_CANARY: Final = "no host can go first now, so nothing is proven before the stage is advanced"


class StagePlan(msgspec.Struct, frozen=True):
    """Effects of a stage: sentences, and the hosts whose level it changes at once."""

    sentences: tuple[str, ...]
    changed: tuple[str, ...]


LATER, SAME, HELD, BOUND, OLD, FORBIDDEN, UNKNOWN = _STAYS = (
    "would stay until the canary is advanced",
    "would not change",
    "no more than now: another stage has a lower level",
    "no more than now: the host's own configuration is the upper bound",
    "would stay in shadow: the agent is older than the level guarantee, upgrade it",
    "may not: may_set_mode off",
    "unknown: the agent has not described itself; older versions never do",
)


def plan_stage(stage: Stage, hosts: Iterable[Host]) -> StagePlan:
    """Return the effect of ``stage`` on each host of the group."""
    moves: Counter[tuple[Level, Level, str]] = Counter()
    stays: Counter[str] = Counter()
    changed: list[str] = []
    silent = 0
    for host in hosts:
        before, after = host.find_effect(host.told), host.find_effect(_find_said(stage, host))
        if before is None or after is None or before == after:
            stays[_find_stay(stage, host)] += 1
            continue
        first = "as canary " if stage.state == "canary" and host.node_id in stage.canaries else ""
        moves[before, after, first] += 1
        silent += not host.is_online
        changed.append(host.node_id)
    told = [
        f"{count(number, 'host')} would go {first}from {format_level(old)} to {format_level(new)}"
        for (old, new, first), number in sorted(moves.items())
    ]
    if silent:
        told.append(f"{count(silent, 'host')} of these {'is' if silent == 1 else 'are'} silent, and may follow later")
    told += [f"{count(stays[text], 'host')} {text}" for text in _STAYS if stays[text]]
    if told and stage.state == "canary" and not stage.canaries:
        told.append(NO_CANARY)
    return StagePlan(tuple(told or ["no node fits the filter now"]), tuple(changed))


def _find_stay(stage: Stage, host: Host) -> str:
    if host.about is None:
        return UNKNOWN
    if not host.about.may_set_mode:
        return FORBIDDEN
    if host.find_level(stage.level) == "guarantee" and not host.about.knows_guarantee:
        return OLD
    if stage.state == "canary" and host.find_effect(stage.level) != host.find_effect(host.told):
        return LATER
    if is_above(stage.level, host.find_level(stage.level)):
        return HELD
    return BOUND if is_above(stage.level, host.about.bound) else SAME


def format_level(level: Level | None) -> str:
    return "no stage" if level is None else f"reclaim by {level}" if level in ACTUATORS else level


class CanaryCounts(NamedTuple):
    """Counters of a canary's agent since the start of its ``run``, from a heartbeat at ``heard_at``. ``is_proof``:
    whether the agent writes limits as its stage sets."""

    run: str
    late_core_seconds: float
    foreign_writes: int
    errors: int
    heard_at: float
    is_proof: bool = True


Seen = Mapping[str, CanaryCounts | None]
"""Host of a canary -> its counters, None if it is silent. Hosts whose agent has not described itself are left out."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Observations of a canary. ``at``: time of the last check; None before the first check."""

    at: float | None = None
    last: Seen = field(default_factory=dict)
    base: Seen = field(default_factory=dict)
    """Counters at the last check of lateness."""
    late_cores: float = 0.0
    """Average of the hosts at the last check of lateness."""
    late_checks: int = 0
    foreign_writes: int = 0
    errors: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Host -> number of restarts of its agent. One restart may be an upgrade; a second one counts as an error."""
    checks: int = 0
    proves_since: float | None = None
    """Time since which all hosts of the canary send heartbeats and do what the stage sets."""
    stop: str = ""
    """Why the canary must be taken back, as long as that has not been done."""


class CanaryVerdict(NamedTuple):
    """Decision of a check. ``why``: the reason in words."""

    action: Literal["", "stop", "advance"] = ""
    why: str = ""


def check(stage: Stage, seen: Seen, before: Watch, now: float) -> tuple[Watch, CanaryVerdict]:
    """Check a canary. What agents counted before the first check is ignored: the stage did not cause it. Lateness is
    not checked before each host that describes itself has sent a new heartbeat: these may be rarer than checks."""
    if before.stop:
        return replace(before, at=now), CanaryVerdict("stop", before.stop)
    proves = bool(stage.canaries) and all((counts := seen.get(each)) and counts.is_proof for each in stage.canaries)
    since = None if not proves else now if before.proves_since is None else before.proves_since
    if before.at is None:
        return Watch(now, dict(seen), dict(seen), proves_since=since), CanaryVerdict()
    writes, errors, restarts = before.foreign_writes, before.errors, dict(before.restarts)
    for node_id, counts in seen.items():
        last = before.last.get(node_id)
        if counts is None:
            errors += last is not None or node_id not in before.last  # the host has become silent
            continue
        if last is None:
            continue
        if last.run != counts.run:
            restarts[node_id] = restarts.get(node_id, 0) + 1
            errors += restarts[node_id] > 1
            since = None if since is None else now
        start = _start_of(last, counts)
        writes += max(counts.foreign_writes - start.foreign_writes, 0)
        errors += max(counts.errors - start.errors, 0)
    after = replace(
        before, at=now, last={**before.last, **seen}, foreign_writes=writes, errors=errors, restarts=restarts,
        proves_since=since,
    )  # fmt: skip
    if _has_news(seen, before.base):
        late_cores = sum(_find_late_cores(before.base.get(node_id), counts) for node_id, counts in seen.items())
        late_cores /= max(len(seen), 1)
        after = replace(
            after, base={**before.base, **seen}, checks=before.checks + 1, late_cores=late_cores,
            late_checks=before.late_checks + 1 if late_cores > stage.budget.max_late_cores else 0,
        )  # fmt: skip
    verdict = _judge(stage, after, now)
    return (replace(after, stop=verdict.why) if verdict.action == "stop" else after), verdict


def _start_of(last: CanaryCounts, counts: CanaryCounts) -> CanaryCounts:
    """Return the counters from which growth since ``last`` is computed: zeros if the agent has a new run."""
    return last if last.run == counts.run else CanaryCounts(counts.run, 0.0, 0, 0, last.heard_at)


def _has_news(seen: Seen, base: Seen) -> bool:
    """Return whether each host has sent a heartbeat since ``base``. Hosts without counters are ignored: they must not
    keep other hosts from being checked."""
    for node_id, counts in seen.items():
        last = base.get(node_id)
        if counts is not None and last is not None and counts.heard_at <= last.heard_at:
            return False
    return bool(seen)


def _find_late_cores(base: CanaryCounts | None, counts: CanaryCounts | None) -> float:
    if base is None or counts is None:
        return 0.0
    late_s = counts.late_core_seconds - _start_of(base, counts).late_core_seconds
    return max(late_s, 0.0) / max(counts.heard_at - base.heard_at, 1e-9)


def _judge(stage: Stage, seen: Watch, now: float) -> CanaryVerdict:
    budget = stage.budget
    for number, most, what in (
        (seen.errors, budget.max_errors, ("error",)),
        (seen.foreign_writes, budget.max_foreign_writes, ("write by another program", "writes by other programs")),
    ):
        if number > most:
            return CanaryVerdict("stop", f"the canary had {count(number, *what)}, its budget is {most}")
    if seen.late_checks >= LATE_CHECKS:
        return CanaryVerdict(
            "stop",
            f"the canary's hosts throttled {seen.late_cores:.2f} cores of work on average in {seen.late_checks} checks "
            f"in a row, its budget is {budget.max_late_cores:g}",
        )
    period_s, since = stage.canary_period_s, seen.proves_since
    # The period counts from when all hosts do what the stage sets. Time in which a different stage restricted the
    # canary, in which it was silent, or in which a different scheduler checked it, proves nothing.
    is_over = period_s is not None and since is not None and now - since >= period_s
    if is_over and seen.checks >= LATE_CHECKS and not seen.late_checks:
        return CanaryVerdict("advance", f"the canary was within its budget for {period_s:g} s")
    return CanaryVerdict()
