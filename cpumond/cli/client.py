"""The command line's side of the control socket: where it is, one request, and the agent's answers as values."""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

import click
import msgspec
from click.core import ParameterSource

from cpumond.cli.options import config_option
from cpumond.config import load_config
from cpumond.decode import ContentError, decode_json
from cpumond.errors import (
    EXIT_UNAVAILABLE,
    AccessError,
    ConfigError,
    CpumondError,
    UnavailableError,
    UsageError,
    describe,
)

TIMEOUT_S = 15.0
"""More than the 10 s which the agent itself waits for its tick."""

STUCK_PERIODS = 5
"""Checks that may be missing before the agent is called stuck; as in its ``/readyz``."""

P = ParamSpec("P")
Result = TypeVar("Result")
Answer = TypeVar("Answer")


class AgentRefusedError(CpumondError):
    """The agent answered with an error: its own sentence and exit code."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class PeakAnswer(msgspec.Struct, frozen=True):
    """What rule ``peak`` knows of a job: cores, ``_s`` seconds, ratios in [0, 1], ``_at`` seconds since 1970.

    ``because`` and ``next``, where the limit comes from and what the next check does, stand in an explain answer only.
    """

    peak_cores: float | None
    target_cores: float | None
    caution: float
    half_life_s: float
    watched_s: float
    held_count: int
    held_s: float
    held_ratio: float
    throttle_budget: float
    seen_at: float | None = None
    held_at: float | None = None
    held_from_cores: float = 0.0
    held_after_s: float = 0.0
    because: str = ""
    next: str = ""


class JobAnswer(msgspec.Struct, frozen=True):
    """One job of ``/v1/status``: limits and usage in cores, ``throttled_ratio`` in [0, 1], ``_s`` seconds."""

    job_id: str
    cgroup: str
    status: str
    mode: str
    cpu_limit: float
    current_cpu_limit: float
    monitor_cpu_limit: float
    operation_id: str = ""
    refused: str = ""
    usage: float | None = None
    smoothed_cpu_usage: float | None = None
    votes_sum: int | None = None
    throttled_ratio: float = 0.0
    last_result: str = ""
    last_error: str = ""
    override_left_s: float | None = None
    override_by: str = ""
    unit: str = ""
    warnings: list[str] = []
    labels: dict[str, str] = {}
    pinned_cpu_limit: float | None = None
    fast_restores: int = 0
    write_errors: int = 0
    limit_rule: str = "document"
    peak: PeakAnswer | None = None

    @property
    def reclaimed(self) -> float:
        """Cores the job ordered and may not use now, >= 0."""
        return max(self.cpu_limit - self.current_cpu_limit, 0.0)


class Totals(msgspec.Struct, frozen=True):
    """Sums over all jobs, in cores."""

    cpu_limit: float
    current_cpu_limit: float
    reclaimed: float


class Counters(msgspec.Struct, frozen=True):
    """What the agent counted since its start, as far as ``status`` shows it."""

    foreign_writes: dict[str, int] = {}
    restores: int = 0
    write_errors: int = 0
    late_ticks: int = 0
    shed_checks: int = 0


class SchedulerAnswer(msgspec.Struct, frozen=True):
    """The node at its scheduler; ``tree`` None: in no pool tree."""

    url: str
    registered: bool
    tree: str | None = None


class ExecutorAnswer(msgspec.Struct, frozen=True):
    """The scheduler's jobs on this node, by state."""

    kind: str
    states: dict[str, int]


class StatusAnswer(msgspec.Struct, frozen=True):
    """``/v1/status``: the agent after its newest check; ``last_tick_age_s`` seconds since that."""

    node_id: str
    layout: str
    tick_duration_s: float
    check_period_s: float
    paused: bool
    totals: Totals
    counters: Counters
    jobs: list[JobAnswer]
    problems: list[str] = []
    last_tick_age_s: float | None = None
    scheduler: SchedulerAnswer | None = None
    executor: ExecutorAnswer | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether the last check is too long ago."""
        return (self.last_tick_age_s or 0.0) > max(STUCK_PERIODS * self.check_period_s, 2.0)


class Bounds(msgspec.Struct, frozen=True):
    """Between what a limit moves, in cores; None = there is no such quota."""

    floor: float
    cap: float
    lower_bound: float
    upper_bound: float
    quota_found: float | None = None
    ancestor_cap: float | None = None
    ancestor: str = ""


class Window(msgspec.Struct, frozen=True):
    """The votes of the next decision; ``values`` in smoothed cores (None = a throttled check), or votes themselves."""

    size: int
    threshold: int
    values: list[float | None]
    votes: list[int]
    votes_sum: int | None = None


class Quota(msgspec.Struct, frozen=True):
    """The settings of a cgroup; ``cores`` None = no quota."""

    quota_us: int | None
    period_us: int
    burst_us: int | None = None
    weight: int | None = None
    cores: float | None = None


class PressureAnswer(msgspec.Struct, frozen=True):
    """PSI of the cgroup's CPU, in [0, 1]."""

    some_10s_ratio: float
    some_60s_ratio: float
    some_total_s: float


class Aggregated(msgspec.Struct, frozen=True):
    """Core-seconds since the agent follows the job."""

    smoothed_cpu_s: float
    preemptible_cpu_s: float
    preempted_cpu_s: float
    max_cpu_s: float
    throttled_cpu_s: float = 0.0
    late_cpu_s: float = 0.0


class DecisionAnswer(msgspec.Struct, frozen=True):
    """One line of the ring of decisions; ``at`` seconds since 1970, cores, ratios in [0, 1]."""

    at: float
    kind: str
    old_cores: float | None
    new_cores: float | None
    applied_cores: float | None
    usage_cores: float | None
    smoothed_cores: float | None
    throttled_ratio: float | None
    votes_sum: int | None
    result: str
    pressure_ratio: float | None = None
    by_look: bool = False


class SamplesAnswer(msgspec.Struct, frozen=True):
    """The points of a job's graphs, oldest first; ``at`` seconds since 1970, cores, ``throttled_ratio`` in [0, 1]."""

    period_s: float
    at: list[float] = []
    usage: list[float] = []
    smoothed: list[float | None] = []
    limit: list[float] = []
    floor: list[float] = []
    lower_bound: list[float] = []
    upper_bound: list[float] = []
    votes_sum: list[int | None] = []
    throttled_ratio: list[float] = []
    peak: list[float | None] = []


class ExplainAnswer(JobAnswer, frozen=True, kw_only=True):
    """``/v1/jobs/JOB/explain``. ``cpu_limit_given`` None = taken from the cgroup; ``source`` "" = added at run time.

    ``pinned_until`` seconds since 1970; ``held_s`` seconds in which nothing shrinks, ``start_left_s`` in which nothing
    is measured yet.
    """

    job_cpu_monitor: dict[str, object]
    bounds: Bounds
    window: Window
    in_force: Quota
    found: Quota
    notes: list[str] = []
    contested_losses: int = 0
    pressure: PressureAnswer | None = None
    aggregated: Aggregated | None = None
    decisions: list[DecisionAnswer] = []
    samples: SamplesAnswer | None = None
    directory: str = ""
    source: str = ""
    cpu_limit_given: float | None = None
    xattr_mode: str | None = None
    paused: bool = False
    pinned_until: float | None = None
    held_s: float = 0.0
    start_left_s: float = 0.0


class RegisteredAnswer(msgspec.Struct, frozen=True):
    """A job added over the socket; ``cpu_limit`` cores, None = from the cgroup."""

    job_id: str
    path: str
    operation_id: str = ""
    cpu_limit: float | None = None
    job_cpu_monitor: dict[str, object] = {}


class RegisteredList(msgspec.Struct, frozen=True):
    """``/v1/registered``."""

    jobs: list[RegisteredAnswer]


class AgentClient:
    """Speaks HTTP with one agent over its unix socket, one connection for each request."""

    def __init__(self, socket_path: str, timeout_s: float = TIMEOUT_S) -> None:
        self.socket_path = socket_path
        self.timeout_s = timeout_s

    def request(self, method: str, path: str, body: object = None) -> bytes:
        """The JSON of a good answer.

        Raises UnavailableError without a running agent, AccessError without the rights, AgentRefusedError for an error
        that the agent answered.
        """
        import httpx2

        try:
            content = None if body is None else msgspec.json.encode(body)
        except UnicodeEncodeError:
            raise UsageError(
                "a name on the command line is not readable text (UTF-8); the agent takes no such name"
            ) from None
        check_socket(self.socket_path, self.timeout_s)
        # Nothing here is TLS: without `verify` no certificates are loaded, which would take longer than the request.
        transport = httpx2.HTTPTransport(uds=self.socket_path, verify=False, trust_env=False)
        try:
            with httpx2.Client(transport=transport, timeout=self.timeout_s, trust_env=False) as client:
                answer = client.request(method, f"http://agent{path}", content=content)
        except httpx2.TimeoutException:
            raise UnavailableError(
                f"{self.socket_path}: the agent did not answer in {self.timeout_s:g} s; see its log"
            ) from None
        except httpx2.TransportError:
            raise UnavailableError(f"{self.socket_path}: the agent ended before it answered; see its log") from None
        if answer.is_success:
            return answer.content
        raise read_refusal(self.socket_path, answer.status_code, answer.content)

    def status(self) -> bytes:
        """``/v1/status``."""
        return self.request("GET", "/v1/status")

    def explain(self, job: str) -> bytes:
        """``/v1/jobs/JOB/explain``."""
        return self.request("GET", f"/v1/jobs/{quote_name(job)}/explain")

    def decode(self, content: bytes, kind: type[Answer]) -> Answer:
        """An answer as a value. Raises UnavailableError for one that another version gave."""
        try:
            return decode_json(content, kind)
        except ContentError as error:
            raise UnavailableError(
                f"{self.socket_path}: the agent's answer is not understood: {error}; restart the agent with this "
                "version of cpumond"
            ) from None


def quote_name(name: str) -> str:
    """A job's name as one part of a path, whatever is in it."""
    # An HTTP client would take "." and ".." for steps of the path.
    return quote(name, safe="", errors="surrogateescape").replace(".", "%2E")


def check_socket(path: str, timeout_s: float) -> None:
    """Whether somebody takes connections on a unix socket; the HTTP library does not tell why one failed.

    Raises UnavailableError or AccessError.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(path)
        except OSError as error:
            raise explain_failure(path, error) from None


def explain_failure(socket_path: str, error: OSError) -> CpumondError:
    """The error of this package for a connection that was not made."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessError(
            f"{socket_path}: only root and the socket's group may speak to the agent; "
            "run as root, or join the group of [control] group"
        )
    return UnavailableError(
        f"no agent answers on {socket_path} ({describe(error)}); start it with `systemctl start cpumond` or "
        "`cpumond agent --config FILE`, or name another one with --config or --socket"
    )


def read_refusal(socket_path: str, status: int, content: bytes) -> AgentRefusedError:
    """The error of an answer that is none of success: the agent's sentence and exit code."""
    try:
        told = decode_json(content, dict[str, object])
    except ContentError:
        told = {}
    sentence, code = told.get("error"), told.get("exit_code")
    return AgentRefusedError(
        sentence if isinstance(sentence, str) else f"{socket_path}: the agent answered with HTTP status {status}",
        code if isinstance(code, int) else EXIT_UNAVAILABLE,
    )


def is_given(parameter: str) -> bool:
    """Whether the user gave a parameter of the current command, on the command line or in the environment."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def find_socket(config_path: str, explicit: bool, socket_path: str | None) -> str:
    """The control socket: the one given, else that of the configuration, else that of the built-in defaults.

    ``explicit``: the user named the configuration, so it must be there. Raises ConfigError or AccessError.
    """
    if socket_path:
        return socket_path
    if not explicit and not os.path.exists(config_path):
        return load_config(None).control_socket
    try:
        return load_config(config_path).control_socket
    except (ConfigError, AccessError) as error:
        # The agent may well run: with the file as it was before.
        raise type(error)(f"{error}; or name the agent's socket with --socket") from None


socket_option = click.option(
    "--socket",
    "socket_path",
    metavar="PATH",
    envvar="CPUMOND_SOCKET",
    help="The agent's control socket; default: control.sock in runtime_dir of the configuration.",
)


def agent_options(command: Callable[Concatenate[AgentClient, P], Result]) -> Callable[..., Result]:
    """Give a command ``--config`` and ``--socket``, and call it with the client that follows from them."""

    @config_option
    @socket_option
    @functools.wraps(command)
    def with_client(config_path: str, socket_path: str | None, *args: P.args, **kwargs: P.kwargs) -> Result:
        return command(AgentClient(find_socket(config_path, is_given("config_path"), socket_path)), *args, **kwargs)

    return with_client
