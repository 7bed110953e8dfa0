"""Where a keeper listens when its directory was removed, and what the next agent finds there."""

import fcntl
import gc
import os
from pathlib import Path

from cpumond.host.executor.keeper import LOCK_NAME, SOCKET_NAME
from cpumond.host.executor.keeper.parent import Keeper, take_place


def test_a_place_where_nobody_can_listen_leaves_the_keeper_as_it_is(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    directory, _ = take_place(str(place))
    keeper = Keeper(str(place), directory, 1024)
    listener = keeper._listener
    place.rename(tmp_path / "removed")
    (place / SOCKET_NAME).mkdir(parents=True)
    gc.collect()  # what other tests left is closed now, and not meanwhile
    before = set(os.listdir("/proc/self/fd"))
    keeper._listen_anew()
    assert keeper._listener is listener
    assert listener.fileno() >= 0
    assert set(os.listdir("/proc/self/fd")) == before
    with open(place / LOCK_NAME, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (place / SOCKET_NAME).rmdir()
    keeper._listen_anew()
    assert keeper._listener is not listener
    assert (place / SOCKET_NAME).is_socket()
    keeper._listener.close()
