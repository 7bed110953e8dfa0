"""Commands while the leader is killed, stopped and ended, again and again."""

from pathlib import Path

import pytest
from commands_through_takeovers import run_commands, shared_schedulers

ROUNDS = 30


def test_no_acknowledged_command_is_lost_and_none_is_done_twice(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with shared_schedulers(tmp_path, database, 3) as schedulers:
        acknowledged, unknown = run_commands(schedulers, ROUNDS)
    with capsys.disabled():
        print(f"\n3 schedulers, {ROUNDS} losses of the leader: {acknowledged} commands acknowledged, {unknown} failed")
    assert acknowledged > 5 * ROUNDS, "too few to show anything"
