"""The scheduler's configuration: TOML and drop-ins, checked like the agent's, as frozen values.

Drop-ins are beside the file in a directory named after it (``scheduler.conf.d/*.toml`` for ``scheduler.toml``): the
agent's ``conf.d`` may be in the same place. Trees and pools are not in the configuration: they are changed at run time.
"""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, field

from cpumond.core.decode import ContentError, decode_toml
from cpumond.core.errors import ConfigError, Mistakes
from cpumond.core.measures import DURATION
from cpumond.core.schema import normalise_table
from cpumond.core.settings import Log, is_loopback, parse_listen, read_layers
from cpumond.core.wire import MAX_NAME
from cpumond.scheduler.model import NAME_REGEX
from cpumond.scheduler.model.node_failures import DEFAULT_NODE_FAILURES, NodeFailures
from cpumond.scheduler.rights.users import find_wrong_name

DEFAULT_SCHEDULER_CONFIG_PATH = "/etc/cpumond/scheduler.toml"
DEFAULT_LISTEN = "127.0.0.1:9757"
PROXY_AT_SOCKET = "unix"

Text = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Wait = Annotated[float, Meta(ge=0.0, le=86_400.0, extra=DURATION)]
Hangup = Annotated[float, Meta(ge=0.1, le=31_536_000.0, extra=DURATION)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]


class MinSpareJobResources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[min_spare_job_resources_on_node]``: free slots, cores and bytes. A node with less of any gets no jobs."""

    user_slots: Count = 1
    cpu: Annotated[float, Meta(ge=0.0, le=1_000_000.0)] = 0.05
    memory: Annotated[int, Meta(ge=0, le=2**60)] = 268_435_456


class Api(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[api]``: addresses, and limits of requests: ``max_body`` in bytes, ``rate_limit`` in 1/s for each user.

    ``listen``: "" is ``DEFAULT_LISTEN``; without ``tokens_file``, the kernel identifies callers there. ``advertise``:
    the address, host:port, that a standby gives to clients while this scheduler leads; "": that of ``listen``.
    ``socket``: a unix socket for accounts of this host. ``certificate``, ``key``: files for TLS at ``listen``.
    ``trusted_proxy``: addresses of proxies that may name the user; PROXY_AT_SOCKET: the unix socket."""

    listen: str = ""
    advertise: str = ""
    tokens_file: str = ""
    socket: str = ""
    certificate: str = ""
    key: str = ""
    trusted_proxy: tuple[str, ...] = ()
    max_body: Annotated[int, Meta(ge=1024, le=2**30)] = 1_048_576
    max_depth: Annotated[int, Meta(ge=8, le=200)] = 64
    rate_limit: Annotated[float, Meta(ge=0.0, le=1_000_000.0)] = 1000.0

    @property
    def address(self) -> str:
        return self.listen or DEFAULT_LISTEN

    @property
    def asks_kernel(self) -> bool:
        """Whether the kernel identifies callers that connect to a loopback address without a token."""
        return not (self.tokens_file or self.is_open)

    @property
    def knows_accounts(self) -> bool:
        """Whether the kernel identifies every account of this host instead of ``LOCAL_USERS`` only."""
        return bool(self.socket)

    @property
    def is_open(self) -> bool:
        """Whether every user of this host may do everything."""
        return bool(self.listen) and not (self.tokens_file or self.socket or self.trusted_proxy)


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[store]``: where the state is stored. ``sqlite``: in ``state_dir``, for one scheduler. ``postgresql``: in the
    database that ``conninfo`` (of libpq) names. Of all schedulers on it one leads, by a lease that lasts ``lease``."""

    kind: Literal["sqlite", "postgresql"] = "sqlite"
    conninfo: str = ""
    lease_s: Annotated[float, Meta(ge=0.5, le=300.0, extra=DURATION)] = field(name="lease", default=10.0)


class PoolMetrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[metrics]``: the number of pools that have their own series."""

    max_pools: Annotated[int, Meta(ge=0, le=100_000)] = 1000


class History(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[history]``: data of the graphs and ``cpumond report``, in a separate file beside the database.

    ``length``: how far back data goes; "0s" keeps none. The last day is kept as points, older days as daily totals.
    ``period``: the time between two points. ``max_size``: maximum bytes of the file. ``max_series``: how many pools,
    nodes, operations and jobs may have points, chosen in this order. ``core_hour_price``: savings are also shown as an
    amount of ``currency``; 0: in core-hours only."""

    length_s: Annotated[float, Meta(ge=0.0, le=34_560_000.0, extra=DURATION)] = field(
        name="length", default=34_560_000.0
    )
    period_s: Annotated[float, Meta(ge=0.1, le=3600.0, extra=DURATION)] = field(name="period", default=60.0)
    max_size: Annotated[int, Meta(ge=1_048_576, le=2**40)] = 268_435_456
    max_series: Annotated[int, Meta(ge=1, le=1_000_000)] = 30_000
    core_hour_price: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    currency: Annotated[str, Meta(max_length=20)] = ""


class Forecasting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[forecast]``: predicted starts of operations, by simulations in a child process. ``period``: interval of the
    rounds, longer if they would take more than ``max_load`` of one core. ``horizon``: how far ahead forecasts and
    what-if simulations look."""

    enabled: bool = True
    period_s: Annotated[float, Meta(ge=1.0, le=86_400.0, extra=DURATION)] = field(name="period", default=30.0)
    max_load: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1
    horizon_s: Annotated[float, Meta(ge=60.0, le=2_592_000.0, extra=DURATION)] = field(name="horizon", default=86_400.0)


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[traces]``: where the trace of each ended operation is sent, over OTLP/HTTP; "": nowhere."""

    endpoint: Annotated[str, Meta(max_length=4096)] = ""


Day = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]


class WasteSummaries(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[waste_summary]``: the summary of last week's waste, sent on ``day`` at ``hour``, UTC. ``webhook``: a URL to
    which the whole summary is sent. ``command``: run for each user, with the user's name as its last argument."""

    webhook: Annotated[str, Meta(max_length=4096)] = ""
    command: tuple[Text, ...] = ()
    day: Day = "monday"
    hour: Annotated[int, Meta(ge=0, le=23)] = 6

    @property
    def at_s(self) -> float:
        """Seconds from Monday 0:00 UTC to the time of sending."""
        return get_args(Day).index(self.day) * 86_400.0 + self.hour * 3600.0


class Audit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[audit]``: how long the store keeps the log of commands and events; ``max_size``: bytes of this log."""

    keep_s: Annotated[float, Meta(ge=3600.0, le=315_360_000.0, extra=DURATION)] = field(
        name="keep", default=7_776_000.0
    )
    max_size: Annotated[int, Meta(ge=1_048_576, le=2**40)] = 1_073_741_824


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of the scheduler (semantics.md 2.4). ``path``: its file, "" if none."""

    state_dir: Text = "/var/lib/cpumond-scheduler"
    cluster_name: Text = "cpumond"
    fair_share_update_period_s: Annotated[float, Meta(ge=0.01, le=60.0, extra=DURATION)] = field(
        name="fair_share_update_period", default=1.0
    )
    max_operation_count: Annotated[int, Meta(ge=1, le=1_000_000)] = 5000
    finished_operation_retention_count: Count = 1000
    max_specification_memory: Annotated[int, Meta(ge=1_048_576, le=2**40)] = 67_108_864
    require_specified_pools_existence: bool = False
    pool_name_regex: Text = NAME_REGEX
    ephemeral_pool_name_regex: Text = NAME_REGEX
    erase_trees_with_pool_limit_violations: bool = False
    node_heartbeat_timeout_s: Annotated[float, Meta(ge=0.01, le=86_400.0, extra=DURATION)] = field(
        name="node_heartbeat_timeout", default=60.0
    )
    waiting_job_timeout_s: Wait = field(name="waiting_job_timeout", default=30.0)
    unmatched_scheduling_tag_timeout_s: Wait = field(name="unmatched_scheduling_tag_timeout", default=60.0)
    operation_hangup_safe_timeout_s: Hangup = field(name="operation_hangup_safe_timeout", default=3600.0)
    operation_hangup_due_to_limiting_ancestor_safe_timeout_s: Hangup = field(
        name="operation_hangup_due_to_limiting_ancestor_safe_timeout", default=300.0
    )
    allowed_node_resources_overcommit_duration_s: Wait = field(
        name="allowed_node_resources_overcommit_duration", default=15.0
    )
    additional_reclaimed_overcommit_duration_s: Wait = field(
        name="additional_reclaimed_overcommit_duration", default=0.0
    )
    allowed_node_cpu_overcommit_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.05
    min_spare_job_resources_on_node: MinSpareJobResources = MinSpareJobResources()
    secrets_key_file: str = ""
    """File of the keys that encrypt secrets of operations (12.6); "": no secrets are kept."""
    node_failures: NodeFailures = DEFAULT_NODE_FAILURES
    api: Api = Api()
    store: StoreSettings = StoreSettings()
    metrics: PoolMetrics = PoolMetrics()
    history: History = History()
    forecast: Forecasting = Forecasting()
    audit: Audit = Audit()
    traces: TraceSettings = TraceSettings()
    waste_summary: WasteSummaries = WasteSummaries()
    groups: dict[str, tuple[str, ...]] = {}
    """Group -> its users, no matter how they authenticate."""
    log: Log = Log()
    path: str = ""

    @property
    def where(self) -> str:
        return self.path or "built-in defaults"


def load_scheduler_config(path: str | None) -> SchedulerConfig:
    """Read, check and merge ``path`` and its drop-ins. ``path`` None: return the built-in defaults. Raises ConfigError
    (file, key, allowed range) or AccessError."""
    if path is None:
        return finish_scheduler_config({}, "")
    folder = f"{os.path.splitext(os.path.abspath(path))[0]}.conf.d"
    return read_layers(path, folder, parse_scheduler_config_text, finish_scheduler_config)


def parse_scheduler_config_text(text: str, path: str) -> dict[str, Any]:
    """Return the checked content of one file: normalised keys, durations in seconds. Raises ConfigError."""
    try:
        raw = decode_toml(text)
    except ContentError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    table = normalise_table(raw, SchedulerConfig, path, "", hidden=frozenset({"path"}))
    for group, users in table.get("groups", {}).items():
        where = f"{path}: groups.{group}"
        if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
            raise ConfigError(f'{where}: must be a list of users, for example ["alice", "bob"]')
        for name, what in ((group, "name of a group"), *((user, "user") for user in users)):
            if problem := find_wrong_name(name):
                raise ConfigError(f"{where}: {name[:MAX_NAME]!r} is no {what}: {problem}")
    return table


def finish_scheduler_config(merged: dict[str, Any], path: str) -> SchedulerConfig:
    """Check the rules between keys and return merged, checked tables as a frozen configuration. Raises ConfigError."""
    config = msgspec.convert({**merged, "path": path}, SchedulerConfig)
    paths = {name: getattr(config.api, name) for name in ("tokens_file", "socket", "certificate", "key")}
    config = msgspec.structs.replace(
        config,
        state_dir=os.path.abspath(config.state_dir),
        secrets_key_file=os.path.abspath(config.secrets_key_file) if config.secrets_key_file else "",
        api=msgspec.structs.replace(
            config.api, **{name: os.path.abspath(path) if path else "" for name, path in paths.items()}
        ),
    )
    check(config)
    return config


def check(config: SchedulerConfig) -> None:
    """Check rules between keys, regular expressions and the address. Raises ConfigError with file, key and remedy."""
    rules = (
        _check_regexes, _check_listen, _check_tls, _check_proxies, _check_advertised, _check_store, _check_secrets,
        _check_traces, _check_waste,
    )  # fmt: skip
    with Mistakes() as mistakes:
        for rule in rules:
            with mistakes.apart():
                rule(config)


def _check_regexes(config: SchedulerConfig) -> None:
    for key in ("pool_name_regex", "ephemeral_pool_name_regex"):
        try:
            re.compile(getattr(config, key))
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{config.where}: {key}: is not a regular expression: {error}") from None


def _check_listen(config: SchedulerConfig) -> None:
    host, _ = parse_listen(config.api.address, f"{config.where}: api.listen")
    if not (config.api.tokens_file or config.api.socket) and not is_loopback(host):
        raise ConfigError(
            f"{config.where}: api.listen: {config.api.listen!r} can be reached from other machines, and without "
            "api.tokens_file anybody could run operations and change pools: set api.tokens_file to a file with "
            'lines "user:sha256-hex", or api.socket, where root makes tokens with `cpumond token create`, or listen '
            "on 127.0.0.1"
        )


def _check_tls(config: SchedulerConfig) -> None:
    if bool(config.api.certificate) != bool(config.api.key):
        missing = "key" if config.api.certificate else "certificate"
        raise ConfigError(f"{config.where}: api.{missing}: is missing; TLS needs both api.certificate and api.key")


def _check_proxies(config: SchedulerConfig) -> None:
    for address in config.api.trusted_proxy:
        if address == PROXY_AT_SOCKET:
            continue
        try:
            ipaddress.ip_network(address)
        except ValueError as error:
            raise ConfigError(
                f"{config.where}: api.trusted_proxy: {address!r} is no address: {error}; expected for example "
                f'"127.0.0.1", "10.1.2.0/24" or "{PROXY_AT_SOCKET}"'
            ) from None


def _check_advertised(config: SchedulerConfig) -> None:
    if config.api.advertise:
        where = f"{config.where}: api.advertise"
        advertised, port = parse_listen(config.api.advertise, where)
        if not port or advertised in ("0.0.0.0", "::"):  # noqa: S104 - refused, not listened on
            raise ConfigError(
                f"{where}: {config.api.advertise!r} is no address that a client could connect to: name this host"
            )


def _check_store(config: SchedulerConfig) -> None:
    store = config.store
    if store.kind == "postgresql" and not store.conninfo:
        raise ConfigError(
            f'{config.where}: store.conninfo: is needed with store.kind = "postgresql"; '
            'set it, for example to "host=db1,db2 dbname=cpumond target_session_attrs=read-write"'
        )
    if store.kind == "sqlite" and store.conninfo:
        raise ConfigError(f'{config.where}: store.conninfo: is for store.kind = "postgresql"; remove it, or set kind')


def _check_traces(config: SchedulerConfig) -> None:
    if config.traces.endpoint and not re.fullmatch(r"https?://[^/\s]+/\S*", config.traces.endpoint):
        raise ConfigError(
            f"{config.where}: traces.endpoint: {config.traces.endpoint!r}: expected an address such as "
            '"http://localhost:4318/v1/traces"'
        )


def _check_waste(config: SchedulerConfig) -> None:
    told, where = config.waste_summary, f"{config.where}: waste_summary"
    if told.webhook and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", told.webhook):
        raise ConfigError(
            f"{where}.webhook: {told.webhook!r}: expected an address that begins with http:// or https://"
        )
    if told.command and not os.path.isabs(told.command[0]):
        raise ConfigError(
            f"{where}.command: {told.command[0]!r}: give the program's absolute path: it is run without a shell"
        )
    if (told.webhook or told.command) and not config.history.length_s:
        raise ConfigError(
            f"{where}: needs the history, which is turned off: set history.length, or remove this section"
        )


def _check_secrets(config: SchedulerConfig) -> None:
    """Check that no other user can read the secrets in heartbeat responses, or get them by pretending to be a node."""
    path, where = config.secrets_key_file, f"{config.where}: secrets_key_file"
    if not path:
        return
    if os.path.commonpath((os.path.realpath(path), os.path.realpath(config.state_dir))) == os.path.realpath(
        config.state_dir
    ):
        raise ConfigError(
            f"{where}: {path} is in state_dir, so every copy of that directory would hold secrets and their key: put "
            "it elsewhere, for example beside this file"
        )
    host, _ = parse_listen(config.api.address, f"{config.where}: api.listen")
    if not (config.api.certificate or is_loopback(host)):
        raise ConfigError(
            f"{where}: secrets would be sent to nodes unencrypted, since api.listen {config.api.listen!r} can be "
            "reached from other hosts without TLS: set api.certificate and api.key, or listen on 127.0.0.1"
        )
    if config.api.is_open:
        raise ConfigError(
            f"{where}: every user of this host could get the secrets as a node, since every connection to "
            f"{config.api.listen!r} may do everything: set api.tokens_file, or leave api.listen out"
        )
