"""``secure_vault``: what a user's specification keeps secret.

It is in no record's ``spec``, no answer and no sentence: neither its values nor the names of its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SECURE_VAULT: Final = "secure_vault"


def is_vault(key: object) -> bool:
    """Whether an option of a specification is the vault, in any accepted spelling."""
    return str(key).replace("-", "_") == SECURE_VAULT


def without_vault(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A specification without the vault, at its root and in its tasks; what is no map stays as it is."""
    shown = {key: value for key, value in spec.items() if not is_vault(key)}
    tasks = shown.get("tasks")
    if isinstance(tasks, Mapping):
        shown["tasks"] = {name: _without(task) for name, task in tasks.items()}
    return shown


def _without(task: Any) -> Any:
    if not isinstance(task, Mapping):
        return task
    return {key: value for key, value in task.items() if not is_vault(key)}
