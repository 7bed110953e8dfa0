"""``secure_vault``: secrets of a specification, and the environment variables made of them (semantics.md 12.6).

Specifications in records, responses and sentences contain neither the values of the vault nor the names of its keys."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from cpumond.scheduler.model import CommandError
from cpumond.scheduler.settings.values import FIELD

SECURE_VAULT: Final = "secure_vault"
VARIABLE: Final = "YT_SECURE_VAULT"
STARTED_BY: Final = "started_by"
"""Key under which `yt` adds facts about itself to a specification: its host, its process, its command line."""
MAX_VAULT_BYTES: Final = 65_536
"""Maximum bytes of the whole vault as text: the kernel accepts a variable of twice this size."""
MAX_DEPTH: Final = 64

_NAME: Final = re.compile(r"[A-Za-z0-9_]+")
_UNSAFE: Final = re.compile(r'[^\x20-\x7e]|["\\]')


def is_vault(key: object) -> bool:
    """Return whether a key of a specification is that of the vault, in any accepted spelling."""
    return key in _SPELLINGS


_SPELLINGS: Final = frozenset({SECURE_VAULT, SECURE_VAULT.replace("_", "-")})


def _has_vault(spec: Mapping[str, Any]) -> bool:
    if not _SPELLINGS.isdisjoint(spec):
        return True
    tasks = spec.get("tasks")
    if not isinstance(tasks, dict | Mapping):
        return False
    for part in (tasks, *tasks.values()):
        if isinstance(part, dict | Mapping) and not _SPELLINGS.isdisjoint(part):
            return True
    return False


def without_vault(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a specification without vaults at its root, among its tasks and in each task. A value that is no map stays
    unchanged. A specification that has no vault is returned as the same object.

    The client's command line, which `yt` adds, is also removed: it may contain the vault."""
    if not _has_vault(spec):
        return spec if isinstance(spec, dict) else dict(spec)
    shown = {key: value for key, value in spec.items() if not is_vault(key)}
    tasks, has_vault = shown.get("tasks"), len(shown) < len(spec)
    if isinstance(tasks, Mapping):
        shown["tasks"] = {name: _without(task) for name, task in tasks.items() if not is_vault(name)}
        has_vault |= shown["tasks"] != tasks
    client = shown.get(STARTED_BY)
    if has_vault and isinstance(client, Mapping):
        shown[STARTED_BY] = {key: value for key, value in client.items() if key != "command"}
    return shown


def _without(task: Any) -> Any:
    return {key: value for key, value in task.items() if not is_vault(key)} if isinstance(task, Mapping) else task


def read_vault(spec: Mapping[str, Any]) -> dict[str, str]:
    """Read the variables of each job: the whole vault as text YSON, and each key's value. Raises CommandError.

    The vault is at the root or, as `yt vanilla` writes it, among the tasks. Errors name the place of the vault, but
    neither keys nor values: errors are shown, logged and stored."""
    where, vault = f"spec/{SECURE_VAULT}", _find_vault(spec)
    variables: dict[str, str] = {}
    for number, (key, value) in enumerate(vault.items(), 1):
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            what = f"key {number} of {len(vault)} is no name of a variable: use letters, digits and _ (ASCII)"
            raise _refuse(where, what)
        if problem := _find_problem(value, 0):
            raise _refuse(where, f"the value of key {number} of {len(vault)} {problem}")
        if value is not None:
            variables[f"{VARIABLE}_{key}"] = _format(value)
    if not vault:
        return {}
    whole = write_yson(vault)
    if len(whole) > MAX_VAULT_BYTES:
        what = (
            f"takes {len(whole)} bytes as text, at most {MAX_VAULT_BYTES} are passed to a job; store long secrets "
            "where jobs can fetch them with a short one"
        )
        raise _refuse(where, what)
    return {VARIABLE: whole, **variables}


def _find_vault(spec: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return the vault of a specification; an empty map if there is none. Raises CommandError."""
    tasks = spec.get("tasks")
    tasks = tasks if isinstance(tasks, Mapping) else {}
    for name, task in tasks.items():
        if isinstance(task, Mapping) and not is_vault(name) and any(is_vault(key) and task[key] for key in task):
            where = f"spec/tasks/{name}/{SECURE_VAULT}"
            raise _refuse(where, "belongs to the root of the specification: every job gets it")
    found = [part[key] for part in (spec, tasks) for key in part if is_vault(key) and part[key] is not None]
    where = f"spec/{SECURE_VAULT}"
    if len(found) > 1:
        raise _refuse(where, "is given twice; keep one of them")
    if found and not isinstance(found[0], Mapping):
        raise _refuse(where, "expected a map of names to secrets")
    return found[0] if found else {}


def _find_problem(value: object, depth: int) -> str:
    """Return the end of a sentence that says why a value cannot be passed to a job; "" if it can be."""
    if value is None or isinstance(value, bool | int | float):
        return ""
    if isinstance(value, str):
        if "\0" in value:
            return "contains a character with the code 0, which cannot be passed to a process"
        return "" if _is_unicode(value) else "is no valid UTF-8; give it in base64, which the job decodes"
    if depth >= MAX_DEPTH:
        return f"is nested deeper than {MAX_DEPTH} levels"
    if isinstance(value, list):
        parts: list[object] = value
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        parts = [*value, *value.values()]
    else:
        return "is neither text, a number, true, false, a list nor a map"
    return next((problem for each in parts if (problem := _find_problem(each, depth + 1))), "")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _format(value: Any) -> str:
    """Return a value of the vault as that of an environment variable: text unchanged, others without YSON's marks."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    return write_yson(value) if isinstance(value, list | Mapping) else str(int(value))


def write_yson(value: Any) -> str:
    """Return text YSON, in ASCII, of a value in which ``_find_problem`` finds none."""
    if value is None:
        return "#"
    if isinstance(value, bool):
        return "%true" if value else "%false"
    if isinstance(value, int):
        return f"{int(value)}u" if value >= 2**63 else str(int(value))
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"%{value}"
    if isinstance(value, str):
        return f'"{_UNSAFE.sub(_escape, value)}"'
    if isinstance(value, list):
        return f"[{''.join(f'{write_yson(each)};' for each in value)}]"
    return f"{{{''.join(f'{write_yson(key)}={write_yson(each)};' for key, each in value.items())}}}"


def _escape(found: re.Match[str]) -> str:
    sign = found[0]
    return f"\\{sign}" if sign in '"\\' else "".join(f"\\x{byte:02X}" for byte in sign.encode())


def _refuse(where: str, what: str) -> CommandError:
    return CommandError(f"{where}: {what}", attributes={FIELD: where.partition("/")[2]})
