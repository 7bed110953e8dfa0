"""Options of ``stub-scheduler`` and ``dry-run``: what is wrong in shape (64), and what is wrong in meaning (78)."""

from __future__ import annotations

import pytest

from cpumond.cli import run


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["stub-scheduler", "--listen", "x"], 64, "--listen: must be \"host:port\" with a port in [0, 65535], got 'x'"),
        (["stub-scheduler", "--listen", "127.0.0.1:70000"], 64, '--listen: must be "host:port"'),
        (["stub-scheduler", "--listen", "192.0.2.1:1"], 78, "--listen: 192.0.2.1:1 can be reached from other machines"),
        (["stub-scheduler", "--listen", "a..b:1"], 78, "--listen: 'a..b' cannot be resolved"),
        (["dry-run", "--cgroup", "/", "--set", "novalue"], 64, "Invalid value for '--set': expected key=value, for"),
        (["dry-run", "--cgroup", "/", "--set", "novalue=1"], 78, "--set: novalue: unknown key"),
        (["dry-run", "--cgroup", "/", "--set", "smoothing_factor=2"], 78, "--set: smoothing_factor: must be"),
    ],
)
def test_a_wrong_shape_is_64_and_a_wrong_meaning_78(capsys, arguments, code, sentence):
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"cpumond: {sentence}")
    assert err.count("\n") == 1
