"""The process of the scheduler, from start to end: configuration, store, sockets, signals, the loop and its server."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import structlog
from starlette.applications import Starlette

from cpumond import __version__
from cpumond.core.errors import ConfigError, CpumondError, UsageError, from_os_error
from cpumond.core.log import configure_logging
from cpumond.core.schema import normalise_table
from cpumond.core.settings import parse_listen
from cpumond.host.service import (
    ServiceManager,
    close_sockets,
    give_back_large_blocks,
    open_tcp_sockets,
    raise_descriptor_limit,
)
from cpumond.monitor.model import MonitorSettings
from cpumond.scheduler.answers.forecasts import Forecasts
from cpumond.scheduler.answers.resulting import MONITOR_DURATIONS
from cpumond.scheduler.answers.spans import Watched
from cpumond.scheduler.events import Event
from cpumond.scheduler.history.recorder import HistoryRecorder
from cpumond.scheduler.history.store import HistoryStore
from cpumond.scheduler.model import CommandError, Rules
from cpumond.scheduler.program.config import Api, SchedulerConfig, load_scheduler_config
from cpumond.scheduler.program.door import LeaderDoor
from cpumond.scheduler.program.exporter import LeadMetrics, MetricsText
from cpumond.scheduler.program.identities import Identities, load_identities
from cpumond.scheduler.program.leading import App, Leading
from cpumond.scheduler.program.listen import Certificate, close_unix_socket, find_socket_path, open_unix_socket
from cpumond.scheduler.program.notify import Vitals, notify_manager, vitals_of, vitals_of_one
from cpumond.scheduler.program.peer import LOCAL_USERS
from cpumond.scheduler.program.reload import Reload
from cpumond.scheduler.program.server import BACKLOG, Server, make_config
from cpumond.scheduler.program.traces import TraceSender
from cpumond.scheduler.program.vault_keys import load_keys
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.service.waste_notices import WasteNotices
from cpumond.scheduler.store import Arbiter, Store
from cpumond.scheduler.store.lead import LeadView
from cpumond.scheduler.store.places import make_arbiter
from cpumond.scheduler.store.retention import LogRetention
from cpumond.scheduler.store.sqlite import open_sqlite_store, set_aside
from cpumond.scheduler.trial.forward import Pace

log = structlog.get_logger("cpumond.scheduler")

STORE_FILE = "scheduler.db"
HISTORY_FILE = "history.db"

SWITCH_INTERVAL_S = 0.001
"""Longest time for which the thread of an update keeps the interpreter from the loop. Python's default, 0.005, is the
time that ten heartbeats take."""


def make_rules(config: SchedulerConfig) -> Rules:
    """Return the part of the configuration on which decisions depend."""
    spare = config.min_spare_job_resources_on_node
    return Rules(
        **{name: getattr(config, name) for name in config.__struct_fields__ if name in Rules.__dataclass_fields__},
        overcommit_duration_s=config.allowed_node_resources_overcommit_duration_s,
        spare=(float(spare.user_slots), spare.cpu, 0.0, float(spare.memory), 0.0),
        read_monitor=read_monitor,
        vault_keys=load_keys(config.secrets_key_file) if config.secrets_key_file else None,
    )


def open_history(scheduler: Scheduler, config: SchedulerConfig) -> HistoryRecorder:
    """Open the history beside the state; if the file cannot be used, this causes only a warning."""
    settings = config.history
    path = os.path.join(config.state_dir, HISTORY_FILE)
    store = HistoryStore(path, settings.length_s, settings.period_s, settings.max_size, scheduler.started_at)
    history = HistoryRecorder(store, scheduler.state, scheduler.started_at, settings.max_series)
    history.core_hour_price, history.currency = settings.core_hour_price, settings.currency
    return history


def read_monitor(raw: object) -> dict[str, object]:
    """Check a section ``job-cpu-monitor`` of a specification in the way in which the agent will read it (semantics.md
    1.1). Return durations in milliseconds, as in YTsaurus. Raises CommandError."""
    try:
        layer = normalise_table(raw, MonitorSettings, "spec", "job_cpu_monitor")
    except ConfigError as error:
        raise CommandError(str(error)) from None
    return {key: value * 1e3 if key in MONITOR_DURATIONS else value for key, value in layer.items()}


AppMaker = Callable[[Scheduler, Api, Identities, Callable[[bool], bytes], str], Starlette]
"""Type of ``api.server.make_app``: ``api`` imports the scheduler, so the scheduler does not import ``api``."""

StandbyMaker = Callable[[Callable[[], LeadView], str, Callable[[bool], bytes]], Starlette]
"""Type of ``api.standby.make_standby_app``."""


class _Entrance(NamedTuple):
    """Sockets on which requests arrive, and the identities that are accepted. ``path``: that of the unix socket, which
    is the last socket; "" if there is none."""

    sockets: list[socket.socket]
    path: str
    context: ssl.SSLContext | None
    reload: Reload

    def close(self) -> None:
        if self.path:
            close_unix_socket(self.sockets[-1], self.path)
        close_sockets(self.sockets)


def _open_entrance(config: SchedulerConfig, identities: Identities, manager: ServiceManager) -> _Entrance:
    """Open the sockets. Raises CpumondError for an address, socket or certificate that cannot be used."""
    api = config.api
    certificate = Certificate(api.certificate, api.key) if api.certificate else None
    sockets, path = open_tcp_sockets(api.address, "api.listen", BACKLOG), find_socket_path(api, os.environ)
    try:
        sockets += [open_unix_socket(path, BACKLOG)] if path else []
    except CpumondError:
        close_sockets(sockets)
        raise
    reload = Reload(config, identities, certificate, manager)
    return _Entrance(sockets, path, None if certificate is None else certificate.context, reload)


class _Service(NamedTuple):
    app: App
    run: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
    """Serves until the event: for a single scheduler, that it is to stop; for one of several, its last answer."""
    ready: asyncio.Event
    vitals: Vitals
    find_scheduler: Callable[[], Scheduler | None]
    """The scheduler of this process; None while a different process leads."""
    leading: Leading | None = None


def run_scheduler(
    config_path: str | None, make_app: AppMaker, new_store: bool = False, time_scale: float = 1.0,
    make_standby: StandbyMaker | None = None,
) -> int:  # fmt: skip
    """Run ``cpumond scheduler`` until SIGTERM or SIGINT. Raises CpumondError for errors that an administrator can fix.
    ``new_store``: set the present database and history aside and begin with empty ones. ``time_scale``: for tests only.
    ``make_standby``: needed if several schedulers share a store."""
    config = load_scheduler_config(config_path)
    configure_logging(config.log.level, config.log.format)
    identities, rules = load_identities(config), make_rules(config)
    is_shared = config.store.kind != "sqlite"
    if is_shared and new_store:
        raise UsageError(
            "--new-store is for a database of this scheduler alone; empty a shared one with its own tools, while no "
            "scheduler runs"
        )
    try:
        os.makedirs(config.state_dir, mode=0o700, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, f"create {config.state_dir}", "fix state_dir or run as its owner") from error
    if new_store:
        # The history belongs to the old store and is set aside, too. The store comes first: its lock shows whether it
        # is in use.
        for old in (STORE_FILE, HISTORY_FILE):
            aside = set_aside(os.path.join(config.state_dir, old))
            if aside is not None:
                log.warning("store_set_aside", path=aside)
    raise_descriptor_limit()
    give_back_large_blocks()
    # Updates, long requests and large answers run in threads: after this time the loop's thread gets its turn.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    manager = ServiceManager(os.environ)
    sender = TraceSender(config.traces.endpoint, config.cluster_name) if config.traces.endpoint else None
    entrance = _open_entrance(config, identities, manager)
    if config.api.is_open:
        log.warning(
            "open_to_every_local_user",
            error=f"every user of this host can connect to {config.api.listen} and do everything, as any user",
            advice=f"set [api] tokens_file, or leave [api] listen out: then only {LOCAL_USERS} can",
        )
    try:
        if is_shared:
            assert make_standby is not None
            arbiter = make_arbiter(config.store.conninfo)
            address = find_own_address(config.api, entrance.sockets)
            service = _share(config, rules, identities, arbiter, address, make_app, make_standby, time_scale, sender)
            asyncio.run(_serve(service, entrance, config, manager, time_scale))
        else:
            _run_alone(config, rules, identities, entrance, manager, make_app, time_scale, sender)
    finally:
        entrance.close()
        if sender is not None:
            sender.close()
    return 0


def _run_alone(
    config: SchedulerConfig, rules: Rules, identities: Identities, entrance: _Entrance, manager: ServiceManager,
    make_app: AppMaker, time_scale: float, sender: TraceSender | None,
) -> None:  # fmt: skip
    path = os.path.join(config.state_dir, STORE_FILE)
    # It takes a while to open a large store, and to copy it before a new version migrates it.
    manager.extend("opening the store")
    is_new, was_used = not os.path.lexists(path), os.path.lexists(f"{path}.lock")
    store = open_sqlite_store(path)
    try:
        if is_new:
            # After the loss of a database, an empty start must not go unnoticed.
            (log.warning if was_used else log.info)("store_created", path=path, state_dir_was_used=was_used)
        manager.extend("reading the store")
        reads_history = partial(manager.extend, "reading the history")
        scheduler = _make_scheduler(config, rules, store, time_scale, sender, reads_history)
        metrics = MetricsText(scheduler, config.metrics.max_pools)
        app = make_app(scheduler, config.api, identities, metrics.encode, config.cluster_name)
        service = _Service(app, scheduler.run, scheduler.ready, vitals_of(scheduler), lambda: scheduler)
        asyncio.run(_serve(service, entrance, config, manager, time_scale))
    finally:
        manager.extend("closing the store")
        entrance.close()
        store.close()


def _make_scheduler(
    config: SchedulerConfig, rules: Rules, store: Store, time_scale: float, sender: TraceSender | None,
    reads_history: Callable[[], None] = lambda: None,
) -> Scheduler:  # fmt: skip
    scheduler = Scheduler(rules, store, Clock(time_scale), config.fair_share_update_period_s)
    scheduler.retention = LogRetention(config.audit.keep_s, config.audit.max_size)
    if (told := config.forecast).enabled:
        scheduler.forecasts = Forecasts(
            scheduler.state, scheduler.clock.now, lambda: pace_of(scheduler), told.period_s, told.max_load,
            told.horizon_s,
        )  # fmt: skip
    if sender is not None:
        watched = Watched(scheduler.state)
        scheduler.trace = lambda: sender.send(watched, scheduler.clock.now())
    if config.history.length_s:
        reads_history()
        scheduler.history = history = open_history(scheduler, config)
        waste = config.waste_summary
        if waste.webhook or waste.command:
            scheduler.waste = WasteNotices(
                store, scheduler.write, scheduler.clock.now, history.waste, waste.at_s, waste.webhook, waste.command,
                config.cluster_name,
            )  # fmt: skip
    return scheduler


def pace_of(scheduler: Scheduler) -> Pace:
    """Return when the next heartbeats and updates of a scheduler are due, counted from now."""
    known = {name: kept.previous_time for name, kept in scheduler.updates.items()}
    at = {name: time for name, time in known.items() if time is not None}
    last, period_s = max(at.values(), default=scheduler.clock.now()), scheduler.update_period_s
    return Pace(scheduler.state.period_s, period_s, last + period_s, at)


def _share(
    config: SchedulerConfig, rules: Rules, identities: Identities, arbiter: Arbiter, address: str, make_app: AppMaker,
    make_standby: StandbyMaker, time_scale: float, sender: TraceSender | None,
) -> _Service:  # fmt: skip
    """Run on a store that several schedulers share; one of them leads."""

    def open_reign(store: Store) -> tuple[Scheduler, App]:
        scheduler = _make_scheduler(config, rules, store, time_scale, sender)
        scheduler.lead = leading.view
        metrics = MetricsText(scheduler, config.metrics.max_pools, lead_metrics)
        return scheduler, make_app(scheduler, config.api, identities, metrics.encode, config.cluster_name)

    leading = Leading(arbiter, open_reign, address, config.store.lease_s)
    lead_metrics = LeadMetrics(leading)
    standby = make_standby(leading.view, address, lead_metrics.encode)
    vitals = vitals_of_one(leading, config.fair_share_update_period_s / time_scale)

    def find_scheduler() -> Scheduler | None:
        reign = leading.find_reign()
        return None if reign is None else reign.scheduler

    return _Service(LeaderDoor(leading, standby), leading.run, leading.ready, vitals, find_scheduler, leading)


def find_own_address(api: Api, sockets: list[socket.socket]) -> str:
    """The address, ``host:port``, at which clients reach this scheduler; "" if only ``[api] advertise`` can tell it."""
    if api.advertise:
        return api.advertise
    host, _ = parse_listen(api.address, "api.listen")
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            log.warning(
                "address_not_known",
                error=f"[api] listen {api.listen!r} is every address of this host: a standby cannot direct clients to "
                "this scheduler while it leads",
                advice='set [api] advertise = "HOST:PORT"',
            )
            return ""
    port = sockets[0].getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _serve(
    service: _Service, entrance: _Entrance, config: SchedulerConfig, manager: ServiceManager, time_scale: float
) -> None:
    stopping, answered = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    def reload() -> None:
        text, scheduler = entrance.reload.run(), service.find_scheduler()
        if scheduler is not None:
            scheduler.event_log.note(Event(at=scheduler.clock.now(), kind="reload", text=text))

    loop.add_signal_handler(signal.SIGHUP, reload)
    server = Server(make_config(service.app), entrance.context)
    async with asyncio.TaskGroup() as tasks:
        # If several schedulers share a store, this one gives up the lead, for the next one, after its last answer.
        running = tasks.create_task(service.run(stopping if service.leading is None else answered))
        await asyncio.wait([running, asyncio.ensure_future(service.ready.wait())], return_when="FIRST_COMPLETED")
        serving = tasks.create_task(server.serve(entrance.sockets))
        host, port = entrance.sockets[0].getsockname()[:2]
        log.info(
            "started",
            version=__version__,
            listen=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            **({"socket": entrance.path} if entrance.path else {}),
            **({} if entrance.context is None else {"tls": True}),
            config=config.path or None,
            state=config.state_dir,
            **({} if service.leading is None else service.leading.view()._asdict()),
            **({} if time_scale == 1.0 else {"time_scale_for_tests": time_scale}),
        )
        tasks.create_task(notify_manager(manager, service.vitals, stopping))
        await stopping.wait()
        log.info("stopping")
        # From now on unfinished requests are cancelled; this is no error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.should_exit = True
        await serving
        answered.set()
