"""The memory that specifications take: of one user, of all, of ended operations."""

import msgspec
import pytest
from scheduler_world import TREE, refused_with

from cpumond.scheduler.model import TOO_MANY_OPERATIONS, CommandError, Config, OperationRecord
from cpumond.scheduler.settings.commands import RemovePool
from cpumond.scheduler.settings.operations import UpdateOperation
from cpumond.scheduler.state import spec_room
from cpumond.scheduler.state.spec_room import SpecRoom, weigh


def record(name: str, user: str = "ann", size: int = 1000, state: str = "running") -> OperationRecord:
    return OperationRecord(
        id=name, sequence=1, user=user, start_time=0.0, tasks=(), trees={}, state=state, spec={"note": "n" * size}
    )  # type: ignore[arg-type]


def end(live: OperationRecord) -> OperationRecord:
    return msgspec.structs.replace(live, state="completed")


def test_texts_values_and_names_have_weight():
    assert weigh("") < weigh("text") == weigh("") + 4
    assert weigh([1] * 10) - weigh([1] * 9) == weigh(1)
    assert weigh({"name": 1}) > weigh([1]) + 4
    assert weigh({"a": [{"b": ["c"]}]}) > 4 * weigh({})
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert weigh(deep) == 100_001 * weigh([]), "no recursion"


def test_one_user_has_half():
    room = SpecRoom(10_000)
    for number in range(3):
        room.check(record("x").spec, "ann")
        room.add(record(str(number)))
    with refused_with(TOO_MANY_OPERATIONS, "those of the operations of user 'ann' take"):
        room.check(record("x").spec, "ann")
    room.check(record("x").spec, "bob")


def test_all_users_together_have_the_whole():
    room = SpecRoom(10_000)
    for number in range(7):
        room.add(record(str(number), f"user-{number}"))
    with pytest.raises(CommandError, match="those of all operations take"):
        room.check(record("x").spec, "zoe")


def test_what_ends_makes_room_and_is_counted_apart():
    room = SpecRoom(10_000)
    live = [record(str(number)) for number in range(3)]
    for each in live:
        room.add(each)
    taken = room.live_bytes
    for each in live:
        room.add(end(each))
    assert (room.live_bytes, room.ended_bytes) == (0, taken)
    room.check(record("x").spec, "ann")
    assert not room.is_full_of_ended
    for number in range(5):
        room.add(end(record(f"old-{number}")))
    assert room.is_full_of_ended
    assert room.weight_of(live[0]) == weigh(live[0].spec)
    for each in live:
        room.remove_ended(each.id)
    room.remove_ended("never there")
    assert room.weight_of(live[0]) == 0
    assert not room.is_full_of_ended


def test_trees_and_pools_are_bounded_in_all_also_over_a_restart(world, monkeypatch):
    monkeypatch.setattr(spec_room, "MAX_CONFIG_BYTES", world.state.config_bytes + 3 * spec_room.POOL_BYTES)
    world.create_pools("a", "b")
    for refused in (lambda: world.create_pool("c", note="n" * 5000), lambda: world.set_pool("a", note="n" * 5000)):
        with pytest.raises(CommandError, match="trees and pools would take"):
            refused()
    world.restart()
    world.set_pool("a", note="n" * 3000)
    taken = world.state.config_bytes
    with pytest.raises(CommandError, match="trees and pools would take"):
        world.create_pool("c")
    monkeypatch.setattr(spec_room, "MAX_CONFIG_BYTES", 0)
    world.do(RemovePool(TREE, "b"))
    assert world.state.config_bytes == taken - spec_room.POOL_BYTES - weigh({})
    world.set_pool("a", note="")
    assert world.state.config_bytes == spec_room.weigh_change(Config({}), world.state.config)


def test_one_wide_character_makes_all_of_its_text_wide():
    assert weigh("a" * 1000 + "\U0001f600") > 4000
    assert weigh({"a" * 1000 + "\U0001f600": 1}) > 4000


def test_operations_that_say_the_same_have_it_once_and_are_shown_as_given(world):
    first, second, other = (world.start("p", annotations={"n": value}) for value in (1, 1, True))
    one, same, alike = (world.state.operations[each].record for each in (first, second, other))
    assert same.spec is one.spec
    assert same.tasks is one.tasks
    assert same.trees is one.trees
    assert alike.spec["annotations"]["n"] is True, "equal to 1, and not the same"
    assert one.spec["annotations"]["n"] is not True
    world.do(UpdateOperation(second, {"weight": 2.0}))
    assert [world.element(each).options.weight for each in (first, second, other)] == [None, 2.0, None]
