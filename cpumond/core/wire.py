"""The messages between agents and a scheduler: registration, heartbeat, and the answers, version 1.

Sent as JSON by HTTP POST: ``NodeRegistration`` to ``/api/v1/nodes``, ``Heartbeat`` to ``/api/v1/heartbeats``,
``JobLog`` to ``/api/v1/logs``, ``JobReply`` to ``/api/v1/replies``. A heartbeat is level-triggered: it holds everything
the node knows, so losing any number of them loses nothing. ``incarnation`` names one run of the agent, ``sequence``
grows by at least one with each heartbeat of a run; a receiver drops what is older than what it has (same incarnation,
sequence not larger), and what is of another incarnation than the one that registered last.

The answer is level-triggered too: jobs to start (as many as fit into one answer) and to stop are in each until the
heartbeat shows that the node has acted; a node ignores the order to start a job that it has or had, and the order to
stop one that it does not have.

CPU values are cores (1.0 = one CPU all the time), memory bytes. ``cpumond schema NAME`` prints the JSON Schema.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec

from cpumond.core.levels import Level

HEARTBEAT_VERSION = 1

MAX_NAME = 4096
MAX_HEARTBEAT_BYTES = 8 * 2**20
MAX_HEARTBEAT_JOBS = 10_000
"""Of each list of jobs in a heartbeat; one job takes some 600 bytes of JSON."""

OUT_OF_MEMORY: Final = "out of memory: "
"""How the ``reason`` of a job begins that failed at its memory limit."""
MEMORY_OVERDRAFT: Final = "resource_overdraft: above its memory reserve: "
"""How the ``reason`` of a job begins that was aborted since its node was short of memory and it used more than it
reserves."""

NO_ROOM: Final = "the node had no room for it within "
"""How the ``reason`` of a job begins that was aborted since it waited for too long on its node."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Cores = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_CoreSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """What is counted of a job, in core-seconds since its start; null where it is not known.

    Every struct that describes a job inherits it: a counter that is added here is in reports, records and answers.
    """

    cpu_seconds: _CoreSeconds | None = None
    """CPU time used."""
    reclaimed_cpu_seconds: _CoreSeconds | None = None
    """What of its order was lowered (semantics.md 1.7, ``aggregated_preempted_cpu``)."""
    ordered_cpu_seconds: _CoreSeconds | None = None
    """What it could have used without the agent (1.7, ``aggregated_max_cpu_usage``)."""
    throttled_cpu_seconds: _CoreSeconds | None = None
    """Time that its threads were held back by a quota, summed over CPUs."""
    late_cpu_seconds: _CoreSeconds | None = None
    """The part of ``throttled_cpu_seconds`` while the agent held its limit below what it could have."""


CPU_COUNTERS: Final = CpuUse.__struct_fields__
CpuTimes = tuple[float | None, float | None, float | None, float | None, float | None]
cpu_times: Final[Callable[[CpuUse], CpuTimes]] = attrgetter(*CPU_COUNTERS)
"""The counters in the order of CPU_COUNTERS."""


class JobFigures(CpuUse, frozen=True, kw_only=True):
    """What a node tells of a job that lives; the last four are of the last check, null before the first one."""

    cpu_usage: _Cores | None = None
    min_cpu_limit: _Cores | None = None
    """The floor: the agent never lowers its limit below."""
    votes_sum: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] | None = None
    throttled_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    """Share of the enforcement periods of the check in which it was throttled."""


def list_figures(told: JobFigures) -> dict[str, Any]:
    """All fields of ``told`` by name, for the constructor of another struct."""
    return dict(zip(JobFigures.__struct_fields__, _figures(told), strict=True))


_figures = attrgetter(*JobFigures.__struct_fields__)


class JobReport(JobFigures, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One job of the node.

    ``cpu_limit`` is what the job ordered; ``current_cpu_limit`` what its cgroup may use now, at most ``cpu_limit``
    unless an operator or another program raised it; ``smoothed_cpu_usage`` null until the second good sample;
    ``mode`` how the agent treats the job.
    """

    job_id: _Name
    operation_id: str
    cpu_limit: _Cores
    current_cpu_limit: _Cores
    smoothed_cpu_usage: _Cores | None = None
    mode: str = "reclaim"
    from_scheduler: bool = False
    """Whether the scheduler ordered this job; others only take room. ``task`` is from its order."""
    stopping: bool = False
    """It was told to stop and has not ended."""
    task: str = ""
    start_time: float | None = None
    memory: _Bytes | None = None
    """What it may use now; null for what it ordered."""
    cgroup: str = ""
    """Relative to the root of the hierarchy of the cpu controller."""
    checkpoint_at: float | None = None
    """When it last told of a checkpoint, by its node's clock; null for never. Schedulers before 0.2 do not know it."""
    over_reserve: bool = False
    """Whether it uses more memory than it reserves; only of a job whose order has a ``memory_reserve``."""


class FinishedJob(CpuUse, frozen=True, forbid_unknown_fields=True):
    """A job of the scheduler that has ended on this node; repeated until an answer acknowledges it.

    ``state``: completed (exit code 0), failed (its own fault), aborted (stopped, or the node's fault) or lost (it is
    not known what became of it: the host was started anew). Times are seconds since 1970.
    """

    job_id: _Name
    operation_id: _Name
    state: Literal["completed", "failed", "aborted", "lost"]
    task: str = ""
    exit_code: int | None = None
    reason: str = ""
    start_time: float | None = None
    finish_time: float | None = None
    max_memory: _Bytes | None = None
    cgroup: str = ""
    stderr_size: _Bytes | msgspec.UnsetType = msgspec.UNSET
    """Bytes that it wrote to stderr, left out where that is not known; told to who ``knows_stderr_size`` only."""


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The full state of one node.

    ``cpu_capacity`` the node's CPUs in cores; ``sent_at`` seconds since 1970, for people only, never compared. ``jobs``
    holds every job that still lives, stopping ones too. The heartbeat of a node that is not registered is dropped.
    """

    node_id: _Name
    incarnation: _Name
    sequence: Annotated[int, msgspec.Meta(ge=0)]
    sent_at: float
    cpu_capacity: _Cores
    jobs: Annotated[list[JobReport], msgspec.Meta(max_length=MAX_HEARTBEAT_JOBS)]
    version: Annotated[int, msgspec.Meta(ge=1, le=HEARTBEAT_VERSION)] = HEARTBEAT_VERSION
    finished_jobs: Annotated[list[FinishedJob], msgspec.Meta(max_length=MAX_HEARTBEAT_JOBS)] = []


class AgentAbout(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an agent tells of itself, in a heartbeat and only when it has changed; later versions may tell more.

    ``level`` is what it does at most to any of its jobs now, ``bound`` what its own configuration allows.
    ``metrics``: where it listens for Prometheus, "" for nowhere.
    ``late_core_seconds`` and the next three count since the start of its run.
    """

    version: Annotated[str, msgspec.Meta(max_length=100)]
    level: Level
    bound: Level
    may_set_mode: bool = False
    knows_guarantee: bool = False
    """Whether it knows the level ``guarantee``: one that does not stays in shadow when it is sent that."""
    limit_rule: Annotated[str, msgspec.Meta(max_length=100)] = ""
    is_paused: bool = False
    metrics: Annotated[str, msgspec.Meta(max_length=300)] = ""
    problems: Annotated[list[Annotated[str, msgspec.Meta(max_length=300)]], msgspec.Meta(max_length=10)] = []
    late_core_seconds: _CoreSeconds = 0.0
    """Time that threads were held back while the agent held their limit below what they could have, to a tenth."""
    foreign_writes: Annotated[int, msgspec.Meta(ge=0)] = 0
    errors: Annotated[int, msgspec.Meta(ge=0)] = 0
    late_ticks: Annotated[int, msgspec.Meta(ge=0)] = 0
    control_group_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    control_group: Literal["job", "host"] = "job"
    """What of the node is left in shadow for comparison; such a job has ``mode`` "control"."""
    max_log_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    """What of each of a job's streams it keeps at most; 0 where that is not its own bound."""
    knows_secrets: bool = False
    """Whether it gives jobs the ``secrets`` of their orders; one that does not is not asked to run such a job."""
    idle_class: Annotated[str, msgspec.Meta(max_length=100)] = ""
    """How jobs on reclaimed CPU give way to others: "idle" (cpu.idle), "lowest weight" without it; "" not at all."""


class NodeHeartbeat(Heartbeat, frozen=True, forbid_unknown_fields=True):
    """A heartbeat as a scheduler reads it: the full state, or with ``base`` what changed since the last accepted one.

    ``base``: the sequence of that one. ``jobs`` are then those that are new or changed, ``gone`` the ids of those that
    live no more, ``job_count`` how many live. Only to a scheduler whose last answer said ``differences``; one that does
    not know the base, or counts otherwise, drops it and asks for the ``full`` state. ``about``: what has changed of the
    agent itself, only to a scheduler whose last answer had ``knows_about``.
    """

    base: Annotated[int, msgspec.Meta(ge=0)] | None = None
    gone: Annotated[list[_Name], msgspec.Meta(max_length=MAX_HEARTBEAT_JOBS)] = []
    job_count: Annotated[int, msgspec.Meta(ge=0)] = 0
    about: AgentAbout | msgspec.UnsetType = msgspec.UNSET


class NodeResources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node offers to jobs. ``memory`` in bytes, ``network`` in any unit that the tasks use, too."""

    cpu: _Cores
    memory: _Bytes = 0
    user_slots: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1_000
    gpu: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0
    network: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] = 0.0
    """Bounded, as the others: sums over nodes must be numbers, or no update of the tree succeeds."""


class NodeRegistration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node makes itself known: at the start of its agent, and when its tags or resources change.

    A registration of the incarnation that is registered already changes tags and resources; a new incarnation replaces
    the old one, whose heartbeats are dropped from then on. ``address`` ("" = the id) counts as one of the tags. ``key``
    is a secret that the agent keeps from run to run: it lets a new run replace one that is still alive.
    """

    node_id: _Name
    incarnation: _Name
    resources: NodeResources
    address: str = ""
    tags: Annotated[list[_Name], msgspec.Meta(max_length=1000)] = []
    version: Annotated[int, msgspec.Meta(ge=1, le=HEARTBEAT_VERSION)] = HEARTBEAT_VERSION
    key: Annotated[str, msgspec.Meta(max_length=256)] = ""


class RegistrationAnswer(msgspec.Struct, frozen=True):
    """``tree`` null: no tree's filter fits the node's tags, it gets no work. ``warning`` says so in words."""

    node_id: str
    tree: str | None
    heartbeat_period_s: float
    warning: str = ""


class JobOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job to start. ``command`` is a shell command or an argument list; ``job_cpu_monitor`` the operation's section.

    ``wait_s``: how long the job may wait on the node for resources that other jobs still hold. ``working_directory``
    "" is a fresh directory of the job's own, removed with it. ``checkpoints``: it tells of checkpoints, by touching the
    file that CPUMOND_CHECKPOINT names. ``reclaimed``: it runs on reclaimed CPU (1.10), in the node's idle class.
    ``variables``: what else its environment has, of the system's own, after the task's ``environment``.
    ``set_container_cpu_limit``: whether ``cpu_limit`` is its ceiling, too; null as its class has it: jobs on reclaimed
    CPU have none. ``interruption_signal``: the name of what interrupts it, "" for SIGTERM; all of its processes get
    it, with ``signal_root_process_only`` the first. ``max_stderr_bytes``: what is kept of its stderr, 0 for the node's
    own bound. ``cpu_monitor_moves`` "weight": its ceiling stays while its guarantee moves; with all else the actuator
    of its node decides (1.6). ``secrets``: variables that win over all others, and that the node
    keeps in no file that others can read, nor in one that outlives the job's start (12.6). ``memory_reserve``: the
    memory that it takes room for, at most ``memory_limit``, at which it fails; 0: all of that. What is as its default
    says is left out: most jobs use few of these.
    """

    job_id: str
    operation_id: str
    task: str
    pool: str
    cpu_limit: _Cores
    memory_limit: _Bytes
    user_slots: Annotated[int, msgspec.Meta(ge=0)]
    command: str | list[str]
    environment: dict[str, str]
    user: str
    job_cpu_monitor: dict[str, Any]
    wait_s: _Seconds
    interruptible: bool = False
    working_directory: str = ""
    checkpoints: bool = False
    reclaimed: bool = False
    set_container_cpu_limit: bool | None = None
    interruption_signal: str = ""
    signal_root_process_only: bool = False
    max_stderr_bytes: int = 0
    variables: dict[str, str] = {}
    cpu_monitor_moves: str = "quota"
    secrets: dict[str, str] = {}
    memory_reserve: _Bytes = 0

    @property
    def moves_ceiling(self) -> bool:
        """Whether it has a quota that may follow its guarantee."""
        return self.has_ceiling and self.cpu_monitor_moves != "weight"

    @property
    def reserved_memory(self) -> int:
        """Bytes of its node that it takes room for."""
        return self.memory_reserve or self.memory_limit

    @property
    def has_ceiling(self) -> bool:
        """Whether a quota of ``cpu_limit`` holds for it."""
        return not self.reclaimed if self.set_container_cpu_limit is None else self.set_container_cpu_limit


class StopOrder(msgspec.Struct, frozen=True):
    """A job to stop: interrupt it, kill it ``timeout_s`` later. ``kind`` and ``why`` as in its preemption record."""

    job_id: str
    timeout_s: _Seconds
    kind: str
    why: str


LogStream = Literal["stdout", "stderr"]
MAX_LOG_BYTES = 1_048_576
"""The most of a log that is asked for at once."""


class LogRequest(msgspec.Struct, frozen=True):
    """The end of what a job wrote is wanted, at most ``tail_bytes``; repeated until the ``JobLog`` is there.

    ``offset``: not the end but what it wrote after so many bytes; agents of before give the end all the same.
    """

    request_id: str
    job_id: str
    stream: LogStream
    tail_bytes: int
    offset: int | None = None


class JobLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a ``LogRequest``: ``content`` (base64 in JSON) is the end of ``total_bytes`` bytes, or, where it
    asked for an ``offset``, begins after ``first_byte`` of them: later than asked for where what is older is gone.

    ``error`` "" or why there is none: the job is not known here, its log was removed.
    """

    node_id: _Name
    request_id: _Name
    content: Annotated[bytes, msgspec.Meta(max_length=MAX_LOG_BYTES)] = b""
    total_bytes: _Bytes = 0
    error: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    first_byte: _Bytes | msgspec.UnsetType = msgspec.UNSET


RequestKind = Literal["explain", "pin", "unpin"]
MAX_REPLY_BYTES = 1_048_576
"""The most that the value of a reply may be as JSON."""


class JobRequest(msgspec.Struct, frozen=True):
    """Something that only the job's node can tell or do; repeated until the ``JobReply`` is there.

    ``explain``: all that is behind its limit. ``pin``: hold ``cpu_limit`` cores (null: what it ordered) for ``ttl_s``
    (null: until ``unpin``). Carrying one out twice is the same as once.
    """

    request_id: str
    kind: RequestKind
    job_id: str
    cpu_limit: float | None = None
    ttl_s: float | None = None


class JobReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a ``JobRequest``: ``value`` is what the agent's own interface gives, null with an ``error``.

    ``is_refused``: the request itself was wrong or is not allowed, asking again does not help.
    """

    node_id: _Name
    request_id: _Name
    value: dict[str, Any] | None = None
    error: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    is_refused: bool = False


class HeartbeatAnswer(msgspec.Struct, frozen=True):
    """What the node shall do. ``accepted`` false: the heartbeat was dropped, ``reason`` says why.

    ``register``: the node must register again. ``acknowledged``: the finished jobs that need not be repeated.
    ``logs``: logs that a client waits to read. ``requests``: what a client waits to know or to have done.
    ``differences``: the next heartbeat may be one (``NodeHeartbeat``). ``full``: the difference was dropped, the full
    state is wanted at once. ``period_s``: how often heartbeats shall come, null as the node likes.
    ``knows_about``: whether the scheduler knows what the agent is (``AgentAbout``); null from one that does not ask.
    ``level``: what the agent shall do at most where its configuration says ``may_set_mode``; "" for no stage.
    ``knows_stderr_size``: whether it reads that of a finished job; one that does not drops the whole heartbeat.
    """

    accepted: bool
    reason: str = ""
    register: bool = False
    start: list[JobOrder] = []
    stop: list[StopOrder] = []
    acknowledged: list[str] = []
    logs: list[LogRequest] = []
    requests: list[JobRequest] = []
    differences: bool = False
    full: bool = False
    period_s: float | None = None
    knows_about: bool | None = None
    level: str = ""
    knows_stderr_size: bool = False


def schema_of(message: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a message."""
    schema = msgspec.json.schema(message)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "heartbeat": lambda: schema_of(Heartbeat, "cpumond heartbeat"),
    "heartbeat-answer": lambda: schema_of(HeartbeatAnswer, "cpumond heartbeat answer"),
    "registration": lambda: schema_of(NodeRegistration, "cpumond node registration"),
    "registration-answer": lambda: schema_of(RegistrationAnswer, "cpumond registration answer"),
    "job-log": lambda: schema_of(JobLog, "cpumond job log"),
    "job-reply": lambda: schema_of(JobReply, "cpumond job reply"),
}
"""Name of a message -> function that gives its JSON Schema (``cpumond schema NAME``)."""
