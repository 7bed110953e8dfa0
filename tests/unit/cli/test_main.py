"""The command line as a whole: help of every command, sentences and exit codes."""

import json
import re
from collections.abc import Callable

import click
import pytest

from cpumond import __version__
from cpumond.cli import COMMAND_GROUPS, COMMANDS, cli, main, run
from cpumond.core.errors import CpumondError, CreateError, RefusedError

SUBCOMMANDS = [*COMMANDS, "job add", "job remove", "job list", "fair-share simulate"]


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_every_command_has_help_with_an_example(capsys, command):
    assert run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: cpumond {command}")
    assert re.search(rf"Example:\s+(printf .*\n\s+)?cpumond {command}\b", text), text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_help_lists_every_command_once_with_its_line_below_its_group(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    sections = dict(re.findall(r"^(\S.*):\n((?:  .*\n)+)", out, re.MULTILINE))
    assert list(sections) == ["Options", *COMMAND_GROUPS]
    for title, group in COMMAND_GROUPS.items():
        # In one column in all groups; what is folded stands further to the right.
        assert re.findall(r"^  (\S+)", sections[title], re.MULTILINE) == list(group)
        for name, (_, text) in group.items():
            assert re.search(rf"^  {name:<14}  {re.escape(text[:40])}", sections[title], re.MULTILINE), name
    assert len(COMMANDS) == sum(map(len, COMMAND_GROUPS.values()))
    assert all(len(line) <= 100 for line in out.splitlines())
    assert "Try it: cpumond demo" in out


def test_version(capsys):
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["job"]])
def test_without_a_command_the_help_is_shown(arguments, capsys):
    code = run(arguments)
    captured = capsys.readouterr()
    assert (captured.out + captured.err).startswith("Usage: cpumond")
    assert code in (0, 64)  # 0 with click before 8.2


@pytest.mark.parametrize(("arguments", "message"), [
    (["nonsense"], r"cpumond: No such command 'nonsense'\. See 'cpumond --help'\.\n"),
    (["--nonsense"], r"cpumond: No such option.* See 'cpumond --help'\.\n"),
    (["status", "--nonsense"], r"cpumond: No such option.* See 'cpumond status --help'\.\n"),
    (["operation", "when", "1", "--shorter"], r"cpumond: No such option\W+--shorter.* Removed; .* why POOL.*\n"),
    (["fair-share", "x", "--format", "table"], r"cpumond: .* 'table' was removed; JSON has the numbers, .*\n"),
    (["fair-share", "simulate", "x", "--csv", "y"],
     r"cpumond: No such option\W+--csv.* Removed; the rows are JSON.*\n"),
    (["report", "--html", "x"], r"cpumond: No such option\W+--html.* Removed; the scheduler's web page has the .*\n"),
    (["report", "-o", "html"], r"cpumond: .* 'html' was removed; the scheduler's web page has the graphs, .*\n"),
    (["statsu"], r"cpumond: No such command 'statsu'\. Did you mean 'status'\? See 'cpumond --help'\.\n"),
    (["job", "nonsense"], r"cpumond: No such command 'nonsense'\. See 'cpumond job --help'\.\n"),
    (["restore", "--quick"], r"cpumond: --quick is for ExecStopPost=, .*leave it out\n"),
    (["explain"], r"cpumond: Missing argument 'JOB'\. See 'cpumond explain --help'\.\n"),
    (["schema"], r"cpumond: Missing argument 'NAME\.\.\.'\. See 'cpumond schema --help'\.\n"),
])  # fmt: skip
def test_a_wrong_command_line_is_64_and_one_sentence(arguments, message, capsys):
    assert run(arguments) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(message, err)


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    def run_with(error: BaseException) -> int:
        @click.command("status")
        def broken() -> None:
            raise error

        monkeypatch.setattr(type(cli), "get_command", lambda *_: broken)
        return run(["status"])

    return run_with


@pytest.mark.parametrize(("error", "code", "sentence"), [
    (CpumondError("it is gone"), 69, "it is gone"),
    (CreateError("cannot make x"), 73, "cannot make x"),
    (RefusedError("outside managed_roots"), 77, "outside managed_roots"),
    (PermissionError(13, "x", "/etc/x"), 77, "/etc/x: Permission denied; run as root"),
    (OSError(28, "x", "/var/x"), 69, "/var/x: No space left on device"),
    (click.UsageError("wrong"), 64, "wrong"),
    (CpumondError("it is\n\tgone\n"), 69, "it is gone\n"),
    (CpumondError("node \x1b]0;x\x07\x9b2J"), 69, "node \\x1b]0;x\\x07\\x9b2J\n"),
    (ZeroDivisionError("by\nzero"), 69,
     "internal error: ZeroDivisionError: by zero; run with CPUMOND_DEBUG=1 for the traceback\n"),
])  # fmt: skip
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


def test_main_ends_the_process_with_the_exit_code(capsys):
    with pytest.raises(SystemExit) as end:
        main(["nonsense"])
    assert end.value.code == 64
    capsys.readouterr()


@pytest.mark.parametrize("as_json", [False, True])
def test_check_config_warns_of_options_without_effect_and_is_content(tmp_path, capsys, as_json):
    path = tmp_path / "cpumond.toml"
    path.write_text('[monitor]\nlimit_rule = "peak"\nvote_window_size = 7\n')
    assert run(["check-config", str(path), *(["--json"] if as_json else [])]) == 0
    out, err = capsys.readouterr()
    sentence = f'{path}: monitor.vote_window_size has no effect under limit_rule = "peak"'
    assert err == ("" if as_json else f"warning: {sentence}\n")
    if as_json:
        assert json.loads(out)["warnings"] == [sentence]
    assert run(["check-config", "--quiet", str(path)]) == 0
    assert capsys.readouterr() == ("", f"warning: {sentence}\n")
    path.write_text('[monitor]\nlimit_rule = "peak"\n')
    assert run(["check-config", str(path)]) == 0
    assert capsys.readouterr().err == ""


def test_scheduler_check_reads_what_the_configuration_names(tmp_path, capsys):
    """Nothing is opened or made; a file of tokens that is missing fails as at a start."""
    path = tmp_path / "scheduler.toml"
    path.write_text(f'state_dir = "{tmp_path}/state"\n')
    assert run(["scheduler", "--check", "--config", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: good.\n"
    path.write_text(f'[api]\ntokens_file = "{tmp_path}/tokens"\n')
    assert run(["scheduler", "--check", "--config", str(path)]) == 78
    assert f"{tmp_path}/tokens: cannot be read" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]
