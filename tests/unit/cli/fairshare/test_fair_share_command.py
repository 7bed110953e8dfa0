"""``cpumond fair-share``: its two outputs, its exit codes, and that it works between two pipes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cpumond.cli.fairshare.command  # noqa: F401  (loaded before a test gives its rights away)
from cpumond.cli import run
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
    def write_trees(*trees: dict[str, Any]) -> str:
        path = tmp_path / "tree.json"
        path.write_text("".join(json.dumps(tree) + "\n" for tree in trees))
        return str(path)

    return write_trees


def small(demand: float, **fields: Any) -> dict[str, Any]:
    operation = {"name": "o", "parent": ROOT, "demand": {"cpu": demand}}
    return {"total_resources": {"cpu": 10}, "now": 0, "operations": [operation], **fields}


def test_a_gang_has_all_or_nothing_as_in_the_scheduler(write, capsys):
    gang = {"name": "o", "parent": ROOT, "demand": {"cpu": 15}, "gang": True}
    tree = small(0.0, operations=[gang])
    found = []
    for words in ([], ["--as-scheduler"]):
        assert run(["fair-share", write(tree), *words]) == 0
        found.append(json.loads(capsys.readouterr().out)["elements"]["o"]["fair_share"]["total"][1])
    assert found == [pytest.approx(1.0), 0.0]


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
    told = set(elements["lab"]["fair_share"])
    assert told == {"total", "strong_guarantee", "integral_guarantee", "weight_proportional"}
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


def test_time_is_a_line_per_update_on_standard_error(write, capsys):
    assert run(["fair-share", write(small(1, id="a"), small(1)), "--time"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 2
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["id"] for line in lines] == ["a", None]
    assert all(0.0 < line["update_s"] < 60.0 for line in lines)


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
    assert first["lines"][0] == "o gets 30.0 % of the cluster (3 of 10 cpu): its whole demand."
    assert second["rule"] == "cluster"


def test_explain_of_an_unknown_element_is_64(write, capsys):
    for name, advice in (("secnd", 'did you mean "second"?'), ("zzzzz", "give the name of a pool or operation")):
        assert run(["fair-share", write(TREE), "--explain", name]) == 64
        assert capsys.readouterr() == ("", f'cpumond: --explain: there is no "{name}" in the tree; {advice}\n')


def test_a_mistake_is_78_and_the_lines_before_it_are_printed(write, capsys):
    broken = small(1)
    broken["operations"][0]["weight"] = 0
    path = write(small(1, id="good"), broken, small(1))
    assert run(["fair-share", path]) == 78
    out, err = capsys.readouterr()
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["good"]
    sentence = 'operation "o": weight: expected a finite number > 0 (at most 9.22e+18), got 0'
    assert err == f"cpumond: {path}: line 2: {sentence}\n"


@pytest.mark.parametrize("arguments", [["./simulate"], ["--format", "json", "simulate"]])
def test_a_file_may_be_called_simulate(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "simulate").write_text(json.dumps(small(1, id="x")))
    assert run(["fair-share", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "x"


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "cpumond", "fair-share", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_each_answer_is_there_before_the_next_question():
    with start("-", "--format", "json") as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for n in range(3):
            program.stdin.write(json.dumps(small(1, id=f"update {n}")).encode() + b"\n")
            program.stdin.flush()
            assert any(f"update {n}".encode() in line for line in iter(program.stdout.readline, b""))
        program.stdin.close()
        assert program.wait(60) == 0
