"""The program as a process: what it imports, output that nobody reads any more, a disk that is full."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("rich", "httpx2", "uvicorn", "starlette", "prometheus_client", "psutil", "jsonschema", "cgroupspy")
"""What takes long to import; no help text needs it."""

LIST_HELP = """
import contextlib, io, json, sys
from cpumond.cli import run
loaded = {}
for name in sys.argv[1:]:
    for module in [name for name in sys.modules if name.partition(".")[0] in HEAVY]:
        del sys.modules[module]
    with contextlib.redirect_stdout(io.StringIO()):
        assert run([*name.split(), "--help"]) == 0
    loaded[name] = sorted({module.partition(".")[0] for module in sys.modules} & set(HEAVY))
print(json.dumps(loaded))
"""

LIGHT = ["status", "top", "explain", "job", "pin", "unpin", "doctor", "job add", "agent", "demo"]


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Of every light command: which heavy libraries its help has imported."""
    done = run_python(f"HEAVY = {HEAVY!r}\n{LIST_HELP}", *LIGHT)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("command", LIGHT)
def test_help_is_quick_because_it_imports_nothing_heavy(loaded, command):
    assert loaded[command] == []


OF_HELP = {"cpumond.cli.help", "cpumond.cli.render", "cpumond.cli.render.grid"}
"""How help is set; they need little."""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_program_itself_imports_no_command(arguments):
    program = f"""
import sys
from cpumond.cli import run
code = run({arguments!r})
ours = [name for name in sys.modules if name.startswith(("cpumond.cli.", "cpumond.agent")) and name not in {OF_HELP!r}]
loaded = ours + [name for name in sys.modules if name in {HEAVY!r}]
sys.exit(f"imported {{loaded}}" if loaded else code)
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert "cpumond" in done.stdout


def test_asking_the_agent_loads_neither_the_scheduler_nor_what_takes_long():
    program = f"""
import sys
from cpumond.cli import run
code = run(["status", "--socket", "/nonexistent"])
loaded = [name for name in sys.modules if name in {HEAVY!r} or name.startswith(("cpumond.scheduler", "cpumond.api"))]
sys.exit(f"imported {{loaded}}" if loaded else code)
"""
    done = run_python(program)
    assert (done.returncode, "no agent answers" in done.stderr) == (69, True), done.stderr


def test_an_error_that_nobody_can_read_keeps_its_exit_code():
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "cpumond", "nonsense"], stderr=full, timeout=250, check=False)
    assert done.returncode == 64


@pytest.mark.parametrize(
    "words",
    ["--help", "status --help", "schema heartbeat", "check-config cpumond.toml", "doctor --json",
     "replay trace.csv --cpu-limit 2"],
)  # fmt: skip
def test_output_that_nobody_reads_is_no_error(words, tmp_path):
    """Also what is only flushed at the end."""
    (tmp_path / "cpumond.toml").write_text("")
    (tmp_path / "trace.csv").write_text("time_s,usage_cores\n0,0\n1,1\n")
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "cpumond", *words.split()],
            stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=250, check=False, cwd=tmp_path,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["schema", "heartbeat"]])
def test_a_closed_standard_output_is_no_error(arguments):
    program = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'cpumond', *sys.argv[1:]])"
    done = run_python(program, *arguments)
    assert done.stderr == ""
    assert done.returncode in (0, 69)


def test_a_full_disk_is_said_in_a_sentence():
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cpumond", "schema", "heartbeat"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=250, check=False,
        )  # fmt: skip
    assert done.returncode == 69
    assert done.stderr.startswith("cpumond: the system: No space left on device")


def test_the_agent_loads_no_library_that_it_never_uses(tmp_path):
    (tmp_path / "wrong.toml").write_text("no = 'such key'\n")
    program = f"""
import sys
from cpumond.cli import run
code = run(["agent", "--config", {str(tmp_path / "wrong.toml")!r}])
assert "cpumond.agent.tick" in sys.modules
assert not [name for name in sys.modules if name.partition(".")[0] in ("rich", "pygments", "greenlet")]
import rich.table
sys.exit(code)
"""
    done = run_python(program)
    assert (done.returncode, "no" in done.stderr) == (78, True), done.stderr
