"""Changes of a specification while its operation runs (yt_protocol.md 12). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from cpumond.scheduler.model import CommandError, OperationRecord, Task
from cpumond.scheduler.settings.operations import MAX_FAILED_JOB_COUNT, MAX_JOB_COUNT
from cpumond.scheduler.settings.values import FIELD

MAX_PATCHES: Final = 1000
MAX_FAILED: Final = "/max_failed_job_count"
_JOB_COUNT: Final = re.compile(r"/tasks/(?P<name>(?:[^/\\]|\\.)+)/job_count")
_ESCAPED: Final = re.compile(r"\\(.)")


def list_known(patches: Iterable[Any]) -> dict[str, Any]:
    """Return path -> value of the patches with a plausible path. Other patches are left out: they may be secrets."""
    known = {}
    for each in patches:
        path, value = (each.get("path"), each.get("value")) if isinstance(each, Mapping) else (None, None)
        is_known = isinstance(path, str) and (path == MAX_FAILED or _JOB_COUNT.fullmatch(path))
        if is_known and isinstance(value, int | float):
            known[str(path)] = value
    return known


def apply_patches(record: OperationRecord, patches: Sequence[Any]) -> OperationRecord:
    """Return the record with all patches applied in order. Raises CommandError if any patch is invalid."""
    if len(patches) > MAX_PATCHES:
        raise CommandError(f"patches: {len(patches)} are more than the limit of {MAX_PATCHES} at once")
    tasks = {task.name: task for task in record.tasks}
    most_failed, done = record.max_failed_job_count, dict(record.cumulative_spec_patch)
    for each in patches:
        if not isinstance(each, Mapping) or set(each) != {"path", "value"} or not isinstance(each["path"], str):
            raise CommandError('patches: expected a list of maps such as {path="/max_failed_job_count";value=3}')
        path, value = each["path"], each["value"]
        found = _JOB_COUNT.fullmatch(path)
        if path == MAX_FAILED:
            most_failed = _read_count(path, value, 0, MAX_FAILED_JOB_COUNT)
        elif found is not None:
            name = _ESCAPED.sub(r"\1", found["name"])
            if name not in tasks:
                raise _refuse(path, f"there is no task {name!r}; tasks can be neither added nor removed")
            count = _read_count(path, value, 1, MAX_JOB_COUNT)
            if count != tasks[name].job_count:
                _check_task(record, tasks[name], path)
                tasks[name] = msgspec.structs.replace(tasks[name], job_count=count)
        elif value != _look_up(record.spec, path):
            what = f"only {MAX_FAILED} and /tasks/NAME/job_count may change; start another operation for the rest"
            raise _refuse(path, what)
        else:
            continue
        done[path] = value
    total = sum(task.job_count for task in tasks.values())
    if total > MAX_JOB_COUNT:
        raise _refuse("/tasks", f"at most {MAX_JOB_COUNT} jobs are allowed in one operation, got {total}")
    return msgspec.structs.replace(
        record, tasks=tuple(tasks.values()), max_failed_job_count=most_failed, cumulative_spec_patch=done
    )


def view_patch(record: OperationRecord) -> dict[str, Any]:
    """Return all patched values in maps that are nested like the specification."""
    shown: dict[str, Any] = {}
    for path, value in record.cumulative_spec_patch.items():
        found = _JOB_COUNT.fullmatch(path)
        if found is None:
            shown[path[1:]] = value
        else:
            shown.setdefault("tasks", {})[_ESCAPED.sub(r"\1", found["name"])] = {"job_count": value}
    return shown


def _check_task(record: OperationRecord, task: Task, path: str) -> None:
    if record.starts_whole:
        raise _refuse(path, "the jobs of a gang start and end together; start another operation with as many as wanted")
    if task.fail_on_job_restart:
        raise _refuse(path, "cannot change with fail_on_job_restart; start another operation for more work")


def _read_count(path: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _refuse(path, f"expected a whole number in [{least}, {most}], got {value!r}")
    return value


def _refuse(path: str, what: str) -> CommandError:
    return CommandError(f"{path}: {what}", attributes={FIELD: path[1:]})


def _look_up(spec: Any, path: str) -> Any:
    """Return the value at a path of a specification; None if there is no value."""
    for key in path.split("/")[1:]:
        spec = spec.get(key) if isinstance(spec, Mapping) else None
    return spec
