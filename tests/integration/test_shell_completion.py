"""Completion in the shells themselves, with the scripts that the Debian package has: what Tab gives."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_command
from test_json_api import LiveScheduler, make_node
from waiting import wait_until

ASK = {
    # What the shell calls at Tab, with what is typed so far; and how it shows what it was given.
    "bash": (
        'source "$1"; COMP_WORDS=({words}); COMP_CWORD={last}; _cpumond_completion cpumond; echo "${{COMPREPLY[@]}}"'
    ),
    "zsh": (
        "compdef() {{ }}; _describe() {{ print -l ${{completions_with_descriptions%%:*}} }}; "
        "compadd() {{ print -l $completions }}; "
        'source "$1"; words=({words}); CURRENT={last}+1; _cpumond_completion'
    ),
    "fish": 'source $argv[1]; complete --do-complete "{words}" | string replace --regex "\\t.*" ""',
}


def ask(shell: str, words: str, tmp_path: Path) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is missing; Debian's package {shell} has it")
    # The scripts call `cpumond` as found on PATH.
    program = tmp_path / "bin" / "cpumond"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m cpumond "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    script = tmp_path / f"completion.{shell}"
    script.write_text(run_command(["completion", shell]).stdout)
    plain = {"bash": ["--noprofile", "--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    command = [shell, *plain, "-c", ASK[shell].format(words=words, last=len(words.split()) - 1)]
    command += [str(script)] if shell == "fish" else [shell, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.stderr == ""
    return done.stdout.split()


def ask_for_names(shell: str, words: str, tmp_path: Path) -> list[str]:
    """The same of names that the scheduler knows: on a busy machine its answer may come too late for one Tab."""
    return wait_until(lambda: ask(shell, words, tmp_path), f"{shell} offers something")


@pytest.mark.parametrize("shell", ASK)
def test_tab_after_the_beginning_of_commands(shell: str, tmp_path: Path) -> None:
    assert ask(shell, "cpumond po", tmp_path) == ["pool"]
    assert sorted(ask(shell, "cpumond re", tmp_path)) == ["record", "replay", "report", "restore"]


@pytest.mark.parametrize("shell", ASK)
def test_tab_gives_known_names_and_none_that_a_shell_would_interpret(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveScheduler(tmp_path) as server:
        monkeypatch.setenv("CPUMOND_SCHEDULER", server.url)
        for name in ("research", "restless", "other"):
            server.post("/trees/default/pools", {"name": name}, 201)
        assert sorted(ask_for_names(shell, "cpumond pool show re", tmp_path)) == ["research", "restless"]
        for name in ("$(id)", "`id`", "a b", "x;id", "*", "a,b", "n\nplain,host-m", "q'", "\x1b[31m", "good"):
            make_node(server, f"host-{name}").register()
        # A description is no candidate either, whatever is in it.
        operation = server.start("p", title="one\nplain\n$(id)\ntwo\x1b[31m")
        assert ask_for_names(shell, "cpumond node show host", tmp_path) == ["host-good"]
        assert ask_for_names(shell, f"cpumond operation show {operation[:3]}", tmp_path) == [operation]


@pytest.mark.parametrize("shell", ASK)
def test_tab_gives_nothing_where_no_scheduler_answers(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPUMOND_SCHEDULER", "http://127.0.0.1:1")
    assert ask(shell, "cpumond pool show re", tmp_path) == []
