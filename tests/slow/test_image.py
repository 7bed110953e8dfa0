"""The container image: its recipe, executed by podman without a network on a Debian made by mmdebstrap, and what
docs/deploy/README.md does with it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpumond import __version__

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "machine"))
from guest_host import NSPAWN, REPOSITORY, gather_wheels, skip_without_means

BASE = "cpumond-test-base"
CPU = Path("/sys/fs/cgroup/cpu")
HIERARCHIES = (CPU, Path("/sys/fs/cgroup/cpuacct"))
QUOTA_US = 100_000
IMAGE = f"cpumond:{__version__}"
LIMITS = "--ulimit nofile=1024:1024 --ulimit nproc=1024:1024"
"""In place of those in the document: not every host of tests may raise them."""
CONFIG = """
managed_roots = ["{root}"]
[monitor]
mode = "reclaim"
check_period = 100
min_cpu_limit = 0.1
[[source]]
kind = "glob"
pattern = "{root}/*"
cpu_limit = 1.0
"""

pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]


class Podman:
    """Images and containers of this test alone, and directories in place of the host's that the document names."""

    def __init__(self, work: Path) -> None:
        self.host = work / "host"
        self._command = f"podman --runtime=runc --root={work}/root --runroot={work}/runroot --log-level=error"

    def run(self, line: str) -> str:
        """What lines of a shell print, in which podman is this one; they must succeed."""
        line = re.sub(r"(^|&& |\| )podman ", rf"\1{self._command} ", line, flags=re.MULTILINE)
        done = subprocess.run(
            ["sh", "-ec", line], cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def wait_for(self, line: str) -> None:
        """Until the line succeeds."""
        self.run(f"n=0; until\n{line}\ndo n=$((n + 1)); [ $n -lt 300 ]; sleep 0.1; done")

    def type(self, line: str) -> str:
        """Lines of the document."""
        line = re.sub(r"(?<= )(/var/lib|/run|/etc)/cpumond", rf"{self.host}\1/cpumond", line)
        line = line.replace("--network host", "--network none").replace("--ulimit nofile=65536", "")
        return self.run(line.replace("podman run ", f"podman run {LIMITS} "))


def find_block(words: str) -> str:
    """The block of shell in the document that has these."""
    text = (REPOSITORY / "docs" / "deploy" / "README.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if words in each)
    return str(block)


def split_lines(block: str) -> list[str]:
    """Each with what continues it, without comments."""
    return [re.sub(r"\s+#.*", "", line) for line in block.replace("\\\n", " ").splitlines()]


def read_offline_options() -> str:
    """What the recipe's head says about hosts without a network, but for the base."""
    text = (REPOSITORY / "docs" / "deploy" / "Containerfile").read_text(encoding="utf-8")
    (options,) = re.findall(r"`--build-arg BASE=\.\.\. ([^`]+)`", text)
    return str(options)


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    skip_without_means()
    for tool in ("podman", "runc"):  # crun refuses hosts that have controllers of v1 and of v2
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing; Debian's package {tool} has it")
    # Podman takes no path of more than 50 characters for what it keeps of running containers.
    work = Path(tempfile.mkdtemp(prefix="cpumond-"))
    try:
        made = Podman(work)
        build_image(made, work / "wheels")
        yield made
        made.run("podman rm --all --force")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def build_image(podman: Podman, wheels: Path) -> None:
    """As the recipe's head says for hosts without a network."""
    gather_wheels(wheels, ("postgresql",))
    made = subprocess.run([NSPAWN, "build"], stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    root = shlex.quote(made.stdout.strip())
    podman.run(f"tar -C {root} --exclude=./var/cache --exclude=./usr/share/doc -c . | podman import - {BASE}")
    offline = f"--network none --build-arg BASE=localhost/{BASE} " + read_offline_options().replace(
        "$PWD/wheels", str(wheels)
    )
    podman.run(find_block("podman build").replace("podman build", f"podman build {offline}"))


@pytest.fixture
def job() -> Iterator[Path]:
    """A cgroup with a quota of one core and a process that sleeps, relative to the root of the hierarchy."""
    root = Path(f"cpumond-image-{os.getpid()}")
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            for hierarchy in HIERARCHIES:
                (hierarchy / root / "one").mkdir(parents=True)
                (hierarchy / root / "one" / "cgroup.procs").write_text(str(sleeper.pid))
            (CPU / root / "one" / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
            yield root / "one"
        finally:
            sleeper.kill()
            sleeper.wait()
            for hierarchy in HIERARCHIES:
                for path in (root / "one", root):
                    (hierarchy / path).rmdir()


def read_quota_us(job: Path) -> int:
    return int((CPU / job / "cpu.cfs_quota_us").read_text())


def test_the_image_is_what_its_name_says(podman: Podman) -> None:
    assert (
        podman.run(f"podman run --rm {LIMITS} --network none {IMAGE} --version") == f"cpumond, version {__version__}\n"
    )
    assert "Usage: cpumond" in podman.run(f"podman run --rm {LIMITS} --network none {IMAGE}")
    shown = podman.run(f"podman run --rm {LIMITS} --network none {IMAGE} demo --duration 2 --json")
    assert json.loads(shown)["kernel"] == "simulated"
    inside = f"podman run --rm {LIMITS} --network none --entrypoint sh {IMAGE} -c"
    assert podman.run(f"{inside} 'id -u; id -g; stat -c %U:%a /var/lib/cpumond-scheduler'").split() == [
        *("950", "950", "cpumond:700")
    ]
    assert podman.run(f"{inside} 'find /usr/lib/cpumond -name \"pip*\" -maxdepth 4; ls /var/lib/apt/lists'") == ""


def test_an_estimate_as_in_the_document(podman: Podman, job: Path) -> None:
    (line,) = split_lines(find_block("estimate"))
    assert f"{job.name} ({job.parent})" in podman.type(line.replace("10m", "3s"))
    assert read_quota_us(job) == QUOTA_US


def test_one_host_as_in_the_document(podman: Podman, job: Path) -> None:
    """Root without a capability lowers a limit; `podman stop` puts it back, and so does `restore` after a kill."""
    conf_d = podman.host / "etc/cpumond/conf.d"
    make, start, ask = split_lines(find_block("mkdir -p"))
    is_lowered = f"[ $(cat {CPU}/{job}/cpu.cfs_quota_us) -lt {QUOTA_US} ]"
    podman.type(make)
    (conf_d / "jobs.toml").write_text(CONFIG.format(root=job.parent))
    podman.type(start)
    podman.wait_for(is_lowered)
    assert "one " in podman.type(ask)
    podman.type("podman stop cpumond")
    assert read_quota_us(job) == QUOTA_US
    podman.type("podman start cpumond")
    podman.wait_for(is_lowered)
    podman.type("podman kill --signal KILL cpumond && podman wait cpumond")
    assert read_quota_us(job) < QUOTA_US
    restore = start.replace("-d --name cpumond", "--rm")
    assert restore.endswith(" agent")
    podman.type(restore.removesuffix("agent") + "restore")
    assert read_quota_us(job) == QUOTA_US


def test_the_scheduler_as_in_the_document(podman: Podman) -> None:
    start, ask = split_lines(find_block("name cpumond-scheduler"))
    podman.type(start)
    podman.wait_for(ask)
    podman.type("podman stop cpumond-scheduler")
