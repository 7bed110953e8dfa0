"""Every command at 80 and 40 columns of a terminal, piped, as JSON against its schema, as CSV, and its help."""

import contextlib
import csv
import fcntl
import io
import json
import os
import pty
import re
import struct
import sys
import termios
import threading
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import click
import jsonschema
import pytest
from commands import end_of_process, run_command
from scheduler_process import terminal_environment
from test_json_api import LiveScheduler, make_node
from waiting import wait_until

from cpumond.cli import cli, run
from cpumond.cli.answers import ANSWERS
from cpumond.cli.schema import make_schema
from cpumond.scheduler.store.sqlite import open_sqlite_store

LONG_POOL = "research-on-large-models"
WIDE_TITLE = "Обучение 訓練 der größten Modelle aller Zeiten, mit sehr langem Titel " * 2
LONG_NODE = "host-17.rack-4.example.org"
HELP_ONLY = {"agent", "scheduler", "stub-scheduler", "kubernetes publish", "cluster", "demo"}
"""Commands that run until they are ended and print a log or a story; their own tests run them, here only their help is.
What ``cluster`` and ``demo`` print with --json is checked there."""


@dataclass(frozen=True)
class Case:
    """Words behind ``cpumond``, ids of the site in braces; ``is_change``: run once; ``code``: what it ends with."""

    words: str
    is_change: bool = False
    code: int = 0
    prints_file: bool = False
    """Whether what it prints is for programs or the journal, whatever the terminal."""
    typed: str = ""
    """What is typed on a terminal, if it asks."""


AS_NAMED = ["tree list", "pool list", "operation list", "node list", "why", "fleet", "rollout show", "events", "audit"]
OF_SCHEDULER = {
    **{name: Case(name) for name in AS_NAMED},
    "tree show": Case("tree show default"),
    "tree create": Case("tree create new-tree nodes_filter=none", is_change=True),
    "tree set": Case("tree set new-tree fair_share_starvation_timeout=10000", is_change=True),
    "tree export": Case("tree export default", prints_file=True),
    "tree import": Case("tree import yunikorn {queues}", prints_file=True),
    "tree plan": Case("tree plan {file}"),
    "tree apply": Case("tree apply {file} --yes", is_change=True),
    "tree remove": Case("tree remove new-tree --yes", is_change=True),
    "pool show": Case(f"pool show {LONG_POOL}"),
    "pool create": Case("pool create new-pool", is_change=True),
    "pool set": Case("pool set new-pool weight=2", is_change=True),
    "pool move": Case("pool move new-pool --name new-name", is_change=True),
    "pool remove": Case("pool remove new-name --yes", is_change=True),
    "pool plan": Case(f"pool plan {LONG_POOL} weight=7 resource_limits={{cpu=1}}"),
    "operation start": Case("operation start --pool started -- true", is_change=True),
    "operation show": Case("operation show {operation}"),
    "operation jobs": Case("operation jobs {operation}"),
    "operation why": Case("operation why {operation}"),
    "operation when": Case("operation when {operation}"),
    "operation simulate": Case("operation simulate -f {spec}"),
    "operation set": Case("operation set {operation} weight=2", is_change=True),
    "operation patch": Case("operation patch {operation} max_failed_job_count=7", is_change=True),
    "operation abort-job": Case("operation abort-job {operation} {job}", is_change=True),
    "operation abandon-job": Case("operation abandon-job {operation} {job2}", is_change=True),
    "operation wait": Case("operation wait {operation} --state running"),
    "operation suspend": Case("operation suspend {operation}", is_change=True),
    "operation resume": Case("operation resume {operation}", is_change=True),
    "operation complete": Case("operation complete {spare}", is_change=True),
    "operation abort": Case("operation abort {spare2}", is_change=True),
    "node show": Case(f"node show {LONG_NODE}"),
    "node cordon": Case(f"node cordon {LONG_NODE} --why kernel", is_change=True),
    "node uncordon": Case(f"node uncordon {LONG_NODE}", is_change=True),
    "node tag": Case(f"node tag {LONG_NODE} ssd --why disks", is_change=True),
    "node drain": Case(f"node drain {LONG_NODE} --plan"),
    "rollout set": Case("rollout set %true weight --canary 0.5", is_change=True),
    "rollout advance": Case("rollout advance %true", is_change=True),
    "rollout stop": Case("rollout stop %true --why trouble", is_change=True),
    "rollout remove": Case("rollout remove %true", is_change=True),
    "can": Case(f"can tester use {LONG_POOL} --why"),
    "token create": Case("token create alice --expires 90d", is_change=True),
    "token list": Case("token list --all"),
    "token revoke": Case("token revoke {token}", is_change=True),
    "undo": Case("undo {change} --plan"),
    "report": Case("report", code=69),  # the history of this scheduler is turned off
    "top": Case("top --cluster --once"),
    "store copy": Case("store copy --from {store} --to {copy}", is_change=True),
}
ASK_A_NODE = {"operation log", "operation explain", "operation pin", "operation unpin", "run"}
"""Commands that need an agent: below, on a cluster."""
OF_AGENT = {
    "status": Case("status"),
    "explain": Case("explain {job}"),
    "pin": Case("pin {job} --cpu-limit 0.1", is_change=True),
    "unpin": Case("unpin {job}", is_change=True),
    "job list": Case("job list"),
    "check-config": Case("check-config {config}"),
}
OF_CGROUPS = {"dry-run", "record", "estimate", "job add", "job remove"}
"""Commands that look at a cgroup; the last two need one of their own, and tests of the control socket run them."""
ALONE = {
    "doctor": Case("doctor", code=-1),
    # What is found depends on the host, and files are shown as they are: test_init_command.py looks at its lines.
    "init": Case("init --config {agent} --unit-dir {home}", prints_file=True, typed="n\n"),
    "restore": Case("restore --config {agent}", prints_file=True),
    "replay": Case("replay {trace} --cpu-limit 10", prints_file=True),
    "simulate": Case("simulate {trace} --cpu-limit 10"),
    "fair-share": Case("fair-share {tree}", prints_file=True),
    "schema": Case("schema heartbeat", prints_file=True),
    "completion": Case("completion bash", prints_file=True),
}
CASES = {**OF_SCHEDULER, **OF_AGENT, **ALONE}


def walk(command: click.Command, context: click.Context, path: str = "") -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from walk(below, click.Context(below, info_name=name, parent=context), f"{path} {name}".strip())
    else:
        yield path, command


COMMANDS = dict(walk(cli, click.Context(cli)))


def takes(name: str, option: str) -> bool:
    return any(option in param.opts for param in COMMANDS[name].params)


def test_every_command_has_a_case():
    assert set(COMMANDS) == {*CASES, *HELP_ONLY, *ASK_A_NODE, *OF_CGROUPS}


def test_every_json_has_a_schema_and_every_table_csv():
    with_json = {name for name in COMMANDS if takes(name, "--json")}
    assert with_json == set(ANSWERS)
    for name in ANSWERS:
        jsonschema.Draft202012Validator.check_schema(make_schema(name))
    assert {name for name in with_json if not takes(name, "-o")} == set()


def test_every_default_keeps_to_its_schema():
    """A source of an engine names no pattern, and ``check-config`` prints it."""
    for name in ANSWERS:
        parts = json.loads(json.dumps(make_schema(name)["$defs"]))
        for title, part in parts.items():
            for of, field in part.get("properties", {}).items():
                kept = jsonschema.Draft202012Validator({**field, "$defs": parts})
                assert "default" not in field or kept.is_valid(field["default"]), (name, title, of)


# ---- the site


ODD_TITLES = (
    "of two\nlines\tand a tab", "red \x1b[31m and \x1b[2J gone\x07", "x" * 900,
    "תרגול של מודל \u202egnp.exe\u202c", "大規模言語モデルの訓練" * 5,
    "👩\u200d🚀 e\u0301 \u200b", "xx\x1b[2J",
)  # fmt: skip
"""None of their signs moves the cursor."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    directory = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        # Updates as often as other tests want them would take most of a core from the commands.
        patch.setattr("test_json_api.PERIOD_S", 0.2)
        server = stack.enter_context(LiveScheduler(directory, foretells=True))
        # Forecasts are made in copies of this process: at its own priority, since they are waited for.
        patch.setattr("cpumond.scheduler.trial.fork.NICENESS", 0)
        pools = "/trees/default/pools"
        server.post(pools, {"name": LONG_POOL, "attributes": {"strong_guarantee_resources": {"cpu": 2}}}, 201)
        server.post(pools, {"name": "small", "parent": LONG_POOL, "attributes": {"resource_limits": {"cpu": 3}}}, 201)
        node = make_node(server, LONG_NODE, tags=("fast", "a-tag-of-some-length", "another-tag"))
        node.register()
        server.wait_for_update()
        operation = server.start(LONG_POOL, job_count=3, title=WIDE_TITLE, alias="*long")
        wait_until(lambda: node.beat() and len(node.jobs) == 3, "three jobs")
        node.beat()
        job, job2, _ = node.jobs
        for title in ODD_TITLES:
            server.start("small", title=title, cpu_limit=0.1)
        spare, spare2 = server.start("small", title="short"), server.start("small", job_count=99)
        server.ask("PATCH", f"{pools}/small", {"edits": [{"path": ["weight"], "value": 3}]})
        trace, tree = directory / "trace.csv", directory / "tree.json"
        trace.write_text("time_s,usage_cores\n" + "".join(f"{n},0.5\n" for n in range(60)))
        tree.write_text(
            '{"now": 0, "total_resources": {"cpu": 100}, "pools": [{"name": "q", "parent": "<root>"}],'
            ' "operations": [{"name": "o", "parent": "q", "demand": {"cpu": 60}}]}'
        )
        file = directory / "default.toml"
        file.write_text(f'tree = "default"\n\n[pools.{LONG_POOL}]\nweight = 5\n')
        spec = directory / "spec.toml"
        spec.write_text('pool = "started"\n[tasks.t]\njob_count = 1\ncommand = "true"\n')
        queues = directory / "queues.yaml"
        queues.write_text("partitions: [{name: default, queues: [{name: root, queues: [{name: a}]}]}]\n")
        open_sqlite_store(str(directory / "store.db")).close()
        (directory / "agent.toml").write_text(f'state_dir = "{directory}/agent"\nruntime_dir = "{directory}/run"\n')
        token = server.post("/tokens", {"user": "bob-with-a-long-name", "note": WIDE_TITLE[:100]}, 201)["id"]
        wait_until(lambda: server.call(lambda scheduler: scheduler.state.forecasts.get(operation)), "a forecast")
        change = next(e["number"] for e in server.get("/events", kind="command")["events"] if e["can_undo"])
        yield {
            "url": server.url, "operation": operation, "spare": spare, "spare2": spare2,
            "change": str(change), "job": job, "job2": job2,
            "trace": str(trace), "tree": str(tree), "file": str(file), "token": token,
            "spec": str(spec), "queues": str(queues), "home": str(directory), "store": str(directory / "store.db"),
            "copy": str(directory / "copy.db"), "agent": str(directory / "agent.toml"),
        }  # fmt: skip


@pytest.fixture(scope="module")
def environment(site: dict[str, str]) -> dict[str, str]:
    return {**terminal_environment(site["url"]), "HOME": site["home"]}


END_OF_OUTPUT = b"\0over\0"


def on_terminal(words: list[str], columns: int, environment: dict[str, str], typed: str = "") -> tuple[str, int]:
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    os.write(main, typed.encode())
    shown = bytearray()

    def read() -> None:
        while not shown.endswith(END_OF_OUTPUT):
            shown.extend(os.read(main, 65_536))

    reader = threading.Thread(target=read)
    reader.start()
    kept = [os.dup(number) for number in range(3)]
    try:
        for number in range(3):
            os.dup2(terminal, number)
        with (
            end_of_process(),
            open(0, encoding="utf-8", closefd=False) as stdin,
            open(1, "w", encoding="utf-8", closefd=False) as stdout,
            open(2, "w", encoding="utf-8", closefd=False) as stderr,
            mock.patch.multiple(sys, stdin=stdin, stdout=stdout, stderr=stderr, __stdout__=stdout),
            mock.patch.dict(os.environ, environment, clear=True),
        ):
            code = run(words)
    finally:
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.write(terminal, END_OF_OUTPUT)
        reader.join()
        os.close(terminal)
        os.close(main)
    return shown.removesuffix(END_OF_OUTPUT).decode().replace("\r\n", "\n"), code


def without_colour(text: str) -> str:
    """What is seen: without colours, and of a line that was written again and again what it was last."""
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text)
    return "\n".join(line.rpartition("\r")[2] for line in plain.split("\n"))


def width(line: str) -> int:
    seen = (sign for sign in line if not unicodedata.combining(sign))
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in seen)


def expand(words: str, names: dict[str, str]) -> list[str]:
    return [re.sub(r"^{(\w+)}$", lambda match: names[match[1]], word) for word in words.split()]


def check_terminal(name: str, case: Case, names: dict[str, str], environment: dict[str, str]) -> None:
    words = expand(case.words, names)
    listed = list_ids(name, words, environment)
    for columns in (80, 40):
        shown, code = on_terminal(words, columns, environment, typed=case.typed)
        assert case.code in (-1, code), shown
        text = without_colour(shown)
        if case.prints_file:
            continue
        assert [sign for sign in text if sign != "\n" and not sign.isprintable()] == []
        longest = max(map(width, [word for word in text.split() if len(word) > columns] or [""]))
        # A word that is longer than a line may be indented, and so may one that only its indentation makes too long.
        too_long = [
            each
            for each in text.split("\n")
            if width(each) > columns and width(each.strip()) > longest and " " in each.strip()
        ]
        assert too_long == []
        if name in ("operation list", "operation jobs"):
            assert all(each[:8] in text for each in listed), text
            text, _ = on_terminal([*words, "--full-ids"], columns, environment)
        for each in listed:
            assert each in text, f"{each} is not whole at {columns} columns:\n{text}"
    uncoloured, _ = on_terminal(words, 80, {**environment, "NO_COLOR": "1"}, typed=case.typed)
    assert "\x1b[3" not in uncoloured


def list_ids(name: str, words: list[str], environment: dict[str, str]) -> set[str]:
    if name not in ("tree list", "pool list", "operation list", "operation jobs", "node list", "token list"):
        return set()
    answer = json.loads(run_command([*words, "--json"], environment).stdout)
    (rows,) = (value for value in answer.values() if isinstance(value, list))
    return {row.get("name") or row["id"] for row in rows}


def check_run_command(name: str, case: Case, names: dict[str, str], environment: dict[str, str]) -> None:
    words = expand(case.words, names)
    done = run_command(words, environment)
    assert case.code in (-1, done.returncode), done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    if case.code > 0 or not takes(name, "--json"):
        return
    check_json(name, words, environment)
    if not case.is_change:
        check_csv(words, environment)


def make_closed(schema: Any) -> Any:
    """The same schema, refusing fields that it does not know: what is printed and not described is a mistake."""
    if isinstance(schema, dict):
        closed = {key: make_closed(value) for key, value in schema.items()}
        if "properties" in schema and schema.get("type") == "object":
            closed.setdefault("additionalProperties", False)
        return closed
    return [make_closed(each) for each in schema] if isinstance(schema, list) else schema


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """Of what a command prints with --json."""
    return jsonschema.Draft202012Validator(make_closed(make_schema(name)))


def check_json(name: str, words: list[str], environment: dict[str, str]) -> None:
    told = run_command([*words, "--json"], environment)
    texts = told.stdout.splitlines() if name in ("events", "audit", "dry-run") else [told.stdout]
    assert texts
    for text in texts:
        validator(name).validate(json.loads(text))


def check_csv(words: list[str], environment: dict[str, str]) -> None:
    told = run_command([*words, "-o", "csv"], environment)
    header, *rows = list(csv.reader(io.StringIO(told.stdout), strict=True))
    assert len(set(header)) == len(header)
    assert {len(row) for row in rows} <= {len(header)}


@pytest.mark.parametrize("name", [name for name, case in {**OF_SCHEDULER, **ALONE}.items() if not case.is_change])
def test_a_command_on_terminals_and_in_a_pipe_as_json_and_csv(name, site, environment):
    check_terminal(name, CASES[name], site, environment)
    check_run_command(name, CASES[name], site, environment)


def test_changes_say_what_was_done_as_text_and_as_json(site, environment):
    for name, case in OF_SCHEDULER.items():
        if not case.is_change:
            continue
        words = expand(case.words, site)
        if name == "operation set":
            check_json(name, words, environment)
        shown, code = on_terminal(words, 40, environment)
        assert code == 0, shown
        lines = without_colour(shown).split("\n")
        assert [line for line in lines if width(line) > 40 and " " in line] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_the_terminal_and_breaks_no_word(name, monkeypatch, capsys):
    words = []
    for columns in (80, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run([*name.split(), "--help"]) == 0
        text = capsys.readouterr().out
        assert "Usage: cpumond" in text
        words.append(set(text.split()))
    assert words[0] == words[1]


def test_all_columns_are_there_with_wide_and_some_are_told_to_be_left_out(site, environment):
    narrow, _ = on_terminal(["operation", "list"], 80, environment)
    assert "left out at this width: " in without_colour(narrow)
    wide, _ = on_terminal(["operation", "list", "--wide"], 80, environment)
    assert WIDE_TITLE.strip() in wide
    assert "left out" not in wide
    # What can be printed is shown as it is, even where something beside it cannot.
    assert all(text in wide for text in ("of two\\nlines", "תרגול", "\\u202egnp.exe"))
    assert "demand" in wide.split("\n")[0]


# ---- names by their beginning


def test_an_operation_is_found_by_its_beginning_its_title_and_a_hyphen(site, environment):
    operation = site["operation"]
    for typed in (operation[:12], WIDE_TITLE, WIDE_TITLE[:15], "long", "*long"):
        found = json.loads(run_command(["operation", "show", typed, "--json"], environment).stdout)
        assert found["id"] == operation
    newest = json.loads(run_command(["operation", "show", "-", "--json"], environment).stdout)["id"]
    assert newest == json.loads(run_command(["operation", "list", "--json"], environment).stdout)["operations"][0]["id"]
    node = json.loads(run_command(["node", "show", LONG_NODE[:5], "--json"], environment).stdout)
    assert node["id"] == LONG_NODE
