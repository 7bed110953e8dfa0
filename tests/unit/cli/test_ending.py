"""Signals that end a command, at whatever moment they come."""

import os
import signal
import threading

from cpumond.cli.ending import ended_by, list_ending_signals

NUMBERS = (signal.SIGUSR1,)


def test_a_signal_ends_the_wait_and_the_handler_before_is_back():
    before = signal.getsignal(signal.SIGUSR1)
    with ended_by(NUMBERS) as ending:
        assert not ending.wait(0.0)
        assert not ending.wait(-1.0)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        assert ending.wait()
        timer.join()
        assert ending.is_set()
        assert ending.wait(60.0)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_signals_while_it_begins_to_wait_never_make_it_wait_for_ever():
    """Thousands of them, from another thread, at all moments of a loop that only waits."""
    for _ in range(300):
        with ended_by(NUMBERS) as ending:
            sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
            sender.start()
            while not ending.wait(0.0):
                pass
            sender.join()
            for _ in range(20):
                os.kill(os.getpid(), signal.SIGUSR1)


def test_a_hangup_that_is_ignored_stays_so():
    """As under nohup."""
    assert list_ending_signals() == [signal.SIGTERM, signal.SIGHUP]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert list_ending_signals() == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
