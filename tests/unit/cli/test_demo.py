"""The parts of ``cpumond demo`` that need no kernel: what its jobs want, its signals, its printing."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from cpumond.cli import demo
from cpumond.testing import SimulatedKernel


def test_bursty_wants_more_than_it_ordered_in_the_last_five_of_twenty_seconds():
    assert [demo.demand_bursty(second) for second in (0.0, 14.9, 15.0, 19.9, 20.0, 35.0)] == [
        demo.SLEEP_CORES, demo.SLEEP_CORES, 2.0, 2.0, demo.SLEEP_CORES, 2.0,
    ]  # fmt: skip
    assert demo.BURST_CORES > demo.ORDERED_CORES
    assert demo.THREADS["bursty"] >= demo.BURST_CORES


def test_a_simulated_burst_is_throttled_at_once_also_at_the_full_limit(tmp_path):
    kernel = SimulatedKernel(str(tmp_path), {"bursty": demo.demand_bursty})
    place = tmp_path / "cgroup" / "bursty"
    (place / "cpu.max").write_text(f"{round(demo.ORDERED_CORES * 100_000)} 100000\n")
    kernel.advance("bursty", demo.demand_bursty(15.0), 0.1)
    stat = dict(line.split() for line in (place / "cpu.stat").read_text().splitlines())
    assert stat["nr_throttled"] == stat["nr_periods"] == "1"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_only_says_that_it_is_time_to_stop(number):
    before = signal.getsignal(number)
    with demo._stop_on_signals() as stopped:
        assert not stopped.is_set()
        os.kill(os.getpid(), number)
        assert stopped.wait(5.0)
    assert signal.getsignal(number) == before


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with demo._stop_on_signals() as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopped.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_table_into_a_closed_pipe_is_an_error_for_the_caller_not_the_end(monkeypatch):
    from rich.table import Table

    read_end, write_end = os.pipe()
    os.close(read_end)
    pipe = open(write_end, "w", encoding="utf-8")  # noqa: SIM115 - its close fails too
    monkeypatch.setattr(sys, "stdout", pipe)
    with pytest.raises(BrokenPipeError):
        demo._print(Table("x", title="y"))
    monkeypatch.undo()
    with pytest.raises(BrokenPipeError):
        pipe.close()
