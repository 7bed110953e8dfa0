"""``cpumond tree export``, ``plan`` and ``apply`` against real schedulers: a tree kept as a file."""

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import run_command
from documents import list_commands
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment
from test_every_command import on_terminal

from cpumond.core.errors import EXIT_CONFIG, EXIT_PERMISSION, EXIT_USAGE

FILE = """
tree = "default"

[options]
acl_required = true
default_memory_limit = 536870912
enable_memory_reserve = true
guarantee_tolerance = 1.0
max_running_operation_count = 100
per_pool_counts_for_leaves_only = true
share_gang_remainders = true

[pools.research]
strong_guarantee_resources = { cpu = 4 }
weight = 2

[pools.research.pools.nightly]
weight = 0.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "default.toml"
    path.write_text(FILE)
    return path


class Shell:
    """The commands in this process, by the token of a user."""

    def __init__(self, scheduler: SchedulerProcess) -> None:
        self.url = scheduler.url

    def words(self, *words: object, who: str = "root") -> list[str]:
        return [*map(str, words), "--scheduler", self.url, "--token", who]

    def __call__(self, *words: object, code: int = 0, who: str = "root") -> tuple[str, str]:
        done = run_command(self.words(*words, who=who))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr


@pytest.fixture
def cpumond(scheduler: SchedulerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    scheduler.write_config(api=scheduler.write_tokens({"root": "admin", "ci": "user"}))
    scheduler.use_token("root")
    scheduler.start()
    monkeypatch.setenv("HOME", str(tmp_path))
    return Shell(scheduler)


def commands(scheduler: SchedulerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = scheduler.get("audit?kind=command&limit=1000")["events"]
    return found


def pools(scheduler: SchedulerProcess) -> dict[str, str]:
    return {each["name"]: each["parent"] for each in scheduler.get("trees/default/pools")["pools"] if each["parent"]}


def test_a_file_is_planned_applied_and_then_nothing_is_left_to_do(
    scheduler: SchedulerProcess, cpumond: Shell, file: Path
) -> None:
    _, refused = cpumond("tree", "plan", file, "--detailed-exitcode", "--simulate", code=64)
    assert "--simulate shows no plan" in refused
    plan, _ = cpumond("tree", "plan", file, "--detailed-exitcode", code=2)
    assert plan.splitlines()[0] == "~ tree default: max_running_operation_count: not set -> 100"
    assert "+ pool nightly: made" in plan
    assert "2 to create, 1 to change, 0 to remove" in plan
    assert pools(scheduler) == {}
    _, told = cpumond("tree", "apply", file, code=EXIT_USAGE)
    assert "give --yes to apply it without a question" in told
    assert pools(scheduler) == {}
    done, _ = cpumond("tree", "apply", file, "--yes", "--why", "Research gets more")
    assert done.splitlines()[-1] == "tree default matches the file"
    assert pools(scheduler) == {"research": "<Root>", "nightly": "research"}
    (entry, *others) = commands(scheduler)
    assert (entry["user"], entry["command"], entry["request"]["why"]) == ("root", "ApplyTree", "Research gets more")
    assert 'root applied a file to pool tree "default" (Research gets more): ' in entry["text"]
    assert entry["plan"].startswith("3 changes")
    again, _ = cpumond("tree", "apply", file, "--yes", "--why", "again")
    assert again == "nothing to do: the tree matches the file\n"
    assert cpumond("tree", "plan", file, "--detailed-exitcode")[0] == again
    assert commands(scheduler) == [entry, *others]


def test_what_is_exported_twice_is_equal_and_changes_nothing(
    scheduler: SchedulerProcess, cpumond: Shell, file: Path, tmp_path: Path
) -> None:
    cpumond("tree", "apply", file, "--yes")
    texts = {form: cpumond("tree", "export", "--format", form)[0] for form in ("toml", "yaml", "json")}
    scheduler.kill()
    scheduler.start()
    cpumond.url = scheduler.url
    for form, text in texts.items():
        assert cpumond("tree", "export", "default", "--format", form)[0] == text
        path = tmp_path / f"exported.{form}"
        path.write_text(text)
        assert cpumond("tree", "plan", path, "--detailed-exitcode", "--prune")[0].startswith("nothing to do")
    assert "[pools.research.pools.nightly]\nweight = 0.5\n" in texts["toml"]
    assert json.loads(texts["json"])["pools"]["research"]["pools"]["nightly"] == {"weight": 0.5}
    told = json.loads(cpumond("tree", "export", "--json")[0])
    assert told["revision"] == scheduler.get("trees/default/file")["revision"]
    (path := tmp_path / "renamed.toml").write_text(
        cpumond("tree", "export", "--ids")[0].replace("pools.research", "pools.science")
    )
    assert "~ pool science: name: research -> science" in cpumond("pool", "plan", path)[0]


def test_a_wrong_file_and_who_may_not_apply_one_change_nothing(
    scheduler: SchedulerProcess, cpumond: Shell, file: Path
) -> None:
    """Which change needs which right is in ``tests/property/test_rights_laws.py``."""
    file.write_text(FILE.replace("weight = 0.5", "weihgt = 0.5"))
    _, told = cpumond("tree", "apply", file, "--yes", code=EXIT_CONFIG)
    assert f'{file}:18: pool "nightly": weihgt: is no option of a pool; did you mean "weight"?' in told
    _, told = cpumond("tree", "plan", file.with_name("no.toml"), code=69)
    assert "No such file" in told
    _, told = cpumond("tree", "plan", "default", code=EXIT_USAGE)
    assert "expected the name of a file that ends with .toml" in told
    assert pools(scheduler) == {}
    file.write_text(FILE)
    cpumond("tree", "apply", file, "--yes")
    file.write_text(cpumond("tree", "export", who="ci")[0].replace("weight = 0.5", 'mode = "fifo"'))
    seen, told = cpumond("tree", "plan", file, "--detailed-exitcode", who="ci", code=2)
    assert seen == (
        "~ pool nightly: weight: 0.5 -> not set\n~ pool nightly: mode: not set -> fifo\n"
        "0 to create, 1 to change, 0 to remove\n"
    )
    assert "this is the difference alone, without its effect on shares, and you may not apply it: ci may not" in told
    _, told = cpumond("tree", "apply", file, "--yes", who="ci", code=EXIT_PERMISSION)
    assert 'ci may not change the options of pool "nightly"' in told


def test_the_documents_example_is_one(cpumond: Shell, file: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/pools-as-files.md").read_text()
    blocks = dict(re.findall(r"^```(toml|yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    file.write_text(blocks["toml"])
    cpumond("tree", "apply", file, "--yes")
    assert below_head(cpumond("tree", "export")[0]) == file.read_text()
    for name, job in yaml.safe_load(blocks["yaml"]).items():
        words = shlex.split(job["script"].replace("pools.toml", str(file)))[1:]
        assert cpumond(*words)[0].startswith("nothing to do"), name


PAGES = ("pools", "why-idle", "what-if", "preemption", "nodes", "events", "scheduler", "jobs")
NOT_RUN = re.compile(r"scheduler|cluster|run|top|undo|report|operation wait|.* (?:[A-Z]+|-|--follow|\S+\.toml)( |$)")
"""Commands that run on, need a terminal or a minute of history, and those with a placeholder."""


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work_in_their_order(tmp_path: Path, page: str) -> None:
    text = (Path(__file__).parents[2] / f"docs/{page}.md").read_text()
    typed = [words for words, is_fenced in list_commands(text) if is_fenced and not NOT_RUN.match(" ".join(words))]
    assert len(typed) > 1
    with contextlib.closing(SchedulerProcess(tmp_path)) as process:
        process.write_config()
        process.start()
        for name in ("host-17", "host1"):
            PlayedNode(process, name).register()
        if page not in ("pools", "scheduler"):
            process.create_pool("research")
        for words in typed:
            place = words.index("--") if "--" in words else len(words)  # options go before a job's command
            done = run_command([*words[:place], "--scheduler", process.url, *words[place:]])
            assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"


def below_head(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#")).lstrip()


def test_a_terminal_shows_the_plan_in_colour_and_asks(scheduler: SchedulerProcess, cpumond: Shell, file: Path) -> None:
    for answer, made in (("n", set()), ("y", {"research", "nightly"})):
        environment = {**clean_environment(), "TERM": "xterm"}
        shown, code = on_terminal(cpumond.words("tree", "apply", file), 80, environment, typed=f"{answer}\n")
        assert code == (0 if made else 130)
        assert "Apply this?" in shown
        assert "\x1b[32m+ pool nightly: made" in shown
        assert set(pools(scheduler)) == made
