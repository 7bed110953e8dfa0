"""``cpumond fair-share``: its three outputs, its exit codes, and that it works between two pipes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cpumond.cli.fairshare.command  # noqa: F401  (loaded before a test gives its rights away)
from cpumond.cli import run
from cpumond.cli.fairshare.command import draw_bar, draw_table
from cpumond.cli.fairshare.input import InputReader
from cpumond.fairshare import ROOT, fair_share_update

Write = Callable[..., str]

TREE: dict[str, Any] = {
    "id": "t1",
    "total_resources": {"user_slots": 1000, "cpu": 200, "memory": 2**38},
    "now": 1000,
    "previous_update_time": 940,
    "options": {"step_function_for_gang_operations": True},
    "pools": [
        {"name": "prod", "parent": ROOT, "weight": 3, "strong_guarantee_resources": {"cpu": 80}},
        {
            "name": "lab",
            "parent": ROOT,
            "integral": {
                "type": "relaxed",
                "resource_flow": {"cpu": 20},
                "accumulated_volume": {"user_slots": 12000, "cpu": 1200, "memory": 2**42},
            },
        },
        {"name": "batch", "parent": ROOT, "mode": "fifo"},
    ],
    "operations": [
        {"name": "web", "parent": "prod", "demand": {"cpu": 90}},
        {"name": "etl", "parent": "prod", "demand": {"cpu": 70}, "weight": 0.5},
        {"name": "exp", "parent": "lab", "demand": {"cpu": 90}},
        {"name": "gang", "parent": "lab", "demand": {"cpu": 150}, "gang": True},
        {"name": "second", "parent": "batch", "demand": {"cpu": 25}, "start_time": 20},
        {"name": "first", "parent": "batch", "demand": {"cpu": 25}, "start_time": 10},
    ],
}

SHARES = {
    "kind", "fair_share", "promised_guarantee_fair_share", "demand_share", "usage_share", "limits_share",
    "strong_guarantee_share", "strong_guarantee_share_priority_tier", "strong_guarantee_share_regular_tier",
    "proposed_integral_share", "estimated_guarantee_share", "inferred_strong_guarantee_resources",
    "dominant_resource", "fifo_index", "effective_fifo_index",
}  # fmt: skip
OF_POOLS = {
    "burst_ratio", "total_burst_ratio", "resource_flow_ratio", "total_resource_flow_ratio", "last_share_ratio",
    "accumulated_volume", "volume_overflow", "acceptable_volume", "accepted_free_volume", "children_volume_overflow",
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write trees, one a line: the path of the file."""

    def write_trees(*trees: dict[str, Any]) -> str:
        path = tmp_path / "tree.json"
        path.write_text("".join(json.dumps(tree) + "\n" for tree in trees))
        return str(path)

    return write_trees


def small(demand: float, **fields: Any) -> dict[str, Any]:
    operation = {"name": "o", "parent": ROOT, "demand": {"cpu": demand}}
    return {"total_resources": {"cpu": 10}, "now": 0, "operations": [operation], **fields}


# ---- JSON


def test_json_is_the_default_with_every_field_of_every_element(write, capsys):
    assert run(["fair-share", write(TREE)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    answer = json.loads(out)
    assert out.count("\n") == 1
    assert list(answer) == ["id", "errors", "elements"]
    assert (answer["id"], answer["errors"]) == ("t1", [])
    elements = answer["elements"]
    assert set(elements) == {ROOT, "prod", "lab", "batch", "web", "etl", "exp", "gang", "second", "first"}
    assert set(elements[ROOT]) == set(elements["lab"]) == SHARES | OF_POOLS
    assert set(elements["web"]) == SHARES
    assert set(elements["lab"]["fair_share"]) == {
        "total", "strong_guarantee", "integral_guarantee", "weight_proportional",
    }  # fmt: skip
    assert (elements["first"]["fifo_index"], elements["web"]["fifo_index"]) == (0, None)
    assert (elements["first"]["kind"], elements["lab"]["kind"], elements[ROOT]["kind"]) == ("operation", "pool", "root")


def test_numbers_are_those_of_the_library_to_the_last_digit(write, capsys):
    run(["fair-share", write(TREE)])
    elements = json.loads(capsys.readouterr().out)["elements"]
    update = InputReader().read(json.dumps(TREE).encode())
    result = fair_share_update(update.snapshot, update.now, update.previous_update_time)
    for name, shares in result.elements.items():
        assert tuple(elements[name]["fair_share"]["total"]) == shares.fair_share.total
        assert elements[name]["dominant_resource"] == shares.dominant_resource
    assert tuple(elements["lab"]["accumulated_volume"]) == result.elements["lab"].accumulated_volume


def test_without_an_id_it_is_null_and_errors_have_code_and_message(write, capsys):
    pools = [{"name": "q", "parent": ROOT, "strong_guarantee_resources": {"cpu": 20}}]
    run(["fair-share", write(small(1, pools=pools))])
    answer = json.loads(capsys.readouterr().out)
    assert answer["id"] is None
    assert [set(error) for error in answer["errors"]] == [{"code", "message"}] * len(answer["errors"])
    assert {error["code"] for error in answer["errors"]} == {29000}


def test_lines_go_through_one_updater_in_their_order(write, capsys):
    demands = [3.0, 4.0, 4.0, 3.0]
    assert run(["fair-share", write(*(small(demand, id=str(n)) for n, demand in enumerate(demands)))]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["id"] for answer in answers] == ["0", "1", "2", "3"]
    assert [answer["elements"]["o"]["fair_share"]["total"][1] for answer in answers] == [0.3, 0.4, 0.4, 0.3]


def test_time_is_a_line_per_update_on_standard_error(write, capsys):
    assert run(["fair-share", write(small(1, id="a"), small(1)), "--time"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 2
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["id"] for line in lines] == ["a", None]
    assert all(0.0 < line["update_s"] < 60.0 for line in lines)


# ---- table

TABLE = """\
t1: 3 pools, 6 operations, cluster of 1000 user_slots, 200 cpu, 256 GiB memory
element     mode                weight  resource  guaranteed  demand  share  strong  integral  by weight    cpu
<root>      fair_share                  cpu             40.0   225.0  100.0    40.0      20.0       40.0    200  ████▓▒▒▒▒···········
  prod      fair_share               3  cpu             40.0    80.0   64.0    40.0       0.0       24.0    128  ██████████▒▒▒▒▒▒····
    web                              1  cpu                     45.0   42.7                               85.33  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒·
    etl                            0.5  cpu                     35.0   21.3                               42.67  ▒▒▒▒▒▒▒▒▒▒▒▒········
  lab       fair_share relaxed       1  cpu              0.0   120.0   28.0     0.0      20.0        8.0     56  ▓▓▓▒▒···············
    exp                              1  cpu                     45.0   28.0                                  56  ▒▒▒▒▒▒▒▒▒▒▒▒········
    gang    gang                     1  cpu                     75.0    0.0                                   0  ····················
  batch     fifo                     1  cpu              0.0    25.0    8.0     0.0       0.0        8.0     16  ▒▒▒▒▒▒··············
    first   #0                       1  cpu                     12.5    8.0                                  16  ▒▒▒▒▒▒▒▒▒▒▒▒▒·······
    second  #1                       1  cpu                     12.5    0.0                                   0  ····················
in percent of the cluster's amount of the resource in the row; guaranteed: strong guarantee after adjustment
bar: what it gets of its demand, █ strong, ▓ integral, ▒ by weight, · missing
"""  # noqa: E501 - a table is as wide as it is


def draw(tree: dict[str, Any], width: int | None = None) -> list[str]:
    update = InputReader().read(json.dumps(tree).encode())
    result = fair_share_update(update.snapshot, update.now, update.previous_update_time)
    return draw_table(update, result, width).splitlines()


def test_the_table(write, capsys):
    assert run(["fair-share", write(TREE), "--format", "table"]) == 0
    assert capsys.readouterr() == (TABLE, "")


def test_tables_of_several_updates_have_a_line_between(write, capsys):
    run(["fair-share", write(small(1, id="a"), small(2)), "--format", "table"])
    out = capsys.readouterr().out
    assert out.startswith("a: 0 pools, 1 operation, cluster of 10 cpu\n")
    assert "\n\n0 pools, 1 operation, cluster of 10 cpu\n" in out


def test_errors_of_the_update_are_below_the_table():
    pools = [{"name": "q", "parent": ROOT, "strong_guarantee_resources": {"cpu": 20}}]
    lines = draw(small(1, pools=pools))
    assert any(line.startswith("error 29000: ") for line in lines)


def test_a_narrow_terminal_does_without_the_bar_and_then_without_the_parts():
    wide = draw(TREE)
    assert draw(TREE, max(map(len, wide))) == wide
    no_bar = draw(TREE, 120)
    assert no_bar[1] == wide[1]
    assert no_bar[2] == wide[2].rstrip("█▓▒·").rstrip()
    assert not no_bar[-1].startswith("bar")
    assert draw(TREE, 40)[1] == ("element     mode                weight  resource  guaranteed  demand  share    cpu")


def test_the_resource_of_a_row_is_its_dominant_one_and_the_amount_is_of_the_main_one():
    operations = [{"name": "o", "parent": ROOT, "demand": {"memory": 2**30, "cpu": 1}, "gang": True}]
    tree = small(0, operations=operations, total_resources={"cpu": 10, "memory": 2**31})
    lines = draw({**tree, "options": {"main_resource": "memory"}})
    assert lines[1].endswith("by weight  memory")
    assert lines[3].split()[:4] == ["o", "gang", "1", "memory"]
    assert "1 GiB" in lines[3]


def test_a_cluster_of_nothing():
    lines = draw({"total_resources": {}, "now": 0, "pools": [{"name": "q", "parent": ROOT}]})
    assert lines[0] == "1 pool, 0 operations, cluster of nothing"
    assert lines[3].split() == ["q", "fair_share", "1", "cpu", "0.0", "0.0", "0.0", "0.0", "0.0", "0.0", "0"]


def test_fifo_operations_are_in_the_order_in_which_they_are_served():
    flags = {"mode": "fifo", "fifo_reordering": True, "strong_guarantee_resources": {"cpu": 5}}
    operations = [
        {"name": "gang", "parent": "q", "demand": {"cpu": 8}, "gang": True, "start_time": 0},
        {"name": "small", "parent": "q", "demand": {"cpu": 4}, "start_time": 1},
    ]
    options = {"step_function_for_gang_operations": True, "fifo_reordering": True}
    lines = draw(small(0, pools=[{"name": "q", "parent": ROOT, **flags}], operations=operations, options=options))
    assert [line.split()[:2] for line in lines[4:6]] == [["small", "#0"], ["gang", "#1"]]


def test_names_are_whole_and_harmless():
    long, wild = "n" * 500, "a\x1b[2J\nb"
    lines = draw(small(0, pools=[{"name": long, "parent": ROOT}, {"name": wild, "parent": ROOT}]), 80)
    assert any(line.startswith(f"  {long}") for line in lines)
    assert any(line.startswith("  a\\x1b[2J\\nb") for line in lines)


def test_a_chain_of_a_thousand_pools():
    pools = [{"name": f"p{n}", "parent": f"p{n - 1}" if n else ROOT} for n in range(1000)]
    assert draw(small(1, pools=pools))[1002].startswith("  " * 1000 + "p999")


@pytest.mark.parametrize(
    ("parts", "demand", "bar"),
    [
        ((0.0, 0.0, 0.0), 0.0, ""),
        ((0.0, 0.0, 0.0), 0.5, "·" * 20),
        ((0.1, 0.1, 0.2), 0.8, "██" + "▓▓▓" + "▒▒▒▒▒" + "·" * 10),
        ((0.0, 0.0, 0.3), 0.3, "▒" * 20),
        ((0.3, 0.0, 0.0), 0.2, "█" * 20),
    ],
)
def test_bars(parts, demand, bar):
    assert draw_bar(parts, demand) == bar


# ---- words


def test_explain_is_words_for_people(write, capsys):
    assert run(["fair-share", write(TREE), "--explain", "etl"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "t1: etl gets 21.3 % of the cluster (42.67 of 200 cpu): limited by its weight, 0.5 of 1.5 among the siblings "
        "that still want more; cpu is the scarce resource."
    )
    assert out[-2] == "  etl, operation: 21.3 of 35.0 cpu demanded"


def test_explain_as_json_is_one_line(write, capsys):
    assert run(["fair-share", write(small(3), small(30)), "--explain", "o", "--format", "json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert list(first) == ["id", "element", "rule", "lines"]
    assert (first["id"], first["element"], first["rule"]) == (None, "o", "demand")
    assert first["lines"][0] == "o gets 30.0 % of the cluster (3 of 10 cpu): all it asks for."
    assert second["rule"] == "cluster"


def test_explain_of_an_unknown_element_is_64(write, capsys):
    assert run(["fair-share", write(TREE), "--explain", "secnd"]) == 64
    assert capsys.readouterr() == (
        "",
        'cpumond: --explain: there is no "secnd" in the tree; did you mean "second"?\n',
    )
    assert run(["fair-share", write(TREE), "--explain", "zzzzz"]) == 64
    assert capsys.readouterr().err == (
        'cpumond: --explain: there is no "zzzzz" in the tree; give the name of a pool or operation\n'
    )


# ---- exit codes


def test_a_mistake_is_78_and_the_lines_before_it_are_printed(write, capsys):
    broken = small(1)
    broken["operations"][0]["weight"] = 0
    path = write(small(1, id="good"), broken, small(1))
    assert run(["fair-share", path]) == 78
    out, err = capsys.readouterr()
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["good"]
    assert err == (
        f'cpumond: {path}: line 2: operation "o": weight: expected a finite number > 0 (at most 9.22e+18), got 0\n'
    )


@pytest.mark.parametrize(
    "arguments", [[], ["FILE", "more"], ["FILE", "--format", "csv"], ["FILE", "--explain"], ["FILE", "--nonsense"]]
)
def test_a_wrong_command_line_is_64(write, capsys, arguments):
    path = write(small(1))
    assert run(["fair-share", *(path if word == "FILE" else word for word in arguments)]) == 64
    assert capsys.readouterr().err.startswith("cpumond: ")


# ---- simulate


def test_simulate_as_the_first_word_is_a_command_of_its_own(capsys):
    assert run(["fair-share", "simulate", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: cpumond fair-share simulate ")


@pytest.mark.parametrize("arguments", [["./simulate"], ["--format", "json", "simulate"]])
def test_a_file_may_be_called_simulate(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "simulate").write_text(json.dumps(small(1, id="x")))
    assert run(["fair-share", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "x"


# ---- between pipes


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """The program, with pipes at both ends."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "cpumond", "fair-share", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("format_", ["json", "table"])
def test_each_answer_is_there_before_the_next_question(format_):
    with start("-", "--format", format_) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for n in range(3):
            program.stdin.write(json.dumps(small(1, id=f"update {n}")).encode() + b"\n")
            program.stdin.flush()
            assert any(f"update {n}".encode() in line for line in iter(program.stdout.readline, b""))
        program.stdin.close()
        assert program.wait(60) == 0
