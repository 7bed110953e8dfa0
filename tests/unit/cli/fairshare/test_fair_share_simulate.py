"""``cpumond fair-share simulate``: what it reads, what it writes, and the sentence behind each mistake."""

import io
import json
import os
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cpumond.cli.fairshare.command  # noqa: F401  (loaded before a test gives its rights away)
import cpumond.cli.fairshare.simulate as module
from cpumond.cli import run
from cpumond.cli.fairshare.simulate import parse_scenario
from cpumond.core.errors import ConfigError
from cpumond.fairshare.simulate import DemandEvent, Scenario, SimulationRow

EXAMPLES = Path(__file__).parents[4] / "config" / "examples"

TREE = """
total_resources = { cpu = 100 }

[[pools]]
name = "p"
parent = "<root>"
integral = { type = "burst", resource_flow = { cpu = 10 }, burst_guarantee_resources = { cpu = 50 } }

[[operations]]
name = "reports"
parent = "p"
"""
START = '[[script]]\noperation = "reports"\nat = "2s"\naction = "start"\ndemand = { cpu = 30 }\n'


@pytest.fixture
def tree(tmp_path: Path) -> str:
    path = tmp_path / "tree.toml"
    path.write_text(TREE + START)
    return str(path)


def simulate(*arguments: str) -> int:
    return run(["fair-share", "simulate", *arguments])


def parse(text: str) -> Scenario:
    return parse_scenario(text.encode(), "tree.toml")


def read_rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_rows_go_to_standard_output_a_line_per_step_and_pool(tree, capsys):
    assert simulate(tree, "--until", "3") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0] == (
        '{"time_s":0.0,"pool":"p","guarantee_type":"burst","demand":0.0,"usage":0.0,"strong_guarantee":0.0,'
        '"resource_flow":10.0,"burst_guarantee":50.0,"fair_share":0.0,"fair_share_strong_guarantee":0.0,'
        '"fair_share_integral_guarantee":0.0,"fair_share_weight_proportional":0.0,"accumulated_volume":0.0,'
        '"integral_pool_capacity":864000.0}'
    )
    rows = [list(row.values())[3:-1] for row in read_rows(out)]
    assert rows[1] == [0, 0, 0, 10, 50, 0, 0, 0, 0, 10]
    assert rows[2] == pytest.approx([30, 30, 0, 10, 50, 30, 0, 1 / 3, 30 - 1 / 3, 20])
    assert rows[3] == pytest.approx([30, 30, 0, 10, 50, 30, 0, 0.4945, 29.5055, 29.67])


def test_a_day_in_steps_of_a_second_is_the_default(tree, monkeypatch, capsys):
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr(module, "simulate", lambda _, until_s, step_s: asked.append((until_s, step_s)) or iter(()))
    assert simulate(tree) == 0
    assert asked == [(86400.0, 1.0)]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("step", "every", "times"), [
    ("1s", "2s", [0, 2, 4, 6]), ("1s", "2.5s", [0, 3, 5]), ("100ms", "300ms", [0, 0.3, 0.6, 0.9, 1.2]),
    ("2s", "1s", [0, 2, 4, 6]), ("2s", "0", [0, 2, 4, 6]), ("1s", "1h", [0]),
])  # fmt: skip
def test_every_prints_the_first_step_of_each_stretch(tree, capsys, step, every, times):
    until = "1.2s" if step == "100ms" else "6s"
    assert simulate(tree, "--until", until, "--step", step, "--every", every) == 0
    assert [row["time_s"] for row in read_rows(capsys.readouterr().out)] == pytest.approx(times)


def test_the_page_is_beside_the_rows(tree, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert simulate(tree, "--until", "10", "--html", str(path)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 11
    text = path.read_text()
    assert "<h1>tree.toml</h1>" in text
    assert sorted(os.listdir(tmp_path)) == ["page.html", "tree.toml"]


def test_every_thins_out_the_rows_and_not_the_page(tree, tmp_path, capsys):
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    assert simulate(tree, "--until", "10", "--html", str(pages[0])) == 0
    assert simulate(tree, "--until", "10", "--html", str(pages[1]), "--every", "5s") == 0
    assert pages[0].read_text() == pages[1].read_text()


def test_a_page_that_was_there_stays_until_the_new_one_is_complete(tree, tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")

    def interrupted(*_: Any) -> Iterator[SimulationRow]:
        assert path.read_text() == "old"
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(module, "simulate", interrupted)
    assert simulate(tree, "--html", str(path)) == 130
    assert path.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["page.html", "tree.toml"]


def test_what_a_killed_run_left_behind_is_in_nobodys_way(tree, tmp_path, capsys):
    path = tmp_path / "page.html"
    (tmp_path / f"page.html.{os.getpid()}.tmp").write_text("left")
    assert simulate(tree, "--until", "1", "--html", str(path)) == 0
    assert sorted(os.listdir(tmp_path)) == ["page.html", "tree.toml"]


def test_a_link_to_a_page_stays_a_link(tree, tmp_path, capsys):
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text("old")
    link.symlink_to(target)
    assert simulate(tree, "--until", "1", "--html", str(link)) == 0
    assert link.is_symlink()
    assert target.read_text().startswith("<!DOCTYPE html>")


def test_a_pipe_is_written_to_and_not_replaced(tree, tmp_path, capsys):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(path.read_text()), daemon=True)
    reader.start()
    assert simulate(tree, "--until", "1", "--html", str(path)) == 0
    reader.join(100)
    assert path.is_fifo()
    assert texts[0].startswith("<!DOCTYPE html>")


def test_a_pipe_that_nobody_reads_is_73(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cpumond.cli.replacement.READER_WAIT_S", 0.0)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert simulate(tree, "--until", "1", "--html", str(path)) == 73
    assert "no program reads this pipe; give --html" in capsys.readouterr().err


def test_a_file_that_cannot_be_made_is_73_before_anything_is_computed(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "render_html", lambda *_, **__: pytest.fail("computed"))
    path = str(tmp_path / "missing" / "file")
    assert simulate(tree, "--html", path) == 73
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"cpumond: cannot write {path}: No such file or directory; give --html a file that can be written\n"


@pytest.mark.parametrize(("name", "why"), [("", "Is a directory"), ("/dev/full", "No space left on device")])
def test_a_file_that_cannot_be_written_is_73(tree, tmp_path, capsys, name, why):
    path = name or str(tmp_path)
    assert simulate(tree, "--until", "5", "--html", path) == 73
    sentence = f"cannot write {path}: {why}; give --html a file that can be written"
    assert capsys.readouterr().err == f"cpumond: {sentence}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_at_a_terminal_and_taken_away(tree, monkeypatch, capsys):
    monkeypatch.setattr(module, "PROGRESS_S", 0.0)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert simulate(tree, "--until", "300") == 0
    first, second = "simulated 0 s of 5 min", "simulated 4 min 16 s of 5 min"
    assert terminal.getvalue() == f"\r{first}\r{second}\r{' ' * len(second)}\r"


def test_there_is_no_progress_between_the_rows(tree, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.stdout", terminal)
    assert simulate(tree, "--until", "1") == 0
    assert len(read_rows(terminal.getvalue())) == 2


def test_a_terminal_does_not_get_the_rows_when_there_is_a_page(tree, tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert simulate(tree, "--until", "1", "--html", str(tmp_path / "page.html")) == 0
    assert terminal.getvalue() == ""


def test_toml_and_json_are_the_same_scenario():
    assert parse(f"\n {json.dumps(tomllib.loads(TREE + START))}") == parse(TREE + START)


def test_an_event_with_all_its_keys():
    text = 'at = "1h30m"\naction = "ramp"\ndemand = { cpu = 5, memory = 7 }\nover = 90\nrepeat-every = "1d"\n'
    script = parse(f'{TREE}[[script]]\noperation = "reports"\n{text}').script
    assert script == (DemandEvent("reports", 5400.0, "ramp", (0.0, 5.0, 0.0, 7.0, 0.0), 90.0, 86400.0),)


@pytest.mark.parametrize(
    ("at", "at_s"), [("5", 5.0), ("0.25", 0.25), ('"5"', 5.0), ('"250ms"', 0.25), ('"1h 30m"', 5400.0)]
)
def test_a_duration_without_a_unit_is_in_seconds(at, at_s):
    assert parse(TREE + START.replace('"2s"', at)).script[0].at_s == at_s


def test_a_tree_as_of_an_update_is_read_too():
    text = 'now = 5e9\nprevious_update_time = 4e9\nid = "x"\n'
    assert parse(text + TREE + START) == parse(TREE + START)


def test_guarantees_beyond_the_cluster_are_a_warning(tmp_path, capsys):
    path = tmp_path / "tree.toml"
    path.write_text(TREE.replace("cpu = 50", "cpu = 150"))
    assert simulate(str(path), "--until", "0") == 0
    out, err = capsys.readouterr()
    assert err.startswith("cpumond: warning: ")
    assert err.endswith("(code 29000)\n")
    assert read_rows(out)[0]["burst_guarantee"] == 100


def test_a_wrong_file_is_78_naming_the_file_once(tmp_path, capsys):
    path = tmp_path / "tree.toml"
    for text in (TREE + START.replace('"start"', '"begin"'), TREE + START.replace("reports", "report"), "x = 1"):
        path.write_text(text)
        assert simulate(str(path)) == 78
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"cpumond: {path}: ")
        assert err.count(str(path)) == 1


def test_an_endless_file_is_78(monkeypatch, capsys):
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    assert simulate("/dev/zero") == 78
    assert "/dev/zero: is longer than " in capsys.readouterr().err


@pytest.mark.parametrize(("text", "message"), [
    (b"", "is empty; see 'cpumond fair-share simulate --help' for its contents"),
    (b"\xff", "byte 0 is not UTF-8; expected TOML or JSON"),
    (b"x = ", "not valid TOML, and not JSON, which begins with {: line 1: `x =`: x has no value: write one"),
    (b'{"pools": ]', "not valid JSON: Expecting value (at line 1, column 11)"),
    (b"x = " + b"[" * 5000, "is nested too deeply; "),
    (b"x = " + b"1" * 5000, "contains a number with thousands of digits; "),
    (b"scripts = 1", 'unknown key "scripts"; did you mean "script"?'),
    (b"zzz = 1", 'unknown key "zzz"; known are total_resources, options, root, pools, operations, script'),
    (b"pools = 1", "pools: expected a list, got 1"),
    (b"pools = []", 'the key "total_resources" is missing'),
    (b"total_resources = { cpu = inf }", "total_resources.cpu: inf is not an amount; leave a missing limit out"),
    (b"total_resources = { cpu = 10 }\nscript = 5", "script: expected a list of tables ([[script]])"),
    (b"total_resources = { cpu = 1979-01-01 }", 'total_resources: cpu: expected a number, got "1979-01-01"'),
    (b"total_resources = { cpu = 1" + b"0" * 400 + b" }", "total_resources: cpu: "),
])  # fmt: skip
def test_what_is_no_scenario_is_one_sentence(text, message):
    with pytest.raises(ConfigError) as error:
        parse_scenario(text, "tree.toml")
    assert str(error.value).startswith(f"tree.toml: {message}")


def test_the_tree_is_checked_as_that_of_an_update():
    with pytest.raises(ConfigError, match=r'^tree.toml: pool "p": unknown key "weights"; did you mean "weight"\?$'):
        parse(TREE.replace("integral", "weights = 3\nintegral"))


@pytest.mark.parametrize(("old", "new", "message"), [
    ("operation", "operations", "script 1.operations: unknown key; did you mean 'operation'?"),
    ('at = "2s"\n', "", "script 1: 'at' is missing; it has no default"),
    ('"2s"', '"2 hours"', 'script 1.at: expected a duration such as "1s", "250ms" or "1h30m", got \'2 hours\', or'),
    ('"2s"', "-1", "script 1.at: must be a number >= 0 or a text, got -1"),
    ('"start"', '"begin"', 'script 1.action: must be one of "ramp", "start", "stop", got \'begin\''),
    ("cpu = 30", "cpus = 30", "script 1.demand.cpus: unknown key; did you mean 'cpu'?"),
    ("demand = { cpu = 30 }", "", 'script 1: "demand" is missing; action "start" needs it'),
    ('"start"', '"stop"', 'script 1.demand: an event with action "stop" must not have it'),
    ('"start"', '"ramp"', 'script 1: "over" is missing; action "ramp" needs it'),
    ('"start"', '"start"\nover = 1', 'script 1.over: an event with action "start" must not have it'),
    ('"start"', '"start"\nrepeat_every = 0', "script 1.repeat_every: expected a duration in [1s, 36500d], got 0s"),
])  # fmt: skip
def test_a_wrong_event_is_one_sentence(old, new, message):
    with pytest.raises(ConfigError) as error:
        parse(TREE + START.replace(old, new, 1))
    assert str(error.value).startswith(f"tree.toml: {message}")


def run_example(name: str, capsys: pytest.CaptureFixture[str], page: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of a day of an example in steps of a minute, by pool."""
    assert simulate(str(EXAMPLES / name), "--step", "60s", "--html", str(page)) == 0
    out, err = capsys.readouterr()
    assert err == "", "an example has no warnings"
    pools: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(out):
        pools.setdefault(row["pool"], []).append(row)
    assert page.read_text().startswith("<!DOCTYPE html>")
    return pools


def test_the_example_of_a_burst_pool_shows_what_its_comments_say(tmp_path, capsys):
    pools = run_example("burst-pool.toml", capsys, tmp_path / "page.html")
    at = {row["time_s"] / 3600: row for row in pools["reports"]}
    assert at[0.0]["integral_pool_capacity"] == 8_640_000
    assert at[2.0]["accumulated_volume"] == pytest.approx(7_200_000 + 2 * 3600 * 100)
    assert at[4.0]["accumulated_volume"] == at[5.0]["accumulated_volume"] == 8_640_000
    assert [at[hour]["fair_share_integral_guarantee"] for hour in (5.0, 8.0, 10.9)] == [500, 500, 500]
    assert at[6.0]["accumulated_volume"] == pytest.approx(8_640_000 - 3600 * 400)
    assert at[11.5]["fair_share_integral_guarantee"] == pytest.approx(100, rel=0.01)
    assert 100 < at[11.5]["usage"] < 110
    assert at[16.0]["accumulated_volume"] == pytest.approx(4 * 3600 * 100, rel=0.01)
    assert at[17.0]["fair_share_integral_guarantee"] == 500
    assert at[18.0]["fair_share_integral_guarantee"] == pytest.approx(100, rel=0.01)
    assert [at[hour]["usage"] for hour in (20.25, 20.5, 20.75, 23.5)] == [0, 300, 0, 300]
    assert at[24.0]["accumulated_volume"] > at[21.0]["accumulated_volume"] > at[20.0]["accumulated_volume"]
    assert {row["fair_share_strong_guarantee"] for row in pools["neighbour"]} == {1500}


def test_the_example_of_a_relaxed_pool_shows_what_its_comments_say(tmp_path, capsys):
    pools = run_example("relaxed-pool.toml", capsys, tmp_path / "page.html")
    at = {row["time_s"] / 3600: row for row in pools["research"]}
    assert (at[3.0]["fair_share_integral_guarantee"], at[3.0]["usage"]) == pytest.approx((300, 600))
    assert (at[6.0]["fair_share_integral_guarantee"], at[6.0]["usage"]) == pytest.approx((200, 200))
    assert at[7.0]["accumulated_volume"] - at[6.0]["accumulated_volume"] == pytest.approx(-100 * 3600)
    assert at[17.0]["fair_share_integral_guarantee"] == pytest.approx(100, rel=0.01)
    assert at[24.0]["accumulated_volume"] > 6 * 3600 * 100
    assert {row["strong_guarantee"] for row in pools["neighbour"]} == {1800}
