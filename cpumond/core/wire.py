"""Messages between agents and a scheduler, version 1: registration, heartbeat, and the answers.

Sent as JSON by HTTP POST: ``NodeRegistration`` to ``/api/v1/nodes``, ``Heartbeat`` to ``/api/v1/heartbeats``,
``JobLog`` to ``/api/v1/logs``, ``JobReply`` to ``/api/v1/replies``. A heartbeat is level-triggered: it holds the
complete state of the node, so lost heartbeats lose no information. ``incarnation`` names one run of the agent;
``sequence`` grows by at least one with each heartbeat of a run. A receiver drops a heartbeat that is not newer than the
last one (same incarnation, sequence not larger) or whose incarnation is not the one that registered last.

The answer is level-triggered, too. It repeats jobs to start (as many as fit) and jobs to stop until a heartbeat shows
that the node has acted. A node ignores the order to start a job that it has or had, and the order to stop a job that it
does not have.

CPU values are cores (1.0 = one CPU all the time), memory is in bytes. ``cpumond schema NAME`` prints the JSON Schema.
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
"""Maximum length of each list of jobs in a heartbeat; one job takes some 600 bytes of JSON."""

OUT_OF_MEMORY: Final = "out of memory: "
"""Prefix of the ``reason`` of a job that failed at its memory limit."""
MEMORY_OVERDRAFT: Final = "resource_overdraft: above its memory reserve: "
"""Prefix of the ``reason`` of a job that was aborted for exceeding its reserve on a node short of memory."""

NO_ROOM: Final = "the node had no room for it within "
"""Prefix of the ``reason`` of a job that was aborted because it waited too long on its node."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Cores = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_CoreSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a job in core-seconds since its start; null if unknown.

    Every struct that describes a job inherits them: a counter added here is in reports, records and answers."""

    cpu_seconds: _CoreSeconds | None = None
    """CPU time used."""
    reclaimed_cpu_seconds: _CoreSeconds | None = None
    """Requested CPU by which the job's limit was lowered (semantics.md 1.7, ``aggregated_preempted_cpu``)."""
    ordered_cpu_seconds: _CoreSeconds | None = None
    """CPU that the job could have used without the agent (1.7, ``aggregated_max_cpu_usage``)."""
    throttled_cpu_seconds: _CoreSeconds | None = None
    """Time for which a quota throttled the job's threads, summed over CPUs."""
    late_cpu_seconds: _CoreSeconds | None = None
    """The part of ``throttled_cpu_seconds`` in which the agent held the limit below what the job could have had."""


CPU_COUNTERS: Final = CpuUse.__struct_fields__
CpuTimes = tuple[float | None, float | None, float | None, float | None, float | None]
cpu_times: Final[Callable[[CpuUse], CpuTimes]] = attrgetter(*CPU_COUNTERS)
"""Return the counters in the order of CPU_COUNTERS."""


class JobFigures(CpuUse, frozen=True, kw_only=True):
    """Figures of a live job from its node; the last four fields are of the last check, null before the first check."""

    cpu_usage: _Cores | None = None
    min_cpu_limit: _Cores | None = None
    """The floor: the agent never lowers the job's limit below it."""
    votes_sum: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] | None = None
    throttled_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    """Share of the check's enforcement periods in which the job was throttled."""


def list_figures(told: JobFigures) -> dict[str, Any]:
    """Return all fields of ``told`` by name, for the constructor of another struct."""
    return dict(zip(JobFigures.__struct_fields__, _figures(told), strict=True))


_figures = attrgetter(*JobFigures.__struct_fields__)


class JobReport(JobFigures, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One job of the node.

    ``cpu_limit`` is the job's request. ``current_cpu_limit`` is what its cgroup may use now, at most ``cpu_limit``
    unless an operator or another program raised it. ``smoothed_cpu_usage`` is null until the second good sample.
    ``mode`` is how the agent treats the job."""

    job_id: _Name
    operation_id: str
    cpu_limit: _Cores
    current_cpu_limit: _Cores
    smoothed_cpu_usage: _Cores | None = None
    mode: str = "reclaim"
    from_scheduler: bool = False
    """Whether the scheduler ordered this job; other jobs only occupy resources. ``task`` is from the job's order."""
    stopping: bool = False
    """Whether the job was asked to stop and has not ended."""
    task: str = ""
    start_time: float | None = None
    memory: _Bytes | None = None
    """Bytes that the job may use now; null if that is its request."""
    cgroup: str = ""
    """Path relative to the root of the hierarchy of the cpu controller."""
    checkpoint_at: float | None = None
    """Time of the job's last checkpoint by its node's clock; null if it made none. Unknown to schedulers before 0.2."""
    over_reserve: bool = False
    """Whether the job uses more memory than it reserves; set only if the job's order has a ``memory_reserve``."""


class FinishedJob(CpuUse, frozen=True, forbid_unknown_fields=True):
    """A job of the scheduler that has ended on this node; repeated until an answer acknowledges it.

    ``state``: completed (exit code 0), failed (its own fault), aborted (stopped, or the node's fault) or lost (its end
    is unknown because the host was rebooted). Times are seconds since 1970."""

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
    """Bytes that the job wrote to stderr, omitted if unknown; sent only to a scheduler that ``knows_stderr_size``."""


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The full state of one node.

    ``cpu_capacity`` is the node's CPUs in cores. ``sent_at`` is in seconds since 1970, for people only, never compared.
    ``jobs`` holds every live job, including those that stop. The heartbeat of an unregistered node is dropped."""

    node_id: _Name
    incarnation: _Name
    sequence: Annotated[int, msgspec.Meta(ge=0)]
    sent_at: float
    cpu_capacity: _Cores
    jobs: Annotated[list[JobReport], msgspec.Meta(max_length=MAX_HEARTBEAT_JOBS)]
    version: Annotated[int, msgspec.Meta(ge=1, le=HEARTBEAT_VERSION)] = HEARTBEAT_VERSION
    finished_jobs: Annotated[list[FinishedJob], msgspec.Meta(max_length=MAX_HEARTBEAT_JOBS)] = []


class AgentAbout(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts about the agent itself, sent in a heartbeat when they change; later versions may add fields.

    ``level`` is the highest level that the agent applies to any of its jobs now, ``bound`` the highest level that its
    own configuration allows. ``metrics`` is the address of its Prometheus endpoint, "" if it has none.
    ``late_core_seconds`` and the next three fields count since the start of the agent's run."""

    version: Annotated[str, msgspec.Meta(max_length=100)]
    level: Level
    bound: Level
    may_set_mode: bool = False
    knows_guarantee: bool = False
    """Whether the agent knows the level ``guarantee``; if not, it stays in shadow when it receives that level."""
    limit_rule: Annotated[str, msgspec.Meta(max_length=100)] = ""
    is_paused: bool = False
    metrics: Annotated[str, msgspec.Meta(max_length=300)] = ""
    problems: Annotated[list[Annotated[str, msgspec.Meta(max_length=300)]], msgspec.Meta(max_length=10)] = []
    late_core_seconds: _CoreSeconds = 0.0
    """Time for which threads were throttled while the agent held their limit below what they could have had. Rounded
    to a tenth of a second."""
    foreign_writes: Annotated[int, msgspec.Meta(ge=0)] = 0
    errors: Annotated[int, msgspec.Meta(ge=0)] = 0
    late_ticks: Annotated[int, msgspec.Meta(ge=0)] = 0
    control_group_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    control_group: Literal["job", "host"] = "job"
    """Whether single jobs or the whole host are left in shadow for comparison; such jobs have ``mode`` "control"."""
    max_log_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    """Maximum bytes kept of each of a job's output streams; 0 if the agent does not bound them itself."""
    knows_secrets: bool = False
    """Whether the agent gives jobs the ``secrets`` of their orders; if not, no job with secrets is sent to it."""
    idle_class: Annotated[str, msgspec.Meta(max_length=100)] = ""
    """How jobs on reclaimed CPU yield to others: "idle" (cpu.idle), "lowest weight" without cpu.idle, "" not at all."""


class NodeHeartbeat(Heartbeat, frozen=True, forbid_unknown_fields=True):
    """A heartbeat as a scheduler reads it: the full state or, with ``base``, the changes since the last accepted one.

    ``base`` is the sequence of that heartbeat. With ``base``, ``jobs`` are the new or changed jobs, ``gone`` the ids of
    jobs that ended, ``job_count`` the number of live jobs. Differences are sent only if the scheduler's last answer
    said ``differences``. A scheduler that does not know the base, or counts a different number of jobs, drops the
    heartbeat and asks for the ``full`` state. ``about`` holds changes of the agent itself; it is sent only if the last
    answer had ``knows_about``."""

    base: Annotated[int, msgspec.Meta(ge=0)] | None = None
    gone: Annotated[list[_Name], msgspec.Meta(max_length=MAX_HEARTBEAT_JOBS)] = []
    job_count: Annotated[int, msgspec.Meta(ge=0)] = 0
    about: AgentAbout | msgspec.UnsetType = msgspec.UNSET


class NodeResources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Resources that a node offers to jobs. ``memory`` is in bytes, ``network`` in any unit that tasks also use."""

    cpu: _Cores
    memory: _Bytes = 0
    user_slots: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1_000
    gpu: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0
    network: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] = 0.0
    """Bounded like the other resources: sums over nodes must be finite, or no update of the tree succeeds."""


class NodeRegistration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Registers a node: at the start of its agent, and when its tags or resources change.

    A registration with the registered incarnation changes tags and resources. A new incarnation replaces the old one,
    whose heartbeats are dropped from then on. ``address`` ("" = the id) counts as one of the tags. ``key`` is a secret
    that the agent keeps from run to run; with it, a new run can replace a run that is still alive."""

    node_id: _Name
    incarnation: _Name
    resources: NodeResources
    address: str = ""
    tags: Annotated[list[_Name], msgspec.Meta(max_length=1000)] = []
    version: Annotated[int, msgspec.Meta(ge=1, le=HEARTBEAT_VERSION)] = HEARTBEAT_VERSION
    key: Annotated[str, msgspec.Meta(max_length=256)] = ""


class RegistrationAnswer(msgspec.Struct, frozen=True):
    """``tree`` null: no tree's filter fits the node's tags, so the node gets no work; ``warning`` says so in words."""

    node_id: str
    tree: str | None
    heartbeat_period_s: float
    warning: str = ""


class JobOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job to start; fields with their default value are omitted, because most jobs use few of them.

    - ``command``: a shell command or an argument list. ``job_cpu_monitor``: the operation's section of that name.
    - ``wait_s``: how long the job may wait on the node for resources that other jobs still hold.
    - ``working_directory``: "" for a new directory of the job's own, removed with it.
    - ``checkpoints``: the job reports checkpoints by touching the file named by CPUMOND_CHECKPOINT.
    - ``reclaimed``: the job runs on reclaimed CPU (1.10), in the node's idle class.
    - ``variables``: further environment variables set by the system, after the task's ``environment``.
    - ``secrets``: variables that override all others; the node never keeps them in a file that others can read, or that
      outlives the job's start (12.6).
    - ``set_container_cpu_limit``: whether ``cpu_limit`` is also the job's ceiling; null: the default of the job's class
      (jobs on reclaimed CPU have no ceiling).
    - ``cpu_monitor_moves``: with "weight", the job's ceiling stays while the guarantee moves; otherwise the node's
      actuator decides (1.6).
    - ``interruption_signal``: the name of the signal that interrupts the job, "" for SIGTERM. All of its processes
      receive the signal, or only the first with ``signal_root_process_only``.
    - ``max_stderr_bytes``: bytes kept of its stderr, 0 for the node's own bound.
    - ``memory_reserve``: memory reserved for the job, at most ``memory_limit`` (where the job fails); 0: all of it."""

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
        """Whether the job has a quota that may follow its guarantee."""
        return self.has_ceiling and self.cpu_monitor_moves != "weight"

    @property
    def reserved_memory(self) -> int:
        """Bytes of memory reserved for the job on its node."""
        return self.memory_reserve or self.memory_limit

    @property
    def has_ceiling(self) -> bool:
        """Whether the job has a quota of ``cpu_limit``."""
        return not self.reclaimed if self.set_container_cpu_limit is None else self.set_container_cpu_limit


class StopOrder(msgspec.Struct, frozen=True):
    """A job to interrupt, and to kill ``timeout_s`` later; ``kind`` and ``why`` are those of its preemption record."""

    job_id: str
    timeout_s: _Seconds
    kind: str
    why: str


LogStream = Literal["stdout", "stderr"]
MAX_LOG_BYTES = 1_048_576
"""Maximum bytes of a log in one request."""


class LogRequest(msgspec.Struct, frozen=True):
    """A request for the last ``tail_bytes`` bytes, or fewer, of a job's output; repeated until the ``JobLog`` arrives.

    ``offset``: return the output after this many bytes instead of the end. Older agents ignore it."""

    request_id: str
    job_id: str
    stream: LogStream
    tail_bytes: int
    offset: int | None = None


class JobLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a ``LogRequest``.

    ``content`` (base64 in JSON) is the end of the log, which has ``total_bytes`` bytes. For a request with an
    ``offset`` it begins at ``first_byte``, which is later than requested if older output is gone. ``error`` says why
    there is no content (the job is unknown here, or its log was removed); otherwise it is ""."""

    node_id: _Name
    request_id: _Name
    content: Annotated[bytes, msgspec.Meta(max_length=MAX_LOG_BYTES)] = b""
    total_bytes: _Bytes = 0
    error: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    first_byte: _Bytes | msgspec.UnsetType = msgspec.UNSET


RequestKind = Literal["explain", "pin", "unpin"]
MAX_REPLY_BYTES = 1_048_576
"""Maximum bytes of a reply's value as JSON."""


class JobRequest(msgspec.Struct, frozen=True):
    """A request that only the job's node can answer or carry out; repeated until the ``JobReply`` arrives.

    ``explain``: return all facts behind the job's limit. ``pin``: hold ``cpu_limit`` cores (null: its request) for
    ``ttl_s`` (null: until ``unpin``). Carrying out a request twice has the same effect as once."""

    request_id: str
    kind: RequestKind
    job_id: str
    cpu_limit: float | None = None
    ttl_s: float | None = None


class JobReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a ``JobRequest``: ``value`` is the answer of the agent's own interface, null if ``error`` is set.

    ``is_refused``: the request itself was wrong or is not allowed; repeating it does not help."""

    node_id: _Name
    request_id: _Name
    value: dict[str, Any] | None = None
    error: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    is_refused: bool = False


class HeartbeatAnswer(msgspec.Struct, frozen=True):
    """Instructions for the node in the response to a heartbeat.

    - ``accepted``: false if the heartbeat was dropped; ``reason`` says why. ``register``: the node must register again.
    - ``acknowledged``: finished jobs that the node need not repeat.
    - ``logs``: logs that clients wait for; ``requests``: requests of clients.
    - ``differences``: the next heartbeat may be a difference (``NodeHeartbeat``); ``full``: the difference was dropped;
      send the full state at once.
    - ``period_s``: the heartbeat period, null for the node's own.
    - ``knows_about``: whether the scheduler has this agent's ``AgentAbout``; null if the scheduler does not use it.
    - ``level``: the agent's highest level if its configuration says ``may_set_mode``; "" if no stage applies.
    - ``knows_stderr_size``: whether the scheduler reads that field of a finished job; a scheduler that does not know
      the field would drop the whole heartbeat."""

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
    """Return the JSON Schema (draft 2020-12) of a message."""
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
"""Name of a message -> function that returns its JSON Schema (``cpumond schema NAME``)."""
