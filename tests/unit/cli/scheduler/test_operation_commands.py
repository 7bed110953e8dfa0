"""What commands about operations read and say: specifications, logs on a terminal, what is waited for, forecasts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_world import World

from cpumond.api.finding import find_matches
from cpumond.api.views import Done, view_operation_details
from cpumond.cli.output import repeat
from cpumond.cli.render.grid import column, draw_grid, make_rows
from cpumond.cli.scheduler.finding import shorten_ids
from cpumond.cli.scheduler.follow import make_visible
from cpumond.cli.scheduler.forecast import describe_forecast, format_start
from cpumond.cli.scheduler.operations import OPERATIONS
from cpumond.cli.scheduler.running import WaitReport, _Run
from cpumond.cli.scheduler.spec import read_document
from cpumond.core.errors import UnavailableError
from cpumond.scheduler.access import Rights
from cpumond.scheduler.model.forecast import Forecast
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import make_id


def test_a_specification_in_yaml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("title: one\ntasks:\n  main: &main {job_count: 2, command: [sleep, '1']}\n  other: *main\n")
    task = {"job_count": 2, "command": ["sleep", "1"]}
    assert read_document(str(path)) == {"title": "one", "tasks": {"main": task, "other": task}}


@pytest.mark.parametrize(("content", "shown"), [
    (b"one\n\ttwo\n", "one\n\ttwo\n"), (b"\x1b[2J\rgone\x00", "\\x1b[2J\\rgone\\x00"), ("é 漢".encode(), "é 漢"),
    (b"\xff\xfe", "\\xff\\xfe"), ("\u202ekcab\u2028".encode(), "\\u202ekcab\\u2028"),
    (b"back\\slash", "back\\slash"), (b"", ""),
])  # fmt: skip
def test_nothing_of_a_log_moves_the_cursor(content, shown):
    assert make_visible(content) == shown


def test_what_is_waited_for_is_told_after_a_while_and_when_it_changes():
    world, told = World(), WaitReport()
    world.create_pool("p")
    operation = world.start("p")

    def look(now_s: float) -> str:
        rights = Rights(world.state, User("tester", admin=True))
        return told.note(view_operation_details(rights, world.record(operation), world.now), now_s)

    no_node = "no online node of the tree takes jobs"
    assert [look(now) for now in (0.0, 4.9, 5.0, 9.0)] == ["", "", no_node, ""]
    world.suspend(operation)
    suspended = "suspended: no job starts until it is resumed"
    assert [look(now) for now in (10.0, 14.0, 16.0, 99.0)] == ["", "", suspended, ""]
    world.resume(operation)
    world.node("n1", cpu=1.0)
    world.settle_down()
    assert [look(now) for now in (100.0, 200.0)] == ["", ""], "it runs"


def test_a_list_on_a_narrow_terminal_has_short_ids_age_and_cause() -> None:
    world = World()
    setattr(world, "new_id", make_id)  # noqa: B010  # ids as a scheduler has them, not numbers
    world.create_pool("research")
    ids = [world.start("research", title=f"training of model {n}") for n in range(3)]
    world.suspend(ids[0])
    world.settle_down()
    rights = Rights(world.state, User("tester", admin=True))
    parts = [(view_operation_details(rights, world.record(each), world.now), "default") for each in ids]
    columns = shorten_ids(OPERATIONS, parts, 80)
    text, _ = draw_grid(columns, make_rows(columns, parts), 80)
    heading, *lines = text.split("\n")
    assert {"age", "cause"} <= set(heading.split())
    for each, line in zip(ids, lines, strict=True):
        short = line.split()[0]
        assert len(short) >= 8
        assert line.endswith("no node") == (each != ids[0])
        assert find_matches(rights, "operation", short).matches == find_matches(rights, "operation", each).matches
    for kept in (shorten_ids(OPERATIONS, parts, None), shorten_ids(OPERATIONS, parts, 80, is_full=True)):
        assert [kept[0].read(part) for part in parts] == ids


@pytest.mark.parametrize(("ids", "shown"), [
    (["12345678-a", "12345678-b", "1234567-9"], ["12345678-a", "12345678-b", "1234567-9"]),
    (["1-2", "1-2"], ["1-2", "1-2"]),
])  # fmt: skip
def test_an_id_is_shortened_no_further_than_to_what_no_other_begins_with(ids: list[str], shown: list[str]) -> None:
    [column_] = shorten_ids([column("job", 0, lambda each: each)], ids, 80)
    assert [column_.read(each) for each in ids] == shown


def test_a_watched_list_is_shown_again_until_ctrl_c(capsys) -> None:
    calls = iter([None, UnavailableError("no scheduler answers"), KeyboardInterrupt()])

    def show() -> None:
        if error := next(calls):
            raise error
        print("a list")

    repeat(show, 0.0)
    assert capsys.readouterr().out == "a list\n\nretrying: no scheduler answers\n\n"


@pytest.mark.parametrize(("failing", "error", "left"), [
    ("", None, "operation one is left to the scheduler, which stops its jobs"),
    ("/abort", UnavailableError("away"), "operation one may continue; `cpumond operation abort one` ends it"),
    ("/operations", KeyboardInterrupt(), "it is unknown whether the operation was started; see"),
])  # fmt: skip
def test_a_second_signal_leaves_what_it_says(failing: str, error: Any, left: str, monkeypatch) -> None:
    def request(_method: str, path: str, _body: object) -> None:
        if error and path.endswith(failing):
            raise error

    def step() -> bool:
        if next(steps):
            raise KeyboardInterrupt
        return False

    steps = iter([False, True])
    follower = SimpleNamespace(step=step, is_final=False, details=None)
    monkeypatch.setattr("cpumond.cli.scheduler.running.Follower", lambda *_: follower)
    client: Any = SimpleNamespace(request=request, decode=lambda *_: Done("one", []))
    ending: Any = SimpleNamespace(wait=lambda _s: True, number=2)
    run = _Run(client, ending, waits=True)
    with pytest.raises(KeyboardInterrupt):
        run.start({})
    assert run.describe_left().startswith(left)


def test_a_foretold_start_that_has_passed_is_late_not_now() -> None:
    found = Forecast(operation_id="a", start_p10=5.0, start_p50=6.0, start_p90=7.0, as_of=0.0, horizon=99.0, runs=5)
    assert describe_forecast(found, 4.0) == ["starts in 1 s to 3 s (8 of 10 simulations), median 2 s"]
    [line] = describe_forecast(found, 20.0)
    assert line.startswith("should have started 13 s ago in nine of ten simulations, and has not")
    assert (format_start(5.0, 6.0, 7.0, 4.0), format_start(5.0, 6.0, 7.0, 20.0)) == ("1 s..3 s", "late")
