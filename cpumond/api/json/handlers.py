"""What each request of the JSON interface does, by the names of ``openapi``'s table."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import itertools
import math
import zlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final, Literal

import msgspec
from starlette.responses import Response

from cpumond import __version__
from cpumond.api import finding, node_views, overview, pool_views, tables, views
from cpumond.api.json import requests, rights, rollouts
from cpumond.api.json.answers import AnswerHandlers
from cpumond.api.json.call import Call
from cpumond.api.json.document import make_document
from cpumond.api.json.events import EventHandlers
from cpumond.api.json.forecasts import ForecastHandlers
from cpumond.api.json.glance import GlanceHandlers, Looks
from cpumond.api.json.rollouts import RolloutHandlers
from cpumond.api.json.tokens import FileTokens, TokenApi
from cpumond.api.permissions import PoolRights
from cpumond.api.session import begin_session, end_session
from cpumond.api.token_views import NewToken
from cpumond.api.updated_tree import UpdatedTree
from cpumond.api.yt.orchid_attributes import operation_attributes, pool_attributes
from cpumond.core.wire import RequestKind
from cpumond.fairshare.explain import Explanation, explain
from cpumond.scheduler.access import Rights
from cpumond.scheduler.access.required import check_operation
from cpumond.scheduler.decide.snapshot import GUARANTEE_PREFIX, OPERATION_PREFIX
from cpumond.scheduler.elements import PoolElement, Tree
from cpumond.scheduler.history.model import HistoryView, ReportView
from cpumond.scheduler.history.savings import SavingsView
from cpumond.scheduler.model import (
    ACCESS_DENIED,
    NO_SUCH_JOB,
    RESOLVE,
    CommandError,
    Config,
    OperationRecord,
    TreeConfig,
)
from cpumond.scheduler.rights.entries import Permission
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings import commands, operations
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.tree_file import ApplyTree
from cpumond.scheduler.settings.undo import ChangedSinceError, UndoChange
from cpumond.scheduler.state import State
from cpumond.scheduler.state.commands import Command
from cpumond.scheduler.state.node_commands import CordonNode, DrainNode, UncordonNode
from cpumond.scheduler.state.transaction import Transaction
from cpumond.scheduler.why.drain import plan_drain
from cpumond.scheduler.why.operation import OperationAnswer, explain_operation, name_operations
from cpumond.scheduler.why.plan import Plan, collect, make_plan, refused_plan, try_command

READY_PERIODS: Final = 5
"""Update periods without an update after which the scheduler is called stuck."""

READY_S: Final = 2.0

ALERT_S: Final = 600.0
"""For how long something that went wrong is an alert."""

GZIP_LEVEL: Final = 4
THREAD_BYTES: Final = 65_536
"""Answers from this size on are compressed in a thread: in the event loop they would hold up heartbeats."""

SUMMED_AT_ONCE: Final = 1000
"""Operations whose jobs are added up, or names made ready for a search, before something else has its turn."""

encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An answer with a status of its own."""

    value: Any
    status: int


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A good answer that was encoded before, and compressed; ``etag`` is weak and names both."""

    content: bytes
    compressed: bytes
    etag: str


@dataclasses.dataclass(slots=True)
class Requests:
    """How often an endpoint was asked, and the seconds that its answers took in all and at most."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0


Handler = Callable[[Call], Awaitable[Any]]


async def compress(content: bytes) -> bytes:
    """By gzip; large content in a thread."""
    if len(content) < THREAD_BYTES:
        return gzip.compress(content, GZIP_LEVEL, mtime=0)
    return await asyncio.to_thread(gzip.compress, content, GZIP_LEVEL, mtime=0)


class JsonApi(EventHandlers, AnswerHandlers, ForecastHandlers, GlanceHandlers, RolloutHandlers):
    """The functions of the table, by their names."""

    def __init__(
        self,
        scheduler: Scheduler,
        cluster_name: str = "",
        needs_token: bool = False,
        is_open: bool = False,
        file_tokens: FileTokens = tuple,
        find_known: Callable[[str], User] = User,
    ) -> None:
        self.scheduler = scheduler
        self.find_known = find_known
        self.tokens = TokenApi(scheduler, is_open, file_tokens)
        self.cluster_name = cluster_name
        self.needs_token = needs_token
        self.is_open = is_open
        self.requests: dict[str, Requests] = {}
        self._cores: dict[str, tuple[tuple[Tree, int], asyncio.Task[tables.CoreSums]]] = {}
        self._tables: dict[str, tuple[tuple[Tree, int, TreeConfig], asyncio.Task[Made]]] = {}
        self._table_numbers = itertools.count(1)
        self.texts = views.SearchTexts()
        self.looks = Looks()
        self._document: Made | None = None
        self._plan_lock = asyncio.Lock()
        """Plans and explanations are made one at a time: the threads are there for updates and the store."""

    def handler(self, name: str) -> Handler:
        """What answers the requests of that endpoint."""
        if name in _COMMANDS:
            return partial(self._execute, _COMMANDS[name])
        return partial(self._show, _SHOWN[name]) if name in _SHOWN else getattr(self, name)

    async def _execute(self, make: Callable[[JsonApi, Call], Command], call: Call) -> views.Done:
        command = make(self, call)
        reply = await self.scheduler.execute(command, call.user, plan=call.plan)
        return views.Done(getattr(command, "operation_id", reply.id), list(reply.warnings))

    async def _show(self, show: Callable[[JsonApi, Call], Any], call: Call) -> Any:
        return show(self, call)

    @property
    def state(self) -> State:
        return self.scheduler.state

    def now(self) -> float:
        return self.scheduler.clock.now()

    def find_tree(self, call: Call) -> Tree:
        """The tree in the path. Raises CommandError."""
        return self.state.find_tree(call.path["tree"])

    def find_pool(self, call: Call) -> PoolElement:
        """The pool in the path. Raises CommandError."""
        return pool_views.find_pool(self.find_tree(call), call.path["pool"])

    def rights(self, call: Call) -> Rights:
        """What the asker may do."""
        return Rights(self.state, call.user)

    def find_operation(self, call: Call, permission: Permission = "read") -> OperationRecord:
        """The operation in the path, by id or alias. Raises CommandError, also where the asker has no such right."""
        record = self.state.find_record(call.path["operation"])
        check_operation(self.rights(call), record, permission)
        return record

    async def get_pool_table(self, call: Call) -> Made:
        tree = self.find_tree(call)
        # A changed pool shows at once, not only with the next update.
        made_of = (tree, tree.update_count, tree.config)
        known = self._tables.get(tree.name)
        if known is None or known[0] != made_of or _has_failed(known[1]):
            self._tables = {name: each for name, each in self._tables.items() if name in self.state.trees}
            known = self._tables[tree.name] = (made_of, asyncio.create_task(self._make_pool_table(tree)))
        return await asyncio.shield(known[1])

    async def _make_pool_table(self, tree: Tree) -> Made:
        content = encode(tables.make_pool_table(tree, await self._cores_of(tree), self.now()))
        etag = f'W/"{tree.update_count}.{next(self._table_numbers)}-{self.scheduler.started_at:.3f}"'
        return Made(content, await compress(content), etag)

    async def _cores_of(self, tree: Tree) -> tables.CoreSums:
        """Summed up once for each update."""
        known = self._cores.get(tree.name)
        if known is None or known[0] != (tree, tree.update_count) or _has_failed(known[1]):
            self._cores = {name: each for name, each in self._cores.items() if name in self.state.trees}
            known = self._cores[tree.name] = ((tree, tree.update_count), asyncio.create_task(_sum_cores(tree)))
        return await asyncio.shield(known[1])

    def look_at(self, tree: Tree) -> UpdatedTree:
        kept = self.scheduler.updates.get(tree.name)
        return UpdatedTree(tree, None if kept is None else kept.result)

    async def list_rights(self, call: Call) -> PoolRights:
        return await rights.list_rights(self.rights(call), self.find_tree(call))

    async def make_plan(self, call: Call) -> Plan:
        scheduler = self.scheduler
        async with self._plan_lock:
            now = self.now()
            change = await self._try_command(call, now)
            if isinstance(change, Plan):
                return change
            material = collect(scheduler.state)
            previous = {name: kept.previous_time for name, kept in scheduler.updates.items()}
            plan = await asyncio.to_thread(make_plan, material, change, now, previous, everything=call.query.everything)
        return rights.show_readable_plan(plan, self.rights(call))

    async def _try_command(self, call: Call, now: float) -> Transaction | Plan:
        log, command = self.scheduler.event_log, call.body
        try:
            command = await log.resolve(command) if isinstance(command, UndoChange) else command
            return try_command(self.state, command, call.user, now)
        except ChangedSinceError as refusal:
            return refused_plan(await log.explain(command, refusal))
        except CommandError as refusal:
            return refused_plan(refusal)

    async def list_operations(self, call: Call) -> views.OperationList:
        query: requests.OperationsQuery = call.query
        if query.search:
            await self.read_texts()
        return views.show_operations(
            self.state, self.now(), limit=query.limit, offset=query.offset, operation_state=query.state,
            user=query.user, tree=query.tree, pool=query.pool, search=query.search, sort=query.sort,
            descending=query.descending == "true", texts=self.texts, rights=self.rights(call), cause=query.cause,
            causes=await self.find_causes(query.tree) if query.cause else {},
        )  # fmt: skip

    async def read_texts(self) -> None:
        """Make what is searched, in parts: heartbeats must not wait for all of it."""
        records = views.list_records(self.state)
        for start in range(0, len(records), SUMMED_AT_ONCE):
            for record in records[start : start + SUMMED_AT_ONCE]:
                self.texts.of(record)
            await asyncio.sleep(0)
        self.texts.forget_gone(self.state)

    async def get_operation_orchid(self, call: Call) -> dict[str, dict[str, Any]]:
        live = self.state.operations.get(self.find_operation(call).id)
        return {
            name: operation_attributes(self.look_at(element.tree), element).to_dict()
            for name, element in (live.elements.items() if live is not None else ())
        }

    async def get_job_log(self, call: Call) -> Response:
        query: requests.LogQuery = call.query
        operation = self.find_operation(call, "read_secrets").id
        found = await self.scheduler.read_log(operation, call.path["job"], query.stream, query.tail, query.offset)
        # Whatever a job wrote, no browser may take it for a page.
        first = (
            found.total_bytes - len(found.content)
            if isinstance(found.first_byte, msgspec.UnsetType)
            else found.first_byte
        )
        headers = {
            requests.TOTAL_BYTES: str(found.total_bytes), requests.FIRST_BYTE: str(first),
            "X-Content-Type-Options": "nosniff",
        }  # fmt: skip
        return Response(found.content, headers={**headers, "content-type": requests.TEXT})

    async def explain_job(self, call: Call) -> dict[str, Any]:
        return await self._ask_job(call, "explain")

    async def pin_job(self, call: Call) -> views.Done:
        body: requests.PinBody = call.body
        job = await self._ask_job(call, "pin", body.cpu_limit, body.ttl_s)
        warnings = []
        if job.get("last_result") == "failed" and job.get("last_error"):
            warnings.append(f"the limit could not be written: {job.get('last_error')}")
        elif job.get("pinned_cpu_limit") is None:
            warnings.append("writes are paused on its node; the pin takes effect when the pause file is gone")
        return views.Done(call.path["job"], warnings)

    async def unpin_job(self, call: Call) -> views.Done:
        await self._ask_job(call, "unpin")
        return views.Done(call.path["job"], [])

    async def _ask_job(
        self, call: Call, kind: RequestKind, cpu_limit: float | None = None, ttl_s: float | None = None
    ) -> dict[str, Any]:
        operation, job = self.find_operation(call, "read" if kind == "explain" else "manage").id, call.path["job"]
        return await self.scheduler.ask_job(operation, job, kind, cpu_limit, ttl_s, call.user)

    async def explain_operation(self, call: Call) -> OperationAnswer:
        record = self.find_operation(call)
        shares = {}
        async with self._plan_lock:
            for name in record.trees:
                told = await self._explain_share(name, GUARANTEE_PREFIX + record.id)
                told = told or await self._explain_share(name, OPERATION_PREFIX + record.id)
                if told is not None:
                    lines = map(self.rights(call).hide_operations, told.lines)
                    shares[name] = (told.rule, name_operations(self.state, lines))
        record = self.state.find_record(record.id)
        return explain_operation(self.state, record, self.now(), shares, self.rights(call))

    async def _explain_share(self, tree: str, element: str) -> Explanation | None:
        """What the last update of a tree says about an element; None where it does not know it."""
        kept = self.scheduler.updates.get(tree)
        if kept is None or kept.snapshot is None or kept.result is None:
            return None
        try:
            return await asyncio.to_thread(explain, kept.snapshot, kept.result, element)
        except KeyError:
            return None

    async def register_node(self, call: Call) -> Any:
        # An administrator is none whose token fits other nodes, too.
        may_replace = call.node is None or call.node.admin or call.node.is_bound
        return await self.scheduler.register(call.body, may_replace)

    async def heartbeat(self, call: Call) -> Any:
        answer = await self.scheduler.heartbeat(call.body)
        return Answer(answer, 409) if answer.register else answer

    async def create_token(self, call: Call) -> NewToken:
        return await self.tokens.create(call.user, call.body)

    async def revoke_token(self, call: Call) -> views.Done:
        return await self.tokens.revoke(call.user, call.path["token"])

    async def get_me(self, call: Call) -> overview.Me:
        scheduler = self.scheduler
        return overview.Me(
            user=call.user.name,
            groups=sorted(call.user.groups),
            is_admin=call.user.admin,
            needs_token=self.needs_token,
            is_open=self.is_open,
            version=__version__,
            cluster_name=self.cluster_name,
            started_at=scheduler.started_at,
            now=self.now(),
            history_length_s=0.0 if scheduler.history is None else scheduler.history.length_s,
        )

    async def get_overview(self, call: Call) -> overview.Overview:
        state = self.state
        default = state.config.default_tree
        reports = self.last_reports(self.rights(call))
        return overview.Overview(
            why=overview.choose_sentence(list(reports.values())),
            status=await self.get_status(call),
            health=self._health(),
            alerts=(await self.list_alerts(call)).alerts,
            trees=[
                overview.show_totals(each, await self._cores_of(each), each.name == default, reports.get(each.name))
                for each in list(state.trees.values())
            ],
            history=None if self.scheduler.history is None else self.scheduler.history.describe(),
        )

    async def read_history(self, call: Call) -> HistoryView:
        query: requests.HistoryQuery = call.query
        history, until = self.find_history(), min(self.now(), query.until or math.inf)
        since = query.since or until - query.since_s
        if since >= until:
            raise CommandError(f"since is {since:.0f}, which is not before {until:.0f}, the end: give an earlier one")
        if query.kind == "pool" and not query.tree:
            default = self.state.config.default_tree
            query = msgspec.structs.replace(query, tree=default)
        tree, name, refusal = query.tree, query.name, None
        try:
            tree, name = self._find_series(query, self.rights(call))
        except CommandError as error:
            if error.code == ACCESS_DENIED:
                raise
            refusal = error
        found = await history.read(query.kind, tree, name, since, until, query.max_points)
        if refusal is not None and not found.times:
            raise refusal
        return found

    def _find_series(self, query: requests.HistoryQuery, asker: Rights) -> tuple[str, str]:
        """The tree and the name by which the history knows it. Raises CommandError for what does not exist now."""
        state, tree, name = self.state, query.tree, query.name
        if query.kind == "pool":
            return tree, pool_views.find_pool(state.find_tree(tree), name).name
        if query.kind == "operation":
            record = state.find_record(name)
            check_operation(asker, record, "read")
            if tree and tree not in record.trees:
                raise CommandError(f"Operation {record.id} does not run in tree {tree!r}", RESOLVE)
            return tree, record.id
        if query.kind == "node":
            return "", node_views.find_node(state, name).id
        check_operation(asker, self._find_operation_of(name), "read")
        return "", name

    def _find_operation_of(self, job_id: str) -> OperationRecord:
        living = self.state.jobs.get(job_id)
        if living is not None:
            return living.element.operation.record
        for operation_id, jobs in self.state.finished_jobs.items():
            if job_id in jobs:
                return self.state.find_record(operation_id)
        raise CommandError(f"No such job {job_id}", NO_SUCH_JOB)

    async def make_report(self, call: Call) -> ReportView:
        query: requests.ReportQuery = call.query
        now = self.now()
        found = await self.find_history().report(now - query.since_s, now, query.tree or None, query.top)
        if query.tree and not found.trees:
            self.state.find_tree(query.tree)
        return rights.show_readable_report(found, self.rights(call))

    async def make_savings(self, call: Call) -> SavingsView:
        return await self.find_history().savings(self.now() - call.query.since_s, self.now(), call.query.tree or None)

    async def list_alerts(self, call: Call) -> overview.AlertList:
        return overview.find_alerts(self.state, self.now(), list(self._own_alerts()), self.rights(call))

    def _own_alerts(self) -> Iterator[overview.Alert]:
        timings = self.scheduler.timings
        refused = f"the store refused {timings.store_errors} writes since the start; see the log and free its disk"
        lost = "somebody removed the store while it was in use; it was written anew, and nothing is lost; see the log"
        failed = f"{timings.failed_updates} fair-share updates failed since the start; see the log"
        late = (
            f"{timings.late_updates} of {timings.updates} fair-share updates began late since the start; raise "
            "fair_share_update_period or give the scheduler more CPU"
        )
        kinds: tuple[tuple[str, Literal["warning", "error"], float | None, str], ...] = (
            ("store_errors", "error", timings.store_error_at, self.scheduler.store_problem or refused),
            ("store_lost", "error", timings.store_lost_at, lost),
            ("failed_updates", "error", timings.failed_at, failed),
            ("late_updates", "warning", timings.late_at, late),
        )
        for code, severity, last_at, message in kinds:
            if (last_at or 0.0) > self.now() - ALERT_S:
                yield overview.Alert(code, severity, "", message)
        health = self._health()
        if health.status == "stuck":
            message = f"the last fair-share update was {health.last_update_age_s or 0.0:.1f} s ago"
            yield overview.Alert("stuck", "error", "", message)

    async def get_status(self, _: Call) -> overview.Status:
        scheduler, now = self.scheduler, self.now()
        return overview.Status(
            version=__version__,
            uptime_s=now - scheduler.started_at,
            now=now,
            update_period_s=scheduler.update_period_s,
            last_update_age_s=self.update_age_s(),
            default_tree=scheduler.state.config.default_tree,
            timings=scheduler.timings.list_numbers(),
            requests={
                name: overview.RequestTiming(taken.count, taken.total_s, taken.longest_s)
                for name, taken in self.requests.items()
                if taken.count
            },
            counts=overview.count_all(scheduler.state),
        )

    async def get_openapi(self, _: Call) -> Made:
        if self._document is None:
            content = encode(make_document(__version__))
            self._document = Made(content, await compress(content), f'W/"{__version__}-{zlib.crc32(content):x}"')
        return self._document

    async def readyz(self, _: Call) -> Any:
        health = self._health()
        return health if health.status == "ok" else Answer(health, 503)

    def _health(self) -> overview.Health:
        health, lead = self._own_health(), self.scheduler.lead
        if lead is None:
            return health
        seen = lead()
        return msgspec.structs.replace(health, role=seen.role, leader=seen.leader, term=seen.term or None)

    def _own_health(self) -> overview.Health:
        age_s = self.update_age_s()
        if not self.scheduler.ready.is_set():
            return overview.Health("starting", age_s)
        stuck = age_s is not None and age_s > max(READY_PERIODS * self.scheduler.update_period_s, READY_S)
        status: Literal["ok", "stuck", "refusing"] = "refusing" if self.scheduler.store_problem else "ok"
        return overview.Health("stuck" if stuck else status, age_s)

    def update_age_s(self) -> float | None:
        """Seconds since the update of the tree that was updated longest ago; None before there was one."""
        times = [kept.previous_time for kept in self.scheduler.updates.values() if kept.previous_time is not None]
        return max(self.now() - min(times), 0.0) if times else None


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _sum_cores(tree: Tree) -> tables.CoreSums:
    sums = tables.CoreSums()
    elements = list(tree.operations.values())
    for start in range(0, len(elements), SUMMED_AT_ONCE):
        sums.add(elements[start : start + SUMMED_AT_ONCE])
        await asyncio.sleep(0)
    return sums.finish(tree)


def _edits(body: requests.EditsBody) -> tuple[Edit, ...]:
    return tuple(Edit(tuple(each.path), each.value, each.recursive) for each in body.edits)


_COMMANDS: Final[dict[str, Callable[[JsonApi, Call], Command]]] = {
    "create_tree": lambda _, c: commands.CreateTree(c.body.name, c.body.attributes, c.body.ignore_existing),
    "change_tree": lambda _, c: commands.ChangeTree(c.path["tree"], _edits(c.body)),
    "remove_tree": lambda _, c: commands.RemoveTree(c.path["tree"], c.query.recursive),
    "set_default_tree": lambda _, c: commands.SetDefaultTree(c.body.tree),
    "apply_tree": lambda _, c: ApplyTree(c.path["tree"], c.body.tables, c.body.prune, c.body.base, c.body.why),
    "create_pool": lambda _, c: commands.CreatePool(
        c.path["tree"], c.body.name, c.body.parent, c.body.attributes, c.body.ignore_existing
    ),
    "change_pool": lambda _, c: commands.ChangePool(c.path["tree"], c.path["pool"], _edits(c.body)),
    "remove_pool": lambda _, c: commands.RemovePool(c.path["tree"], c.path["pool"], c.query.recursive),
    "move_pool": lambda api, c: _move_pool(api.state.config, c),
    "transfer_resources": lambda _, c: commands.TransferPoolResources(
        c.path["tree"], c.path["pool"], c.body.destination, c.body.delta
    ),
    "start_operation": lambda _, c: operations.StartOperation(c.body.spec, c.body.type),
    "update_operation": lambda api, c: operations.UpdateOperation(api.find_operation(c).id, c.body.parameters),
    "abort_operation": lambda api, c: operations.AbortOperation(api.find_operation(c).id, c.body.message),
    "suspend_operation": lambda api, c: operations.SuspendOperation(
        api.find_operation(c).id, c.body.abort_running_jobs
    ),
    "resume_operation": lambda api, c: operations.ResumeOperation(api.find_operation(c).id),
    "cordon_node": lambda _, c: CordonNode(c.path["node"], c.body.why),
    "uncordon_node": lambda _, c: UncordonNode(c.path["node"], c.body.why),
    "drain_node": lambda _, c: DrainNode(c.path["node"], c.body.why, c.body.graceful),
    **rollouts.COMMANDS,
    "complete_operation": lambda api, c: operations.CompleteOperation(api.find_operation(c).id),
}
"""Endpoints that carry out one command of the scheduler."""

_SHOWN: Final[dict[str, Callable[[JsonApi, Call], Any]]] = {
    "list_trees": lambda api, c: pool_views.show_trees(api.rights(c)),
    "get_tree": lambda api, c: pool_views.show_tree(api.rights(c), api.find_tree(c)),
    "get_tree_file": lambda api, c: pool_views.show_tree_file(api.find_tree(c)),
    "list_pools": lambda api, c: pool_views.show_pools(api.find_tree(c), api.now()),
    "get_pool": lambda api, c: pool_views.show_pool(api.find_pool(c), api.now(), api.rights(c)),
    "get_pool_orchid": lambda api, c: pool_attributes(api.look_at(api.find_tree(c)), api.find_pool(c)).to_dict(),
    "get_operation": lambda api, c: views.show_operation_details(api.rights(c), api.find_operation(c), api.now()),
    "get_specification": lambda api, c: views.show_specification(api.state, api.find_operation(c, "read_secrets")),
    "list_jobs": lambda api, c: views.show_jobs(
        api.state, api.find_operation(c), limit=c.query.limit, offset=c.query.offset, job_state=c.query.state,
        node_id=c.query.node,
    ),
    "get_job": lambda api, c: views.find_job(api.state, api.find_operation(c), c.path["job"]),
    "list_nodes": lambda api, c: node_views.show_nodes(
        api.state, api.now(), limit=c.query.limit, offset=c.query.offset, tree=c.query.tree, tag=c.query.tag,
        online=c.query.online == "true" if c.query.online else None,
    ),
    "get_node": lambda api, c: node_views.show_node_details(
        node_views.find_node(api.state, c.path["node"]), api.now(), api.rights(c)
    ),
    "find": lambda api, c: finding.find_matches(
        api.rights(c), c.query.kind, c.query.name, operation=c.query.operation, tree=c.query.tree,
        all_of=c.query.all_of, within=c.query.within, limit=c.query.limit,
    ),
    "plan_drain": lambda api, c: plan_drain(
        node_views.find_living_node(api.state, c.path["node"]), api.rights(c), api.now()
    ),
    "can": lambda api, c: rights.judge_question(api.rights(c), c.query, api.find_known),
    "sign_in": lambda _, c: begin_session(c.request, c.user),
    "sign_out": lambda _, c: end_session(c.request),
    "list_tokens": lambda api, c: api.tokens.list(c.user),
    "take_job_log": lambda api, c: views.Taken(api.scheduler.logs.take(c.body)),
    "take_job_reply": lambda api, c: views.Taken(api.scheduler.requests.take(c.body)),
    "list_preemptions": lambda api, c: node_views.show_preemptions(
        api.state, limit=c.query.limit, operation=c.query.operation, pool=c.query.pool, rights=api.rights(c),
        group=c.query.group,
    ),
    "healthz": lambda api, _: overview.Health("ok", api.update_age_s()),
}  # fmt: skip
"""Endpoints whose answer needs no waiting."""


def _move_pool(config: Config, call: Call) -> commands.MovePool:
    tree = commands.find_tree(config, call.path["tree"])
    pool = commands.find_pool(tree, call.path["pool"])
    return commands.MovePool(tree.name, pool.name, call.body.parent or pool.parent, call.body.name or pool.name)
