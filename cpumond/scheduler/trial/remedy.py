"""A change that would let waiting work start: as words, commands and command lines, and applied to a copy. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpumond.core.words import number as format_number
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.commands import ChangePool, ChangeTree, ConfigCommand
from cpumond.scheduler.state import State, changes
from cpumond.scheduler.state.commands import Command, prepare
from cpumond.scheduler.trial.rounds import settle


@dataclass(frozen=True, slots=True)
class Remedy:
    """``why``: the cause. ``text``: the change, as an imperative. ``pool``: the pool that is limited, "" if none is.
    ``cores``: of the jobs that start after the change."""

    why: str
    text: str
    commands: tuple[ConfigCommand, ...] = ()
    """Changes of trees and pools."""
    lines: tuple[str, ...] = ()
    """The same changes as command lines."""
    operations: tuple[str, ...] = ()
    """Ids of operations that the text names."""
    tried: tuple[Command | Callable[[State], None], ...] = ()
    """If ``commands`` is empty: what is applied to a copy of the state instead."""
    kind: str = ""
    pool: str = ""
    cores: float = 0.0
    lead: str = ""
    """How the sentence begins if it is not about idle CPU."""

    def apply(self, state: State, now: float) -> None:
        """Apply the change to a copy of the state. Raises CommandError."""
        for change in (*self.commands, *self.tried):
            if callable(change):
                change(state)
            else:
                changes.apply(state, prepare(state, change, "", now, lambda: "tried"), now)
        settle(state, now)


def join(parts: Sequence[Remedy]) -> Remedy:
    return Remedy(
        " and ".join(part.why for part in parts),
        " and ".join(part.text for part in parts),
        tuple(command for part in parts for command in part.commands),
        tuple(line for part in parts for line in part.lines),
        tuple(name for part in parts for name in part.operations),
        tuple(change for part in parts for change in part.tried),
    )


def set_tree(tree: str, values: Sequence[tuple[str, object]], why: str, text: str) -> Remedy:
    command = ChangeTree(tree, tuple(Edit((option,), value) for option, value in values))
    line = command_line("tree", "set", tree, *(f"{option}={_format(value)}" for option, value in values))
    return Remedy(why, text, (command,), (line,))


def set_pool(tree: str, pool: str, values: Sequence[tuple[tuple[str, ...], object]], why: str, text: str) -> Remedy:
    """Return a remedy that sets options of a pool; each option is given by its path."""
    command = ChangePool(tree, pool, tuple(Edit(path, value) for path, value in values))
    words = [f"{'/'.join(path)}={_format(value)}" for path, value in values]
    return Remedy(why, text, (command,), (command_line("pool", "set", pool, *words, "--tree", tree),))


def command_line(*words: str) -> str:
    """Return a command of ``cpumond`` as a user types it."""
    return shlex.join(["cpumond", *words])


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return format_number(value) if isinstance(value, float) else str(value)
