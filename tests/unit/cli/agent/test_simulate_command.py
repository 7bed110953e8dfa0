"""``cpumond simulate``: its table, its JSON, its exit codes, and the sentence behind each."""

import io
import json
from pathlib import Path

import pytest

import cpumond.cli.agent.simulate  # noqa: F401  (loaded before a test gives its rights away)
from cpumond.cli import run
from cpumond.monitor.model import MonitorSettings
from cpumond.monitor.shapes import make_work
from cpumond.monitor.simulate import simulate

DEMAND = "seconds,cores\n0,0.5\n60,6\n90,0.5\n"
RECORDED = "time_s,usage_cores,throttled_ratio\n0,0,0\n60,0.5,0\n61,1,0.2\n90,0.5,0\n"
KEYS = [
    "rule", "reclaimed_ratio", "held_back_ratio", "held_back_seconds_ratio", "late_ratio", "delay_s", "p99_stretch_s",
    "writes_per_hour", "kept_work_ratio", "lost_work_ratio",
]  # fmt: skip


@pytest.fixture
def demand(tmp_path: Path) -> str:
    path = tmp_path / "demand.csv"
    path.write_text(DEMAND)
    return str(path)


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(RECORDED)
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[dict[str, object]]]:
    assert run(["simulate", "--cpu-limit", "8", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_values_of_the_simulation(capsys):
    found = answer(capsys, "--shape", "batch", "--seed", "3", "--duration", "5m", "--program")
    result = simulate(make_work("batch", 8.0, 3, 300.0), 8.0, MonitorSettings(), is_program=True)
    assert found == {"results": [{key: getattr(result, key) for key in KEYS}]}


def test_the_rule_and_its_options_come_from_set(demand, capsys):
    (document,) = answer(capsys, demand)["results"]
    (peak,) = answer(capsys, demand, "--set", "limit_rule=peak", "--set", "throttle-poll=100ms")["results"]
    (slow,) = answer(capsys, demand, "--set", "limit_rule=peak", "--set", "throttle_poll=0")["results"]
    assert [document["rule"], peak["rule"], slow["rule"]] == ["document", "peak", "peak"]
    assert peak["held_back_ratio"] < slow["held_back_ratio"]


def test_each_compared_rule_has_its_own_defaults_and_the_other_options(demand, capsys):
    compared = answer(capsys, demand, "--compare", "document,peak", "--set", "min_cpu_limit=2")["results"]
    for rule, found in zip(("document", "peak"), compared, strict=True):
        assert answer(capsys, demand, "--set", f"limit_rule={rule}", "--set", "min_cpu_limit=2")["results"] == [found]


def test_a_longer_wait_keeps_work_of_jobs_on_reclaimed_cpu(capsys):
    options = ("--shape", "web", "--duration", "20m", "--set", "actuator=guarantee", "--set", "min_cpu_limit=0.1")
    (ended,) = answer(capsys, *options, "--reclaimed-job-wait", "0s")["results"]
    (kept,) = answer(capsys, *options, "--reclaimed-job-wait", "10m")["results"]
    (short,) = answer(capsys, *options, "--reclaimed-job-wait", "0s", "--reclaimed-job-length", "5s")["results"]
    assert kept["lost_work_ratio"] == 0.0 < short["lost_work_ratio"] < ended["lost_work_ratio"]
    assert ended["kept_work_ratio"] < kept["kept_work_ratio"] <= 1.0


def test_a_trace_in_which_the_job_was_throttled_is_run_for_two_demands(recorded, capsys):
    assert run(["simulate", recorded, "--cpu-limit", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("A recorded trace is not demand: in 1 of 3 rows the job was throttled, ")
    assert lines[2] == "It does not show bursts shorter than a row (30s on average)."
    assert lines[3] == "usage as recorded:"
    assert lines[6] == "the whole request wanted in the rows that were throttled:"
    assert [line.split()[0] for line in lines[4:6] + lines[7:]] == ["rule", "document", "rule", "document"]


def test_json_keeps_the_second_demand_apart_and_stderr_has_the_doubt(recorded, capsys):
    assert run(["simulate", recorded, "--cpu-limit", "8", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert list(found) == ["results", "results_held_back_at_order"]
    assert [list(each) for rows in found.values() for each in rows] == [KEYS, KEYS]
    assert found["results"][0]["held_back_ratio"] == 0.0
    assert found["results_held_back_at_order"][0]["held_back_ratio"] > 0.0
    assert err.startswith("cpumond: note: A recorded trace is not demand: ")


def test_a_file_that_is_no_demand_is_78(tmp_path, capsys):
    path = tmp_path / "x.csv"
    path.write_text("0,1\n1,-1\n")
    assert run(["simulate", str(path), "--cpu-limit", "8"]) == 78
    sentence = "line 2: column cores: expected a number in [0, 1e+06], got '-1'"
    assert capsys.readouterr() == ("", f"cpumond: {path}: {sentence}\n")


@pytest.mark.parametrize(("arguments", "warnings"), [
    (["--set", "throttle_budget=0.1"], ['throttle_budget has no effect under limit_rule = "document"']),
    (["--set", "throttle_budget=0.1", "--compare", "document,peak"], []),
    (["--set", "limit_rule=peak", "--set", "vote-mode=ytsaurus"],
     ['vote_mode has no effect under limit_rule = "peak"']),
    (["--set", "limit_rule=peak", "--compare", "document"],
     ["limit_rule of --set has no effect: --compare names the rules"]),
    (["--set", "mode=off"], ["mode has no effect in a simulation"]),
])  # fmt: skip
def test_an_option_without_effect_is_a_warning(arguments, warnings, demand, capsys):
    assert run(["simulate", demand, "--cpu-limit", "8", *arguments]) == 0
    assert capsys.readouterr().err.splitlines() == [f"warning: {each}" for each in warnings]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_at_a_terminal_and_taken_away(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert run(["simulate", "--shape", "steady", "--cpu-limit", "8", "--duration", "30m"]) == 0
    shown = terminal.getvalue()
    assert "simulating" in shown
    assert shown.endswith("\x1b[2K")
    assert "simulating" not in capsys.readouterr().out
