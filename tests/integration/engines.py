"""Real engines of containers and a Slurm, each with all that it keeps in a directory, and a keeper that leaves nothing.

Where PID 1 is systemd, as in ``tests/machine``, it makes their cgroups; elsewhere engines do, all below ``top``.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from agent_process import free_port
from waiting import PATIENCE, is_over, wait_until

KEEPER = Path(__file__).with_name("keeper.py")
BUSYBOX = "/bin/busybox"
IMAGE = "busybox"
APPLETS = ("sh", "sleep", "true", "false", "cat", "echo", "dd", "yes", "nice", "kill", "usleep", "mkfifo")
HAS_SYSTEMD = os.path.isdir("/run/systemd/system")
LIMITS = ("nofile=1024:1024", "nproc=1000:1000")
"""In place of the engines' own: not every host of tests may raise them."""

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={directory}/munge.sock
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmdSpoolDir={directory}/%n
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup,task/affinity
JobAcctGatherType=jobacct_gather/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# As many CPUs as it says here, whatever the host has.
SlurmdParameters=config_overrides
ReturnToService=2
FirstJobId={first_job}
# They listen on the loopback alone.
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MailProg=/bin/true
NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=2
PartitionName=main Nodes={node} Default=YES MaxTime=INFINITE State=UP
"""
MUNGED_FILES = {
    "key-file": "munge.key",
    "socket": "munge.sock",
    "pid-file": "munged.pid",
    "log-file": "munged.file.log",
    "seed-file": "munged.seed",
}
READY = {"idle", "mixed", "allocated", "completing"}

_numbers = itertools.count()


def require(*programs: str) -> None:
    """Skip the test unless this is root and the programs are there; each is named with Debian's package of it."""
    if os.geteuid() != 0:
        pytest.skip("only root can start an engine")
    for program in programs:
        name, _, package = program.partition(":")
        if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            pytest.skip(f"needs {name} (apt-get install --no-install-recommends {package or name})")


def make_rootfs() -> bytes:
    """The file system of a container as a tar: a busybox that needs no library, and names for it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(BUSYBOX, "bin/busybox")
        for name in APPLETS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        for name in ("tmp", "etc", "proc", "sys", "dev"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
    return buffer.getvalue()


def wait_for_end(process: psutil.Process, name: str) -> None:
    wait_until(lambda: not process.is_running(), f"{name} ends", 60)


def name_of(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return ""


def read_cgroups(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def waits_or_burns(directory: str) -> str:
    """A shell script that uses nothing until ``Work.begin``, and then a CPU until ``Work.end``."""
    return (
        f"mkfifo {directory}/wake; while true; do read wake < {directory}/wake; "
        f"while [ -e {directory}/burn ]; do :; done; done"
    )


class Work:
    """What a job whose script is ``waits_or_burns`` does; ``directory`` is the script's as it is seen from here."""

    def __init__(self, directory: Path) -> None:
        self._wake, self._burn = directory / "wake", directory / "burn"

    def begin(self) -> None:
        wait_until(self._wake.exists, "the job has begun")
        self._burn.touch()
        wake = os.open(self._wake, os.O_WRONLY)  # waits until the job reads
        os.write(wake, b"\n")
        os.close(wake)

    def end(self) -> None:
        self._burn.unlink()


def cgroup_of(pid: int, controller: str = "cpu") -> str:
    """The path of a process's cgroup: that of a controller of version 1, else of version 2."""
    lines = [line.split(":", 2) for line in read_cgroups(pid).splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    return paths.get(controller) or paths[""]


class Keeper:
    """The process that everything of an engine descends from; see ``keeper.py``."""

    def __init__(self, directory: Path, *cgroups: str, private: bool = False) -> None:
        command = [sys.executable, str(KEEPER)]
        if private:
            command = ["unshare", "--net", "--mount", *command, "--private"]
        command += [str(directory), *cgroups]
        # In a session of its own: it tidies up after a signal to all processes of the terminal, or of `timeout`.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._read() == "ready", "the keeper of an engine ended; its error is above"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, log: Path, command: Sequence[str]) -> psutil.Process:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(log), *command]) + "\n")
        self._process.stdin.flush()
        return psutil.Process(int(self._read()))

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def close(self) -> None:
        """End all that descends from it, and remove cgroups and files; AssertionError with what is left."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        left = self._read()
        self._process.stdout.close()
        assert self._process.wait(60) == 0
        assert left == "", left


class Engine:
    """A daemon with an API on ``socket_path``, and its containers, which have their cgroups below ``top``."""

    name: str
    _at_once: tuple[str, ...] = ()
    """What ``rm --force`` needs to give no time to end in."""

    def __init__(self, top: str = "", options: Sequence[str] = ()) -> None:
        self.top = top or f"cpumond-engine-{os.getpid()}-{next(_numbers)}"
        self.options = tuple(options)
        # Sockets and podman's directories take short paths only, shorter than some of pytest's.
        self.directory = Path(tempfile.mkdtemp(prefix="cpumond-"))
        self.socket_path = self.directory / f"{self.name}.sock"
        self.log_path = self.directory / f"{self.name}.log"
        self.keeper = Keeper(self.directory, self.top, private=not HAS_SYSTEMD)
        self.process: psutil.Process | None = None

    def _daemon(self) -> list[str]:
        raise NotImplementedError

    def _client(self) -> list[str]:
        raise NotImplementedError

    def _run_options(self) -> list[str]:
        return []

    def start(self) -> None:
        """Start the daemon, for the first time or again, and wait until it answers; the first time makes the image."""
        first = self.process is None
        self.process = self.keeper.start(self.log_path, self._daemon())
        wait_until(self._answers, f"{self.name} answers; its log: {self.log()[-2000:]}", 60)
        if first:
            self.client("import", "-", IMAGE, stdin=make_rootfs())

    def _answers(self) -> bool:
        assert self.process is not None
        assert not is_over(self.process), f"{self.name} ended: {self.log()[-3000:]}"
        try:
            return self.get("/_ping").status_code == 200
        except httpx2.TransportError:
            return False

    def get(self, path: str) -> httpx2.Response:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.socket_path)):  # httpx2 would leave its socket to the garbage collector
                raise httpx2.ConnectError(f"{self.name} does not listen")
        transport = httpx2.HTTPTransport(uds=str(self.socket_path), verify=False)
        with httpx2.Client(transport=transport, timeout=250) as client:
            return client.get(f"http://engine{path}")

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the daemon a signal that ends it and wait for its end: SIGTERM as its service's stop does."""
        assert self.process is not None
        # Docker's containerd is killed with it, a moment later; one that comes before that takes it for its own.
        ends = [self.process, *(child for child in self.process.children() if child.name() == "containerd")]
        self.process.send_signal(number)
        for process in ends:
            wait_for_end(process, self.name)

    def kill(self) -> None:
        """Kill the daemon. Its containers go on where it was told so, and always podman's."""
        self.terminate(signal.SIGKILL)

    def client(self, *arguments: str, stdin: bytes | None = None) -> str:
        """What a command of the client prints on stdout; AssertionError with its stderr when it fails."""
        done = subprocess.run(
            [*self._client(), *arguments],
            input=stdin or b"",
            capture_output=True,
            timeout=250 * PATIENCE,
            env={**os.environ, **self._environment()},
            check=False,
        )
        error = done.stderr.decode(errors="replace")
        assert done.returncode == 0, f"{self.name} {' '.join(arguments)}: {error}; its log: {self.log()[-2000:]}"
        return done.stdout.decode().strip()

    def _environment(self) -> dict[str, str]:
        return {}

    def run(self, name: str, *options: str, command: Sequence[str] = ("sleep", "10000")) -> str:
        return self.client("run", "--detach", f"--name={name}", *self._run_options(), *options, IMAGE, *command)

    def update(self, name: str, *options: str) -> None:
        self.client("update", *options, name)

    def remove(self, *names: str) -> None:
        self.client("rm", "--force", *self._at_once, *names)

    def inspect(self, name: str) -> dict[str, Any]:
        answer = self.get(f"/containers/{name}/json")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def pid(self, name: str) -> int:
        """The container's first process, as this host counts; 0 when it does not run."""
        return int(self.inspect(name)["State"]["Pid"])

    def cgroup(self, name: str, controller: str = "cpu") -> str:
        """The path of a container's cgroup below the root of its hierarchy."""
        return cgroup_of(self.pid(name), controller)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def close(self) -> None:
        """End the daemon, its containers and what served them, and remove cgroups and files."""
        try:
            if HAS_SYSTEMD and self.process is not None and not is_over(self.process):
                self.remove_all()  # systemd removes scopes when their processes end, engines their names
        finally:
            self.keeper.close()

    def remove_all(self) -> None:
        found = self.get("/containers/json?all=1").json()
        if found:
            self.remove(*(each["Id"] for each in found))

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Dockerd(Engine):
    """Docker's daemon and containers without a network; ``options`` as ``--live-restore`` are added."""

    name = "dockerd"

    def __init__(self, top: str = "", options: Sequence[str] = ()) -> None:
        require("dockerd:docker.io", "docker:docker.io", "busybox:busybox-static")
        super().__init__(top, options)

    def _daemon(self) -> list[str]:
        config = self.directory / "daemon.json"
        config.write_text("{}", encoding="utf-8")
        driver = "systemd" if HAS_SYSTEMD else "cgroupfs"
        parent = [] if HAS_SYSTEMD else [f"--cgroup-parent=/{self.top}"]
        return [
            "dockerd",
            f"--config-file={config}",
            f"--host=unix://{self.socket_path}",
            f"--data-root={self.directory / 'data'}",
            f"--exec-root={self.directory / 'exec'}",
            f"--pidfile={self.directory / 'pid'}",
            "--group=",
            "--storage-driver=vfs",
            f"--exec-opt=native.cgroupdriver={driver}",
            *parent,
            # Nothing of the host's network is touched.
            "--bridge=none",
            "--iptables=false",
            "--ip6tables=false",
            "--ip-forward=false",
            "--ip-masq=false",
            "--userland-proxy=false",
            *(f"--default-ulimit={limit}" for limit in LIMITS),
            *self.options,
        ]

    def _environment(self) -> dict[str, str]:
        return {"DOCKER_CONFIG": str(self.directory / "client")}

    def _client(self) -> list[str]:
        return ["/usr/bin/docker", f"--host=unix://{self.socket_path}"]

    def _run_options(self) -> list[str]:
        return ["--network=none"]


class Podman(Engine):
    """Podman's API service and containers without a network. They live on when the service ends."""

    name = "podman"
    _at_once = ("--time=0",)

    def __init__(self, top: str = "", options: Sequence[str] = ()) -> None:
        # crun refuses hosts that have controllers of v1 and of v2
        runtime = "crun" if HAS_SYSTEMD else "runc"
        require("podman", "conmon", runtime, "busybox:busybox-static")
        super().__init__(top, options)
        manager = "systemd" if HAS_SYSTEMD else "cgroupfs"
        limits = ", ".join(f'"{limit}"' for limit in LIMITS)
        (self.directory / "containers.conf").write_text(
            f'[containers]\nnetns = "none"\ncgroups = "no-conmon"\ndefault_ulimits = [{limits}]\n'
            f'log_driver = "k8s-file"\nvolumes = []\n'
            f'[engine]\ncgroup_manager = "{manager}"\nruntime = "{runtime}"\nevents_logger = "file"\n'
            f'lock_type = "file"\nstatic_dir = "{self.directory}/libpod"\ntmp_dir = "{self.directory}/tmp"\n'
            f'volume_path = "{self.directory}/volumes"\n',
            encoding="utf-8",
        )
        (self.directory / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{self.directory}/root"\nrunroot = "{self.directory}/run"\n',
            encoding="utf-8",
        )

    def _environment(self) -> dict[str, str]:
        return {
            "CONTAINERS_CONF": str(self.directory / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.directory / "storage.conf"),
        }

    def _daemon(self) -> list[str]:
        settings = [f"{name}={value}" for name, value in self._environment().items()]
        return [
            "env",
            *settings,
            "podman",
            *self.options,
            "system",
            "service",
            "--time=0",
            f"unix://{self.socket_path}",
        ]

    def _client(self) -> list[str]:
        # Through the service, so that what serves the containers descends from it.
        return ["podman", "--remote", f"--url=unix://{self.socket_path}"]

    def _run_options(self) -> list[str]:
        return [] if HAS_SYSTEMD else [f"--cgroup-parent=/{self.top}"]


class SlurmCluster:
    """Slurm without a database, with the node ``node`` of partition ``main``; commands find it by ``environment``."""

    def __init__(self) -> None:
        require("slurmctld", "slurmd", "munged:munge", "sbatch:slurm-client", "squeue:slurm-client")
        # Slurm's cgroups bear the node's name, and tests run beside each other.
        self.node = f"n{os.getpid()}x{next(_numbers)}"
        self.directory = Path(tempfile.mkdtemp(prefix="cpumond-"))
        (self.directory / "state").mkdir()
        self.environment = {"SLURM_CONF": str(self.directory / "slurm.conf")}
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        values = {
            "host": socket.gethostname().partition(".")[0],
            "ports": [free_port() for _ in range(2)],
            "directory": self.directory,
            "node": self.node,
            # An agent would take the job of another cluster for that of its own with the same number.
            "first_job": os.getpid() % 60_000 * 1000 + 1,
        }
        (self.directory / "slurm.conf").write_text(SLURM_CONF.format_map(values), encoding="utf-8")
        (self.directory / "cgroup.conf").write_text("ConstrainCores=yes\n", encoding="utf-8")
        environment = [f"{name}={value}" for name, value in self.environment.items()]
        munged = [f"--{name}={self.directory}/{file}" for name, file in MUNGED_FILES.items()]
        self._commands = {
            "munged": ["munged", "--foreground", "--force", *munged],
            "slurmctld": ["env", *environment, "slurmctld", "-D"],
            "slurmd": ["env", *environment, "slurmd", "-D", "-N", self.node],
        }
        self.processes: dict[str, psutil.Process] = {}
        self.keeper = Keeper(self.directory, f"slurm_{self.node}")

    def start(self) -> None:
        """Start all daemons, and wait until the controller answers and the node takes jobs."""
        for name, command in self._commands.items():
            self.processes[name] = self.keeper.start(self.directory / f"{name}.log", command)
            if name == "munged":
                wait_until((self.directory / "munge.sock").exists, f"munged listens; its log: {self.log(name)}", 60)
        wait_until(self._are_ready, f"Slurm is ready; its log: {self.log('slurmctld')[-3000:]}", 60)

    def _are_ready(self) -> bool:
        for name, process in self.processes.items():
            assert not is_over(process), f"{name} ended: {self.log(name)[-3000:]}"
        try:
            return self.command("sinfo", "--noheader", "--format=%T") in READY
        except AssertionError:
            return False

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def command(self, *words: str) -> str:
        """What a command of Slurm prints on stdout; AssertionError with its stderr when it fails."""
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=250 * PATIENCE,
            env={**os.environ, **self.environment},
            cwd="/",
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def sbatch(self, script: str, *options: str) -> int:
        """Submit lines of a shell; the job's number."""
        return int(self.command("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}"))

    def scancel(self, *jobs: int) -> None:
        self.command("scancel", *map(str, jobs))

    def squeue(self) -> list[dict[str, Any]]:
        """The jobs that the controller knows, also those that ended a few minutes ago, as ``squeue --json`` tells."""
        found: list[dict[str, Any]] = json.loads(self.command("squeue", "--json"))["jobs"]
        return found

    def pids(self, job: int) -> list[int]:
        """The processes of a job, its steps' among them, without Slurm's own."""
        mark = f"/job_{job}/"
        processes = {process.pid: name_of(process.pid) for process in self.keeper.processes()}
        return [pid for pid, name in processes.items() if name != "slurmstepd" and mark in read_cgroups(pid)]

    def close(self) -> None:
        """End daemons and jobs, and remove cgroups and files."""
        self.keeper.close()

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
