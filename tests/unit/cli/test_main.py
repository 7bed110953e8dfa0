"""The command line as a whole: help of every command, exit codes, output that nobody reads any more."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from cpumond import __version__
from cpumond.cli import COMMANDS, cli, main, run
from cpumond.errors import CpumondError, CreateError, RefusedError

HEAVY = ("rich", "httpx2", "uvicorn", "starlette", "prometheus_client", "psutil", "jsonschema", "cgroupspy")
"""What takes long to import; no help text needs it."""

LIST_HELP = """
import contextlib, io, json, sys
from cpumond.cli import COMMANDS, run
loaded, texts = {}, {}
for name in sys.argv[1:]:
    for module in [name for name in sys.modules if name.partition(".")[0] in HEAVY]:
        del sys.modules[module]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = run([*name.split(), "--help"])
    texts[name] = (code, output.getvalue())
    loaded[name] = sorted({module.partition(".")[0] for module in sys.modules} & set(HEAVY))
print(json.dumps([texts, loaded]))
"""

SUBCOMMANDS = [*COMMANDS, "job add", "job remove", "job list", "fair-share simulate"]


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def helps() -> tuple[dict[str, tuple[int, str]], dict[str, list[str]]]:
    """Of every command: (exit code, help text), and which heavy libraries its help has imported."""
    done = run_python(f"HEAVY = {HEAVY!r}\n{LIST_HELP}", *SUBCOMMANDS)
    assert done.returncode == 0, done.stderr
    texts, loaded = json.loads(done.stdout)
    return texts, loaded


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_every_command_has_help_with_an_example(helps, command):
    code, text = helps[0][command]
    assert code == 0
    assert text.startswith(f"Usage: cpumond {command}")
    assert re.search(rf"Example:\s+(printf .*\n\s+)?cpumond {command}\b", text), text
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize(
    "command", ["status", "top", "explain", "job", "pin", "unpin", "doctor", "job add", "agent", "demo"]
)
def test_help_is_quick_because_it_imports_nothing_heavy(helps, command):
    assert helps[1][command] == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_program_itself_imports_no_command(arguments):
    program = f"""
import sys
from cpumond.cli import run
code = run({arguments!r})
loaded = [name for name in sys.modules if name.startswith(("cpumond.cli.", "cpumond.config")) or name in {HEAVY!r}]
sys.exit(f"imported {{loaded}}" if loaded else code)
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert "cpumond" in done.stdout


def test_help_lists_every_command_with_its_line(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, text) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text[:40])}", out, re.MULTILINE), name
    assert "Try it: cpumond demo" in out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_of_the_table_is_there(name):
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, click.Command)
    assert command.name == name


def test_version(capsys):
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["job"]])
def test_without_a_command_the_help_is_shown(arguments, capsys):
    code = run(arguments)
    captured = capsys.readouterr()
    assert (captured.out + captured.err).startswith("Usage: cpumond")
    assert code in (0, 64)  # 0 with click before 8.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], r"cpumond: No such command 'nonsense'\. See 'cpumond --help'\.\n"),
        (["--nonsense"], r"cpumond: No such option.* See 'cpumond --help'\.\n"),
        (["status", "--nonsense"], r"cpumond: No such option.* See 'cpumond status --help'\.\n"),
        (["job", "nonsense"], r"cpumond: No such command 'nonsense'\. See 'cpumond job --help'\.\n"),
        (["restore", "--quick"], r"cpumond: --quick is for ExecStopPost=, .*leave it out\n"),
        (["explain"], r"cpumond: Missing argument 'JOB'\. See 'cpumond explain --help'\.\n"),
        (["schema"], r"cpumond: Missing argument 'NAME'\. .*heartbeat.*\. See 'cpumond schema --help'\.\n"),
    ],
)
def test_a_wrong_command_line_is_64_and_one_sentence(arguments, message, capsys):
    assert run(arguments) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(message, err)


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Run a command that ends with an exception; the exit code."""

    def run_with(error: BaseException) -> int:
        @click.command("status")
        def broken() -> None:
            raise error

        monkeypatch.setattr(type(cli), "get_command", lambda *_: broken)
        return run(["status"])

    return run_with


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (CpumondError("it is gone"), 69, "it is gone"),
        (CreateError("cannot make x"), 73, "cannot make x"),
        (RefusedError("outside managed_roots"), 77, "outside managed_roots"),
        (PermissionError(13, "x", "/etc/x"), 77, "/etc/x: Permission denied; run as root"),
        (OSError(28, "x", "/var/x"), 69, "/var/x: No space left on device"),
        (click.UsageError("wrong"), 64, "wrong"),
        (CpumondError("it is\n\tgone\n"), 69, "it is gone\n"),
        (
            ZeroDivisionError("by\nzero"),
            69,
            "internal error: ZeroDivisionError: by zero; run with CPUMOND_DEBUG=1 for the traceback\n",
        ),
    ],
)
def test_errors_are_one_sentence_and_an_exit_code(raising, capsys, monkeypatch, error, code, sentence):
    monkeypatch.delenv("CPUMOND_DEBUG", raising=False)
    assert raising(error) == code
    err = capsys.readouterr().err
    assert err.startswith(f"cpumond: {sentence}")
    assert err.count("\n") == 1


def test_ctrl_c_is_130(raising):
    assert raising(KeyboardInterrupt()) == 130


def test_a_mistake_of_our_own_has_a_traceback_where_it_is_asked_for(raising, capsys, monkeypatch):
    monkeypatch.setenv("CPUMOND_DEBUG", "1")
    assert raising(ZeroDivisionError("x")) == 69
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert "in broken" in err
    assert err.endswith("\ncpumond: internal error: ZeroDivisionError: x; run with CPUMOND_DEBUG=1 for the traceback\n")


def test_an_exit_that_is_asked_for_is_not_an_error(raising):
    with pytest.raises(SystemExit) as end:
        raising(SystemExit(3))
    assert end.value.code == 3


def test_an_error_that_nobody_can_read_keeps_its_exit_code():
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "cpumond", "nonsense"], stderr=full, timeout=60, check=False)
    assert done.returncode == 64


def test_main_ends_the_process_with_the_exit_code(capsys):
    with pytest.raises(SystemExit) as end:
        main(["nonsense"])
    assert end.value.code == 64
    capsys.readouterr()


def run_into_closed_pipe(program: str, *arguments: str) -> tuple[int, str]:
    """A program whose output goes into a pipe that nobody reads: (exit code, its stderr)."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program, *arguments],
            stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(write_end)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["status", "--help"], ["schema", "heartbeat"], ["check-config", "CONFIG"], ["doctor", "--json"]],
)
def test_output_that_nobody_reads_is_no_error(arguments, tmp_path):
    (tmp_path / "cpumond.toml").write_text("")
    arguments = [str(tmp_path / "cpumond.toml") if word == "CONFIG" else word for word in arguments]
    assert run_into_closed_pipe("from cpumond.cli import main; main()", *arguments) == (0, "")


def test_output_that_is_only_flushed_at_the_end_is_no_error_either(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,usage_cores\n0,0\n1,1\n")
    program = "from cpumond.cli import main; main()"
    assert run_into_closed_pipe(program, "replay", str(trace), "--cpu-limit", "2") == (0, "")


@pytest.mark.parametrize("as_json", [False, True])
def test_check_config_warns_of_options_without_effect_and_is_content(tmp_path, as_json):
    path = tmp_path / "cpumond.toml"
    path.write_text('[monitor]\nlimit_rule = "peak"\nvote_window_size = 7\n')
    program = "from cpumond.cli import main; main()"
    done = run_python(program, "check-config", str(path), *(["--json"] if as_json else []))
    sentence = f'{path}: monitor.vote_window_size has no effect under limit_rule = "peak"'
    assert done.returncode == 0
    assert done.stderr == ("" if as_json else f"warning: {sentence}\n")
    if as_json:
        assert json.loads(done.stdout)["warnings"] == [sentence]
    path.write_text('[monitor]\nlimit_rule = "peak"\n')
    assert run_python(program, "check-config", str(path)).stderr == ""


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["schema", "heartbeat"]])
def test_a_closed_standard_output_is_no_error(arguments):
    program = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'cpumond', *sys.argv[1:]])"
    done = run_python(program, *arguments)
    assert done.stderr == ""
    assert done.returncode in (0, 69)


def test_a_full_disk_is_said_in_a_sentence():
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cpumond", "schema", "heartbeat"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 69
    assert done.stderr.startswith("cpumond: the system: No space left on device")


def test_the_module_is_the_program(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "cpumond", "--version"],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    with contextlib.suppress(FileNotFoundError):
        assert not os.listdir(tmp_path)


def test_the_agent_holds_no_library_that_it_never_uses_and_nobody_else_is_kept_from_it(tmp_path):
    (tmp_path / "wrong.toml").write_text("no = 'such key'\n")
    program = f"""
import sys
from cpumond.cli import run
code = run(["agent", "--config", {str(tmp_path / "wrong.toml")!r}])
assert "cpumond.agent.loop" in sys.modules
assert not [name for name in sys.modules if name.partition(".")[0] in ("rich", "pygments", "greenlet")]
import rich.table
sys.exit(code)
"""
    done = run_python(program)
    assert (done.returncode, "no" in done.stderr) == (78, True), done.stderr
