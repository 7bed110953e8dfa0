"""Files that are removed while an agent runs: it says so, and gives way to another agent that has come."""

import fcntl
import os
import stat
from pathlib import Path

import pytest

from cpumond.agent.limits import first_aid
from cpumond.agent.limits.restore import LOCK_FILE, RunLock
from cpumond.agent.places import LOG_AGAIN_S, PATIENCE, Places
from cpumond.agent.state_file import Original, Originals, load_newest, overwrite, read_boot_id, save
from cpumond.core.errors import AccessError, CreateError, UnavailableError
from cpumond.host.cgroup.settings import CpuSettings
from cpumond.testing import make_v2_host, v2_cgroup

FULL = CpuSettings(200_000, 100_000)


def test_a_loss_is_told_for_a_while() -> None:
    lost = [["/state/x"], [], []]
    places = Places(lambda: lost.pop(0))
    for now_s, told in ((10.0, True), (10.0 + LOG_AGAIN_S - 1, True), (10.0 + LOG_AGAIN_S, False)):
        places.look(now_s)
        assert bool(places.problem) == told
    assert places.lost_total == 1


def test_a_file_that_cannot_be_written_is_reported_and_delays_nothing_else() -> None:
    errors = [AccessError("no rights"), AccessError("no rights"), None]
    looked = []

    def fail() -> list[str]:
        error = errors.pop(0)
        if error is not None:
            raise error
        return []

    places = Places(fail, lambda: looked.append(1) or [])  # type: ignore[func-returns-value]
    told = []
    for now_s in range(3):
        places.look(now_s)
        told.append(places.problem)
    assert (told, len(looked)) == (["no rights", "no rights", ""], 3)


def test_a_lock_that_was_removed_is_taken_again(tmp_path: Path) -> None:
    lock = RunLock(str(tmp_path / "run"), "")
    assert lock.look_after() == []
    os.unlink(lock.path)
    os.rmdir(tmp_path / "run")
    assert lock.look_after() == [lock.path]
    with pytest.raises(UnavailableError, match=f"pid {os.getpid()}"):
        RunLock(str(tmp_path / "run"), "")
    lock.close()


def test_nobody_else_may_hold_the_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).touch(0o644)
    before = os.umask(0)
    try:
        lock = RunLock(str(tmp_path), "")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(lock.path).st_mode) == 0o600
    lock.close()


def test_an_agent_gives_way_to_a_holder_of_its_lock_but_not_to_a_restore(tmp_path: Path) -> None:
    lock = RunLock(str(tmp_path), "")
    written = []
    places = Places(lambda: written.append(1) or [])  # type: ignore[func-returns-value]
    places.lock = lock.look_after
    os.unlink(lock.path)
    other = os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    for now_s in range(PATIENCE - 1):
        places.look(now_s)
    assert (places.is_ousted, written) == (False, [])
    fcntl.flock(other, fcntl.LOCK_UN)
    places.look(5.0)
    assert (places.is_ousted, written) == (False, [1])
    fcntl.flock(other, fcntl.LOCK_UN)
    os.unlink(lock.path)
    os.close(other)
    other = os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    for now_s in range(PATIENCE):
        places.look(now_s)
    assert (places.is_ousted, written) == (True, [1])
    os.close(other)
    lock.close()


def make_copies(tmp_path: Path, *numbers: int) -> list[str]:
    paths = [str(tmp_path / f"copy{number}") for number in numbers]
    for number, path in zip(numbers, paths, strict=True):
        save(path, Originals("boot", {f"jobs/{number}": Original(1, FULL)}, number))
    return paths


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1)])
def test_the_copy_with_the_larger_number_counts(tmp_path: Path, numbers: tuple[int, int]) -> None:
    content, complaint = load_newest(make_copies(tmp_path, *numbers))
    assert content is not None
    assert (list(content.cgroups), complaint) == (["jobs/2"], "")


def test_a_damaged_or_unreadable_copy_does_not_hide_the_other(tmp_path: Path) -> None:
    paths = make_copies(tmp_path, 1, 2)
    Path(paths[1]).write_bytes(b"\xff")
    (tmp_path / "folder").mkdir()
    for bad in (paths[1], str(tmp_path / "folder")):
        content, complaint = load_newest([bad, paths[0]], keep_damaged=True)
        assert content is not None
        assert (content.number, bad in complaint) == (1, True)
    with pytest.raises(CreateError, match="folder"):
        load_newest([str(tmp_path / "folder"), str(tmp_path / "none")])


def test_a_file_is_overwritten_in_place(tmp_path: Path) -> None:
    [path] = make_copies(tmp_path, 1)
    before = os.stat(path).st_ino
    overwrite(path, Originals("boot", {}, 2))
    assert os.stat(path).st_ino == before
    assert load_newest([path])[0] == Originals("boot", {}, 2)


def test_first_aid_takes_the_newer_copy_too(tmp_path: Path) -> None:
    mountinfo = make_v2_host(tmp_path, {name: v2_cgroup(quota="50000 100000") for name in ("a", "b")})
    inodes = {name: os.stat(tmp_path / "cgroup" / name).st_ino for name in ("a", "b")}
    for place, name, number in (("run", "a", 3), ("state", "b", 4)):
        (tmp_path / place).mkdir()
        content = Originals(read_boot_id(), {name: Original(inodes[name], FULL)}, number)
        save(str(tmp_path / place / first_aid.STATE_FILE), content)
    told = {"SERVICE_RESULT": "signal", "STATE_DIRECTORY": f"{tmp_path}/state", "RUNTIME_DIRECTORY": f"{tmp_path}/run"}
    assert first_aid.raise_quotas(told, mountinfo) == 1
    assert (tmp_path / "cgroup" / "b" / "cpu.max").read_text().startswith("200000")
    assert (tmp_path / "cgroup" / "a" / "cpu.max").read_text().startswith("50000")
