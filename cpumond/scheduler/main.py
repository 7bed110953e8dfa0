"""The life of the scheduler's process: configuration, store, sockets, signals, the loop and its server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator

import structlog
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cpumond import __version__
from cpumond.api.server import make_app
from cpumond.config import parse_layer
from cpumond.errors import ConfigError, CpumondError, from_os_error
from cpumond.log import configure_logging
from cpumond.process import (
    Deadline,
    ServiceManager,
    close_sockets,
    open_tcp_sockets,
    raise_descriptor_limit,
)
from cpumond.scheduler.admission import PoolRules
from cpumond.scheduler.commands import Rules
from cpumond.scheduler.config import SchedulerConfig, load_scheduler_config
from cpumond.scheduler.exporter import MetricsText
from cpumond.scheduler.loop import Clock, Scheduler
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.notify import tell_manager
from cpumond.scheduler.recorder import History
from cpumond.scheduler.resulting import MONITOR_DURATIONS
from cpumond.scheduler.store.history import HistoryStore
from cpumond.scheduler.store.sqlite import open_sqlite_store, set_aside
from cpumond.scheduler.tokens import load_tokens

log = structlog.get_logger("cpumond.scheduler")

STORE_FILE = "scheduler.db"
HISTORY_FILE = "history.db"
BACKLOG = 1024
MAX_CONNECTIONS = 20_000
KEEP_ALIVE_S = 75
MAX_HEAD_BYTES = 1024 * 1024
"""Of the request line and the headers, in which the parameters of `yt` travel."""
EXCHANGE_S = 150.0
"""From the connection, or the answer before, to the end of the next answer; longer than KEEP_ALIVE_S."""


def make_rules(config: SchedulerConfig) -> Rules:
    """What decisions read of the configuration."""
    spare = config.min_spare_job_resources_on_node
    return Rules(
        max_operation_count=config.max_operation_count,
        pools=PoolRules(config.require_specified_pools_existence, config.ephemeral_pool_name_regex),
        pool_name_regex=config.pool_name_regex,
        erase_trees_with_pool_limit_violations=config.erase_trees_with_pool_limit_violations,
        node_heartbeat_timeout_s=config.node_heartbeat_timeout_s,
        waiting_job_timeout_s=config.waiting_job_timeout_s,
        overcommit_duration_s=config.allowed_node_resources_overcommit_duration_s,
        spare=(float(spare.user_slots), spare.cpu, 0.0, float(spare.memory), 0.0),
        finished_operation_retention_count=config.finished_operation_retention_count,
        read_monitor=read_monitor,
    )


def open_history(scheduler: Scheduler, config: SchedulerConfig) -> History:
    """The history beside the state; a file that cannot be used costs a warning, nothing else."""
    settings = config.history
    path = os.path.join(config.state_dir, HISTORY_FILE)
    store = HistoryStore(path, settings.length_s, settings.period_s, settings.max_size, scheduler.started_at)
    return History(store, scheduler.state, scheduler.started_at, settings.max_series)


def read_monitor(raw: object) -> dict[str, object]:
    """A section ``job-cpu-monitor`` of a specification, checked as the agent will read it (semantics.md 1.1).

    Durations come back in milliseconds, as the documents have them. Raises CommandError.
    """
    try:
        layer = parse_layer(raw, "spec", "job_cpu_monitor")
    except ConfigError as error:
        raise CommandError(str(error)) from None
    return {key: value * 1e3 if key in MONITOR_DURATIONS else value for key, value in layer.items()}


def run_scheduler(config_path: str | None, new_store: bool = False, time_scale: float = 1.0) -> int:
    """``cpumond scheduler``: runs until SIGTERM or SIGINT. Raises CpumondError for what a user can mend.

    ``new_store`` sets the present database and history aside and begins with empty ones. ``time_scale`` is for tests
    only.
    """
    config = load_scheduler_config(config_path)
    configure_logging(config.log.level, config.log.format)
    tokens = load_tokens(config.api.tokens_file) if config.api.tokens_file else None
    path = os.path.join(config.state_dir, STORE_FILE)
    try:
        os.makedirs(config.state_dir, mode=0o700, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, f"make {config.state_dir}", "fix state_dir or run as its owner") from error
    if new_store:
        # The history of what is not there any more goes, too; the store goes first: it says whether it is in use.
        for old in (path, os.path.join(config.state_dir, HISTORY_FILE)):
            aside = set_aside(old)
            if aside is not None:
                log.warning("store_set_aside", path=aside)
    raise_descriptor_limit()
    manager = ServiceManager(os.environ)
    sockets = open_tcp_sockets(config.api.listen, "api.listen", BACKLOG)
    try:
        # A large one takes a while, and so does its copy when a new version changes its form.
        manager.extend("opening the store")
        is_new, was_used = not os.path.lexists(path), os.path.lexists(f"{path}.lock")
        store = open_sqlite_store(path)
        if is_new:
            # A directory that was used before and has lost its database is not to begin anew without a word.
            (log.warning if was_used else log.info)("store_created", path=path, state_dir_was_used=was_used)
    except CpumondError:
        close_sockets(sockets)
        raise
    try:
        manager.extend("reading the store")
        scheduler = Scheduler(make_rules(config), store, Clock(time_scale), config.fair_share_update_period_s)
        if config.history.length_s:
            manager.extend("reading the history")
            scheduler.history = open_history(scheduler, config)
        metrics = MetricsText(scheduler, config.metrics.max_pools)
        app = make_app(scheduler, config.api, tokens, metrics.encode, config.cluster_name)
        asyncio.run(_serve(scheduler, app, sockets, config, manager))
    finally:
        manager.extend("closing the store")
        close_sockets(sockets)
        store.close()
    return 0


class _Connection(HttpToolsProtocol):
    """One connection, with an end for peers that never finish a request, and a limit to its head."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes: int | None = 0
        self._deadline = Deadline(EXCHANGE_S)
        self._deadline.restart(self.loop, self.transport)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._deadline.restart(self.loop, self.transport)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """A server that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    scheduler: Scheduler,
    app: Starlette,
    sockets: list[socket.socket],
    config: SchedulerConfig,
    manager: ServiceManager,
) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = _Server(
        uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=3,
        )
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(scheduler.run(stopping))
        await asyncio.wait([running, asyncio.ensure_future(scheduler.ready.wait())], return_when="FIRST_COMPLETED")
        serving = tasks.create_task(server.serve(sockets))
        host, port = sockets[0].getsockname()[:2]
        log.info(
            "started",
            version=__version__,
            listen=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            config=config.path or None,
            state=config.state_dir,
            **({} if scheduler.clock.scale == 1.0 else {"time_scale_for_tests": scheduler.clock.scale}),
        )
        tasks.create_task(tell_manager(manager, scheduler, stopping))
        await stopping.wait()
        log.info("stopping")
        # Requests that are never finished are cancelled then, which is no error of anybody.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.should_exit = True
        await serving
