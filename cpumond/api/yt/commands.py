"""The commands of the ``yt`` protocol, for one scheduler (yt_protocol.md 6 and 10).

``YtBackend`` answers each command from the live state at once. Only changes wait, as commands of the scheduler do."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from cpumond.api.permissions import RightsTarget, check_question, find_path_target, judge_action
from cpumond.api.refusals import record_refusal
from cpumond.api.updated_tree import look_once
from cpumond.api.views import list_jobs, list_records
from cpumond.api.yt import job_filters, jobs, orchid
from cpumond.api.yt.cypress import POOL_TREES, Cypress, CypressNode, Turn, materialise_in_parts
from cpumond.api.yt.filters import count_operations, operation_tests
from cpumond.api.yt.lazy import MISSING, Lazy, materialise
from cpumond.api.yt.parameters import (
    YtRequest,
    get_flag,
    get_list,
    get_milliseconds,
    get_names,
    get_number,
    get_path,
    get_table,
    get_text,
    plain,
)
from cpumond.api.yt.replies import export_reply
from cpumond.api.yt.values import Attributed, YtError, quote_text, strip_attributes
from cpumond.api.yt.ypath import YPath
from cpumond.core.errors import CpumondError
from cpumond.core.wire import MAX_LOG_BYTES, MAX_NAME
from cpumond.scheduler.access import Rights
from cpumond.scheduler.access.required import check_operation
from cpumond.scheduler.elements import Job
from cpumond.scheduler.model import (
    ALREADY_EXISTS,
    NO_SUCH_JOB,
    NODE_OFFLINE,
    RESOLVE,
    ROOT_POOL,
    TIMEOUT,
    CommandError,
    JobRecord,
    OperationRecord,
)
from cpumond.scheduler.rights.entries import Permission
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Reply, Scheduler
from cpumond.scheduler.service.stored import MUTATION
from cpumond.scheduler.settings import operations
from cpumond.scheduler.settings.attributes import Edit, canonical_name
from cpumond.scheduler.settings.commands import (
    CreatePool,
    CreateTree,
    MovePool,
    RemovePool,
    RemoveTree,
    TransferPoolResources,
)
from cpumond.scheduler.settings.values import REMOVE
from cpumond.scheduler.state.commands import Command
from cpumond.scheduler.store import Change

MAX_EDITS: Final = 1000
MAX_LISTED_OPERATIONS: Final = 1000
MAX_LISTED_BYTES: Final = 16 * 2**20
"""Maximum bytes of memory that the specifications in one answer may take."""
SPECIFICATIONS: Final = frozenset({"spec", "provided_spec", "full_spec", "unrecognized_spec"})
DEFAULT_LISTED_OPERATIONS: Final = 100

LISTED_ATTRIBUTES: Final = (
    "id", "type", "state", "authenticated_user", "start_time", "finish_time", "suspended", "brief_spec",
    "brief_progress", "runtime_parameters",
)  # fmt: skip
"""Attributes that ``list_operations`` returns if the request names no attributes."""


class YtBackend:
    """Answers the commands for one scheduler; a ``Backend`` of ``cpumond.api.yt.transport``.

    Raises YtError and CommandError for refusals, StoreError if a change cannot be stored."""

    def __init__(
        self, scheduler: Scheduler, cluster_name: str, *version: str, find_known: Callable[[str], User] = User
    ) -> None:
        self.scheduler = scheduler
        self.find_known = find_known
        self.cypress = Cypress(scheduler, cluster_name, *version)

    async def __call__(self, request: YtRequest) -> Any:
        seen = copy.copy(self)
        seen.cypress = self.cypress.seen_by(request.user)
        try:
            return await seen._answer(request)
        except CpumondError as error:
            # Refusals are recorded here, because a batch returns them within its answer and raises none itself.
            operation = str(strip_attributes(request.parameters.get("operation_id", "")))[:MAX_NAME]
            await record_refusal(self.scheduler, request.user, f"yt {request.command}", error, operation=operation)
            raise

    async def _answer(self, request: YtRequest) -> Any:
        handler, change = _HANDLERS.get(request.command), _CHANGES.get(request.command)
        if handler is not None:
            return await handler(self, request)
        if change is None:
            raise YtError(f"Command {quote_text(request.command)} is not supported")
        return await self.execute(change(self, request), request)

    def find_record(self, request: YtRequest, permission: Permission = "read") -> OperationRecord:
        """Return the operation that a request names. Raises CommandError, also if its user lacks the right."""
        record = self.scheduler.state.find_record(_operation_id(request))
        check_operation(Rights(self.scheduler.state, request.user), record, permission)
        return record

    async def execute(self, command: Command, request: YtRequest, key: str = "") -> dict[str, str]:
        """Carry out a command of the scheduler; return the request's answer, ``{key: id}``, or ``{}`` without a key.

        The answer is stored together with the command under the request's mutation id: if the request is repeated after
        a crash, it is answered and not run again."""
        mutation_id = strip_attributes(request.parameters.get("mutation_id"))

        def remember(reply: Reply) -> Change:
            user, answer = request.user.name, {key: reply.id} if key else {}
            entry = export_reply(user, str(mutation_id), request.command, self.scheduler.clock.now(), answer)
            return Change(MUTATION, f"{user} {mutation_id}", msgspec.json.encode(entry))

        is_kept = isinstance(mutation_id, str)
        reply = await self.scheduler.execute(command, request.user, remember if is_kept else None)
        return {key: reply.id} if key else {}


async def _get(backend: YtBackend, request: YtRequest) -> Any:
    path = get_path(request)
    if path.attribute is not None:
        return {"value": backend.cypress.read(path)}
    node, attributes = backend.cypress.resolve(path), get_names(request, "attributes") or ()
    if node.is_value:
        return {"value": node.with_attributes(await materialise_in_parts(node.value), attributes)}
    return {"value": await node.get(attributes, Turn())}


async def _list(backend: YtBackend, request: YtRequest) -> Any:
    path = get_path(request)
    if path.attribute is not None:
        value = backend.cypress.read(path)
        if not isinstance(value, Mapping):
            raise YtError(f"{path} is not a map: it has no children to list")
        return {"value": list(value)}
    node = backend.cypress.resolve(path)
    if node.is_value and not isinstance(node.value, Mapping):
        raise YtError(f"{path} is not a map: it has no children to list")
    names = list(node.names())
    limit = get_number(request, "max_size", len(names), len(names))
    attributes = get_names(request, "attributes") or ()
    shown: list[Any] = names[:limit]
    if attributes:
        shown, turn = [], Turn()
        for name in names[:limit]:
            child = node.find(name)
            if child is not None:
                shown.append(child.with_attributes(name, attributes))
            await turn.give()
    return {"value": Attributed(shown, {"incomplete": True}) if limit < len(names) else shown}


async def _exists(backend: YtBackend, request: YtRequest) -> Any:
    path = get_path(request)
    try:
        (backend.cypress.resolve if path.attribute is None else backend.cypress.read)(path, with_hints=False)
    except YtError as error:
        if error.code != RESOLVE:
            raise
        return {"value": False}
    return {"value": True}


def _settable(backend: YtBackend, path: YPath) -> CypressNode:
    """Return the node whose attributes are changed: never a link itself, but its target."""
    return backend.cypress.resolve(YPath(path.root, path.steps, path.attribute))


async def _set(backend: YtBackend, request: YtRequest) -> Any:
    path, value = get_path(request), plain(request.value)
    if path.attribute is None:
        raise YtError(
            f"{path} cannot be set as a whole; set an attribute, {path}/@name, or create and remove pools below it"
        )
    node = _settable(backend, path)
    if path.attribute:
        edits: list[Edit] = [Edit(path.attribute, value, get_flag(request, "recursive"))]
    elif isinstance(value, dict):
        stale = _stale(node, value)
        edits = [*(Edit((name,), REMOVE) for name in stale), *(Edit((name,), item) for name, item in value.items())]
    else:
        raise YtError(f"{path}: the attributes of a node must be a map, not {quote_text(value)}")
    return await _change(backend, request, node, edits)


async def _change(backend: YtBackend, request: YtRequest, node: CypressNode, edits: Sequence[Edit]) -> dict[str, str]:
    if len(edits) > MAX_EDITS:
        raise YtError(f"{len(edits)} attributes are more than the limit of {MAX_EDITS} at once; change some at a time")
    return await backend.execute(node.change(tuple(edits)), request) if edits else {}


def _stale(node: CypressNode, value: Mapping[str, Any]) -> list[str]:
    """Return the stored attributes that a new set of attributes does not name."""
    given = {canonical_name(node.kind, name) for name in value}
    return [name for name in node.stored if name not in given]


async def _multiset(backend: YtBackend, request: YtRequest) -> Any:
    path, value = get_path(request), plain(request.value)
    if path.attribute is None:
        raise YtError(f'multiset_attributes: the path must end with "/@", but is {path}')
    if not isinstance(value, dict):
        raise YtError("multiset_attributes: the value must be a map of attributes")
    node = _settable(backend, path)
    is_recursive = get_flag(request, "recursive")
    edits = [Edit((*path.attribute, name), item, is_recursive) for name, item in value.items()]
    return await _change(backend, request, node, edits)


async def _remove(backend: YtBackend, request: YtRequest) -> Any:
    path = get_path(request)
    is_forced = get_flag(request, "force")
    try:
        if path.attribute is not None:
            node = _settable(backend, path)
            if path.attribute and not is_forced:
                backend.cypress.read(YPath(path.root, path.steps, path.attribute), with_defaults=False)
            removed = [path.attribute] if path.attribute else [(name,) for name in node.stored]
            return await _change(backend, request, node, [Edit(keys) for keys in removed])
        node = backend.cypress.resolve(path)
    except YtError as error:
        if is_forced and error.code == RESOLVE:
            return {}
        raise
    command: Any
    if node.tree is not None and node.pool is not None:
        command = RemovePool(node.tree.name, node.pool.name, get_flag(request, "recursive"))
    elif node.tree is not None and path.steps != ("sys", "pools"):
        command = RemoveTree(node.tree.name, get_flag(request, "recursive"))
    else:
        raise YtError(f"{path} cannot be removed; pools, pool trees and their attributes can")
    return await backend.execute(command, request)


async def _create(backend: YtBackend, request: YtRequest) -> Any:
    kind = get_text(request, "type")
    attributes = get_table(request, "attributes")
    may_exist = get_flag(request, "ignore_existing")
    if kind not in ("scheduler_pool", "scheduler_pool_tree", "map_node"):
        raise YtError(
            f'create: type {quote_text(kind)} is not supported; use "scheduler_pool" or "scheduler_pool_tree"'
        )
    if request.parameters.get("path") is not None:
        return await _create_at(backend, request, kind, attributes, may_exist)
    if kind == "map_node":
        raise YtError('create: parameter "path" is missing')
    name = attributes.pop("name", None)
    if not isinstance(name, str):
        raise YtError(f'create: a {kind} needs the attribute "name"')
    if kind == "scheduler_pool_tree":
        return await backend.execute(CreateTree(name, attributes, may_exist), request, "object_id")
    tree = attributes.pop("pool_tree", None) or backend.cypress.config.default_tree
    parent = attributes.pop("parent_name", None) or ROOT_POOL
    if not tree:
        raise YtError('create: a scheduler_pool needs the attribute "pool_tree": there is no default tree')
    for key, value in (("pool_tree", tree), ("parent_name", parent)):
        if not isinstance(value, str):
            raise YtError(f"create: attribute {key} must be text, not {quote_text(value)}")
    return await backend.execute(CreatePool(tree, name, parent, attributes, may_exist), request, "object_id")


async def _create_at(
    backend: YtBackend, request: YtRequest, kind: str, attributes: dict[str, Any], may_exist: bool
) -> dict[str, str]:
    """Create a pool or tree by its path; with ``recursive`` also missing pools above it."""
    path = get_path(request)
    if path.attribute is not None or not path.steps:
        raise YtError(f"create: {path} cannot hold a node")
    name = path.steps[-1]
    for key in ("name", "pool_tree", "parent_name"):
        if key in attributes:
            raise YtError(f"create: the path determines the place; leave the attribute {key} out")
    missing = [name]
    above = YPath(path.root, path.steps[:-1])
    while True:
        try:
            parent = backend.cypress.resolve(above)
            break
        except YtError as error:
            if error.code != RESOLVE or not get_flag(request, "recursive") or not above.steps:
                raise
            missing.append(above.steps[-1])
            above = YPath(path.root, above.steps[:-1])
    if parent.type == POOL_TREES and len(missing) == 1 and kind != "scheduler_pool":
        return await backend.execute(CreateTree(name, attributes, may_exist), request, "node_id")
    if parent.tree is None or kind == "scheduler_pool_tree":
        raise YtError(f"create: a {kind} cannot be created at {path}; pools are in //sys/pool_trees/<tree>")
    tree, parent_name, first = parent.tree.name, parent.pool_name, ""
    try:
        for step in reversed(missing[1:]):
            await backend.scheduler.execute(CreatePool(tree, step, parent_name), request.user)
            first, parent_name = first or step, step
        return await backend.execute(CreatePool(tree, name, parent_name, attributes, may_exist), request, "node_id")
    except CommandError:
        # A refused request must change nothing: remove the pools that it created above the refused one.
        if first:
            undoing = replace(request.user, admin=True)  # not every user who may create a pool may remove it
            await backend.scheduler.execute(RemovePool(tree, first, recursive=True), undoing)
        raise


async def _move(backend: YtBackend, request: YtRequest) -> Any:
    source, target = get_path(request, "source_path"), get_path(request, "destination_path")
    node = backend.cypress.resolve(source)
    if node.tree is None or node.pool is None or source.attribute is not None:
        raise YtError(f"{source} cannot be moved; pools can")
    if not target.steps or target.attribute is not None:
        raise YtError(f"{target} cannot hold a pool")
    parent = backend.cypress.resolve(YPath(target.root, target.steps[:-1]))
    if parent.tree is None:
        raise YtError(f"{target} cannot hold a pool; pools are in //sys/pool_trees/<tree>")
    if parent.tree.name != node.tree.name:
        raise YtError(f'pool "{node.name}" of tree "{node.tree.name}" cannot be moved to tree "{parent.tree.name}"')
    name = target.steps[-1]
    if name == node.name and parent.pool_name == node.pool.parent and not get_flag(request, "force"):
        raise YtError(f"Node {target} already exists", ALREADY_EXISTS)
    return await backend.execute(MovePool(node.tree.name, node.name, parent.pool_name, name), request, "node_id")


def _operation_id(request: YtRequest) -> str:
    if request.parameters.get("operation_id") is None and request.parameters.get("operation_alias") is None:
        raise YtError(f'{request.command}: "operation_id" or "operation_alias" is missing')
    name = "operation_id" if request.parameters.get("operation_id") is not None else "operation_alias"
    return get_text(request, name)


async def _start(backend: YtBackend, request: YtRequest) -> Any:
    name = "operation_type" if "operation_type" in request.parameters else "type"
    command = operations.StartOperation(get_table(request, "spec"), get_text(request, name))
    return await backend.execute(command, request, "operation_id")


async def _get_operation(backend: YtBackend, request: YtRequest) -> Any:
    names = get_names(request, "attributes")
    # Other attributes never contain secrets; the specification is refused to users who may not read secrets.
    wants_secrets = not SPECIFICATIONS.isdisjoint(names or ())
    record = backend.find_record(request, "read_secrets" if wants_secrets else "read")
    turn, statistics = Turn(), None
    if names is None or "progress" in names:
        statistics = await _sum_up(backend, record, turn)
        record = backend.scheduler.state.record_of(record.id) or record
    results = look_once(backend.cypress.results())
    now = backend.scheduler.clock.now()
    info = orchid.operation_info(backend.cypress.rights(), record, results, now, statistics)
    return await _pick(info, names, turn)


async def _sum_up(backend: YtBackend, record: OperationRecord, turn: Turn) -> jobs.JobStatistics:
    statistics = jobs.JobStatistics(record)
    for number, job in enumerate([*backend.scheduler.state.finished_jobs.get(record.id, {}).values()]):
        statistics.add(job)
        if number % 500 == 0:
            await turn.give()
    return statistics


async def _pick(info: Lazy, names: Iterable[str] | None, turn: Turn) -> dict[str, Any]:
    """Return the named attributes that exist, or all for None."""
    found = {}
    for name, value in info.parts() if names is None else ((name, info.get(name, MISSING)) for name in names):
        if value is not MISSING:
            found[name] = materialise(value)
        await turn.give()
    return found


async def _list_operations(backend: YtBackend, request: YtRequest) -> Any:
    state = backend.scheduler.state
    tests = operation_tests(request)
    chosen: list[OperationRecord] = []
    almost: dict[str, list[OperationRecord]] = {name: [] for name in tests}
    """Filter -> the operations that this filter, and no other, leaves out."""
    rights = Rights(state, request.user)
    for record in rights.readable(list_records(state)):
        failing = [name for name, test in tests.items() if not test(record)]
        if not failing:
            chosen.append(record)
        elif len(failing) == 1:
            almost[failing[0]].append(record)
    chosen.sort(key=lambda record: (record.start_time, record.sequence), reverse=True)
    limit = get_number(request, "limit", DEFAULT_LISTED_OPERATIONS, MAX_LISTED_OPERATIONS)
    is_past = get_text(request, "cursor_direction", "past") == "past"
    shown = chosen[:limit] if is_past else chosen[max(len(chosen) - limit, 0) :]
    attributes, view = get_names(request, "attributes") or LISTED_ATTRIBUTES, look_once(backend.cypress.results())
    specs = len(SPECIFICATIONS.intersection(attributes))
    if specs * sum(map(state.spec_room.weight_of, shown)) > MAX_LISTED_BYTES:
        raise YtError(
            f"list_operations: the specifications of these {len(shown)} operations take more than {MAX_LISTED_BYTES} "
            "bytes; list fewer (limit), or leave them out of the attributes"
        )
    turn = Turn()
    without = [name for name in attributes if name not in SPECIFICATIONS]
    described, now = [], backend.scheduler.clock.now()
    for record in shown:
        names = without if specs and not rights.may_read_secrets(record) else attributes
        described.append(await _pick(orchid.operation_info(rights, record, view, now), names, turn))
    answer: dict[str, Any] = {"operations": described, "incomplete": len(chosen) > limit}
    if strip_attributes(request.parameters.get("include_counters", True)) is not False:
        answer.update(count_operations(chosen, almost))
    return answer


async def _list_jobs(backend: YtBackend, request: YtRequest) -> Any:
    record = backend.find_record(request)
    query = job_filters.read_query(request, partial(_address, backend), backend.scheduler.clock.now())
    page, about = job_filters.choose_jobs(list_jobs(backend.scheduler.state, record), query)
    described, turn = [], Turn()
    for job in page:
        info = jobs.job_info(job, record, _address(backend, job))
        described.append(_take(info, None if query.names is None else ["id", *query.names]))
        await turn.give()
    return {"jobs": described, **about}


def _take(info: dict[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    return info if names is None else {name: info[name] for name in names if name in info}


def _address(backend: YtBackend, job: Job | JobRecord) -> str:
    node = backend.scheduler.state.nodes.get(job.node_id)
    return job.node_id if node is None else node.address


async def _get_job(backend: YtBackend, request: YtRequest) -> Any:
    state = backend.scheduler.state
    job_id = get_text(request, "job_id")
    job: Job | JobRecord | None = state.jobs.get(job_id)
    if job is None and request.parameters.get("operation_id") is not None:
        job = state.finished_jobs.get(_operation_id(request), {}).get(job_id)
    if job is None:
        raise YtError(f"No such job {job_id}", NO_SUCH_JOB)
    record = state.find_record(job.element.operation.id if isinstance(job, Job) else job.operation_id)
    check_operation(Rights(state, request.user), record, "read")
    info = {**jobs.job_info(job, record, _address(backend, job)), "statistics": jobs.view_statistics(job, record)}
    return _take(info, get_names(request, "attributes"))


async def _get_job_stderr(backend: YtBackend, request: YtRequest) -> bytes:
    """Return the end of a job's output, or the part that the request names, fetched from the job's node.

    A client that tracks an operation requests its failed jobs' stderr. If the answer is "no such job", the client goes
    on; after any other error it would not tell why the operation failed."""
    job_id = get_text(request, "job_id")
    kind = get_text(request, "type", "user_job_stderr")
    if kind != "user_job_stderr":
        raise YtError(f"No such job {job_id} with a stderr of type {quote_text(kind)}", NO_SUCH_JOB)
    live = backend.scheduler.state.jobs.get(job_id)
    named = any(request.parameters.get(name) is not None for name in ("operation_id", "operation_alias"))
    operation = live.element.operation.id if live is not None and not named else _operation_id(request)
    state = backend.scheduler.state
    check_operation(Rights(state, request.user), state.find_record(operation), "read_secrets")
    limit, offset = get_number(request, "limit", MAX_LOG_BYTES, MAX_LOG_BYTES), None
    if any(request.parameters.get(name) is not None for name in ("limit", "offset")):
        offset = get_number(request, "offset", 0, 2**62)
    try:
        return (await backend.scheduler.read_log(operation, job_id, "stderr", limit, offset)).content
    except CommandError as error:
        if error.code not in (NODE_OFFLINE, TIMEOUT):
            raise
        raise YtError(f"No such job {job_id} at the moment: {error}", NO_SUCH_JOB) from None


INCARNATION_STARTED: Final = "incarnation_started"


async def _list_operation_events(backend: YtBackend, request: YtRequest) -> Any:
    record, kind = backend.find_record(request), get_text(request, "event_type", INCARNATION_STARTED)
    if kind != INCARNATION_STARTED:
        raise YtError(f"list_operation_events: event_type must be {INCARNATION_STARTED}, not {quote_text(kind)}")
    return [orchid.view_incarnation(each) for each in record.incarnations]


async def _get_version(backend: YtBackend, _: YtRequest) -> Any:
    return {"version": backend.cypress.version}


async def _get_features(_: YtBackend, __: YtRequest) -> Any:
    return {"features": {"primitive_types": [], "compression_codecs": [], "erasure_codecs": []}}


async def _check_permission(backend: YtBackend, request: YtRequest) -> Any:
    path = get_path(request).node
    backend.cypress.resolve(path)
    return _view_verdict(backend, request, find_path_target(backend.scheduler.state, path))


async def _check_operation_permission(backend: YtBackend, request: YtRequest) -> Any:
    record = backend.scheduler.state.find_record(_operation_id(request))
    return _view_verdict(backend, request, RightsTarget(operation=record))


def _view_verdict(backend: YtBackend, request: YtRequest, target: RightsTarget) -> dict[str, Any]:
    """Return the answer to a question about a user's rights; the user may be another one than the sender."""
    name, state = get_text(request, "user"), backend.scheduler.state
    user = request.user if name == request.user.name else backend.find_known(name)
    if user is not request.user and not request.user.admin:
        check_question(Rights(state, request.user), target, name)
    verdict = judge_action(state, Rights(state, user), get_text(request, "permission"), target)
    return {"action": "allow" if verdict.allowed else "deny", "because": verdict.because}


_HANDLERS: Final[dict[str, Callable[[YtBackend, YtRequest], Awaitable[Any]]]] = {
    "get": _get, "list": _list, "exists": _exists, "set": _set, "multiset_attributes": _multiset, "remove": _remove,
    "create": _create, "move": _move, "start_operation": _start, "get_operation": _get_operation,
    "list_operations": _list_operations, "list_jobs": _list_jobs, "get_job": _get_job,
    "get_job_stderr": _get_job_stderr, "list_operation_events": _list_operation_events,
    "check_permission": _check_permission, "check_operation_permission": _check_operation_permission,
    "get_version": _get_version, "get_supported_features": _get_features,
}  # fmt: skip

_CHANGES: Final[dict[str, Callable[[YtBackend, YtRequest], Command]]] = {
    "abort_operation": lambda _, r: operations.AbortOperation(_operation_id(r), get_text(r, "abort_message", "")),
    "complete_operation": lambda _, r: operations.CompleteOperation(_operation_id(r)),
    "suspend_operation": lambda _, r: operations.SuspendOperation(_operation_id(r), get_flag(r, "abort_running_jobs")),
    "resume_operation": lambda _, r: operations.ResumeOperation(_operation_id(r)),
    "update_operation_parameters": lambda _, r: operations.UpdateOperation(
        _operation_id(r), get_table(r, "parameters")
    ),
    "patch_operation_spec": lambda _, r: operations.PatchOperation(_operation_id(r), get_list(r, "patches")),
    "abort_job": lambda _, r: operations.AbortJob(
        get_text(r, "job_id"), interrupt_timeout=get_milliseconds(r, "interrupt_timeout")
    ),
    "abandon_job": lambda _, r: operations.AbandonJob(get_text(r, "job_id")),
    "transfer_pool_resources": lambda backend, r: TransferPoolResources(
        get_text(r, "pool_tree", backend.cypress.config.default_tree),
        get_text(r, "source_pool"),
        get_text(r, "destination_pool"),
        get_table(r, "resource_delta"),
    ),
}
"""Commands of ``yt`` that become one command of the scheduler; their answer is empty."""
