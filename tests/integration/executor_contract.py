"""What every executor does, whatever its kind: tests over a ``rig`` fixture, for classes that inherit them."""

import contextlib
import hashlib
import itertools
import math
import os
import select
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
from waiting import SLOWNESS, count_descriptors, wait_until

from cpumond.core.errors import CpumondError
from cpumond.host.cgroup import open_cgroup
from cpumond.host.cgroup.idle import IdleParent
from cpumond.host.cgroup.job_tree import JobCgroupTree
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.cgroup.settings import CpuSettings, compute_start_weight
from cpumond.host.executor import cgroup as cgroup_executor
from cpumond.host.executor.model import Ended, Event, Executor, Launch, NotStarted, Started

Kind = TypeVar("Kind", Started, NotStarted, Ended)

TIMEOUT_S = 100.0
MARK = "CPUMOND_TEST_MARK"
NUMBERS = "import sys\nfor number in range({count}): sys.stdout.write(f'{{number}}\\n')\n"
BUSY = 'taskset -pc "$CPU" $$ >/dev/null && echo busy && while :; do :; done'
SHARED_CPU_S = 3.0
"""After so much CPU time of a job that shares a CPU its share is judged."""
HOG = "import time\nkept = [bytearray(b'x' * (1 << 20)) for _ in range(512)]\ntime.sleep(1000)\n"


def find_pids_controller() -> bool:
    with open("/proc/cgroups", encoding="ascii") as file:
        return any(line.split()[0] == "pids" and line.split()[3] == "1" for line in file)


def read_settings(hierarchies: Hierarchies, path: str) -> CpuSettings:
    cgroup = open_cgroup(hierarchies, path)
    assert cgroup is not None
    with contextlib.closing(cgroup):
        settings = cgroup.read_settings()
    assert settings is not None
    return settings


def read_cores(hierarchies: Hierarchies, path: str) -> float:
    return read_settings(hierarchies, path).cores


class Rig:
    """An executor under test, its jobs and all that it said; ``make`` makes another one in the same place."""

    def __init__(
        self, make: Callable[[], Executor], cgroups: JobCgroupTree, hierarchies: Hierarchies, directory: Path
    ) -> None:
        self.cgroups = cgroups
        self.hierarchies = hierarchies
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self.events: list[Event] = []
        self._make = make
        self._numbers = itertools.count()
        self.executor, self.recovered = self._open([])

    def _open(self, job_ids: Sequence[str]) -> tuple[Executor, dict[str, Started]]:
        """Its keeper is waited for as long as it takes on an emulated processor."""
        executor = self._make()
        with patch.object(cgroup_executor, "CONNECT_S", TIMEOUT_S):
            return executor, executor.recover(job_ids)

    def describe(self, argv: list[str], **changes: Any) -> Launch:
        """A job that is not started yet, with a directory of its own."""
        job_id = changes.pop("job_id", f"job-{os.getpid()}-{next(self._numbers)}")
        directory = self.directory / job_id
        directory.mkdir(mode=0o700, parents=True)
        environment = {"PATH": os.environ.get("PATH", os.defpath), MARK: self.mark, **changes.pop("environment", {})}
        fields: dict[str, Any] = {
            "user": "",
            "working_directory": "/",
            "cpu_limit": 1.0,
            "memory_limit": 0,
            "directory": str(directory),
            "max_log_bytes": 1 << 20,
            **changes,
        }
        return Launch(job_id=job_id, argv=argv, environment=environment, **fields)

    def start(self, *argv: str, **changes: Any) -> str:
        launch = self.describe(list(argv), **changes)
        self.executor.start(launch)
        return launch.job_id

    def shell(self, script: str, **changes: Any) -> str:
        return self.start("sh", "-c", script, **changes)

    def spin(self, cpu: int, **changes: Any) -> str:
        return self.shell(BUSY, environment={"CPU": str(cpu)}, **changes)

    def read_cpu_s(self, job_id: str) -> float:
        (pid,) = self.cgroups.list_processes(job_id)
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[0]) / 1e9

    def is_idle(self) -> bool:
        return IdleParent(self.hierarchies, self.cgroups.idle_parent).is_set()

    def gated(self, before: str, after: str, gate: str = "gate") -> str:
        script = f'{before}; while [ ! -e "$GATE" ]; do sleep 0.02; done; {after}'
        return self.shell(script, environment={"GATE": str(self.directory / gate)})

    def open_gate(self, gate: str = "gate") -> None:
        (self.directory / gate).touch()

    def poll(self, timeout_s: float = 0.2) -> None:
        ready = select.poll()
        ready.register(self.executor.fileno(), select.POLLIN)
        ready.poll(timeout_s * 1000)
        self.events += self.executor.poll()

    def find(self, kind: type[Kind], job_id: str) -> Kind | None:
        return next((event for event in self.events if isinstance(event, kind) and event.job_id == job_id), None)

    def wait(self, kind: type[Kind], job_id: str) -> Kind:
        deadline_s = time.monotonic() + TIMEOUT_S
        while (event := self.find(kind, job_id)) is None:
            assert time.monotonic() < deadline_s, f"no {kind.__name__} for {job_id}: {self.events}"
            assert kind is NotStarted or self.find(NotStarted, job_id) is None, self.events
            self.poll()
        return event

    def wait_all(self, kind: type[Kind], job_ids: Iterable[str]) -> list[Kind]:
        return [self.wait(kind, job_id) for job_id in job_ids]

    def wait_over(self, job_id: str) -> Ended | NotStarted:
        deadline_s = time.monotonic() + TIMEOUT_S
        while (event := self.find(Ended, job_id) or self.find(NotStarted, job_id)) is None:
            assert time.monotonic() < deadline_s, f"{job_id} does not end: {self.events}"
            self.poll()
        return event

    def read(self, job_id: str, stream: Any = "stdout", tail_bytes: int = 1 << 30) -> bytes:
        return self.executor.read_log(job_id, str(self.directory / job_id), stream, tail_bytes)[0]

    def wait_written(self, job_id: str, text: bytes) -> None:
        def look() -> bool:
            self.poll(0.0)
            with contextlib.suppress(CpumondError):
                return text in self.read(job_id)
            return False

        wait_until(look, f"{job_id} writes {text!r}", TIMEOUT_S)

    def restart(self, *job_ids: str) -> dict[str, Started]:
        self.executor.close()
        return self.come_back(*job_ids)

    def come_back(self, *job_ids: str) -> dict[str, Started]:
        self.executor, self.recovered = self._open(job_ids)
        return self.recovered

    def list_marked(self) -> list[int]:
        """The processes of this rig's jobs, wherever they went."""
        found = []
        wanted = f"{MARK}={self.mark}".encode()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.append(int(name))
        return found

    def _has_only_logs(self, job_id: str) -> bool:
        # The executor may hear of the end of a job that nobody waits for only now.
        self.poll(0.0)
        return all(name.startswith(("stdout", "stderr")) for name in os.listdir(self.directory / job_id))

    def assert_nothing_left(self, *job_ids: str) -> None:
        """No process, no cgroup, and nothing but logs on disk."""
        self.poll(0.0)
        wait_until(lambda: not self.list_marked(), "no process is left")
        assert not set(job_ids) & set(self.cgroups.list_job_ids())
        for job_id in job_ids:
            wait_until(lambda: self._has_only_logs(job_id), "only logs are left")  # noqa: B023
            fifos = [path for path in (self.directory / job_id).iterdir() if path.is_fifo()]
            assert not fifos, fifos

    def close(self) -> None:
        for job_id in self.cgroups.list_job_ids():
            self.executor.kill(job_id)

        def is_clean() -> bool:
            self.poll(0.0)
            return not self.cgroups.list_job_ids()

        try:
            wait_until(is_clean, "all jobs are gone")
            self.executor.poll()
        finally:
            self.executor.close()


class ExecutorContract:
    """Inherit it in a class named Test..., with a fixture ``rig``."""

    def test_an_exit_code(self, rig: Rig) -> None:
        before_s = time.time()
        ends = {f"exit {code}": (code, None) for code in (0, 3, 203, 255)}  # 203 is systemd's, too
        ends |= {f"kill -{number} $$": (None, number) for number in (9, 15, 11)}
        job_ids = {rig.shell(script): end for script, end in ends.items()}
        for job_id, end in job_ids.items():
            ended = rig.wait(Ended, job_id)
            started = rig.find(Started, job_id)
            assert started is not None
            assert rig.events.index(started) < rig.events.index(ended)
            assert started.cgroup == rig.cgroups.path(job_id)
            assert (ended.exit_code, ended.signal, ended.problem, ended.oom_killed) == (*end, "", False)
            assert before_s - 1.0 <= started.start_time <= ended.finish_time <= time.time() + 1.0
        assert len(rig.events) == 2 * len(ends)
        rig.assert_nothing_left(*job_ids)

    def test_counters_of_the_whole_job(self, rig: Rig) -> None:
        job_id = rig.shell("sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done' & wait")
        ended = rig.wait(Ended, job_id)
        assert ended.cpu_seconds is not None
        # An emulated machine counts what its host takes away, too.
        assert 0.01 < ended.cpu_seconds < 20.0 * SLOWNESS
        assert ended.max_memory is None or 0 < ended.max_memory < 1 << 30

    def test_what_cannot_be_started_is_its_own_fault(self, rig: Rig) -> None:
        words_of = {
            rig.start("no-such-program-at-all"): "no-such-program-at-all",
            rig.start("/dev/null"): "/dev/null",
            rig.start("true", working_directory="/no/such/directory"): "/no/such/directory",
            rig.start("true", user="no-such-user-at-all"): "no-such-user-at-all",
            rig.start(): "empty",
        }
        for job_id, words in words_of.items():
            event = rig.wait(NotStarted, job_id)
            assert words in event.problem
            assert "Traceback" not in event.problem
            assert not event.node_fault
            assert rig.find(Ended, job_id) is None
        rig.assert_nothing_left(*words_of)
        assert rig.wait(Ended, rig.start("true")).exit_code == 0

    def test_its_environment(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OF_THE_AGENT", "yes")
        job_id = rig.start("env", environment={"WORDS": "two words\nand é", "EMPTY": "", "PERCENT": '%h $HOME "\\'})
        assert rig.wait(Ended, job_id).exit_code == 0
        written = rig.read(job_id).decode()
        for line in ("WORDS=two words\nand é\n", "EMPTY=\n", 'PERCENT=%h $HOME "\\\n', f"{MARK}={rig.mark}\n"):
            assert line in written
        assert "OF_THE_AGENT" not in written

    def test_its_secrets(self, rig: Rig) -> None:
        """They win over the environment, and while it runs they are in no file and no command line."""
        secret = f"hunter2 \n'$HOME' `x` \"\\ é {rig.mark[::-1]}"
        gate = rig.directory / "gate"
        rig.directory.mkdir(parents=True, exist_ok=True)
        os.mkfifo(gate)
        script = f'printf %s "$KEY" | sha256sum; read line <"{gate}"'
        job_id = rig.shell(script, environment={"KEY": "of the task"}, secrets={"KEY": secret})
        rig.wait(Started, job_id)
        wanted = rig.mark[::-1].encode()
        files = [path for path in rig.directory.parent.rglob("*") if path.is_file()]
        assert [path for path in files if wanted in path.read_bytes()] == []
        lines = [Path(f"/proc/{entry}/cmdline") for entry in os.listdir("/proc") if entry.isdigit()]
        for line in lines:
            with contextlib.suppress(OSError):
                assert wanted not in line.read_bytes()
        gate.write_text("go\n")
        assert rig.wait(Ended, job_id).exit_code == 0
        assert rig.read(job_id).split()[0].decode() == hashlib.sha256(secret.encode()).hexdigest()

    def test_its_arguments_are_not_touched(self, rig: Rig) -> None:
        job_id = rig.start("printf", "%s|", "a b", "$HOME", "${A}", "%h", "", "'\"\\", "\u00e9", ";", "line\nfeed")
        rig.wait(Ended, job_id)
        assert rig.read(job_id).decode() == "a b|$HOME|${A}|%h||'\"\\|\u00e9|;|line\nfeed|"

    def test_its_user(self, rig: Rig) -> None:
        if os.geteuid() != 0:
            pytest.skip("needs root to become another user")
        job_id = rig.shell("id -un; id -u; id -G; grep NoNewPrivs /proc/self/status", user="nobody")
        assert rig.wait(Ended, job_id).exit_code == 0
        name, number, groups, flag = rig.read(job_id).decode().splitlines()
        assert (name, "0" in groups.split()) == ("nobody", False)
        assert number != "0"
        assert flag.split() == ["NoNewPrivs:", "1"], "no program gives it rights that it does not have"

    def test_it_has_so_many_processes_at_most(self, rig: Rig) -> None:
        if not find_pids_controller():
            pytest.skip("no pids controller here")
        script = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1000 & done; echo all"
        stopped, free = rig.shell(script, max_tasks=6), rig.shell(script, max_tasks=20)
        assert rig.wait(Ended, stopped).exit_code not in (0, None)
        assert rig.read(stopped) == b""
        assert b"fork" in rig.read(stopped, "stderr")
        assert rig.wait(Ended, free).exit_code == 0
        assert rig.read(free) == b"all\n"

    def test_its_working_directory_and_its_empty_input(self, rig: Rig, tmp_path: Path) -> None:
        job_id = rig.shell("pwd && cat", working_directory=str(tmp_path))
        assert rig.wait(Ended, job_id).exit_code == 0
        assert os.path.samefile(rig.read(job_id).decode().strip(), tmp_path)

    def test_both_streams_are_kept_apart(self, rig: Rig) -> None:
        job_id = rig.shell("echo out; echo err >&2; exit 3")
        ended = rig.wait(Ended, job_id)
        assert (rig.read(job_id), rig.read(job_id, "stderr")) == (b"out\n", b"err\n")
        assert (ended.last_words, ended.stderr_size) == (b"err\n", 4)

    def test_its_quota_is_in_force(self, rig: Rig) -> None:
        cores_of = {rig.start("sleep", "1000", cpu_limit=cores): cores for cores in (0.05, 0.5, 1.5)}
        for job_id, cores in cores_of.items():
            cgroup = rig.wait(Started, job_id).cgroup
            assert read_cores(rig.hierarchies, cgroup) == pytest.approx(cores, rel=0.02)
            assert len(rig.cgroups.list_processes(job_id)) == 1
            rig.executor.kill(job_id)
            assert rig.wait(Ended, job_id).signal == 9

    @staticmethod
    def compute_weight(cores: float, version: int) -> int:
        return compute_start_weight(cores, version)

    @pytest.mark.parametrize("reclaimed", [False, True], ids=["ordinary", "reclaimed"])
    @pytest.mark.parametrize("has_ceiling", [False, True], ids=["no ceiling", "ceiling"])
    def test_its_weight_follows_its_order_and_a_quota_is_for_a_ceiling_alone(
        self, rig: Rig, reclaimed: bool, has_ceiling: bool
    ) -> None:
        for cores in (0.05, 0.75, 3.0):
            job_id = rig.start("sleep", "1000", cpu_limit=cores, has_ceiling=has_ceiling, reclaimed=reclaimed)
            settings = read_settings(rig.hierarchies, rig.wait(Started, job_id).cgroup)
            assert settings.weight == self.compute_weight(cores, rig.hierarchies.cpu_version)
            assert settings.cores == (pytest.approx(cores, rel=0.02) if has_ceiling else math.inf)
            rig.executor.kill(job_id)
            rig.wait(Ended, job_id)

    def test_a_job_on_reclaimed_cpu_is_in_the_idle_class(self, rig: Rig) -> None:
        script = "cat /proc/self/oom_score_adj; sleep 1000"
        ordinary, reclaimed = (rig.shell(script, reclaimed=reclaimed) for reclaimed in (False, True))
        place = rig.wait(Started, reclaimed).cgroup
        assert os.path.dirname(place) == rig.cgroups.idle_parent
        assert os.path.dirname(rig.wait(Started, ordinary).cgroup) != rig.cgroups.idle_parent
        assert "/" not in rig.cgroups.idle_parent, "idle counts among siblings"
        assert rig.is_idle()
        for job_id, score in ((ordinary, b"0\n"), (reclaimed, b"1000\n")):
            rig.wait_written(job_id, score)
            assert rig.read(job_id) == score
        rig.executor.interrupt(reclaimed)
        assert rig.wait(Ended, reclaimed).signal == 15
        rig.executor.kill(ordinary)
        rig.wait(Ended, ordinary)
        rig.assert_nothing_left(ordinary, reclaimed)

    @pytest.mark.alone
    def test_a_job_on_reclaimed_cpu_yields_to_ordinary_ones(self, rig: Rig) -> None:
        cpu = max(os.sched_getaffinity(0))
        reclaimed = rig.spin(cpu, cpu_limit=8.0, has_ceiling=False, reclaimed=True)
        rig.wait_written(reclaimed, b"busy\n")
        ordinary = rig.spin(cpu, cpu_limit=0.5, has_ceiling=False)
        rig.wait_written(ordinary, b"busy\n")
        begin_s = rig.read_cpu_s(ordinary), rig.read_cpu_s(reclaimed)
        wait_until(lambda: rig.read_cpu_s(ordinary) >= begin_s[0] + SHARED_CPU_S, "it used the CPU", TIMEOUT_S)
        used_s = rig.read_cpu_s(ordinary) - begin_s[0], rig.read_cpu_s(reclaimed) - begin_s[1]
        assert used_s[0] / sum(used_s) > 0.9

    def test_too_much_memory_is_told(self, rig: Rig) -> None:
        job_id = rig.start(sys.executable, "-S", "-c", HOG, memory_limit=64 << 20)
        ended = rig.wait(Ended, job_id)
        assert ended.oom_killed
        assert ended.signal == 9
        assert ended.max_memory is None or 32 << 20 < ended.max_memory <= 65 << 20
        rig.assert_nothing_left(job_id)

    def test_an_interrupt_is_a_sigterm_for_all(self, rig: Rig) -> None:
        job_id = rig.shell(
            "sh -c 'trap \"echo child; exit 0\" TERM; while :; do sleep 0.05; done' &"
            " trap 'wait; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
        )
        rig.wait_written(job_id, b"ready")
        rig.executor.interrupt(job_id)
        ended = rig.wait(Ended, job_id)
        assert (ended.exit_code, ended.signal) == (7, None)

    def test_an_interrupt_by_another_signal_for_the_first_process_only(self, rig: Rig) -> None:
        job_id = rig.shell(
            "trap 'kill -USR2 $!; wait $!; exit $?' USR1;"
            ' sh -c \'trap "exit 1" USR1; trap "exit 9" USR2; echo ready; while :; do sleep 0.05; done\' &'
            " while :; do sleep 0.05; done"
        )
        rig.wait_written(job_id, b"ready")
        rig.executor.interrupt(job_id, signal.SIGUSR1, first_only=True)
        assert rig.wait(Ended, job_id).exit_code == 9

    def test_a_job_that_ignores_an_interrupt_is_killed(self, rig: Rig) -> None:
        job_id = rig.shell("trap '' TERM; echo ready; while :; do sleep 0.05; done")
        rig.wait_written(job_id, b"ready")
        rig.executor.interrupt(job_id)
        rig.poll(0.3)
        assert rig.find(Ended, job_id) is None
        rig.executor.kill(job_id)
        rig.executor.kill(job_id)
        ended = rig.wait(Ended, job_id)
        assert (ended.exit_code, ended.signal, ended.oom_killed) == (None, 9, False)
        rig.executor.kill(job_id)
        rig.executor.interrupt(job_id)
        rig.assert_nothing_left(job_id)

    def test_what_comes_while_it_is_being_started_is_not_lost(self, rig: Rig) -> None:
        number_of = {}
        for act, number in [(rig.executor.interrupt, 15), (rig.executor.kill, 9)] * 5:
            job_id = rig.start("sleep", "1000")
            number_of[job_id] = number
            act(job_id)
        for job_id, number in number_of.items():
            event = rig.wait_over(job_id)
            assert isinstance(event, NotStarted) or event.signal == number
        rig.assert_nothing_left(*number_of)

    def test_what_forks_away_is_killed_too(self, rig: Rig) -> None:
        scripts = (
            "setsid sh -c 'sleep 1000 & sleep 1000' >/dev/null 2>&1 & exit 5",
            "(setsid sh -c '(trap \"\" TERM HUP; sleep 1000) & ' &) & sleep 0.1; exit 5",
            "i=0; while [ $i -lt 30 ]; do i=$((i+1)); (while :; do sleep 0.01; done) & done; exit 5",
        )
        job_ids = [rig.shell(script) for script in scripts]
        assert [ended.exit_code for ended in rig.wait_all(Ended, job_ids)] == [5] * 3
        rig.assert_nothing_left(*job_ids)

    def test_a_flood_stays_below_the_cap(self, rig: Rig) -> None:
        cap, count = 65_536, 300_000
        launch = rig.describe([sys.executable, "-S", "-c", NUMBERS.format(count=count)], max_log_bytes=cap)
        rig.executor.start(launch)
        job_id, most = launch.job_id, 0

        def measure() -> int:
            sizes = 0
            for entry in os.scandir(launch.directory):
                with contextlib.suppress(FileNotFoundError):
                    sizes += entry.stat().st_size
            return sizes

        deadline_s = time.monotonic() + TIMEOUT_S
        while rig.find(Ended, job_id) is None:
            assert time.monotonic() < deadline_s
            most = max(most, measure())
            rig.poll(0.005)
        assert max(most, measure()) <= cap + 4096
        written = b"".join(b"%d\n" % number for number in range(count))
        content, total = rig.executor.read_log(job_id, launch.directory, "stdout", 1 << 30)
        assert total == len(written)
        assert cap // 2 <= len(content) <= cap
        assert written.endswith(content)

    def test_a_flood_does_not_hold_up_others(self, rig: Rig) -> None:
        flood = rig.start("yes", max_log_bytes=65_536, cpu_limit=1.0)
        rig.wait(Started, flood)
        job_ids = [rig.shell("echo here") for _ in range(5)]
        for job_id in job_ids:
            rig.wait(Ended, job_id)
            rig.wait_written(job_id, b"here\n")  # the journal may be later than the end
            assert rig.read(job_id) == b"here\n"
        rig.executor.kill(flood)
        rig.wait(Ended, flood)
        assert rig.read(flood, tail_bytes=4) in (b"y\ny\n", b"\ny\ny")
        rig.assert_nothing_left(flood, *job_ids)

    def test_the_end_of_a_log(self, rig: Rig, tmp_path: Path) -> None:
        with pytest.raises(CpumondError):
            rig.executor.read_log("none", str(tmp_path / "none"), "stdout", 10)
        job_id = rig.shell("echo one; echo two; sleep 1000")
        rig.wait_written(job_id, b"two\n")
        directory = str(rig.directory / job_id)
        for tail_bytes, expected in ((0, b""), (1, b"\n"), (4, b"two\n"), (6, b"e\ntwo\n"), (100, b"one\ntwo\n")):
            assert rig.executor.read_log(job_id, directory, "stdout", tail_bytes) == (expected, 8)
        rig.executor.kill(job_id)
        rig.wait(Ended, job_id)
        assert rig.executor.read_log(job_id, directory, "stderr", 10) == (b"", 0)
        assert rig.executor.read_log(job_id, directory, "stdout", 4) == (b"two\n", 8)

    def test_jobs_outlive_the_agent(self, rig: Rig) -> None:
        living, ending = rig.gated("echo ready", "echo over; exit 4"), rig.gated(":", "exit 6", "other")
        killed = rig.start("sleep", "1000")
        started = {job_id: rig.wait(Started, job_id) for job_id in (living, ending, killed)}
        rig.wait_written(living, b"ready")
        rig.executor.close()
        rig.open_gate("other")
        wait_until(lambda: not rig.cgroups.list_processes(ending), "the job ends without an agent")
        rig.events.clear()
        assert rig.come_back(living, ending, killed, "unknown") == {
            job_id: started[job_id] for job_id in (living, killed)
        }
        assert rig.wait(Ended, ending).exit_code == 6
        assert isinstance(rig.wait_over("unknown"), (Ended, NotStarted))
        rig.open_gate()
        rig.executor.kill(killed)
        assert rig.wait(Ended, living).exit_code == 4
        assert rig.wait(Ended, killed).signal == 9
        assert rig.read(living) == b"ready\nover\n"
        assert not [event for event in rig.events if isinstance(event, Started)]
        rig.assert_nothing_left(living, ending, killed)

    def test_a_job_that_the_agent_forgot_is_left_alone(self, rig: Rig) -> None:
        job_id = rig.start("sleep", "1000")
        rig.wait(Started, job_id)
        rig.events.clear()
        assert rig.restart() == {}
        rig.poll(0.2)
        assert len(rig.cgroups.list_processes(job_id)) == 1
        rig.cgroups.kill(job_id)
        deadline_s = time.monotonic() + TIMEOUT_S
        while job_id in rig.cgroups.list_job_ids():
            assert time.monotonic() < deadline_s
            rig.poll()
        assert rig.events == []
        rig.assert_nothing_left(job_id)

    def test_many_at_once(self, rig: Rig) -> None:
        rig.wait(Ended, rig.start("true"))
        descriptors = count_descriptors()
        job_ids = [rig.start("sleep", "1000") for _ in range(50)]
        rig.wait_all(Started, job_ids)
        for job_id in job_ids:
            rig.executor.kill(job_id)
        assert {ended.signal for ended in rig.wait_all(Ended, job_ids)} == {9}
        rig.assert_nothing_left(*job_ids)
        assert count_descriptors() <= descriptors
