"""Operations: specifications as users write them, commands, and the effects of the end of a job.

The functions are pure: they turn records into records. See semantics.md 1.1, 2.5, 2.9, 3; yt_protocol.md 10."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from cpumond.core.errors import ConfigError
from cpumond.core.words import nearest
from cpumond.scheduler.model import (
    CommandError,
    GangOptions,
    JobCounts,
    JobRecord,
    OperationFacts,
    OperationRecord,
    OperationState,
    OperationTreeOptions,
    Task,
    encode_record,
)
from cpumond.scheduler.model.failures import EndError
from cpumond.scheduler.rights.entries import OPERATION_PERMISSIONS, AccessEntry
from cpumond.scheduler.settings import failures, incarnations, memory_reserve, retries
from cpumond.scheduler.settings.access_lists import read_acl
from cpumond.scheduler.settings.nodes_filter import TAG_FILTER, parse_tag_filter
from cpumond.scheduler.settings.spec_options import Place, canonical, find_idle, find_refused, honoured
from cpumond.scheduler.settings.values import (
    FIELD,
    MAX_MILLISECONDS,
    TIME_WORDS,
    fields_of,
    format_value,
    name_field,
    normalise_value,
    to_milliseconds,
)
from cpumond.scheduler.settings.vault import read_vault, without_vault, write_yson

MAX_JOB_COUNT: Final = 100_000
MAX_TASKS: Final = 100
MAX_FAILED_JOB_COUNT: Final = 10_000
MAX_ANNOTATIONS_BYTES: Final = 10_240
MAX_MEMORY_LIMIT: Final = 2**44
"""Bytes: 16 TiB."""
LEAST_JOB_TIME_LIMIT: Final = 1000.0
"""Milliseconds."""
MAX_OPTIONS: Final = 500
"""Maximum number of options, known or unknown, in a specification and in each task: the event loop reads them all."""
MAX_TEXT: Final = 65_536
LEAST_SHARE: Final = 1e-6
"""Minimum fraction of ``memory_limit`` that an option may set."""
MAX_PATH: Final = 4095
MAX_NAMED: Final = 20
MAX_SHOWN: Final = 80
"""Maximum number of unknown options that warnings name, and maximum number of characters of each name."""
MAX_COUNTED: Final = 1000
"""Maximum number of unknown options that are counted for the warnings whenever an operation is shown."""

MAX_TASK_BYTES: Final = 262_144
"""Maximum UTF-8 bytes of a task's command, environment and working_directory in total: each start carries them all."""

TREE_OPTIONS: Final = frozenset(OperationTreeOptions.__struct_fields__) - {"pool"}
"""Options for all trees of an operation or, in ``scheduling_options_per_pool_tree``, for one tree (2.5)."""

ACL: Final = "acl"
ANNOTATIONS: Final = "annotations"
MAX_ANNOTATION_BYTES: Final = 10_240
SHELLS: Final = "options_per_job_shell"
MEANT_FOR_YTSAURUS: Final = frozenset({"controller_agent_tag", "enable_detailed_logs"})
"""Parameters of a live operation that only YTsaurus uses."""
UNENFORCED: Final = ("owners", "aco_name")
"""Options that are refused in a specification and in parameters, since they would not be enforced."""


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", omit_defaults=True):
    pass


class StartOperation(_Command, frozen=True, tag="start_operation"):
    """Start an operation from a user's specification; ``tasks`` and ``pool`` are read from ``spec``."""

    spec: dict[str, Any]
    type: str = "vanilla"


class AbortOperation(_Command, frozen=True, tag="abort_operation"):
    """Stop all jobs and end the operation."""

    operation_id: str
    message: str = ""


class CompleteOperation(_Command, frozen=True, tag="complete_operation"):
    """End the operation as completed, even if work is left."""

    operation_id: str


class SuspendOperation(_Command, frozen=True, tag="suspend_operation"):
    """Start no more jobs of the operation. Running jobs continue unless ``abort_running_jobs``."""

    operation_id: str
    abort_running_jobs: bool = False


class ResumeOperation(_Command, frozen=True, tag="resume_operation"):
    """Resume a suspended operation."""

    operation_id: str


class UpdateOperation(_Command, frozen=True, tag="update_operation_parameters"):
    """Change options of a live operation, such as pool and weight, for all of its trees or for single ones (3.5)."""

    operation_id: str
    parameters: dict[str, Any]


class AbortJob(_Command, frozen=True, tag="abort_job"):
    """Stop a job, which is then started again. ``interrupt_timeout``: milliseconds that the job has to end.

    ``operation_id``: "" for the operation to which the job belongs."""

    job_id: str
    operation_id: str = ""
    interrupt_timeout: float | None = None


class AbandonJob(_Command, frozen=True, tag="abandon_job"):
    """Stop a job and count it as completed. ``operation_id`` as in AbortJob."""

    job_id: str
    operation_id: str = ""


class PatchOperation(_Command, frozen=True, tag="patch_operation_spec"):
    """Change the specification of a live operation. ``patches``: maps of ``path`` and ``value``; all apply or none."""

    operation_id: str
    patches: list[Any]


JobCommand = AbortJob | AbandonJob
OperationCommand = (
    StartOperation | AbortOperation | CompleteOperation | SuspendOperation | ResumeOperation | UpdateOperation
    | PatchOperation | JobCommand
)  # fmt: skip


class ParsedSpecification(OperationFacts, frozen=True):
    """A specification, read and checked, before its pools are chosen.

    ``trees``: None if not specified, which means the default tree. ``options``: tree ("" for all trees) -> name of an
    option (of ``TREE_OPTIONS``, or ``pool``) -> value."""

    tasks: tuple[Task, ...]
    trees: tuple[str, ...] | None
    options: dict[str, dict[str, Any]]
    acl: tuple[AccessEntry, ...]
    schedule_in_single_tree: bool
    """Whether one of the trees is chosen when the operation starts (2.5)."""
    secrets: dict[str, str]
    """Environment variables of each job that are not stored in the specification, but apart from it (12.6)."""


ROOT_OPTIONS: Final = honoured("root")
TASK_OPTIONS: Final = honoured("task")


def read_spec(
    spec: Mapping[str, Any],
    read_monitor: Callable[[object], dict[str, Any]],
    default_memory_limit: Callable[[tuple[str, ...] | None], int] = lambda _: 0,
) -> ParsedSpecification:
    """Read and check a specification. ``read_monitor``: checks its section ``job_cpu_monitor``.
    ``default_memory_limit``: returns, for ``trees``, the limit in bytes of tasks that set none. Raises CommandError."""
    shown = without_vault(spec)
    secrets = {} if shown is spec else read_vault(spec)
    table = _normalise(shown, "spec")
    trees, options = _read_places(table)
    several = trees is not None and len(trees) > 1
    _refuse_options("root", table, "spec", several_trees=several or bool(table.get("tentative_pool_trees")))
    _check_annotations(table.get("annotations"))
    monitor = table.get("job_cpu_monitor", {})
    facts = {option: read(table[option], f"spec/{option}") for option, read in _FACTS.items() if option in table}
    if facts.get("require_reclaimed") and not facts.get("allow_reclaimed", True):
        what = "with allow_reclaimed = false jobs that run only on reclaimed CPU could never start; set one of the two"
        raise _refuse("spec/require_reclaimed", what)
    in_one = _flag(table.get("schedule_in_single_tree", False), "spec/schedule_in_single_tree")
    if in_one and table.get("tentative_pool_trees"):
        raise _refuse("spec/schedule_in_single_tree", "contradicts tentative_pool_trees; leave one of the two out")
    return ParsedSpecification(
        tasks=_read_tasks(table, secrets, default_memory_limit(trees)), trees=trees, options=options,
        job_cpu_monitor=_read_monitor(monitor, read_monitor) if monitor else {}, acl=_read_acl(table, "spec"),
        schedule_in_single_tree=in_one, secrets=secrets, **facts,
    )  # fmt: skip


Places = tuple[tuple[str, ...] | None, dict[str, dict[str, Any]]]
"""``trees`` and ``options`` of a ParsedSpecification."""


def read_places(spec: Mapping[str, Any]) -> Places:
    """Read the trees and pools of a specification, as a part of ``read_spec``."""
    return _read_places(_normalise(spec, "spec"))


def list_erased_trees(record: OperationRecord) -> list[str]:
    """Return the trees that a specification names, but to which its operation does not belong, or no longer belongs."""
    with contextlib.suppress(CommandError):
        return [name for name in read_places(without_vault(record.spec))[0] or () if name not in record.trees]
    return []


def _read_places(table: Mapping[str, Any]) -> Places:
    shared, per_tree = _read_options("spec", table), _read_per_tree(table, "spec")
    trees, tentative = table.get("pool_trees"), table.get("tentative_pool_trees")
    if isinstance(tentative, list):
        # The operation does not run in tentative trees: their options must cause no warnings.
        per_tree = {tree: given for tree, given in per_tree.items() if tree not in tentative or tree in (trees or ())}
    if trees is not None:
        trees = tuple(_text(name, "spec/pool_trees", 100) for name in _list(trees, "spec/pool_trees"))
        if not trees:
            raise _refuse("spec/pool_trees", "no pool tree is specified; name at least one or omit the option")
        if len(set(trees)) != len(trees):
            raise _refuse("spec/pool_trees", "a tree is named twice")
        stray = [tree for tree in per_tree if tree not in trees]
        if stray:
            what = f"tree {stray[0]!r} is not among pool_trees {list(trees)}"
            raise _refuse("spec/scheduling_options_per_pool_tree", what)
    elif per_tree:
        trees = tuple(per_tree)
    return trees, {"": shared, **per_tree}


def _list_idle(spec: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, Any, str]]:
    """Yield (place, key, value, reason) of each option without effect that a user should know of."""
    spec = without_vault(spec)
    for key, value, reason in find_idle("root", spec):
        yield (), key, value, reason
    for part, inside in spec.items():
        place = _PARTS.get(canonical(part))
        if place is None:
            continue
        for name, given in inside.items():
            for key, value, reason in find_idle(place, given):
                yield (part, name), key, value, reason


_PARTS: Final[Mapping[str, Place]] = {"tasks": "task", "scheduling_options_per_pool_tree": "tree"}
"""Options at the root that contain further options of tasks or trees, by the name of the task or tree."""


def find_unrecognized(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without effect that a user should know of, in the user's spelling."""
    found: dict[str, Any] = {}
    for place, key, value, _ in _list_idle(spec):
        inside = found
        for part in place:
            inside = inside.setdefault(part, {})
        inside[key] = value
    return found


def unrecognized_warnings(spec: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each option of ``find_unrecognized``, with the reason or a similar option."""
    found = ((place, key, reason) for place, key, _, reason in _list_idle(spec))
    idle = list(itertools.islice(found, MAX_COUNTED))
    sentences = [_describe_idle(*each) for each in sorted(idle)[:MAX_NAMED]]
    if len(idle) > MAX_NAMED:
        least = "at least " * (len(idle) == MAX_COUNTED)
        sentences.append(f"{least}{len(idle) - MAX_NAMED} more spec options are not recognized")
    return sentences


def _describe_idle(place: tuple[str, ...], key: str, reason: str) -> str:
    subject = f'spec option "{"/".join((*place, key[:MAX_SHOWN]))}"'
    if reason:
        return f"{subject} has no effect: {reason}"
    near = nearest(canonical(key), _KNOWN[canonical(place[0]) if place else ""], 0.7)
    return f"{subject} is not recognized" + (f'; did you mean "{near}"?' if near else "")


_KNOWN: Final = {"": ROOT_OPTIONS, "tasks": TASK_OPTIONS, "scheduling_options_per_pool_tree": honoured("tree")}


def _refuse_options(place: Place, table: Mapping[str, Any], where: str, *, several_trees: bool = False) -> None:
    for name, option in find_refused(place, table, several_trees=several_trees):
        raise _refuse(f"{where}/{name}", option.sentence)


def _read_acl(table: Mapping[str, Any], where: str) -> tuple[AccessEntry, ...]:
    place, given = f"{where}/{ACL}", table.get(ACL)
    try:
        given = read_acl([] if given is None else given, place, OPERATION_PERMISSIONS)
    except CommandError as error:
        raise name_field(error, _field_of(str(error.attributes.get(FIELD, place)))) from None
    return msgspec.convert(given, tuple[AccessEntry, ...])


def _check_annotations(value: object) -> None:
    """Check that annotations are a map of at most MAX_ANNOTATIONS_BYTES as text YSON; they are kept unchanged."""
    where = "spec/annotations"
    if value is None:
        return
    try:
        size = len(write_yson(_table(value, where)))
    except UnicodeEncodeError:
        return  # the store refuses invalid Unicode
    except RecursionError:
        raise _refuse(where, "are nested too deep") from None
    if size > MAX_ANNOTATIONS_BYTES:
        what = f"at most {MAX_ANNOTATIONS_BYTES} bytes of text YSON are kept, got {size}; put long texts into a file"
        raise _refuse(where, what)


def _read_alias(value: object, where: str) -> str:
    alias = _text(value, where, 1000)
    if alias and not alias.startswith("*"):
        raise _refuse(where, f'an alias begins with an asterisk, unlike an id; write "*{alias[:MAX_SHOWN]}"')
    return alias


def _duration(value: object, where: str, least: float = 1.0) -> float | None:
    """Read a time. Returns milliseconds, None for no limit. Raises CommandError."""
    if value is None:
        return None
    milliseconds = to_milliseconds(value)
    if milliseconds is None or not least <= milliseconds <= MAX_MILLISECONDS:
        raise _refuse(where, f"expected {TIME_WORDS} in [{least:g}, {MAX_MILLISECONDS:g}], got {format_value(value)}")
    return float(milliseconds)


def _read_monitor(given: object, read_monitor: Callable[[object], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read_monitor(given)
    except CommandError as error:
        # The agent's reader raised this error, which names the option only in its message.
        named = _MONITOR_OPTION.search(str(error))
        option = "" if named is None else "/" + named[1].replace("-", "_")
        raise name_field(error, f"job_cpu_monitor{option}") from None


_MONITOR_OPTION: Final = re.compile(r"\bjob[-_]cpu[-_]monitor[./]([A-Za-z_-]+)")


def _refuse(where: str, what: str) -> CommandError:
    """Return the error that refuses the value at ``where`` in a specification or in parameters."""
    field = _field_of(where)
    return CommandError(f"{where}: {what}", attributes={FIELD: field} if field else {})


def _field_of(where: str) -> str:
    """Return the path of an option below its first part: ``tasks/main/cpu_limit`` of ``spec/tasks/main/cpu_limit``."""
    return where.partition("/")[2]


def _normalise(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``table`` with canonical names that have underscores. Two spellings of one option are an error (0.2)."""
    if len(table) > MAX_OPTIONS:
        what = f"{len(table)} options, at most {MAX_OPTIONS} are allowed; put your own data into annotations"
        raise _refuse(where, what)
    result: dict[str, Any] = {}
    for key, value in table.items():
        name = canonical(key)
        if name in result:
            error = _refuse(where, f"option {name!r} is given twice in two spellings; keep one of them")
            raise name_field(error, _field_of(f"{where}/{name}"))
        result[name] = value
    return result


def _refuse_unknown(table: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = nearest(key, known)
            hint = f"did you mean {near!r}?" if near else f"known options: {', '.join(sorted(known))}"
            raise _refuse(f"{where}/{key}", f"unknown option; {hint}")


_OPTION_TYPES: Final = fields_of(OperationTreeOptions)
_RESETS: Final = {field.name: field.default for field in msgspec.structs.fields(OperationTreeOptions)}


def _read_options(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``pool`` and the options of ``TREE_OPTIONS`` in ``given``, checked by type. None resets an option."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name == "pool":
            options[name] = _text(value, f"{where}/pool", 1000)
        elif name in TREE_OPTIONS and value is None:
            default = _RESETS[name]
            options[name] = {} if default is msgspec.NODEFAULT else default
        elif name in TREE_OPTIONS:
            place = f"{where}/{name}"
            try:
                options[name] = normalise_value(value, _OPTION_TYPES[name], place)
                if name == TAG_FILTER:
                    parse_tag_filter(options[name], place)
            except ConfigError as error:
                raise CommandError(str(error), attributes={FIELD: _field_of(place)}) from None
            except CommandError as error:
                raise name_field(error, _field_of(str(error.attributes.get(FIELD, place)))) from None
    return options


def _read_per_tree(table: Mapping[str, Any], inside: str, *, strict: bool = False) -> dict[str, dict[str, Any]]:
    """Read ``scheduling_options_per_pool_tree``: tree -> its options. ``strict``: unknown options are refused."""
    where = f"{inside}/scheduling_options_per_pool_tree"
    options = {}
    for tree, given in _table(table.get("scheduling_options_per_pool_tree", {}), where).items():
        place = f"{where}/{tree}"
        named = _normalise(_table(given, place), place)
        _refuse_options("tree", named, place)
        if strict:
            _refuse_unknown(named, TREE_OPTIONS | {"pool", *MEANT_FOR_YTSAURUS}, place)
        options[tree] = _read_options(place, named)
    return options


def _read_tasks(table: Mapping[str, Any], secrets: Mapping[str, str], default_memory_limit: int) -> tuple[Task, ...]:
    """Read tasks. ``secrets``: environment variables that each job has in addition to those of its task."""
    tasks = _table(table.get("tasks"), "spec/tasks", "a map of a task's name to its job_count and command")
    if not tasks:
        raise _refuse("spec/tasks", "at least one task is needed, for example {t={job_count=1;command=...}}")
    if len(tasks) > MAX_TASKS:
        raise _refuse("spec/tasks", f"at most {MAX_TASKS} tasks are allowed, got {len(tasks)}")
    result = tuple(
        _read_task(_text(name, "spec/tasks", 1000), given, secrets, default_memory_limit)
        for name, given in tasks.items()
    )
    if _flag(table.get("fail_on_job_restart", False), "spec/fail_on_job_restart"):
        result = tuple(msgspec.structs.replace(task, fail_on_job_restart=True) for task in result)
    if incarnations.is_gang(result):
        strict = next((task for task in result if task.fail_on_job_restart), None)
        if strict is not None:
            what = "it cannot be honoured, since a gang is started again as a whole; omit it, or gang_options"
            where = "spec" if table.get("fail_on_job_restart") else f"spec/tasks/{strict.name}"
            raise _refuse(f"{where}/fail_on_job_restart", what)
    result = _share_retries(table, result)
    total = sum(task.job_count for task in result)
    if total > MAX_JOB_COUNT:
        raise _refuse("spec/tasks", f"at most {MAX_JOB_COUNT} jobs are allowed in one operation, got {total}")
    return result


def _read_task(name: str, given: object, secrets: Mapping[str, str], default_memory_limit: int) -> Task:
    if not name:
        raise _refuse("spec/tasks", "the name of a task must not be empty")
    where = f"spec/tasks/{name}"
    task = _normalise(_table(given, where), where)
    _refuse_options("task", task, where)
    command = task.get("command", "")
    if isinstance(command, list):
        arguments: str | tuple[str, ...] = tuple(_word(part, f"{where}/command", MAX_TEXT) for part in command)
    else:
        arguments = _word(command, f"{where}/command", MAX_TEXT)
    environment = {
        _read_variable(key, f"{where}/environment"): _word(value, f"{where}/environment/{key}", MAX_TEXT)
        for key, value in _table(task.get("environment", {}), f"{where}/environment").items()
    }
    directory = _read_directory(task.get("working_directory", ""), f"{where}/working_directory")
    _check_size(arguments, environment, directory, secrets, where)
    if "job_count" not in task:
        raise _refuse(f"{where}/job_count", "is missing; how many jobs shall run?")
    if not (arguments if isinstance(arguments, str) else "".join(arguments[:1])).strip():
        raise _refuse(f"{where}/command", "is missing or blank; what shall each job run?")
    gang = _read_gang(task, where)
    interrupts = _read_signal(task.get("interruption_signal"), f"{where}/interruption_signal")
    # Only the options that a task has are read: most tasks have few.
    options = {option: _READERS[option](task[option], f"{where}/{option}") for option in task if option in _READERS}
    options.setdefault("memory_limit", default_memory_limit)
    if interrupts:
        options["interruptible"] = True
    return Task(
        name=name, command=arguments, environment=environment, interruption_signal=interrupts,
        working_directory=directory, gang_options=gang,
        spec={key: task[key] for key in sorted(task.keys() - TASK_OPTIONS)}, **options,
    )  # fmt: skip


def _share_retries(table: Mapping[str, Any], tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Give the root's retry policy to tasks without one. Raises CommandError for a policy that cannot be followed."""
    shared = _policy(table.get(retries.RETRY_POLICY), f"spec/{retries.RETRY_POLICY}")
    if shared is not None:
        tasks = tuple(msgspec.structs.replace(t, retry_policy=shared) if t.retry_policy is None else t for t in tasks)
    for task in tasks:
        policy = task.retry_policy or ()
        where = f"spec/{'' if policy == shared else f'tasks/{task.name}/'}{retries.RETRY_POLICY}"
        if policy and task.fail_on_job_restart:
            what = "with fail_on_job_restart no job of the task is ever started again; omit one of the two"
            raise _refuse(where, what)
        if retries.is_for_preempted(policy) and (table.get("is_gang") or incarnations.is_gang(tasks)):
            what = "a gang that is preempted starts again as a whole, without a rule; leave the kind preempted out"
            raise _refuse(where, what)
    return tasks


def _read_gang(task: Mapping[str, Any], inside: str) -> GangOptions | None:
    """Read ``gang_options`` of a task; None if it has none. Raises CommandError."""
    given, where = task.get("gang_options"), f"{inside}/gang_options"
    if given is None:
        return None
    options = _normalise(_table(given, where), where)
    _refuse_unknown(options, frozenset(GangOptions.__struct_fields__), where)
    size, most = options.get("size"), task.get("job_count")
    if task.get("restart_completed_jobs"):
        what = "completed jobs would start again for ever, and the gang would never be complete; omit one of the two"
        raise _refuse(f"{inside}/restart_completed_jobs", what)
    if size is None:
        return GangOptions()
    number = _integer(size, f"{where}/size", 1, MAX_JOB_COUNT)
    if isinstance(most, int | float) and number > most:
        raise _refuse(f"{where}/size", f"{number} jobs must have a rank, but job_count is only {most:g}; lower size")
    return GangOptions(number)


_SIGNALS: Final = frozenset(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP"}


def _read_signal(value: object, where: str) -> str:
    """Read the name of a signal that a process can handle; "" if there is none. Raises CommandError."""
    if value is None:
        return ""
    if value not in _SIGNALS:
        near = nearest(value, _SIGNALS) if isinstance(value, str) else ""
        what = f"expected the name of a signal that a process can handle, such as SIGINT, got {value!r}"
        raise _refuse(where, what + (f"; did you mean {near}?" if near else ""))
    return str(value)


def _check_size(
    command: str | tuple[str, ...], environment: Mapping[str, str], working_directory: str, secrets: Mapping[str, str],
    where: str,
) -> None:  # fmt: skip
    """Check the total size of the texts that are sent to a node with each start of a job. Raises CommandError."""
    words = (command,) if isinstance(command, str) else command
    texts = (*words, *environment.keys(), *environment.values(), working_directory, *secrets, *secrets.values())
    if 4 * sum(map(len, texts)) <= MAX_TASK_BYTES:
        return
    # Invalid Unicode must not raise here: the store refuses it.
    size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    if size > MAX_TASK_BYTES:
        told = ", with the variables of secure_vault," if secrets else ""
        what = (
            f"command, environment and working_directory together{told} may take at most {MAX_TASK_BYTES} bytes "
            f"(UTF-8), got {size}; put long texts into a file that the job reads"
        )
        raise _refuse(where, what)


def _word(value: object, where: str, most: int) -> str:
    """Read text that can be passed to a process. Raises CommandError."""
    text = _text(value, where, most)
    if "\0" in text:
        raise _refuse(where, "a character with the code 0 cannot be passed to a process")
    return text


def _read_variable(value: object, where: str) -> str:
    name = _text(value, where, MAX_TEXT)
    if _VARIABLE.fullmatch(name) is None:
        what = f"the name of a variable must consist of letters, digits and _ (ASCII), got {format_value(name)}"
        raise _refuse(where, what)
    return name


_VARIABLE: Final = re.compile(r"[A-Za-z0-9_]+")


def _read_directory(value: object, where: str) -> str:
    """Read the path of a directory on the nodes; "" if there is none. Raises CommandError."""
    path = _word(value, where, MAX_PATH)
    if path and not path.startswith("/"):
        raise _refuse(where, f"expected an absolute path such as /srv/data, got {path!r}")
    return path


def _table(value: object, where: str, expected: str = "a map") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(where, f"expected {expected}, got {_kind(value)}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _refuse(where, f"expected a list, got {_kind(value)}")
    return list(value)


def _text(value: object, where: str, most: int) -> str:
    if not isinstance(value, str):
        raise _refuse(where, f"expected text, got {_kind(value)}")
    if len(value) > most:
        raise _refuse(where, f"at most {most} characters are allowed, got {len(value)}")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise _refuse(where, f"expected true or false, got {_kind(value)}")
    return value


def _choice(value: object, where: str) -> Literal["normal", "graceful"]:
    if value not in ("normal", "graceful"):
        raise _refuse(where, f'expected "normal" or "graceful", got {value!r}')
    return "graceful" if value == "graceful" else "normal"


def _number(value: object, where: str, most: float, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refuse(where, f"expected a number, got {_kind(value)}")
    if not least <= value <= most:
        raise _refuse(where, f"expected a number in [{least:g}, {most:g}], got {value}")
    return float(value)


def _integer(value: object, where: str, least: int, most: int) -> int:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise _refuse(where, f"expected a whole number, got {_kind(value)}")
    if not least <= number <= most:
        raise _refuse(where, f"expected a whole number in [{least}, {most}], got {number}")
    return number


def _bounded(read: Callable[..., Any], *bounds: float, optional: bool = False) -> Callable[[object, str], Any]:
    """Make a reader of a value and its place in a specification. ``optional``: an entity (``#``) is also accepted."""
    return lambda value, where: None if optional and value is None else read(value, where, *bounds)


def _policy(value: object, where: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    policy = tuple(_text(rule, where, MAX_TEXT) for rule in _list(value, where))
    try:
        retries.check_policy(policy)
    except ValueError as error:
        raise _refuse(where, str(error)) from None
    return policy


_READERS: Final[Mapping[str, Callable[[object, str], Any]]] = {
    "job_count": _bounded(_integer, 1, MAX_JOB_COUNT),
    "cpu_limit": _bounded(_number, 1e9),
    "memory_limit": _bounded(_integer, 0, MAX_MEMORY_LIMIT),
    "user_slots": _bounded(_integer, 0, 10**6),
    "gpu_limit": _bounded(_number, 1e6),
    "network": _bounded(_number, 1e12),
    "interruptible": _flag,
    "signal_root_process_only": _flag,
    "redirect_stdout_to_stderr": _flag,
    "restart_exit_code": _bounded(_integer, 1, 255, optional=True),
    "max_stderr_size": _bounded(_integer, 1, 2**30, optional=True),
    "job_time_limit": _bounded(_duration, LEAST_JOB_TIME_LIMIT),
    "min_run_time": _bounded(_duration, 0.0),
    "checkpoints": _flag,
    "fail_on_job_restart": _flag,
    "restart_completed_jobs": _flag,
    retries.RETRY_POLICY: _policy,
    "set_container_cpu_limit": _bounded(_flag, optional=True),
    "user_job_memory_digest_default_value": _bounded(_number, 1.0, LEAST_SHARE, optional=True),
    "user_job_memory_digest_lower_bound": _bounded(_number, 1.0, LEAST_SHARE, optional=True),
    "memory_reserve_factor": _bounded(_number, 1.0, LEAST_SHARE, optional=True),
    "user_job_resource_overdraft_memory_multiplier": _bounded(_number, 10.0, 1.0, optional=True),
    "ignore_memory_reserve_factor_less_than_one": _flag,
}
"""Options of a task that can be checked without other options -> reader of the value."""

_FACTS: Final[Mapping[str, Callable[[object, str], Any]]] = {
    "title": _bounded(_text, MAX_TEXT),
    "alias": _read_alias,
    "preemption_mode": _choice,
    "is_gang": _flag,
    "suspend_on_job_failure": _flag,
    "max_failed_job_count": _bounded(_integer, 0, MAX_FAILED_JOB_COUNT),
    "time_limit": _duration,
    "allow_reclaimed": _flag,
    "require_reclaimed": _flag,
    "enable_limiting_ancestor_check": _flag,
}
"""Options of an operation as a whole (``OperationFacts``) -> reader of the value."""


def _kind(value: object) -> str:
    names = {dict: "a map", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def tree_options(given: Mapping[str, Mapping[str, Any]], tree: str, pool: str) -> OperationTreeOptions:
    """Return the options of one tree: its own, else those for all trees (2.5). ``pool``: the pool that was chosen."""
    return OperationTreeOptions(**{**given.get("", {}), **given.get(tree, {}), "pool": pool})


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read ``update_operation_parameters``: options by tree, "" for all trees. Raises CommandError."""
    table = _normalise(parameters, "parameters")
    _refuse_options("root", {name: table.get(name) for name in UNENFORCED}, "parameters")
    given = {name: value for name, value in table.items() if name not in UNENFORCED}
    if given.get(SHELLS):
        raise _refuse(f"parameters/{SHELLS}", "there are no shells in jobs; read a job's log, or sign in on its node")
    known = {"pool", "scheduling_options_per_pool_tree", ACL, ANNOTATIONS, SHELLS, *MEANT_FOR_YTSAURUS}
    _refuse_unknown(given, TREE_OPTIONS | known, "parameters")
    return {"": _read_options("parameters", table), **_read_per_tree(table, "parameters", strict=True)}


def read_changed_annotations(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the annotations in ``update_operation_parameters``; None if they do not change."""
    value = _normalise(parameters, "parameters").get(ANNOTATIONS)
    if value is None:
        return None
    annotations = _table(value, f"parameters/{ANNOTATIONS}")
    size = len(encode_record(annotations))
    if size > MAX_ANNOTATION_BYTES:
        raise _refuse(f"parameters/{ANNOTATIONS}", f"at most {MAX_ANNOTATION_BYTES} bytes as JSON, got {size}")
    return annotations


def read_changed_acl(parameters: Mapping[str, Any]) -> tuple[AccessEntry, ...] | None:
    """Return the access list in ``update_operation_parameters``; None if it does not change."""
    table = _normalise(parameters, "parameters")
    return _read_acl(table, "parameters") if ACL in table else None


def needed_jobs(record: OperationRecord, active: Mapping[str, int]) -> dict[str, int]:
    """Return task -> number of jobs still to be started. ``active``: as ``Operation.active``."""
    if record.is_finished:
        return {}
    needed: dict[str, int] = {}
    for task in record.tasks:
        left = count_left(record, task, active.get(task.name, 0))
        if left > 0:
            needed[task.name] = left
    return needed


def count_left(record: OperationRecord, task: Task, active: int) -> int:
    """How many jobs of a task are still to be started, <= 0 for none. ``active``: its active jobs."""
    counts = record.counts.get(task.name)
    if counts is None:
        return task.job_count - active
    if task.gang_options is not None and incarnations.is_complete(record, task):
        return 0
    return task.job_count - counts.completed - active


def starts_again(task: Task | None, job: JobRecord) -> bool:
    """Return whether a completed job must be started again. A job that a user abandoned need not be."""
    if task is None or job.state != "completed" or job.exit_code is None:
        return False
    return task.restart_completed_jobs or job.exit_code == task.restart_exit_code


NONE_STOPPED: Final[Mapping[str, int]] = MappingProxyType({})


def _ran_in_vain(job: JobRecord) -> bool:
    return job.state == "failed" or (job.state in ("aborted", "lost") and job.has_run)


def count_job(
    record: OperationRecord, job: JobRecord, now: float, terms: retries.Terms = retries.NO_TERMS, *,
    blames_node: bool = False,
) -> OperationRecord:  # fmt: skip
    """Return the record after a job ended: completed, failed, aborted or lost (3.6).

    If all jobs have completed, the operation is completed. If ``max_failed_job_count`` jobs have failed, or a job ended
    that must not be started again, the operation fails. A failure that the retry policy in ``terms`` retries does not
    count (3.9). ``blames_node``: the failure does not count until a different node confirms it (2.14)."""
    if record.is_finished:
        return record
    task = next((task for task in record.tasks if task.name == job.task), None)
    is_again = starts_again(task, job)
    counts, state = record.counts.get(job.task, JobCounts()), "lost" if is_again else job.state
    if job.incarnation != record.incarnation and state != "lost":
        state = "aborted"  # a job of an earlier incarnation: its work is done again
    counts = msgspec.structs.replace(counts, **{state: getattr(counts, state) + 1})
    if state == "aborted":
        record = _note_aborted(record, failures.find_abort_reason(job))
    record = msgspec.structs.replace(record, counts={**record.counts, job.task: counts})
    if job.memory_reserve and task is not None:
        record = memory_reserve.note_end(record, task, job)
    if job.incarnation != record.incarnation:
        return record
    if state == "completed" and job.gang_rank < 0 and task is not None and task.gang_options is not None:
        reserved = {**record.reserved_done, task.name: record.reserved_done.get(task.name, 0) + 1}
        record = msgspec.structs.replace(record, reserved_done=reserved)
    if task is not None and task.fail_on_job_restart and _ran_in_vain(job):
        return _fail(record, now, *failures.would_restart(job))
    record, note = retries.follow_end(record, task, job, terms, now, is_done=state == "completed")
    if note.outcome == "failed":
        return _fail(record, now, *failures.by_rule(note, job))
    is_excused = note.outcome == "retried"
    if job.state == "failed" and is_excused:
        record = msgspec.structs.replace(record, uncounted_failures=record.uncounted_failures + 1)
    if failures.is_failure(job):
        record = failures.note_failure(record, job, blames_node)
    failed = failures.count_failures(record)
    if job.state == "failed" and not is_excused and failed and failed >= record.max_failed_job_count:
        return fail_by_jobs(record, job, now, why=note.why)
    if job.state == "failed" and not is_excused and record.suspend_on_job_failure:
        record = msgspec.structs.replace(record, suspended=True, suspended_for=failures.of_job(job))
    if incarnations.is_over(record, task, job, is_again):
        return incarnations.follow_job(record, job, now)
    return finish(record, "completed", now, "") if is_complete(record) else record


def is_complete(record: OperationRecord) -> bool:
    """Return whether enough jobs of each task have completed."""
    return all(incarnations.is_complete(record, task) for task in record.tasks)


def fail_by_jobs(
    record: OperationRecord, last: JobRecord, now: float, stopped: Mapping[str, int] = NONE_STOPPED, why: str = ""
) -> OperationRecord:
    """Return the record of an operation with too many failed jobs. ``why``: why ``last`` was not started again."""
    failure, error = failures.too_many_failed(record, last)
    return _fail(record, now, failure, f"{error}; {why}" if why else error, stopped)


def _note_aborted(record: OperationRecord, reason: str, number: int = 1) -> OperationRecord:
    reasons = {**record.aborted_for, reason: record.aborted_for.get(reason, 0) + number}
    return msgspec.structs.replace(record, aborted_for=reasons)


def finish(
    record: OperationRecord, state: OperationState, now: float, error: str, stopped: Mapping[str, int] = NONE_STOPPED
) -> OperationRecord:
    """Return the record of an operation that ends. ``stopped``: task -> number of its jobs that this end stops."""
    counts = dict(record.counts)
    for task, number in stopped.items():
        if number:
            old = counts.get(task, JobCounts())
            counts[task] = msgspec.structs.replace(old, aborted=old.aborted + number)
            record = _note_aborted(record, f"operation_{state}", number)
    return msgspec.structs.replace(record, state=state, running_in=(), finish_time=now, error=error, counts=counts)


def _fail(
    record: OperationRecord, now: float, failure: EndError, error: str, stopped: Mapping[str, int] = NONE_STOPPED
) -> OperationRecord:
    return msgspec.structs.replace(finish(record, "failed", now, error, stopped), failure=failure)


def cut_short(
    record: OperationRecord, now: float, needed: Mapping[str, int], stopped: Mapping[str, int]
) -> OperationRecord:
    """Return the record of an operation with ``fail_on_job_restart`` that fails: before a restart of the scheduler only
    some of its jobs were started."""
    missing = sum(needed.get(task.name, 0) for task in record.tasks if task.fail_on_job_restart)
    return _fail(record, now, *failures.lost_by_restart(missing), stopped)


def is_cut_short(record: OperationRecord, needed: Mapping[str, int], active: Mapping[str, int]) -> bool:
    """Return whether some jobs of tasks with ``fail_on_job_restart`` have been started, and others have not."""
    names = [task.name for task in record.tasks if task.fail_on_job_restart]
    ended = [record.counts[name] for name in names if name in record.counts]
    # Aborted jobs had not begun to run; if they had, the operation would have failed.
    has_begun = any(active.get(name, 0) for name in names) or any(each.completed or each.lost for each in ended)
    return has_begun and any(needed.get(name, 0) for name in names)


def deadline(record: OperationRecord) -> float | None:
    """Return when a live operation fails by its ``time_limit`` (counted from its start), in seconds since 1970."""
    return None if record.time_limit is None else record.start_time + record.time_limit / 1e3


def exceed_time(record: OperationRecord, now: float, stopped: Mapping[str, int]) -> OperationRecord:
    """Return the record of an operation that has reached its ``time_limit``."""
    assert record.time_limit is not None
    return _fail(record, now, *failures.running_too_long(record.time_limit), stopped)


def fail_unmatched(record: OperationRecord, now: float, filters: str) -> OperationRecord:
    """Return the record of an operation that fails because no online node matches its ``filters``."""
    failure = EndError(f"No online node fits {filters}")
    return _fail(record, now, failure, failure.message)


def activate(record: OperationRecord, tree: str) -> OperationRecord:
    """Return the record with a running slot in ``tree`` (3.2)."""
    return msgspec.structs.replace(record, state="running", running_in=(*record.running_in, tree))


def keep_trees(record: OperationRecord, trees: Mapping[str, Any], now: float) -> OperationRecord:
    """Return the record without trees that are not in ``trees``. If no tree is left, the operation is aborted (2.3)."""
    left = {name: options for name, options in record.trees.items() if name in trees}
    if len(left) == len(record.trees):
        return record
    if not left:
        failure = failures.NO_TREES_LEFT
        return msgspec.structs.replace(finish(record, "aborted", now, failure.message), failure=failure)
    running = tuple(name for name in record.running_in if name in left)
    state: Literal["running", "pending"] = "running" if running else "pending"
    return msgspec.structs.replace(record, trees=left, running_in=running, state=state)
