"""``cpumond replay``: its output, its exit codes, and the sentence behind each."""

import json
from pathlib import Path

import pytest

import cpumond.cli.agent.simulate  # noqa: F401  (loaded before a test gives its rights away)
from cpumond.cli import run

TRACE = "time_s,usage_cores\n0,0\n" + "".join(f"{second},0.1\n" for second in range(1, 12))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def test_csv_is_the_default_one_row_per_check_after_the_first(trace, capsys):
    assert run(["replay", trace, "--cpu-limit", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "time_s,usage_cores,smoothed_cores,votes_sum,decision,cpu_limit_cores"
    assert lines[1] == "1.0,0.1,10.0,,hold,10.0"
    assert lines[2] == f"2.0,0.1,{0.1 * 0.1 + 0.9 * 10.0!r},,hold,10.0"
    assert lines[9].endswith(",-4,shrink,9.7")
    assert len(lines) == 1 + 11


def test_json_is_one_object_per_line_with_the_same_keys_and_values(trace, capsys):
    run(["replay", trace, "--cpu-limit", "10"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert run(["replay", trace, "--cpu-limit", "10", "--format", "json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [",".join(item) for item in objects] == [header] * len(rows)
    assert objects[0]["votes_sum"] is None
    for item, row in zip(objects, rows, strict=True):
        assert row.split(",") == ["" if v is None else v if isinstance(v, str) else repr(v) for v in item.values()]


def test_set_changes_options_of_the_monitor(trace, capsys):
    assert run(["replay", trace, "--cpu-limit", "10", "--set", "smoothing-factor=1", "--set", "start_delay=2s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("3.0,0.1,10.0,")
    assert lines[2].startswith("4.0,0.1,0.1,")


def test_rule_peak_has_two_columns_more(trace, capsys):
    assert run(["replay", trace, "--cpu-limit", "10", "--set", "limit_rule=peak"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == "time_s,usage_cores,smoothed_cores,votes_sum,decision,cpu_limit_cores,peak_cores,caution"
    assert rows[-1].split(",")[3:5] == ["", "shrink"]
    assert float(rows[-1].split(",")[-1]) == pytest.approx(2.0 - 11 * 0.004)
    assert run(["replay", trace, "--cpu-limit", "10", "--set", "limit_rule=peak", "--format", "json"]) == 0
    assert ",".join(json.loads(capsys.readouterr().out.splitlines()[0])) == header


def test_a_bad_trace_is_78_naming_file_and_line(tmp_path, capsys):
    """Each sentence is in tests/unit/monitor/test_replay.py."""
    path = tmp_path / "trace.csv"
    path.write_text("time_s,usage_cores\n0,0\n1,x\n")
    assert run(["replay", str(path), "--cpu-limit", "10"]) == 78
    message = f"{path}: line 3: column usage_cores: expected a finite number of cores >= 0, got 'x'"
    assert capsys.readouterr().err.startswith(f"cpumond: {message}")


def test_bytes_that_are_no_text_are_78_naming_the_line(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"# caf\xe9\ntime_s,usage_cores\n0,\xff\n")
    assert run(["replay", str(path), "--cpu-limit", "10"]) == 78
    assert "line 3: column usage_cores" in capsys.readouterr().err


def test_an_endless_line_is_78_before_it_is_read(capsys):
    assert run(["replay", "/dev/zero", "--cpu-limit", "10"]) == 78
    said = "cpumond: /dev/zero: line 1: is longer than 64 KiB; expected comma-separated numbers\n"
    assert capsys.readouterr().err == said


def test_a_line_of_64_kib_is_read(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE + "#" * (64 * 1024 - 1) + "\n12,0.1\n" + "#" * (64 * 1024) + "\n13,0.1\n")
    assert run(["replay", str(path), "--cpu-limit", "10"]) == 78
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("12.0,")
    assert err.startswith(f"cpumond: {path}: line 16: is longer than 64 KiB")
