"""The run of the tests themselves: turns, time, what is left out, and what is said when a run is ended."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from turns import hold_room, note_end, wait_for_ends

TESTS = Path(__file__).resolve().parents[1]
ALONE = """
import pathlib, pytest, time
HERE = pathlib.Path({folder!r})

@pytest.mark.timeout(2)
def test_long():
    (HERE / "long_began").touch()
    with pytest.raises(pytest.fail.Exception, match="Timeout"):  # holds the room for its whole time
        time.sleep(60)
    (HERE / "long_ended").touch()
"""
WAITS = """
import pathlib, pytest, time
HERE = pathlib.Path({folder!r})

def test_first():
    while not (HERE / "long_began").exists():
        time.sleep(0.01)

@pytest.mark.alone
@pytest.mark.timeout(1)
def test_alone():
    assert (HERE / "long_ended").exists()
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder of tests with this project's own way to run them."""
    for name in ("conftest.py", "examples.py", "turns.py"):
        (tmp_path / name).symlink_to(TESTS / name)
    (tmp_path / "spine.py").write_text("SPINE = {}\n", encoding="utf-8")
    (tmp_path / "unit").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  alone:\n", encoding="utf-8")
    return tmp_path


def start(suite: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    plugins = ["-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider"]  # the others take long to import
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "CPUMOND"))}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *plugins, *arguments],
        cwd=suite,
        env={**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(suite: Path, *arguments: str, **environment: str) -> str:
    with start(suite, *arguments, **environment) as process:
        output, _ = process.communicate(timeout=100)
    return output


def test_waiting_for_a_turn_is_no_time_of_the_test(suite: Path) -> None:
    (suite / "test_a.py").write_text(ALONE.format(folder=str(suite)), encoding="utf-8")
    (suite / "test_b.py").write_text(WAITS.format(folder=str(suite)), encoding="utf-8")
    output = run(suite, "-n2", "--dist=loadfile", "--no-loadscope-reorder")
    assert "3 passed" in output, output


def test_the_room_is_free_when_a_process_dies_whose_child_lives_on(tmp_path: Path) -> None:
    holder = """
import os, pathlib, signal, sys, time
from turns import hold_room, note_end, wait_for_ends
with hold_room(pathlib.Path(sys.argv[1]), alone=True):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], cwd=TESTS, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            process.wait()
            with hold_room(tmp_path, alone=True):  # for ever, if it is held
                assert Path(f"/proc/{child}").exists()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_clock_goes_on_with_what_was_left() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPS_THE_CLOCK], cwd=TESTS, stdout=subprocess.PIPE) as process:
        output, _ = process.communicate(timeout=60)
    assert (output, process.returncode) == (b"waited\n", -signal.SIGALRM)


STOPS_THE_CLOCK = """
import signal, time
from turns import stopped_clock
signal.setitimer(signal.ITIMER_REAL, 0.2)
with stopped_clock():
    time.sleep(0.5)
print("waited", flush=True)
time.sleep(60)
"""


@pytest.mark.alone
def test_one_that_runs_alone_comes_before_the_other_work_of_the_host() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may prefer a process")
    assert os.getpriority(os.PRIO_PROCESS, 0) == -20


def test_the_others_are_not_preferred() -> None:
    assert os.getpriority(os.PRIO_PROCESS, 0) >= os.getpriority(os.PRIO_PROCESS, os.getppid())


FILES = {
    "spine.py": "SPINE = {'test_part.py': ('test_of_spine',)}",
    "unit/test_unit.py": "def test_unit(): pass",
    "property/test_law.py": "from examples import WHOLE\ndef test_law(): pass\nif WHOLE:\n  def test_more(): pass",
    "integration/test_part.py": "def test_of_spine(): pass\ndef test_other(): pass",
    "integration/test_not_of_spine.py": "def test_third(): pass\nfrom examples import WHOLE\nassert WHOLE",
    "machine/test_vm.py": "def test_boot(): pass",
    "slow/test_day.py": "def test_whole_day(): pass",
}
SHORT = {"test_unit", "test_law", "test_of_spine"}
ALL = SHORT | {"test_more", "test_other", "test_third", "test_boot"}


@pytest.fixture
def lanes(suite: Path) -> Path:
    for name, text in FILES.items():
        (suite / name).parent.mkdir(exist_ok=True)
        (suite / name).write_text(f"{text}\n", encoding="utf-8")
    return suite


@pytest.mark.parametrize("processes", ["-n0", "-n1"])
@pytest.mark.parametrize(
    ("words", "tests"),
    [
        ((), SHORT),
        ((".",), SHORT),
        (("--all",), ALL),
        (("--rest",), ALL - {"test_unit", "test_of_spine"}),
        (("machine", "unit"), {"test_boot", "test_unit"}),
        (("./machine/../slow/test_day.py::test_whole_day",), {"test_whole_day"}),
        (("property", "integration/test_part.py"), {"test_law", "test_more", "test_of_spine", "test_other"}),
    ],
    ids=["nothing", "here", "all", "rest", "folders", "test", "folder-and-file"],
)
def test_a_run_is_of_the_lane_that_is_asked_for(
    lanes: Path, processes: str, words: tuple[str, ...], tests: set[str]
) -> None:
    output = run(lanes, processes, "-v", *words)
    assert set(re.findall(r"(?:::(\w+) PASSED|PASSED \S+::(\w+))", output)) == {
        ("", name) if processes == "-n1" else (name, "") for name in tests
    }, output


def test_the_spine_names_tests_that_exist(lanes: Path) -> None:
    (lanes / "integration" / "test_part.py").write_text("def test_renamed(): pass\n", encoding="utf-8")
    assert "tests/spine.py names tests that do not exist: test_part.py::test_of_spine" in run(lanes)


def test_where_all_is_required_a_test_that_is_left_out_is_a_failure(lanes: Path) -> None:
    text = "import pytest\ndef test_left_out(): pytest.skip('no browser')\n"
    (lanes / "unit" / "test_out.py").write_text(text, encoding="utf-8")
    output = run(lanes, "-ra", CPUMOND_REQUIRE="all")
    assert "1 failed, 3 passed" in output, output
    assert "left out, but CPUMOND_REQUIRE=all: no browser" in output


@pytest.mark.parametrize("processes", ["-n0", "-n1"])
def test_a_run_that_is_ended_says_what_it_was_at(suite: Path, processes: str) -> None:
    (suite / "test_long.py").write_text("import time\ndef test_hangs(): time.sleep(600)\n", encoding="utf-8")
    with start(suite, "-v", processes) as process:
        assert process.stdout is not None
        begun = ""
        while "test_long.py::test_hangs" not in begun:
            letter = process.stdout.read(1)
            assert letter, begun
            begun += letter
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert "test_long.py::test_hangs" in output.partition("had begun and did not end")[2], begun + output


def test_a_machine_is_booted_when_all_that_must_be_alone_is_over(tmp_path: Path) -> None:
    note_end(tmp_path)
    waiter = threading.Thread(target=wait_for_ends, args=(tmp_path, 2))
    waiter.start()
    waiter.join(0.5)
    assert waiter.is_alive()
    note_end(tmp_path)
    waiter.join(60)
    assert not waiter.is_alive()
    wait_for_ends(tmp_path / "empty", 0)
    wait_for_ends(tmp_path, 3, patience_s=0.0)
