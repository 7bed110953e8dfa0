"""Which connections go where a server has too many of them, or they hold too much."""

from typing import Any

from structlog.testing import capture_logs

from cpumond.host.connections import Door


class Connection:
    """What the door sees of one."""

    def __init__(self, at_work: bool = False, source: str = "") -> None:
        self.held = 0
        self.source = source
        self.is_at_work = at_work
        self.is_ended = False

    def end(self) -> None:
        self.is_ended = True


def make(door: Door, count: int) -> list[Any]:
    made: list[Any] = [Connection() for _ in range(count)]
    for each in made:
        door.enter(each)
    return made


def ended(connections: list[Connection]) -> list[int]:
    return [number for number, each in enumerate(connections) if each.is_ended]


def test_the_one_without_an_answer_for_longest_goes_for_a_new_one():
    door = Door(3, 100, 1.0)
    connections = make(door, 3)
    door.renew(connections[0])
    connections += make(door, 1)
    assert ended(connections) == [1]
    connections += make(door, 2)
    assert ended(connections) == [0, 1, 2]


def test_the_oldest_of_the_address_with_most_goes_for_a_new_one():
    door = Door(4, 100, 1.0, by_source=True)
    connections: list[Any] = [Connection(source=source) for source in "abbbbcc"]
    for each in connections[:5]:
        door.enter(each)
    assert ended(connections) == [1]
    connections[2].is_at_work = True
    door.enter(connections[5])
    assert ended(connections) == [1, 3]
    door.leave(connections[4])
    door.enter(connections[6])
    assert ended(connections) == [1, 3]


def test_one_that_is_being_answered_stays():
    door = Door(2, 100, 1.0)
    connections = make(door, 2)
    connections[0].is_at_work = True
    connections += make(door, 1)
    assert ended(connections) == [1]


def test_one_that_is_over_makes_room():
    door = Door(2, 100, 1.0)
    connections = make(door, 2)
    door.hold(connections[0], 60)
    door.leave(connections[0])
    door.renew(connections[0])
    assert door.held_bytes == 0
    connections += make(door, 1)
    assert ended(connections) == []


def test_one_that_is_over_holds_nothing_though_its_last_answer_comes_then():
    door = Door(10, 100, 1.0)
    gone, ousted, other = make(door, 3)
    door.leave(gone)
    door.hold(ousted, 101)
    for each in (gone, ousted):
        assert not door.renew(each)
        door.hold(each, 60)
    assert door.held_bytes == 0
    assert door.renew(other)


def test_the_oldest_that_holds_something_goes_for_bytes():
    door = Door(10, 100, 1.0)
    connections = make(door, 5)
    for number, held in ((1, 50), (2, 40), (3, 10)):
        door.hold(connections[number], held)
    assert ended(connections) == []
    connections[1].is_at_work = True
    with capture_logs() as logs:
        door.hold(connections[3], 30)
    assert ended(connections) == [2]
    assert door.held_bytes == 80
    assert [(each["event"], each["bound"], each["limit"]) for each in logs] == [("connections_ended", "bytes", 100)]
    with capture_logs() as logs:
        door.hold(connections[4], 90)
    assert ended(connections) == [2, 4], "who holds too much by itself goes at once"
    assert logs == [], "said once a minute"


def test_who_holds_little_stays_though_its_answer_is_longest_ago():
    door = Door(10, 100, 1.0)
    connections = make(door, 4)
    for number, held in enumerate((5, 40, 50, 10)):
        door.hold(connections[number], held)
    assert ended(connections) == [1]
    connections[2].is_at_work = True
    door.hold(connections[3], 60)
    assert ended(connections) == [1, 3]
    door.hold(connections[2], 96)
    assert ended(connections) == [0, 1, 3], "where nobody else may go"


def test_as_many_go_as_it_takes():
    door = Door(10_000, 600, 1.0)
    connections = make(door, 601)
    for each in connections[:600]:
        door.hold(each, 1)
    connections[-1].is_at_work = True
    door.hold(connections[-1], 400)
    assert door.held_bytes == 600
    assert ended(connections) == list(range(400))
    assert sum(each.held for each in connections) == 600
