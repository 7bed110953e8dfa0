"""The agent's configuration: a TOML file and ``conf.d`` drop-ins are checked, and become frozen values.

Each file is checked by itself, so that a message names the file and the key. Then tables are merged: a key in a later
file overrides the same key in earlier files, but ``[[source]]`` entries of all files are kept. After that, rules
between keys are checked. Keys may have hyphens or underscores; both spellings of a key in one table are an error."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from cpumond.core.decode import ContentError, decode_toml
from cpumond.core.errors import ConfigError, Mistakes
from cpumond.core.job_cgroups import (
    DEFAULT_ROOT,
    IDLE_NAME,
    IDLE_SLICE,
    JOBS_SLICE_CGROUP,
    is_idle_name,
    name_idle_parent,
)
from cpumond.core.levels import LEVELS, SAFE, Level, lowest
from cpumond.core.measures import DURATION, stable_fraction
from cpumond.core.schema import normalise_table
from cpumond.core.settings import Log, is_loopback, parse_listen, read_layers
from cpumond.core.wire import MAX_NAME
from cpumond.monitor.model import (
    Duration,
    Mode,
    MonitorSettings,
    check_together,
    find_level,
    hold_to_level,
    list_idle_options,
    merge_layers,
)

DEFAULT_CONFIG_PATH = "/etc/cpumond/cpumond.toml"
ENGINE_KINDS = ("docker", "podman", "slurm", "kubernetes")
ENGINE_DEFAULTS: Mapping[str, Any] = {"min_cpu_limit": 0.1}
"""Default options of ``job-cpu-monitor`` for jobs of engines, because their requests may be small."""
MAX_LABELS = 8
"""Maximum number of unit properties that one source may read."""

Layer = Annotated[dict[str, Any], msgspec.Meta(extra={"table": MonitorSettings})]
"""Options of ``job-cpu-monitor`` that a node, source, operation or job sets: normalised names, durations in seconds."""

Positive = Annotated[float, msgspec.Meta(gt=0.0)]
PositiveDuration = Annotated[float, msgspec.Meta(gt=0.0, extra=DURATION)]


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[source]]``: where to find jobs.

    ``pattern`` is a cgroup path relative to the root of the cpu controller's hierarchy. With ``kind = "glob"`` it may
    contain ``*``, ``?``, ``[...]`` and ``**``. ``id_regex`` is searched in the path of a cgroup; its groups ``id`` and
    ``operation`` name the job. ``cpu_limit`` is in cores, or "from-cgroup": the quota found before the first change.
    ``whole``: each match, with all cgroups below it, is one job, like a container that creates its own cgroups.

    With ``kind = "systemd"`` the jobs are services and scopes of ``slices``. Then ``pattern`` (default "*") and
    ``id_regex`` match the unit's name, and ``labels`` are properties of the unit to display.

    If ``kind`` is an engine, the jobs are those of the engine. Then ``pattern`` (default "*") matches the job's name,
    and ``socket`` is the engine's address ("" = its default). ``token_file`` contains the token for a kubelet, and
    ``ca_file`` the authority of the kubelet's certificate ("none": no check, only on the loopback). ``unlimited``
    decides about jobs that request no CPU limit: they stay in shadow or, with "host", count as requesting all CPUs."""

    kind: Literal["static", "glob", "systemd", "docker", "podman", "slurm", "kubernetes"]
    pattern: Annotated[str, msgspec.Meta(min_length=1)] = ""
    slices: list[str] = []
    labels: list[str] = []
    socket: str = ""
    token_file: str = ""
    ca_file: str = ""
    unlimited: Literal["", "shadow", "host"] = ""
    cpu_limit: Positive | Literal["from-cgroup"] = "from-cgroup"
    operation: str = ""
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)] | None = None
    id_regex: str | None = None
    whole: bool = False
    mode: Mode | None = None
    job_cpu_monitor: Layer = {}

    @property
    def is_engine(self) -> bool:
        return self.kind in ENGINE_KINDS


class OperationOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[operation.NAME]``: options for the jobs of an operation on this node."""

    mode: Mode | None = None
    job_cpu_monitor: Layer = {}


class Writes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[writes]``: what the agent does if another program or an operator changes a limit that the agent moved.

    The new limit becomes the original, and the agent does not move it for ``override_ttl``. ``drift_...`` only apply to
    the limit files of units."""

    override_ttl_s: Duration = msgspec.field(name="override_ttl", default=600.0)
    drift_backoff_s: Duration = msgspec.field(name="drift_backoff", default=5.0)
    drift_max: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 5


class Discovery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[discovery]``: how to find jobs."""

    rescan_period_s: PositiveDuration = msgspec.field(name="rescan_period", default=30.0)
    empty_rescans: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 6
    max_jobs: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 9000


class Metrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[metrics]``: the Prometheus endpoint. ``listen = ""`` turns it off. ``names``: other names of this host."""

    listen: str = "127.0.0.1:9756"
    names: list[str] = []
    job_series: Literal["all", "top", "off"] = "all"
    max_jobs: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 1000


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[report]``: the receiver of reports on limits."""

    kind: Literal["none", "log", "http"] = "log"
    url: str = ""
    report_period_s: PositiveDuration = msgspec.field(name="report_period", default=10.0)
    timeout_s: PositiveDuration = msgspec.field(name="timeout", default=5.0)
    retry_max_s: PositiveDuration = msgspec.field(name="retry_max", default=30.0)
    token_file: str = ""


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[scheduler]``: the scheduler that uses this host as a node. ``tags`` decide which tree the host belongs to.
    ``url``: the scheduler's address, or a list of addresses of schedulers, one of which leads; "" = no scheduler.
    ``ca_file``: the authority of the scheduler's certificate, "" = the authorities that the system trusts.
    ``may_set_mode``: the scheduler's roll-out stages set the highest level for this host, but no level above what this
    configuration allows. Until the scheduler sends a level, no limit is written (shadow)."""

    url: str | list[str] = ""
    token: str = ""
    token_file: str = ""
    ca_file: str = ""
    heartbeat_period_s: PositiveDuration = msgspec.field(name="heartbeat_period", default=1.0)
    timeout_s: PositiveDuration = msgspec.field(name="timeout", default=5.0)
    retry_max_s: PositiveDuration = msgspec.field(name="retry_max", default=30.0)
    tags: list[str] = []
    may_set_mode: bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the schedulers that may lead; empty if the host is no node."""
        return tuple(self.url) if isinstance(self.url, list) else (self.url,) if self.url else ()


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[resources]``: the resources that this host offers to jobs. If one is None, the host offers all that it has.

    The remaining keys decide how long the jobs together may exceed these resources before jobs are aborted, and by
    which fraction of the CPU they may exceed it permanently (semantics.md 1.9)."""

    cpu: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] | None = None
    memory: Annotated[int, msgspec.Meta(ge=0, le=2**60)] | None = None
    user_slots: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    allowed_cpu_overdraft_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.05
    cpu_overdraft_timeout_s: Duration = msgspec.field(name="cpu_overdraft_timeout", default=600.0)
    memory_overdraft_timeout_s: Duration = msgspec.field(name="memory_overdraft_timeout", default=300.0)
    resource_adjustment_period_s: PositiveDuration = msgspec.field(name="resource_adjustment_period", default=5.0)


class ExecutorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[executor]``: how the scheduler's jobs run. ``cgroup_root`` is relative to the cpu hierarchy's root.

    ``user``: "" = the user of the operation, whose uid must be at least ``min_uid``. ``jobs_dir``: "" = ``state_dir``
    with "-jobs" appended. ``max_tasks``: maximum number of processes and threads of a job, 0 = no limit."""

    kind: Literal["none", "cgroup", "systemd"] = "none"
    cgroup_root: str = ""
    allow_root: bool = False
    user: str = ""
    min_uid: Annotated[int, msgspec.Meta(ge=1, le=2**32)] = 1000
    jobs_dir: str = ""
    max_tasks: Annotated[int, msgspec.Meta(ge=0, le=2**22)] = 4096
    max_log_bytes: Annotated[int, msgspec.Meta(ge=4096, le=2**40)] = 16_777_216
    log_retention_s: Duration = msgspec.field(name="log_retention", default=86_400.0)
    max_kept_logs: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1000

    @property
    def cgroup_roots(self) -> tuple[str, ...]:
        """The cgroups below which jobs run: the first for ordinary jobs, the second for jobs on reclaimed CPU, which is
        at the hierarchy's root, not below ``cgroup_root``; empty without an executor."""
        if self.kind == "none":
            return ()
        return self.cgroup_root, name_idle_parent(self.cgroup_root) if self.kind == "cgroup" else IDLE_SLICE


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[control]``: the unix socket in ``runtime_dir``. Root and ``group`` ("" = the agent's own) may open it."""

    group: str = ""


class Web(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[web]``: the read-only page of this node's jobs. ``listen`` is a loopback address and port, "" = no page.

    ``samples``: number of points of each job that are kept in memory for its graphs, one every ``period``, of 28 bytes
    each (32 with a peak). They are kept only if a page can show them: the page here, or that of a scheduler."""

    listen: str = ""
    samples: Annotated[int, msgspec.Meta(ge=0, le=5000)] = 180
    period_s: PositiveDuration = msgspec.field(name="period", default=5.0)


class Cost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[cost]``: the fraction of a core that checks may use. If they use more, jobs are checked in turns. 0: never."""

    cpu_budget_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=64.0)] = 0.25


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of the agent. ``path`` is the file it was read from ("" for built-in defaults).

    ``control_group_ratio``: the fraction of the jobs (with "host": of all hosts with this setting) that is left in
    shadow. ``ceiling``: the highest level that the scheduler allows, None if the scheduler may not set one; this is no
    key of a file."""

    node_id: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    state_dir: Annotated[str, msgspec.Meta(min_length=1)] = "/var/lib/cpumond"
    runtime_dir: Annotated[str, msgspec.Meta(min_length=1)] = "/run/cpumond"
    mountinfo: Annotated[str, msgspec.Meta(min_length=1)] = "/proc/self/mountinfo"
    managed_roots: list[str] = []
    control_group_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=0.5)] = 0.0
    control_group: Literal["job", "host"] = "job"
    monitor: Layer = {}
    source: list[Source] = []
    operation: dict[str, OperationOptions] = {}
    writes: Writes = Writes()
    discovery: Discovery = Discovery()
    metrics: Metrics = Metrics()
    report: Report = Report()
    scheduler: SchedulerOptions = SchedulerOptions()
    resources: Resources = Resources()
    executor: ExecutorOptions = ExecutorOptions()
    control: Control = Control()
    web: Web = Web()
    log: Log = Log()
    cost: Cost = Cost()
    path: str = ""
    ceiling: Level | None = None

    def is_control(self, job_id: str) -> bool:
        """Return whether a job is left in shadow, to compare it with the others. A restart does not change this."""
        ratio, chosen_by = self.control_group_ratio, self.node_id if self.control_group == "host" else job_id
        return ratio > 0.0 and stable_fraction(chosen_by) < ratio

    @property
    def control_socket(self) -> str:
        return os.path.join(self.runtime_dir, "control.sock")

    def find_roots(self, is_engines: bool) -> list[str]:
        """Return the cgroups below which limits may be written, for jobs of engines or for other jobs.

        These are ``managed_roots``. If they are not set, jobs of engines are managed everywhere, and other jobs
        nowhere. The executor's jobs are always managed, because this agent creates their cgroups."""
        return (self.managed_roots or [""]) if is_engines else [*self.managed_roots, *self.executor.cgroup_roots]

    def node_settings(self) -> MonitorSettings:
        return self.resolve_settings(None, "", {})

    def resolve_settings(self, source: Source | None, operation_id: str, job: Mapping[str, Any]) -> MonitorSettings:
        """Merge the layers of a job's settings: node < source < operation < job. Raises ConfigError."""
        layers: list[Mapping[str, Any]] = [self.monitor]
        if source is not None:
            layers += [{**ENGINE_DEFAULTS, **self.monitor}] if source.is_engine else []
            layers += [source.job_cpu_monitor, {"mode": source.mode} if source.mode else {}]
        operation = self.operation.get(operation_id)
        if operation is not None:
            layers += [operation.job_cpu_monitor, {"mode": operation.mode} if operation.mode else {}]
        layers.append(job)
        settings = msgspec.convert(merge_layers(layers), MonitorSettings)
        check_together(settings, f"{self.path or 'built-in defaults'}: resulting job-cpu-monitor")
        held = {} if self.ceiling is None else hold_to_level(settings, self.ceiling)
        return msgspec.convert(merge_layers([*layers, held]), MonitorSettings) if held else settings

    def find_highest_level(self) -> Level:
        """Return the highest level that a job can have, over the node's settings, each source and each operation;
        on a host of the control group, no level above shadow."""
        names = ["", *self.operation]
        found = [self.resolve_settings(source, name, {}) for source in (None, *self.source) for name in names]
        highest = max(map(find_level, found), key=LEVELS.index)
        is_control = self.control_group == "host" and self.is_control("")
        return lowest(highest, "shadow") if is_control else highest


def load_config(path: str | None) -> AgentConfig:
    """Read, check and merge ``path`` and the ``conf.d/*.toml`` beside it; return the built-in defaults for None.

    Raises AccessError, or ConfigError, whose message names the file, the key and the allowed range."""
    if path is None:
        return finish_config({}, "")
    folder = os.path.join(os.path.dirname(os.path.abspath(path)), "conf.d")
    return read_layers(path, folder, parse_config_text, finish_config)


def parse_config_text(text: str, path: str) -> dict[str, Any]:
    """Parse and check the text of one file; normalise keys, convert durations to seconds. Raises ConfigError."""
    try:
        raw = decode_toml(text)
    except ContentError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    executor = raw.get("executor")
    if isinstance(executor, dict) and executor.get("kind") == "slurm":
        raise ConfigError(
            f'{path}: executor.kind: "slurm" was removed; use "systemd" or "cgroup", whose jobs run beside those '
            "of Slurm, and delete partition and node_name"
        )
    return normalise_table(raw, AgentConfig, path, "", hidden=frozenset({"path", "ceiling"}))


def parse_layer(raw: object, where: str, key: str = "job-cpu-monitor") -> Layer:
    """Check a section ``job-cpu-monitor`` that was given at run time or in a source. Raises ConfigError."""
    return normalise_table(raw, MonitorSettings, where, key)


def read_assignments(assignments: tuple[str, ...]) -> dict[str, Any]:
    """Read unchecked options given as ``key=value`` on the command line. A value that is not TOML counts as text.

    Raises ConfigError if the equals sign is missing, or if a value has several lines, which could be several values."""
    raw: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: expected key=value, for example --set vote_window_size=7")
        if "\n" in text.strip():
            raise ConfigError(f"--set: {key.strip()}: expected a value on one line, got {text.strip()!r}")
        try:
            raw[key.strip()] = decode_toml(f"value = {text.strip()}")["value"]
        except ContentError:
            raw[key.strip()] = text.strip()
    return raw


def parse_assignments(assignments: tuple[str, ...]) -> Layer:
    """Read options by ``read_assignments``, and check them. Raises ConfigError."""
    return parse_layer(read_assignments(assignments), "--set", "")


def finish_config(merged: dict[str, Any], path: str) -> AgentConfig:
    """Make the frozen configuration from merged, checked tables; check the rules between keys. Raises ConfigError."""
    config = msgspec.convert({**merged, "path": path}, AgentConfig)
    where = path or "built-in defaults"
    config = msgspec.structs.replace(
        config,
        node_id=config.node_id or socket.gethostname(),
        managed_roots=[normalise_root(root, where) for root in config.managed_roots],
        state_dir=os.path.abspath(config.state_dir),
        runtime_dir=os.path.abspath(config.runtime_dir),
        ceiling=SAFE if config.scheduler.may_set_mode else None,
    )
    with Mistakes() as mistakes:
        with mistakes.apart():
            config = _finish_executor(config, where)
        with mistakes.apart():
            _check_scheduler(config.scheduler, where)
        for number, source in enumerate(config.source, 1):
            with mistakes.apart():
                _check_source(source, f"{where}: source {number}")
        for each, operation_id in itertools.product((None, *config.source), ("", *config.operation)):
            with mistakes.apart():
                config.resolve_settings(each, operation_id, {})
        with mistakes.apart():
            if config.report.kind == "http" and not re.match(r"https?://[^/\s]+", config.report.url):
                raise ConfigError(
                    f'{where}: report.url: must be an http:// or https:// address when report.kind is "http", '
                    f"got {config.report.url!r}"
                )
        with mistakes.apart():
            if config.metrics.listen:
                parse_listen(config.metrics.listen, f"{where}: metrics.listen")
        with mistakes.apart():
            if config.web.listen:
                _check_loopback(config.web.listen, f"{where}: web.listen")
    return config


def find_idle_options(config: AgentConfig) -> list[str]:
    """Describe options of ``job-cpu-monitor`` that affect none of the jobs to which they apply, because of the jobs'
    resulting rules and actuators (semantics.md 1.1)."""
    operations, sources = ["", *config.operation], [None, *config.source]

    def list_idle(given: Layer, some: Sequence[Source | None], names: Sequence[str]) -> list[str]:
        """Return the options in ``given`` that affect no job of the sources ``some`` and the operations ``names``."""
        found = [list_idle_options(config.resolve_settings(each, name, {}), given) for each in some for name in names]
        return [text for text in found[0] if all(text in others for others in found)]

    told = [f"monitor.{text}" for text in list_idle(config.monitor, sources, operations)]
    for number, source in enumerate(config.source, 1):
        idle = list_idle(source.job_cpu_monitor, [source], operations)
        told += [f"source {number}.job-cpu-monitor.{text}" for text in idle]
    for name, operation in config.operation.items():
        where, given = f"operation.{name}.job-cpu-monitor", operation.job_cpu_monitor
        always = list_idle(given, sources, [name])
        told += [f"{where}.{text}" for text in always]
        for number, source in enumerate(config.source, 1):
            only = [text for text in list_idle(given, [source], [name]) if text not in always]
            told += [f"{where}.{text}, for jobs of source {number}" for text in only]
    return [f"{config.path or 'built-in defaults'}: {text}" for text in told]


EXECUTOR_ROOTS = {"none": "", "cgroup": DEFAULT_ROOT, "systemd": JOBS_SLICE_CGROUP}
"""``executor.kind`` -> cgroup below which jobs run if ``cgroup_root`` is not set."""


def _finish_executor(config: AgentConfig, where: str) -> AgentConfig:
    options = config.executor
    root = normalise_root(options.cgroup_root, where, "executor.cgroup_root") or EXECUTOR_ROOTS[options.kind]
    if options.kind == "systemd" and root != EXECUTOR_ROOTS["systemd"]:
        raise ConfigError(
            f'{where}: executor.cgroup_root: with kind = "systemd" jobs are always in {EXECUTOR_ROOTS["systemd"]}, '
            f"got {root!r}; delete this line"
        )
    if options.kind == "cgroup" and is_idle_name(root):
        raise ConfigError(
            f"{where}: executor.cgroup_root: {IDLE_NAME} is only for jobs on reclaimed CPU, got {root!r}; "
            f'choose a cgroup outside it, such as the default "{DEFAULT_ROOT}"'
        )
    if options.user and not re.fullmatch(r"[A-Za-z_][-A-Za-z0-9_.]{0,63}[$]?|[0-9]{1,10}", options.user):
        raise ConfigError(f"{where}: executor.user: must be the name of a user, got {options.user!r}")
    jobs_dir = os.path.abspath(options.jobs_dir) if options.jobs_dir else f"{config.state_dir}-jobs"
    options = msgspec.structs.replace(options, cgroup_root=root, jobs_dir=jobs_dir)
    return msgspec.structs.replace(config, executor=options)


def _check_scheduler(scheduler: SchedulerOptions, where: str) -> None:
    for url in scheduler.addresses:
        if not re.match(r"https?://[^/\s]+|unix:/.", url):
            raise ConfigError(
                f"{where}: scheduler.url: must be an http:// or https:// address, or unix:/PATH, got {url!r}"
            )
        if "," in url:
            raise ConfigError(
                f'{where}: scheduler.url: write several addresses as a list, url = ["http://...", ...], got {url!r}'
            )
    if scheduler.may_set_mode and not scheduler.addresses:
        raise ConfigError(
            f"{where}: scheduler.may_set_mode: needs scheduler.url, the address of the scheduler that sets the mode"
        )
    if scheduler.token and scheduler.token_file:
        raise ConfigError(f"{where}: scheduler.token: set either token or token_file, not both")
    if not scheduler.token.isascii() or any(sign.isspace() for sign in scheduler.token):
        raise ConfigError(f"{where}: scheduler.token: must be visible ASCII characters without spaces")


def _check_loopback(listen: str, where: str) -> None:
    host, _ = parse_listen(listen, where)
    if not is_loopback(host):
        raise ConfigError(
            f"{where}: must be a loopback address such as 127.0.0.1:9759, [::1]:9759 or localhost:9759, because the "
            f"page has no password, got {listen!r}; to see it from elsewhere: `ssh -L 9759:127.0.0.1:9759 HOST`"
        )


def normalise_root(root: str, where: str, key: str = "managed_roots") -> str:
    """Return a managed root as a relative path without outer slashes; "" is the whole hierarchy. Raises ConfigError."""
    refuse_mounted(root, f"{where}: {key}")
    parts = [part for part in root.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in root:
        raise ConfigError(f"{where}: {key}: {root!r} must not contain '..'")
    return "/".join(parts)


def refuse_mounted(cgroup: str, where: str) -> None:
    """Raise ConfigError if ``cgroup`` is a path in the file system, not a path below the hierarchy's root."""
    found = re.match(r"/*sys/fs/cgroup(?:/unified|/(?:cpu|cpuacct)(?:,cpu|,cpuacct)?(?![^/]))?(?:/+|$)", cgroup)
    if found:
        rest = cgroup[found.end() :]
        raise ConfigError(
            f"{where}: {cgroup!r}: name a cgroup by its path below the root of the hierarchy; write "
            + (f'"{rest}"' if rest else '"/" for all of it')
        )


def _check_source(source: Source, where: str) -> None:
    refuse_mounted(source.pattern, f"{where}: pattern")
    if source.is_engine:
        _check_engine(source, where)
        return
    key = next((key for key in ("socket", "token_file", "ca_file", "unlimited") if getattr(source, key)), "")
    if key:
        kinds = ", ".join(ENGINE_KINDS)
        raise ConfigError(f'{where}: {key}: is only for the kinds {kinds}; this source is of kind "{source.kind}"')
    if source.kind == "systemd":
        _check_units(source, where)
    elif source.slices or source.labels:
        key = "slices" if source.slices else "labels"
        raise ConfigError(f'{where}: {key}: is only for kind = "systemd"; this source is of kind "{source.kind}"')
    elif not source.pattern:
        raise ConfigError(f"{where}: 'pattern' is missing; it has no default")
    where = f"{where} ({source.pattern or source.slices[0]!r})"
    if ".." in source.pattern.split("/"):
        raise ConfigError(f"{where}: pattern must not contain '..'")
    if source.id_regex is not None:
        try:
            re.compile(source.id_regex)
        except re.error as error:
            raise ConfigError(f"{where}: id_regex is not a regular expression: {error}") from None
    if source.kind == "static" and any(sign in source.pattern for sign in "*?["):
        raise ConfigError(f'{where}: a static pattern is one path; use kind = "glob" for {source.pattern!r}')


def _check_engine(source: Source, where: str) -> None:
    if source.whole:
        raise ConfigError(f'{where}: whole: must not be set with kind = "{source.kind}", whose jobs are always whole')
    for key in ("slices", "labels", "id", "id_regex"):
        if getattr(source, key):
            raise ConfigError(f'{where}: {key}: must not be set with kind = "{source.kind}": the engine names its jobs')
    if source.kind == "slurm" and source.socket:
        raise ConfigError(f'{where}: socket: must not be set with kind = "slurm", which is queried by `squeue`')
    is_address = source.kind == "kubernetes" and re.match(r"https?://[^/\s]+", source.socket)
    if source.socket and not (source.socket.startswith("/") or is_address):
        wanted = "an absolute path" + (", or kubelet's https:// address" if source.kind == "kubernetes" else "")
        raise ConfigError(f"{where}: socket: must be {wanted}, got {source.socket!r}")
    is_kubelet = source.kind == "kubernetes" and (not source.socket or source.socket.startswith("https:"))
    for key in ("token_file", "ca_file"):
        if getattr(source, key) and not is_kubelet:
            raise ConfigError(f"{where}: {key}: is only for a kubelet at an https:// address; delete this line")
    if source.ca_file == "none" and not is_loopback(urlsplit(source.socket or "//127.0.0.1").hostname or ""):
        raise ConfigError(
            f'{where}: ca_file: "none" is only for a kubelet on the loopback; at {source.socket!r} another host could '
            "answer and receive the token; name the file of the kubelet's certificate authority"
        )


def _check_units(source: Source, where: str) -> None:
    if not source.slices:
        raise ConfigError(f'{where}: slices: name at least one, for example slices = ["batch.slice"]')
    for name in source.slices:
        if not re.fullmatch(r"(-|[A-Za-z0-9:_.\\@]+(-[A-Za-z0-9:_.\\@]+)*)\.slice", name):
            raise ConfigError(f'{where}: slices: {name!r} is not the name of a slice such as "batch.slice"')
    if "/" in source.pattern:
        raise ConfigError(f'{where}: pattern: with kind = "systemd" it must match unit names, got {source.pattern!r}')
    if source.id is not None:
        raise ConfigError(f'{where}: id: is only for kind = "static"; use id_regex')
    if len(source.labels) > MAX_LABELS:
        raise ConfigError(f"{where}: labels: at most {MAX_LABELS} are allowed, got {len(source.labels)}")
    for label in source.labels:
        if not re.fullmatch(r"[A-Z][A-Za-z0-9]{0,63}", label):
            raise ConfigError(f'{where}: labels: {label!r} is not a property of a unit such as "User" (systemctl show)')
