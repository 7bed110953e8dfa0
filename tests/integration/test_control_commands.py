"""``status``, ``top``, ``explain``, ``job`` and ``doctor`` against a real agent on real cgroups."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_every_command as every
from agent_process import AgentProcess
from commands import AS_NOBODY
from own_terminal import Terminal
from real_cgroups import CgroupTree
from scheduler_process import terminal_environment
from waiting import wait_until

from cpumond.cli.answers import ANSWERS
from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.cgroup

CONFIG = """managed_roots = ["{top}"]
[monitor]
mode = "{mode}"
check_period = "100ms"
min_cpu_limit = 0.2
[[source]]
kind = "glob"
pattern = "{top}/job-*"
cpu_limit = 2
operation = "sort"
[cost]
cpu_budget_ratio = 0.0  # on a busy machine checks would be left out, and that would be said
"""

TOP = f"cpumond-test-control-{os.getpid()}"


@pytest.fixture
def running(agent: AgentProcess, cgroups: CgroupTree) -> Callable[..., AgentProcess]:
    def start(*names: str, mode: str = "reclaim") -> AgentProcess:
        return start_over(agent, cgroups, *names, mode=mode)

    return start


def start_over(agent: AgentProcess, cgroups: CgroupTree, *names: str, mode: str = "reclaim") -> AgentProcess:
    for name in names:
        cgroups.make(name)
    return agent.start(CONFIG.format(top=cgroups.top, mode=mode))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[AgentProcess]:
    """An agent with job-1 and job-2, whose limits are lowered, for tests that change nothing."""
    process = AgentProcess(tmp_path_factory.mktemp("shared"))
    with CgroupTree(hierarchies, TOP) as tree:
        try:
            start_over(process, tree, "job-1", "job-2")
            for name in ("job-1", "job-2"):
                wait_for_reclaim(process, name)
            yield process
        finally:
            process.close()


def call(agent: AgentProcess, *arguments: str) -> tuple[int, str, str]:
    done = agent.run(*arguments)
    return done.returncode, done.stdout, done.stderr


def run_quietly(agent: AgentProcess, *arguments: str) -> str:
    code, output, errors = call(agent, *arguments)
    assert (code, errors) == (0, ""), output
    return output


def answered(agent: AgentProcess, *arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run_quietly(agent, *arguments, "--json"))
    name = next(each for each in (" ".join(arguments[:2]), arguments[0]) if each in ANSWERS)
    every.validator(name).validate(answer)
    return answer


def refused(agent: AgentProcess, *arguments: str) -> tuple[int, str]:
    code, output, errors = call(agent, *arguments)
    assert output == ""
    assert errors.startswith("cpumond: ")
    assert errors.count("\n") == 1, errors
    return code, errors


def wait_for_reclaim(agent: AgentProcess, name: str, below_cores: float = 1.9) -> None:
    wait_until(lambda: agent.job(name)["current_cpu_limit"] < below_cores, f"the limit of {name} goes down")


@contextlib.contextmanager
def top_of(agent: AgentProcess, columns: int, rows: int) -> Iterator[Terminal]:
    """``top`` on a terminal, once two frames were shown."""
    words = ("top", "--interval", "0.1", "--config", str(agent.config_path))
    with contextlib.closing(Terminal(terminal_environment(""), columns, rows, *words)) as terminal:
        wait_until(lambda: terminal.read().count("test-node") >= 2, "frames come")
        yield terminal


def test_top_survives_a_restart_of_the_agent(running):
    agent = running("job-1")
    with top_of(agent, 100, 24) as terminal:
        assert agent.stop() == 0
        terminal.wait("agent not running, retrying")
        agent.start()
        terminal.press("")
        terminal.wait("test-node")


def test_explain_answers_in_the_first_sentence_and_finds_a_job_by_cgroup(running, cgroups):
    agent = running("job-1")
    wait_for_reclaim(agent, "job-1")
    text = run_quietly(agent, "explain", "job-1")
    assert re.match(
        r"The limit of job-1 is [0-9.]+ of 2 requested cores, because its recent usage is about [0-9.]+ \(smoothed\)\. "
        r"The last change, [0-9.]+ -> [0-9.]+ at [-0-9:]+ [0-9:]+ \S+: usage stayed below 0\.6 of the limit "
        r"\(votes -[45]; more than 3 are needed\)\.\n",
        text,
    )
    for word in ("cap", "floor", "in force", "next check: needs |sum| > 3", "relative_lower_bound = 0.6", "shrink"):
        assert word in text
    assert re.search(r"^last \d+ of \d+ decisions?:$", text, re.MULTILINE)
    answer = answered(agent, "explain", f"{cgroups.top}/job-1")
    assert answer["job_id"] == "job-1"
    assert answer["directory"] == cgroups.path("job-1").rstrip("/")
    assert answer["cpu_limit_given"] == 2.0
    assert answer["source"] == f"{cgroups.top}/job-*"
    assert answer["decisions"][-1]["kind"] == "shrink"
    assert len(answer["window"]["votes"]) == 5
    assert answer["samples"]["at"] == []  # neither page nor scheduler


def test_explain_of_no_job_is_69_and_names_those_there_are(shared):
    code, sentence = refused(shared, "explain", "nonsense")
    assert code == 69
    assert "no job 'nonsense' here" in sentence
    assert "job-1" in sentence
    assert refused(shared, "explain", "..")[0] == 69
    assert refused(shared, "explain", "")[0] == 69


def test_a_job_is_added_listed_explained_and_removed(running, cgroups):
    agent = running()
    path = cgroups.make("other")
    before = cgroups.read_all("other")
    text = run_quietly(
        agent, "job", "add", "--cgroup", path, "--cpu-limit", "2", "--id", "a/b c", "--operation", "op",
        "--mode", "reclaim", "--set", "check-period=200", "--set", 'start_delay="10ms"',
    )  # fmt: skip
    assert text == f"job a/b c ({path}): mode reclaim, 2 cores requested, limit 2\n"
    wait_until(lambda: "a/b c" in run_quietly(agent, "status"), "the next check shows it")
    assert agent.job("a/b c")["operation_id"] == "op"
    section = answered(agent, "explain", "a/b c")["job_cpu_monitor"]
    assert (section["check_period"], section["start_delay"], section["mode"]) == ("200ms", "10ms", "reclaim")
    listed = run_quietly(agent, "job", "list").splitlines()[1]
    assert " ".join(listed.split()) == f"a/b c op {path} 2 check_period = 200ms, start_delay = 10ms, mode = reclaim"
    assert [job["job_id"] for job in answered(agent, "job", "list")["jobs"]] == ["a/b c"]
    wait_for_reclaim(agent, "a/b c")
    assert run_quietly(agent, "job", "remove", "a/b c").startswith("job a/b c is removed")
    assert cgroups.read_all("other") == before
    assert "no job was added over the socket" in run_quietly(agent, "job", "list")


def test_a_job_without_an_order_takes_it_from_its_cgroup(running, cgroups):
    agent = running(mode="shadow")
    path = cgroups.make("other")
    name = "cpu.max" if cgroups.hierarchies.cpu_version == 2 else "cpu.cfs_quota_us"
    cgroups.write("other", name, 50000)
    text = run_quietly(agent, "job", "add", "--cgroup", cgroups.path("other"))
    assert text == (
        f"job other ({path}): mode shadow, 0.5 cores requested, limit 0.5; its limit is not changed; "
        "--mode reclaim changes that\n"
    )
    assert answered(agent, "job", "remove", "other") == {"job_id": "other", "removed": True}
    assert answered(agent, "job", "add", "--cgroup", path)["cpu_limit"] == 0.5


# without the agent, without the rights


COMMANDS = [
    ["status"], ["top", "--once"], ["top"], ["explain", "job-1"], ["job", "list"], ["job", "remove", "job-1"],
    ["job", "add", "--cgroup", "x"], ["pin", "job-1"], ["unpin", "job-1"],
]  # fmt: skip


def test_without_an_agent_every_command_is_69_and_says_how_to_start_one(agent):
    agent.write_config("")
    for arguments in COMMANDS:
        code, sentence = refused(agent, *arguments)
        assert code == 69
        assert f"no agent answers on {agent.socket_path} (No such file or directory); start it with" in sentence


def run_as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    command = [*AS_NOBODY, sys.executable, "-m", "cpumond", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def test_without_the_rights_every_command_is_77(shared):
    for arguments in (["status"], ["explain", "job-1"], ["unpin", "job-1"]):
        done = run_as_nobody(*arguments, "--socket", str(shared.socket_path))
        assert done.returncode == 77, done.stderr
        assert "only root and the socket's group may connect to the agent; run as root" in done.stderr
        assert done.stdout == ""


def test_doctor_sees_the_running_agent(shared):
    findings = {finding["check"]: finding for finding in answered(shared, "doctor")["findings"]}
    assert findings["agent"]["text"] == f"it answers on {shared.socket_path} and follows 2 jobs"
    assert findings["metrics"]["text"] == f"the agent serves http://127.0.0.1:{shared.port}/metrics"
    assert findings["rights"]["level"] == "ok"
    assert f"{TOP}/job-1 -> job 'job-1' of operation 'sort'" in findings["source 1"]["text"]
    assert "pid " in run_quietly(shared, "doctor")
