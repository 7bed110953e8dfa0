"""Files of state_dir: whole or not at all, and what is wrong with a damaged one is said."""

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cpumond.agent import state_file
from cpumond.core.answers import RegisteredJob
from cpumond.core.errors import CpumondError, CreateError, StateFileError
from cpumond.host.cgroup.settings import CpuSettings

CONTENT = state_file.Originals(
    "boot",
    {
        "jobs/a": state_file.Original(2**63 + 5, CpuSettings(None, 100_000, 0, 1024)),
        "jobs/zażółć": state_file.Original(7, CpuSettings(50_001, 33_333, None, None), ("quota", "weight")),
    },
)
REGISTRY = state_file.Registry(
    {"a": RegisteredJob("a", "jobs/a", "op", 2.5, {"mode": "shadow", "vote_window_size": 3})},
    {"a": state_file.Pin(1.5, 1.7e9), "b": state_file.Pin(0.1)},
)


def test_a_copy_in_memory_is_of_this_boot(tmp_path: Path) -> None:
    """Whatever identity of the boot the writer saw; on a disk that outlives the boot only the identity counts."""
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        for place in (memory, tmp_path):
            state_file.save(str(place / "copy"), CONTENT, sync=False)
        assert state_file.is_of_this_boot(CONTENT, str(memory / "copy"), str(memory))
        assert not state_file.is_of_this_boot(CONTENT, str(memory / "copy"), "/run")
        assert not state_file.is_of_this_boot(CONTENT, str(memory / "none"), str(memory))
        assert state_file.is_of_this_boot(state_file.Originals(state_file.read_boot_id()), "/none")
        assert len(state_file.read_boot_id()) == 36
        if os.stat(tmp_path).st_dev == os.stat("/").st_dev:
            assert not state_file.is_of_this_boot(CONTENT, str(tmp_path / "copy"), str(tmp_path))
    finally:
        shutil.rmtree(memory)


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    """The directory is the agent's; root may be the one who writes."""
    (tmp_path / "target").write_text("precious")
    (tmp_path / "file.new").symlink_to(tmp_path / "target")
    with pytest.raises(CpumondError, match=r"write .*file"):
        state_file.save(str(tmp_path / "file"), CONTENT)
    assert (tmp_path / "target").read_text() == "precious"


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "file.state")


@pytest.mark.parametrize("content", [CONTENT, state_file.Originals(""), REGISTRY, state_file.Registry()])
def test_what_is_saved_reads_back(path, content):
    assert state_file.load(path, type(content)) is None
    state_file.save(path, content)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    Path(f"{path}.new").write_bytes(b"x" * 100_000)  # a crash left it
    state_file.save(path, content)
    assert state_file.load(path, type(content)) == content
    assert not os.path.exists(f"{path}.new")
    if isinstance(content, state_file.Registry):
        with pytest.raises(StateFileError, match="boot_id"):
            state_file.load(path, state_file.Originals)


def test_no_byte_can_change_without_being_noticed(path):
    state_file.save(path, CONTENT)
    good = Path(path).read_bytes()
    for position in range(len(good)):
        head, tail = good[:position], good[position + 1 :]
        for damaged in (head + bytes([good[position] ^ 1]) + tail, head, head + tail):
            Path(path).write_bytes(damaged)
            with pytest.raises(StateFileError, match=r"file\.state"):
                state_file.load(path, state_file.Originals)


@pytest.mark.parametrize(("header", "match"), [
    (b"cpumond-state 2 sha256=0\n{}", "version 1"),
    (b"another file\n", "not a state file"),
    (b"{}", "not a state file"),
    (b"", "not a state file"),
])  # fmt: skip
def test_a_file_of_another_kind_or_version(path, header, match):
    with open(path, "wb") as file:
        file.write(header)
    with pytest.raises(StateFileError, match=match):
        state_file.load(path, state_file.Originals)


def test_content_is_on_disk_before_its_name_and_that_before_the_return(path, monkeypatch):
    done: list[str] = []

    def note(word: str, function: Callable[..., object]) -> Callable[..., object]:
        def noted(*arguments: object) -> object:
            done.append(word)
            return function(*arguments)

        return noted

    for word in ("write", "fsync", "rename"):
        monkeypatch.setattr(f"cpumond.agent.state_file.os.{word}", note(word, getattr(os, word)))
    state_file.save(path, CONTENT)
    assert done == ["write", "fsync", "rename", "fsync"]


def test_a_save_that_fails_leaves_the_old_content(path):
    state_file.save(path, CONTENT)
    os.mkdir(f"{path}.new")
    with pytest.raises(CreateError, match="state_dir"):
        state_file.save(path, state_file.Originals("other"))
    os.rmdir(f"{path}.new")
    assert state_file.load(path, state_file.Originals) == CONTENT
    with pytest.raises(CreateError, match="No such file or directory"):
        state_file.save(f"{path}.none/file.state", CONTENT)
    os.mkdir(f"{path}.folder")
    with pytest.raises(CpumondError, match=r"file\.state\.folder"):
        state_file.load(f"{path}.folder", state_file.Originals)


def test_each_damaged_file_is_kept(path):
    kept = []
    for number in range(3):
        with open(path, "w") as file:
            file.write(str(number))
        kept.append(state_file.put_aside(path))
        assert not os.path.exists(path)
    assert [Path(name).read_text() for name in kept] == ["0", "1", "2"]


def test_directories(tmp_path):
    state_file.make_directory(str(tmp_path / "a" / "b"), 0o700, "state_dir")
    state_file.make_directory(str(tmp_path / "a" / "b"), 0o700, "state_dir")
    assert stat.S_IMODE(os.stat(tmp_path / "a" / "b").st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(CreateError, match="state_dir"):
        state_file.make_directory(str(tmp_path / "file"), 0o700, "state_dir")
    with pytest.raises(CreateError, match="state_dir"):
        state_file.make_directory(str(tmp_path / "file" / "below"), 0o700, "state_dir")


def test_the_key_of_a_node_outlives_what_becomes_of_its_file(tmp_path: Path) -> None:
    folder, path = str(tmp_path / "state"), tmp_path / "state" / state_file.KEY_FILE
    assert len({state_file.read_node_key(folder), state_file.read_node_key(folder)}) == 2, "nowhere to keep it"
    path.parent.mkdir()
    key = state_file.read_node_key(folder)
    assert state_file.read_node_key(folder) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert state_file.keep_node_key(folder, key) == []
    shutil.rmtree(folder)
    assert state_file.keep_node_key(folder, key) == [str(path)]
    assert state_file.read_node_key(folder) == key
    for content in (b"", b"\xff\n\xff", path.read_bytes()[:-3]):
        path.write_bytes(content)
        assert state_file.read_node_key(folder) not in ("", key)
