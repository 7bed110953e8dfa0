"""What ``cpumond restore`` reads of a configuration, and the short way to it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpumond.agent.config import DEFAULT_CONFIG_PATH as OF_THE_CONFIGURATION
from cpumond.agent.config import AgentConfig
from cpumond.agent.limits import restore
from cpumond.agent.limits.restore import DEFAULT_CONFIG_PATH, DEFAULT_PATHS, find_paths, main
from cpumond.agent.state_file import STATE_FILE, Original, Originals, read_boot_id, save
from cpumond.core.errors import CgroupWriteError, CpumondError, UnavailableError
from cpumond.host.cgroup.settings import CpuSettings
from cpumond.testing import make_tree, make_v2_host, v2_cgroup, write_mountinfo

UNDER_SYSTEMD = {"STATE_DIRECTORY": "/sys/state", "RUNTIME_DIRECTORY": "/sys/run"}


def write(tmp_path: Path, text: str, **drop_ins: str) -> str:
    path = tmp_path / "cpumond.toml"
    path.write_text(text)
    for name, content in drop_ins.items():
        (tmp_path / "conf.d").mkdir(exist_ok=True)
        (tmp_path / "conf.d" / f"{name}.toml").write_text(content)
    return str(path)


def test_the_defaults_are_those_of_the_configuration() -> None:
    default = AgentConfig()
    assert {key: getattr(default, key) for key in DEFAULT_PATHS} == DEFAULT_PATHS
    assert DEFAULT_CONFIG_PATH == OF_THE_CONFIGURATION
    assert find_paths(None, UNDER_SYSTEMD) == DEFAULT_PATHS


def test_what_a_configuration_names_counts(tmp_path: Path) -> None:
    path = write(tmp_path, 'state-dir = "/a"\nruntime_dir = "/b"\nmountinfo = "/c"\n[monitor]\nmode = "shadow"\n')
    assert find_paths(path, UNDER_SYSTEMD) == {"state_dir": "/a", "runtime_dir": "/b", "mountinfo": "/c"}


def test_drop_ins_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    path = write(tmp_path, 'state_dir = "/a"\n', b='state_dir = "/c"\n', a='state_dir = "/b"\n')
    assert find_paths(path, {})["state_dir"] == "/c"


@pytest.mark.parametrize("damage", ["[[[", "no_such = 1 2", "state_dir = 3", "x = " + "[" * 3000])
def test_a_damaged_file_still_says_its_directories(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path, f'state_dir = "/a"\n{damage}\n')
    assert find_paths(path, UNDER_SYSTEMD)["state_dir"] == "/a"
    assert find_paths(path, UNDER_SYSTEMD)["runtime_dir"] == "/sys/run"


def test_a_file_that_cannot_be_read_leaves_it_to_systemd(tmp_path: Path) -> None:
    assert find_paths(str(tmp_path / "none"), UNDER_SYSTEMD)["state_dir"] == "/sys/state"
    assert find_paths(str(tmp_path), {}) == DEFAULT_PATHS


@pytest.mark.parametrize("arguments", [["--help"], ["--config"], ["--conf", "x"], ["--config", "x", "y"], ["x"]])
def test_other_arguments_are_for_the_command_line(arguments: list[str]) -> None:
    assert main(arguments, {}) is None


def test_the_short_way_restores_and_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, f'state_dir = "{tmp_path}/state"\nruntime_dir = "{tmp_path}/run"\nno_such = 1\n')
    (tmp_path / "state").mkdir()
    assert main(["--config", path], {}) == 78
    out, err = capsys.readouterr()
    assert out == f"nothing to restore in {tmp_path}/state/originals.state\n"
    assert "no_such: unknown key" in err
    assert err.count("\n") == 1


def test_a_limit_that_is_not_back_is_worse_than_a_wrong_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's scripts keep the state file for this exit code alone."""
    path = write(tmp_path, f'state_dir = "{tmp_path}"\nruntime_dir = "{tmp_path}/run"\nno_such = 1\n')
    mountinfo = make_v2_host(tmp_path, {"a": v2_cgroup(quota="50000 100000")})
    (tmp_path / "cpumond.toml").write_text((tmp_path / "cpumond.toml").read_text() + f'mountinfo = "{mountinfo}"\n')
    inode = os.stat(tmp_path / "cgroup" / "a").st_ino
    save(f"{tmp_path}/{STATE_FILE}", Originals(read_boot_id(), {"a": Original(inode, CpuSettings(100_000, 100_000))}))

    def refuse(*_: object) -> None:
        raise CgroupWriteError("cpu.max", "100000", OSError(22, "Invalid argument"))

    monkeypatch.setattr(restore, "restore_cgroup", refuse)
    assert main(["--config", path], {}) == 69
    refused, wrong = capsys.readouterr().err.splitlines()
    assert "cpu.max" in refused
    assert "no_such: unknown key" in wrong
    monkeypatch.undo()
    assert main(["--config", path], {}) == 78


def test_a_cgroup_whose_counters_are_not_there_is_put_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On v1 with cpu and cpuacct apart systemd puts units into the first alone."""
    files = {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n", "cpu.shares": "1024\n", "cpu.stat": ""}
    make_tree(tmp_path, {"cpu": {"a": files}, "cpuacct": {"cpuacct.usage": "0\n"}})
    mountinfo = write_mountinfo(tmp_path / "mountinfo", {f"{tmp_path}/{name}": name for name in ("cpu", "cpuacct")})
    path = write(tmp_path, f'state_dir = "{tmp_path}"\nruntime_dir = "{tmp_path}/run"\nmountinfo = "{mountinfo}"\n')
    inode = os.stat(tmp_path / "cpu" / "a").st_ino
    settings = CpuSettings(200_000, 100_000, None, 1024)
    save(f"{tmp_path}/{STATE_FILE}", Originals(read_boot_id(), {"a": Original(inode, settings)}))
    assert main(["--config", path], {}) == 0
    assert capsys.readouterr().out == "restored a\n"
    assert (tmp_path / "cpu" / "a" / "cpu.cfs_quota_us").read_text().strip() == "200000"


def test_limits_of_another_boot_are_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mountinfo = make_v2_host(tmp_path, {"a": v2_cgroup(quota="50000 100000")})
    path = write(tmp_path, f'state_dir = "{tmp_path}"\nruntime_dir = "{tmp_path}/run"\nmountinfo = "{mountinfo}"\n')
    inode = os.stat(tmp_path / "cgroup" / "a").st_ino
    save(f"{tmp_path}/{STATE_FILE}", Originals("another", {"a": Original(inode, CpuSettings(100_000, 100_000))}))
    assert main(["--config", path], {}) == 0
    assert "restored a" not in capsys.readouterr().out
    assert (tmp_path / "cgroup" / "a" / "cpu.max").read_text().split() == ["50000", "100000"]


def test_a_lock_that_is_a_link_is_not_opened(tmp_path: Path) -> None:
    """Its directory is the agent's; root may run the command."""
    (tmp_path / "target").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / restore.LOCK_FILE).symlink_to(tmp_path / "target")
    with pytest.raises(CpumondError, match="open the lock"):
        restore.RunLock(str(tmp_path / "run"), "")
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize("content", [b'{"pid": 1, "since": 1.0, "config": "\xff"}', b"[" * 5000, b""])
def test_who_holds_the_lock_need_not_be_readable(tmp_path: Path, content: bytes) -> None:
    with contextlib.closing(restore.RunLock(str(tmp_path), "")):
        (tmp_path / restore.LOCK_FILE).write_bytes(content)
        with pytest.raises(UnavailableError, match="another agent is running"):
            restore.RunLock(str(tmp_path), "")


def test_the_file_of_the_environment_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, f'state_dir = "{tmp_path}/state"\nruntime_dir = "{tmp_path}/run"\n')
    assert main([], {"CPUMOND_CONFIG": path}) == 0
    assert f"{tmp_path}/state" in capsys.readouterr().out


def test_the_short_way_imports_little() -> None:
    """A job is held down until the limits are right: what the limits do not need comes later, or not at all."""
    program = "import sys, cpumond.agent.limits.restore; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"click", "rich", "structlog", "asyncio", "dbus_fast", "psutil", "starlette", "httpx2", "ssl"}
    assert "cpumond.agent.config" not in done.stdout.split()
