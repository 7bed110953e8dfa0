"""What ``status``, ``top``, ``explain`` and the other commands print for an answer of the agent."""

import errno
import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import click
import httpx2
import msgspec
import pytest
from explained import JOB, PEAK, SHRINK, make_explain

from cpumond.agent.config import parse_layer
from cpumond.cli import options, run
from cpumond.cli.agent import control, explain
from cpumond.cli.agent.client import AgentClient, explain_failure, find_socket, read_refusal
from cpumond.cli.agent.top import sort_answer
from cpumond.cli.options import quote_name
from cpumond.cli.render import tables
from cpumond.core.answers import JobAnswer, RegisteredJob, StatusAnswer
from cpumond.core.errors import AccessError, ConfigError, UnavailableError, UsageError

ANSI = re.compile(r"\x1b\[[0-9;]*m")
LONG_ID = "0123456789abcdef" * 4


def make_job(**changes: object) -> JobAnswer:
    return msgspec.json.decode(msgspec.json.encode({**JOB, **changes}), type=JobAnswer)


def make_status(*jobs: dict[str, object], **changes: object) -> StatusAnswer:
    answer = {
        "node_id": "node-7", "layout": "v2", "tick": 3, "tick_duration_s": 0.0012, "check_period_s": 1.0,
        "paused": False, "totals": {"cpu_limit": 10.0, "current_cpu_limit": 3.2, "reclaimed": 6.8},
        "counters": {"late_ticks": 0, "foreign_writes": {"raise": 0, "lower": 0}, "decisions": {"grow": 0}},
        "problems": [], "last_tick_age_s": 0.4, "jobs": [{**JOB, **job} for job in jobs], **changes,
    }  # fmt: skip
    return msgspec.json.decode(msgspec.json.encode(answer), type=StatusAnswer)


def words(line: str) -> str:
    """A line of a table with one space between its words."""
    return " ".join(line.split())


# status


def test_status_into_a_pipe_is_one_plain_line_for_each_job():
    jobs = [{"job_id": LONG_ID}, {"job_id": "x", "operation_id": "an operation with a long name " * 5}]
    text = tables.draw_status(make_status(*jobs), None, False)
    lines = text.split("\n")
    assert not ANSI.search(text)
    assert all(line == line.rstrip() for line in lines)
    assert lines[0] == "node-7: 2 jobs, cgroups v2, one check every 1s, the last one took 1.2 ms"
    assert words(lines[1]) == "job operation status requested limit usage smoothed votes throttled last result"
    assert words(lines[2]) == f"{LONG_ID} sort-17 reclaim 10.00 3.20 1.75 1.80 -4 0% applied"
    assert lines[3].startswith("x ")
    assert lines[4] == "total: 10 cores requested, limit 3.2, 6.8 reclaimed by quota"
    assert len(lines) == 5


def test_without_quotas_guarantees_and_ceilings_are_apart():
    jobs = [{"actuator": "guarantee", "ceiling": 10.0}, {"job_id": "x", "actuator": "weight"}]
    lines = tables.draw_status(make_status(*jobs), None, False).split("\n")
    assert words(lines[1]).startswith("job operation status requested guarantee ceiling usage")
    assert [words(line).split()[3:6] for line in lines[2:4]] == [["10.00", "3.20", "10.00"], ["10.00", "3.20", "-"]]
    assert lines[4] == "total: 10 cores requested, guarantee 3.2, 6.8 reclaimed by guarantee, weight"


def test_jobs_that_can_give_nothing_are_named():
    answer = make_status({"min_cpu_limit": 10.0}, {"min_cpu_limit": 1.0})
    [said] = [text for text, _ in tables.list_notices(answer) if "nothing" in text]
    named = "nothing can be reclaimed from 1 job, for example steady-low"
    assert said == f"{named}: its floor is as high as its request, 10 cores; see min_cpu_limit"


def test_why_a_job_is_refused_is_said_once_for_all_that_are_alike():
    answer = make_status({"refused": "outside of managed_roots"}, {"refused": "outside of managed_roots"}, {})
    refused = [text for text, _ in tables.list_notices(answer) if "refused" in text]
    assert refused == ["2 jobs refused, for example steady-low: outside of managed_roots"]


def test_columns_of_a_rule_are_there_where_a_job_is_under_it():
    def heading(*jobs: dict[str, object]) -> str:
        return words(tables.draw_status(make_status(*jobs), None, False).split("\n")[1])

    peak: dict[str, object] = {"limit_rule": "peak", "peak": PEAK, "votes_sum": None}
    assert heading({"operation_id": ""}) == "job status requested limit usage smoothed votes throttled last result"
    columns = "job status requested limit usage peak half-life throttled last result"
    assert heading({**peak, "operation_id": ""}) == columns
    both = tables.draw_status(make_status(peak, {"job_id": "d"}), None, False).split("\n")
    assert words(both[1]).endswith("usage smoothed peak half-life votes throttled last result")
    assert words(both[2]).endswith("1.75 1.80 3.05 40 s - 0% applied")
    assert words(both[3]) == "d sort-17 reclaim 10.00 3.20 1.75 1.80 -4 0% applied"
    new = tables.draw_status(make_status({**peak, "peak": {**PEAK, "peak_cores": None}}), None, False).split("\n")
    assert words(new[2]).endswith("1.75 - 40 s 0% applied")
    assert "peak" in tables.draw_top(make_status(peak), "job", 100, False, 24)


def test_status_without_jobs_says_how_to_get_some():
    text = tables.draw_status(make_status(), 80, False)
    assert "no jobs; see `cpumond doctor`, or add one with `cpumond job add`" in text


def test_status_shows_what_a_job_in_shadow_would_have():
    shadow = {
        "status": "shadow", "mode": "shadow", "current_cpu_limit": 10.0, "monitor_cpu_limit": 2.5, "last_result": "",
    }  # fmt: skip
    lines = tables.draw_status(make_status({}, shadow), None, False).split("\n")
    assert "(would be)" in lines[1]
    assert words(lines[3]) == "steady-low sort-17 shadow 10.00 10.00 2.50 1.75 1.80 -4 0% -"
    assert lines[4].endswith("6.8 reclaimed by quota (7.5 more in shadow)")


def test_status_shows_what_is_not_known_yet_as_a_dash():
    job = {"usage": None, "smoothed_cpu_usage": None, "votes_sum": None, "last_result": ""}
    line = tables.draw_status(make_status(job), None, False).split("\n")[2]
    assert words(line) == "steady-low sort-17 reclaim 10.00 3.20 - - - 0% -"


def test_status_says_in_words_what_needs_an_operator():
    answer = make_status(
        {"last_error": "cannot write '1' to cpu.max: Invalid argument"}, paused=True, last_tick_age_s=75.0,
        counters={"foreign_writes": {"raise": 2, "lower": 1}, "write_errors": 4, "shed_checks": 5},
        problems=["a: id_regex 'x' does not match; left out"],
    )  # fmt: skip
    lines = tables.draw_status(answer, None, False).split("\n")
    assert lines[4:] == [
        "stuck: the last check was 1m15s ago; see the agent's log",
        "paused: no limit is written while the pause file is in the agent's runtime_dir",
        "foreign writes: another program raised a limit 2 x and lowered one 1 x",
        "write errors: 4 limits could not be written",
        "over its CPU budget: 5 checks were skipped ([cost])",
        "problem: a: id_regex 'x' does not match; left out",
        "job steady-low: cannot write '1' to cpu.max: Invalid argument",
    ]


def test_a_name_cannot_move_the_cursor_or_be_taken_for_markup():
    text = tables.draw_status(make_status({"job_id": "a\x1b[2Jb\nc", "operation_id": "[bold]x[/bold]"}), None, False)
    assert "\x1b" not in text
    assert "a\\x1b[2Jb\\nc" in text
    assert "[bold]x[/bold]" in text


# top


def test_top_sorts_and_puts_the_one_with_most_first():
    jobs = [
        {"job_id": "a", "cpu_limit": 4.0, "current_cpu_limit": 4.0, "usage": 0.1},
        {"job_id": "b", "cpu_limit": 9.0, "current_cpu_limit": 1.0, "usage": None},
        {"job_id": "c", "cpu_limit": 8.0, "current_cpu_limit": 7.0, "usage": 3.0},
    ]

    def order(sort):
        lines = tables.draw_top(make_status(*jobs), sort, None, False, None).split("\n")
        return [line.split()[0] for line in lines[2:]]

    assert order("reclaimed") == ["b", "c", "a"]
    assert order("usage") == ["c", "a", "b"]
    assert order("limit") == ["c", "a", "b"]
    assert order("job") == ["a", "b", "c"]


@pytest.mark.parametrize("height", [1, 2, 3, 5, 10, 24, 60])
def test_top_fits_the_height_and_says_how_many_lines_are_hidden(height):
    jobs = [{"job_id": f"job-{number:03d}"} for number in range(50)]
    lines = tables.draw_top(make_status(*jobs, paused=True), "job", 80, False, height).split("\n")
    assert len(lines) <= height
    if height >= 60:
        assert lines[-1].startswith("job-049")
    elif height >= 5:
        shown = [line for line in lines if line.startswith("job-")]
        assert lines[-1] == f"... {50 - len(shown)} more lines, 50 jobs by job"


def test_top_keeps_notices_from_taking_the_screen():
    text = tables.draw_top(make_status({}, problems=["p"] * 40), "job", 80, False, 20)
    assert "and 38 more notices: cpumond status" in text
    assert "steady-low" in text


def test_json_of_top_is_the_whole_answer_in_the_order_of_the_table():
    content = msgspec.json.encode({"new_key": 1, "jobs": [{**JOB, "job_id": name} for name in ("b", "a")]})
    answer = sort_answer(content, "job")
    assert answer["new_key"] == 1
    assert [job["job_id"] for job in answer["jobs"]] == ["a", "b"]


# explain: everything


def test_explain_tells_the_whole_story():
    text = explain.draw_explain(make_explain(), 10, None, False)
    assert text.split("\n")[0].startswith("The limit of steady-low is 3.2 of 10 requested cores, because ")
    for line in (
        "job         steady-low, operation sort-17, from source jobs/*",
        "cgroup      /sys/fs/cgroup/jobs/steady-low",
        "ordered     10 cores",
        "cap         10 cores: least of its request, the quota found (none), the quotas above (none)",
        "floor       1 core: min_cpu_limit = 1",
        "mode        reclaim",
        (
            "in force    320000 us of each 100000 us = 3.2 cores, weight 100; "
            "found: no quota (period 100000 us), weight 100"
        ),
        "use         1.75 cores in the last check, 1.80 smoothed, 0% of the periods throttled",
        "pressure    unknown (no PSI for this cgroup)",
        "last write  applied",
        "so far      core-seconds: 100 requested, 20 used (smoothed), 60 reclaimed",
        "votes compare with the limit of 3.2: -1 below 0.6 x 3.2 = 1.92, +1 above 0.9 x 3.2 = 2.88",
        "      2.000   0",
        "      1.900  -1",
        "next check: needs |sum| > 3, has -4: 4 of 5 below 0.6 x 3.2 = 1.92 cores -> shrink to 3.1 (x 0.97)",
        "last 1 of 1 decision:",
    ):
        assert line in text.split("\n"), line
    assert "  relative_upper_bound = 0.9" in text
    stamp = time.strftime("%b %d %H:%M:%S %Z", time.localtime(1795223773.1))
    assert text.endswith(f"{stamp}  shrink  3.30 -> 3.20  applied  votes -4, usage 1.75, smoothed 1.80")


def test_explain_shows_as_many_decisions_as_asked_for():
    e = make_explain(decisions=[{**SHRINK, "votes_sum": -number} for number in range(30)])

    def shown(last):
        return [line for line in explain.draw_explain(e, last, None, False).split("\n") if "  shrink  " in line]

    assert len(shown(10)) == 10
    assert "votes -29" in shown(10)[-1]
    assert len(shown(None)) == 30
    assert shown(0) == []


def test_explain_of_rule_peak_has_no_votes():
    peak = make_explain(peak={**PEAK, "because": "3.2 = 3.05 + 5 %.", "next": "hold: that"}, limit_rule="peak")
    assert "votes against" not in explain.draw_explain(peak, None, None, False)


def test_what_a_node_says_moves_no_cursor():
    e, odd = make_explain(), "a\x1b[2J\u202eb"
    facts = {"facts": {odd: odd}, "next": odd, "job_cpu_monitor": {**e.job_cpu_monitor, odd: odd}}
    window = msgspec.structs.replace(e.window, meaning=odd)
    decision = msgspec.structs.replace(e.decisions[0], kind=odd, result=odd, reason=odd)
    changed = msgspec.structs.replace(e, window=window, decisions=[decision], **facts)
    said = explain.draw_explain(changed, 10, None, False)
    assert said.count("a\\x1b[2J\\u202eb") == 9
    assert all(line.isprintable() for line in said.split("\n"))


def test_the_answer_of_an_agent_that_gives_no_sentences_is_said():
    of_0_1 = msgspec.structs.replace(make_explain(), why="", next="", facts={})
    with pytest.raises(UnavailableError, match="agent of job steady-low is an older version, which gives no reasons"):
        explain.draw_explain(of_0_1, 10, None, False)


# the other commands


def test_registered_jobs_are_listed_with_options_as_people_write_them():
    jobs = [
        RegisteredJob("a", "jobs/a", "", None, {"check_period": 0.25, "throttle_vote": True}),
        RegisteredJob("b", "jobs/b", "op", 2.5, {}),
    ]
    lines = tables.draw_registered(jobs, None, False).split("\n")
    assert lines[1].split("  ")[0] == "a"
    assert lines[1].endswith("from cgroup  check_period = 250ms, throttle_vote = true")
    assert lines[2].split() == ["b", "op", "jobs/b", "2.5", "-"]


def test_what_became_of_a_pin():
    pinned, said = make_job(pinned_cpu_limit=3.2), "job steady-low is pinned at 3.2 cores until "
    assert tables.describe_pin(pinned, None) == f"{said}`cpumond unpin`"
    assert re.fullmatch(rf"{said}\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d \S+", tables.describe_pin(pinned, 60.0))
    assert "writes are paused" in tables.describe_pin(make_job(), None)
    failed = make_job(pinned_cpu_limit=3.2, last_result="failed", last_error="cannot write")
    assert tables.describe_pin(failed, None).endswith("but the limit could not be written: cannot write")


def test_options_of_a_new_job_are_checked_here_and_sent_as_they_were_given():
    given = ("check-period=250", 'start_delay="2s"', "restore_hold=1m", "throttle_vote=true")
    layer = control.read_layer(given, "shadow")
    assert layer == {
        "check-period": 250, "start_delay": "2s", "restore_hold": "1m", "throttle_vote": True, "mode": "shadow",
    }  # fmt: skip
    read_there = parse_layer(json.loads(json.dumps(layer)), "job")
    assert (read_there["check_period"], read_there["start_delay"]) == (0.25, 2.0)
    with pytest.raises(ConfigError, match=r"--set: check_perod: unknown key; did you mean 'check_period'\?"):
        control.read_layer(("check_perod=1",), None)
    with pytest.raises(UsageError, match="both set the mode"):
        control.read_layer(("mode=off",), "shadow")


@pytest.mark.parametrize(
    ("text", "seconds"), [("2", 2.0), ("0.5", 0.5), ("1e1", 10.0), ("250ms", 0.25), ("1h30m", 5400.0)]
)
def test_a_bare_duration_on_the_command_line_is_seconds(text, seconds):
    assert options.DurationType(0.1).convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "0.05", "-1", "nan", "inf", "1x", "50ms"])
def test_a_duration_that_makes_no_sense_is_refused(text):
    with pytest.raises(click.BadParameter):
        options.DurationType(0.1).convert(text, None, None)


# client


def test_a_name_is_one_part_of_a_path_whatever_is_in_it():
    for name in ("a", "..", ".", "a/b", "a b?c#d%41", "ü", "a\nb"):
        url = httpx2.URL(f"http://agent/v1/jobs/{quote_name(name)}/explain")
        assert (url.raw_path.count(b"/"), url.path) == (4, f"/v1/jobs/{name}/explain")


def test_the_socket_is_that_of_the_configuration(tmp_path):
    config = tmp_path / "cpumond.toml"
    config.write_text(f'runtime_dir = "{tmp_path}/run"\n')
    assert find_socket(str(config), True, None) == f"{tmp_path}/run/control.sock"
    assert find_socket(str(config), False, None) == f"{tmp_path}/run/control.sock"
    assert find_socket(str(config), True, "/x/y.sock") == "/x/y.sock"


def test_a_missing_configuration_matters_only_when_it_was_named(tmp_path):
    missing = str(tmp_path / "missing.toml")
    assert find_socket(missing, False, None) == "/run/cpumond/control.sock"
    with pytest.raises(ConfigError, match=r"cannot be read: .*; or name the agent's socket with --socket"):
        find_socket(missing, True, None)


def test_a_wrong_configuration_says_how_to_reach_the_agent_all_the_same(tmp_path):
    config = tmp_path / "cpumond.toml"
    config.write_text("nonsense = 1\n")
    with pytest.raises(ConfigError, match=r"nonsense: unknown key; .*; or name the agent's socket with --socket"):
        find_socket(str(config), False, None)


def test_the_system_s_reason_decides_about_the_error():
    denied = explain_failure("/s", PermissionError(errno.EACCES, "no"))
    assert isinstance(denied, AccessError)
    assert "only root and the socket's group" in str(denied)
    refused = explain_failure("/s", ConnectionRefusedError(errno.ECONNREFUSED, "x"))
    assert isinstance(refused, UnavailableError)
    assert str(refused).startswith("no agent answers on /s (Connection refused); start it with `systemctl start ")


def test_an_agent_that_hangs_up_is_said(listener):
    hang_up = threading.Thread(target=lambda: [listener[0].accept()[0].close()])
    hang_up.start()
    with pytest.raises(UnavailableError, match=r"control.sock: the agent ended before it answered; see its log"):
        AgentClient(listener[1], timeout_s=10.0).status()
    hang_up.join()


def test_an_error_of_the_agent_keeps_its_sentence_and_exit_code():
    error = read_refusal("/s", 403, b'{"error": "it is refused", "exit_code": 77}')
    assert (str(error), error.exit_code) == ("it is refused", 77)
    error = read_refusal("/s", 500, b"Internal Server Error")
    assert (str(error), error.exit_code) == ("/s: the agent answered with HTTP status 500", 69)


def test_an_answer_of_another_version_is_said():
    with pytest.raises(UnavailableError, match=r"/s: the agent's answer cannot be decoded: .*; restart the agent"):
        AgentClient("/s").decode(b"{}", StatusAnswer)


@pytest.fixture
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[socket.socket, str]]:
    path = str(tmp_path_factory.mktemp("s") / "control.sock")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        yield sock, path


def test_an_agent_that_does_not_answer_is_given_up(listener):
    with pytest.raises(UnavailableError, match=r"control.sock: the agent did not answer in 0.1 s; see its log"):
        AgentClient(listener[1], timeout_s=0.1).status()


def test_the_socket_may_come_from_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CPUMOND_SOCKET", str(tmp_path / "other.sock"))
    assert run(["job", "list"]) == 69
    assert "other.sock" in capsys.readouterr().err
