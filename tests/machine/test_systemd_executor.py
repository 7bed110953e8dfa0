"""The executor of kind "systemd" in a real systemd.

One boot for what every executor must do (``guest/systemd_contract.py``), one for what it alone does
(``guest/systemd_executor.py``); each test judges facts.
"""

import json

import pytest
from guest_host import Facts, assert_came, assert_passed, assert_quiet, lives, of

LIMIT_S = 240
NOTHING = {"units": [], "cgroups": []}
SLICE = "cpumond.slice/cpumond-jobs.slice"

pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]


facts = lives("systemd_executor.py", LIMIT_S)
contract = lives("systemd_contract.py", LIMIT_S, tools=["pytest>=8.2"])
"""How each test of the contract went."""


def ended(fact: Facts) -> Facts:
    kinds = [event["kind"] for event in fact["events"]]
    assert kinds == ["Started", "Ended"], fact
    end: Facts = fact["events"][1]
    assert end["problem"] == ""
    return end


def refused(fact: Facts) -> str:
    """Why a job was not started, by its own fault."""
    assert [event["kind"] for event in fact["events"]] == ["NotStarted"], fact
    assert not fact["events"][0]["node_fault"]
    return str(fact["events"][0]["problem"])


def test_what_every_executor_does(contract: Facts) -> None:
    assert_passed(contract)
    assert len(contract) > 20


def test_the_guest_is_ready(facts: Facts) -> None:
    assert_quiet(*of(facts, "install")["answers"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("path", "the program '/no/such/program'"),
        ("not_for_user", "user nobody may not run it"),
        ("interpreter", "the program '/usr/local/bin/bad-interpreter'"),
        ("closed_directory", "the working directory /root/only does not exist, or user nobody may not enter it"),
        ("odd_user", "no such:user"),
    ],
)
def test_what_cannot_be_started(facts: Facts, name: str, words: str) -> None:
    assert words in refused(of(facts, "refusals")[name])


def test_refused_jobs_leave_nothing(facts: Facts) -> None:
    fact = of(facts, "refusals")
    assert ended(fact["after"])["exit_code"] == 0
    assert fact["left"] == NOTHING


def test_logs(facts: Facts) -> None:
    fact = of(facts, "logs")
    assert fact["talk"] == [["no end", 6], ["<3>to stderr\n", 13]]
    assert fact["long"] == [200_001 + 7, "xx\n\u00e9\x01 end\n"]
    assert fact["unknown"][0].startswith("ExecutorError: the journal has no entries about job never-ran")


def test_lines_of_processes_that_end_at_once_are_not_lost(facts: Facts) -> None:
    out, err = of(facts, "logs")["short_lived"]
    assert out[0].split() == [str(number) for number in range(1, 201)]
    assert err[0].split() == [f"e{number}" for number in range(1, 201)]
    assert of(facts, "logs")["exited_log"] == ["only line\n", 10]


def test_jobs_outlive_a_killed_agent(facts: Facts) -> None:
    """The one that lives is found again, the ends of the others are told; also over a reload of systemd."""
    fact = of(facts, "recovery")
    assert_came(fact, "ready_s", "settled_s")
    assert_quiet(*fact["reload"])
    assert list(fact["recovered"]) == ["lives"]
    assert fact["recovered"]["lives"]["cgroup"] == f"{SLICE}/cpumond-job-lives.service"
    assert fact["took_s"] < 30.0
    ends = {name: (events[0]["exit_code"], events[0]["signal"]) for name, events in fact["events"].items()}
    assert ends == {
        "lives": (5, None), "ends": (0, None), "fails": (44, None), "dies": (None, 10), "never-heard-of": (None, None),
    }  # fmt: skip
    assert [event["kind"] for events in fact["events"].values() for event in events] == ["Ended"] * 5
    assert "its end is unknown" in fact["events"]["never-heard-of"][0]["problem"]


def test_unknown_jobs_are_left_alone(facts: Facts) -> None:
    """Those that live, that is; of an ended one the unit is removed."""
    fact = of(facts, "recovery")
    assert fact["unknown"] == {"unknown-lives": "running", "unknown-ended": "dead"}
    assert fact["killed"][0]["signal"] == 9
    assert fact["left"] == NOTHING


def test_reloads_lose_no_job(facts: Facts) -> None:
    """One whose start falls into a reload may be refused: better than a command that systemd 252 has damaged."""
    fact = of(facts, "reloads")
    for name, end in fact["ends"].items():
        if "exit_code" in end:
            assert end["exit_code"] == int(name.rpartition("-")[2]), name
        else:
            assert "systemd was reloaded" in end["problem"]
            assert end["node_fault"]
    assert len(fact["ends"]) == 14
    assert fact["quota_us"] == "70000\n"
    assert fact["load_state"] == "loaded"
    assert fact["through"][-1]["exit_code"] == 9
    assert fact["left"] == NOTHING


def test_a_lost_bus_loses_no_job(facts: Facts) -> None:
    fact = of(facts, "bus_restart")
    assert fact["silent"]
    assert fact["back_s"] < 30.0
    codes = {"over-bus": 11, "after-bus": 11, "without-bus": 12}
    assert {name: fact[name][-1]["exit_code"] for name in codes} == codes
    assert fact["left"] == NOTHING


def test_an_operator_stops_a_unit(facts: Facts) -> None:
    fact = of(facts, "by_hand")
    assert ended(fact)["exit_code"] == 6
    assert fact["left"] == NOTHING


def test_an_agent_without_rights_says_what_to_do(facts: Facts) -> None:
    said = json.loads(of(facts, "rights")["output"])
    assert said["type"] == "ExecutorError"
    assert "run the agent as root: see /usr/share/cpumond/systemd/executor.conf" in said["text"]


def test_jobs_of_the_hardened_service(facts: Facts) -> None:
    """The shipped unit with the drop-in may put jobs into the idle class."""
    fact = of(facts, "service")
    for name in ("verify", "start", "stop"):
        assert_quiet(fact[name])
    assert ended(fact["reclaimed"])["exit_code"] == 0
    assert fact["idle"]
    assert fact["left"] == NOTHING


def test_jobs_are_not_in_the_sandbox_of_the_service(facts: Facts) -> None:
    """What ProtectHome= hides from the agent, a job can run."""
    assert ended(of(facts, "service")["home"])["exit_code"] == 21
