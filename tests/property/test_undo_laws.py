"""Laws of taking back changes of trees and pools, over random sequences of commands (semantics.md 12.5)."""

import itertools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from examples import examples
from hypothesis import event, given
from hypothesis import strategies as st
from test_scheduler_config_laws import COMMANDS, NODES, START

from cpumond.scheduler.events import EventChange
from cpumond.scheduler.model import CommandError, Config
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.changes import ConfigChange, compare_configs, join_path, split_path
from cpumond.scheduler.settings.commands import ChangePool, ConfigCommand, Outcome, apply, check
from cpumond.scheduler.settings.undo import list_reverse_commands, reverse


def raw(config: Config) -> bytes:
    """All that a configuration says, as text that tells 1 from 1.0 and from true; ids and spellings are left out."""
    trees = {
        name: [dict(tree.attributes), [[pool.name, pool.parent, dict(pool.attributes)] for pool in tree.pools.values()]]
        for name, tree in config.trees.items()
    }
    return msgspec.json.encode([config.default_tree, trees], order="deterministic")


def take_back(
    config: Config, changes: tuple[ConfigChange, ...], new_id: Callable[[], str], nodes: Mapping[str, Collection[str]]
) -> Outcome:
    return check(config, Outcome(reverse(config, changes, new_id), ""), nodes=nodes)


def kept(old: Config, new: Config) -> tuple[ConfigChange, ...]:
    """The exact differences as they come back from the log."""
    changes = [EventChange(c.tree, c.pool, c.attribute, c.old, c.new) for c in compare_configs(old, new, exact=True)]
    read = msgspec.json.decode(msgspec.json.encode(changes), type=list[EventChange])
    return tuple(ConfigChange(c.tree, c.pool, c.attribute, c.old, c.new) for c in read)


def run(commands: list[ConfigCommand]) -> tuple[list[Config], Callable[[Config, tuple[ConfigChange, ...]], Outcome]]:
    """The configurations that the accepted commands make one after another, and what takes back a change."""
    ids = (f"{number:x}-0-0-1" for number in itertools.count(1))
    made = [Config(MappingProxyType({}))]
    for command in (*START, *commands):
        try:
            outcome = apply(made[-1], command, new_id=lambda: next(ids), nodes=NODES)
        except CommandError:
            continue
        made.append(outcome.config)
    return made, lambda config, changes: take_back(config, changes, lambda: next(ids), NODES)


@examples(80)
@given(st.lists(COMMANDS, min_size=5, max_size=20))
def test_taking_all_back_gives_back_each_configuration(commands: list[ConfigCommand]) -> None:
    made, undo = run(commands)
    now = made[-1]
    for before, after in reversed(list(itertools.pairwise(made))):
        changes = kept(before, after)
        assert raw(now) == raw(after)
        back = undo(now, changes).config
        assert raw(back) == raw(before)
        assert list(back.trees) == list(before.trees)
        # Taken back itself, it is there again.
        assert raw(undo(back, kept(now, back)).config) == raw(after)
        now = back


@examples(80)
@given(st.lists(COMMANDS, min_size=5, max_size=20), st.data())
def test_what_was_changed_since_is_not_overwritten(commands: list[ConfigCommand], data: st.DataObject) -> None:
    made, undo = run(commands)
    number = data.draw(st.integers(0, len(made) - 2))
    changes, now = kept(made[number], made[number + 1]), made[-1]
    try:
        back = undo(now, changes).config
    except CommandError:
        event("refused")
        return
    event("taken back" if changes else "nothing to take back")
    # It differs in nothing but what was asked for, and can be taken back in turn.
    differences = kept(now, back)
    assert len(differences) <= len(changes) + sum(len(tree.pools) for tree in now.trees.values())
    assert raw(undo(back, differences).config) == raw(now)
    for command in list_reverse_commands(changes):
        assert isinstance(command, ConfigCommand)


@given(st.lists(st.text("a/\\b", min_size=1), min_size=1, max_size=4))
def test_paths_are_read_as_they_were_joined(path: list[str]) -> None:
    assert split_path(join_path(path)) == tuple(path)


def test_names_with_slashes_and_empty_dictionaries_come_back() -> None:
    values: list[Any] = [{}, {"a/b": {"c": 1}}, {"a/b": {}}, {"a": {"b": {"c": 1}}}, {"x": None}, 1, True, 1.0, None]
    for old, new in itertools.permutations(values, 2):
        made, undo = run([ChangePool("t", "d", (Edit(("odd",), value),)) for value in (old, new)])
        assert raw(undo(made[-1], kept(made[-2], made[-1])).config) == raw(made[-2])
