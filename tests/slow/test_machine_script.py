"""``tests/machine/vm.sh`` with a machine that is played: one that stands still, dies, or wants a reboot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MACHINE = Path(__file__).resolve().parents[1] / "machine"
sys.path.insert(0, str(MACHINE))
from guest_host import assert_passed  # noqa: E402
from vm_host import Machine, Part, limit_of  # noqa: E402

PLAYED = r"""#!/bin/bash
# Takes the next line of $PLAY, a list of what to do in this boot.
for argument; do
    case $argument in
    file:*) console=${argument#file:} ;;
    file=*/disk,*) disk=${argument#file=} disk=${disk%%,*} ;;
    file=*/root,*) root=${argument#file=} root=${root%%,*} ;;
    esac
done
leave() { echo "$2" >"$disk.new"; debugfs -w -R "write $disk.new $1" "$disk" >/dev/null 2>&1; }
echo "boot of $(cat "$root")" | tee "$console"
acts=$(head -n 1 "$PLAY")
sed -i 1d "$PLAY"
for act in $acts; do
    case $act in
    begin) leave began '' ;;
    use) echo "used $(cat "$root")" >"$root" ;;
    stand) exec sleep 100 ;;
    live) for _ in 1 2 3 4 5 6 7 8; do sleep 0.5; echo alive >>"$console"; done ;;
    again) leave again reboot ;;
    end) leave status 7 ;;
    esac
done
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder with the played qemu and an image of one word."""
    for tool in ("mke2fs", "debugfs", "e2fsck", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing")
    for name in ("bin", "image", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "qemu-system-x86_64").write_text(PLAYED, encoding="utf-8")
    (tmp_path / "bin" / "qemu-system-x86_64").chmod(0o755)
    (tmp_path / "image" / "disk").write_text("a fresh system", encoding="utf-8")
    return tmp_path


def run(host: Path, *boots: str, limit_s: int = 60) -> tuple[int, str]:
    """The exit code and output of ``vm.sh`` where these boots happen one after the other."""
    (host / "play").write_text("".join(f"{boot}\n" for boot in boots), encoding="utf-8")
    environment = {
        **os.environ, "PATH": f"{host}/bin:{os.environ['PATH']}:/usr/sbin:/sbin", "TMPDIR": str(host / "tmp"),
        "MACHINE_IMAGE": str(host / "image"), "MACHINE_SILENCE": "3", "PLAY": str(host / "play"),
    }  # fmt: skip
    done = subprocess.run(
        [MACHINE / "vm.sh", "run", "-t", str(limit_s), "--", "true"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert list((host / "tmp").iterdir()) == [], "left behind"
    return done.returncode, done.stdout


def test_a_machine_without_life_is_ended_and_booted_once_more(host: Path) -> None:
    code, output = run(host, "begin use stand", "begin end")
    assert code == 7, output
    assert "the guest showed no life for 3 s" in output
    assert "it is booted once more" in output
    assert output.count("boot of a fresh system\n") >= 2, output


def test_a_machine_that_shows_no_life_again_is_given_up(host: Path) -> None:
    code, output = run(host, "stand", "begin stand", "begin end")
    assert code == 125, output
    assert output.count("the guest showed no life for 3 s") == 2


def test_one_that_shows_life_may_take_longer(host: Path) -> None:
    assert run(host, "begin live end") == (7, "boot of a fresh system\n")


def test_the_limit_holds_for_one_that_shows_life(host: Path) -> None:
    code, output = run(host, "begin live live live end", limit_s=2)
    assert code == 124, output
    assert "not done after 2 s" in output


def test_a_machine_that_stands_still_after_a_planned_reboot_keeps_its_disks(host: Path) -> None:
    code, output = run(host, "begin use again", "stand", "begin end")
    assert code == 7, output
    assert output.count("boot of used a fresh system\n") >= 2, output


def test_a_machine_that_is_lost_in_its_work_after_a_planned_reboot_begins_with_a_fresh_system(host: Path) -> None:
    code, output = run(host, "begin use again", "begin use", "begin end")
    assert code == 7, output
    assert "the guest ended early" in output
    assert output.endswith("it is booted once more\nboot of a fresh system\n"), output


def test_reboots_that_are_wanted_are_no_failures(host: Path) -> None:
    assert run(host, "begin again", "begin again", "begin again", "begin end") == (7, "boot of a fresh system\n" * 4)


def test_what_failed_in_the_guest_is_named() -> None:
    tests = {
        "test_a.py::test_good": {"outcome": "passed", "text": ""},
        "test_a.py::test_bad": {"outcome": "failed", "text": "assert 1 == 2"},
        "test_a.py::test_out": {"outcome": "skipped", "text": "no bus"},
    }
    with pytest.raises(AssertionError, match=r"(?s)1 of 3 tests failed in the guest: test_a.py::test_bad\n.*1 == 2"):
        assert_passed(tests, "skipped")
    with pytest.raises(
        AssertionError, match=r"2 of 3 tests failed in the guest: test_a.py::test_bad, test_a.py::test_out"
    ):
        assert_passed(tests)


def test_a_part_that_was_lost_is_said_and_the_others_are_kept() -> None:
    machine = Machine("v2", 9.0, "units: exit code 0 after 5 s\nvm.sh: the guest showed no life", 125)
    machine.facts["units"] = {"install": {}}
    assert machine.of("units") == {"install": {}}
    assert machine.times() == "units: 5 s"
    with pytest.raises(AssertionError, match=r"(?s)reboot left nothing.*the guest showed no life"):
        machine.of("reboot")


def test_a_machines_limit_is_above_that_of_its_parts() -> None:
    assert limit_of([Part("a", 100), Part("b", 200)]) > 100 + 200
