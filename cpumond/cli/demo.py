"""``cpumond demo``: three real loads in cgroups of their own, the agent and a receiver over them, live.

As root on v1 it uses the real hierarchy; on v2 it starts itself again in a delegated scope of systemd (of the user's
session without root); where neither works it simulates the kernel, and says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpumond.cli.options import DurationType
from cpumond.errors import CpumondError, CreateError, UnavailableError

if TYPE_CHECKING:
    import httpx2
    from rich.table import Table

    from cpumond.cgroup.mounts import Hierarchies
    from cpumond.testing import LoadProcess

ORDERED_CORES = min(1.0, 0.375 * (os.cpu_count() or 2))
"""What each job orders: two of them together must fit on the machine beside everything else."""

CHECK_PERIOD_S = 0.5
POLL_S = 0.02
SCOPE_GUARD = "CPUMOND_DEMO_IN_SCOPE"
BURST_S = 5.0
BURST_CORES = 2.0
"""What bursty wants when it is awake: more than it ordered, so that its quota holds it back and not its neighbours."""

SLEEP_CORES = 0.02
PR_SET_PDEATHSIG = 1
FIGURES = ("ordered_cpu_s", "used_cpu_s", "reclaimed_cpu_s", "throttled_s")


def demand_steady_low(_: float) -> float:
    """A job that uses a tenth of what it ordered."""
    return 0.1


def demand_bursty(seconds: float) -> float:
    """A job that sleeps for 15 s and then wants more than it ordered for 5 s, again and again."""
    return BURST_CORES if seconds % 20.0 >= 20.0 - BURST_S else SLEEP_CORES


def demand_busy(_: float) -> float:
    """A job that uses all it ordered."""
    return ORDERED_CORES


DEMANDS: dict[str, Callable[[float], float]] = {
    "steady-low": demand_steady_low,
    "bursty": demand_bursty,
    "busy": demand_busy,
}

THREADS = {"bursty": 2}
"""Of a load that wants more than one core."""


class Wakeup(msgspec.Struct):
    """One burst: when it began and when the job's full limit was in force (None: not yet), in seconds."""

    began_s: float
    back_s: float | None = None


class Summary(msgspec.Struct):
    """What the demo ends with; core-seconds and seconds. ``restored``: all limits are as they were found."""

    kernel: str
    duration_s: float
    ordered_cpu_s: float
    used_cpu_s: float
    reclaimed_cpu_s: float
    throttled_s: float
    give_back_s: list[float]
    heartbeats: int
    restored: bool
    jobs: dict[str, dict[str, float]]


@click.command("demo", epilog="Example: cpumond demo --duration 60")
@click.option("--duration", "duration_s", type=DurationType(), default=60.0, show_default="60s", help="How long.")
@click.option("--json", "as_json", is_flag=True, help="Print only the summary, as JSON.")
def demo_command(duration_s: float, as_json: bool) -> int:
    """Three test cgroups with real load, the agent and a receiver over them, with a live table.

    steady-low uses a tenth of what it ordered, bursty sleeps and wakes up, busy uses all. Ends with a summary and
    removes everything it made, also after Ctrl-C or when its terminal is closed.
    """
    with _stop_on_signals() as stopped, tempfile.TemporaryDirectory(prefix="cpumond-demo-") as directory:
        host = _choose_host(directory)
        try:
            if not as_json:
                click.echo(host.describe())
            summary = _run(host, directory, duration_s, stopped, as_json)
        finally:
            host.close()
    if as_json:
        click.echo(msgspec.json.encode(summary))
    else:
        _show_summary(summary)
    return 0 if summary.restored else 69


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set, so that the way out is always the ordinary one."""
    stopped = threading.Event()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup wants it to go on
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, lambda *_: stopped.set()) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class RealHost:
    """Real cgroups with real processes in them."""

    kernel = "real"

    def __init__(self, hierarchies: Hierarchies, top: str) -> None:
        from cpumond.testing import CgroupTree

        for root in {hierarchies.cpu_root, hierarchies.cpuacct_root}:
            remove_leftovers(os.path.join(root, os.path.dirname(top)))
        self.tree = CgroupTree(hierarchies, top)
        self.mountinfo = "/proc/self/mountinfo"
        self.top = top
        self._loads: dict[str, LoadProcess] = {}
        self._asked: dict[str, float] = {}
        try:
            for name in DEMANDS:
                self.tree.make(name)
                self._loads[name] = self.tree.start_load(name, THREADS.get(name, 1))
        except (OSError, RuntimeError) as error:
            self.close()
            raise CreateError(f"cannot start the demo's loads below {top}: {error}; see `cpumond doctor`") from error

    def describe(self) -> str:
        """What is real here, in a sentence."""
        layout = self.tree.hierarchies.layout
        return f"Real cgroups ({layout}) below {self.tree.path('')}, real processes, the real agent."

    def start(self) -> None:
        """Nothing to start: the loads wait for ``move``."""

    def move(self, seconds: float) -> None:
        """Tell each load what it wants now."""
        for name, demand in DEMANDS.items():
            cores = demand(seconds)
            if self._asked.get(name) != cores:
                self._asked[name] = cores
                self._loads[name].burn(cores)

    def quota_cores(self, name: str) -> float:
        """The quota in force."""
        return self.tree.quota_cores(name)

    def read_settings(self) -> dict[str, dict[str, str]]:
        """All settings, for the comparison at the end."""
        return {name: self.tree.read_all(name) for name in DEMANDS}

    def close(self) -> None:
        """Remove everything."""
        self.tree.close()


class SimulatedHost:
    """A fake hierarchy whose counters run by themselves; only the agent and the receiver are real."""

    kernel = "simulated"
    top = ""

    def __init__(self, directory: str, reason: str) -> None:
        from cpumond.testing import SimulatedKernel

        self._kernel = SimulatedKernel(os.path.join(directory, "kernel"), DEMANDS, step_s=0.05)
        self.mountinfo = self._kernel.mountinfo
        self._root = os.path.join(directory, "kernel", "cgroup")
        self._reason = reason

    def describe(self) -> str:
        """What is simulated here, in a sentence."""
        return f"SIMULATED kernel and loads ({self._reason}); the agent and the receiver are real."

    def start(self) -> None:
        """Let the counters run."""
        self._kernel.start()

    def move(self, seconds: float) -> None:
        """The simulated loads know the time themselves."""

    def quota_cores(self, name: str) -> float:
        """The quota in force."""
        with open(os.path.join(self._root, name, "cpu.max"), encoding="ascii") as file:
            quota, _, period = file.read().partition(" ")
        return float("inf") if quota in ("max", "") else int(quota) / int(period or 100_000)

    def read_settings(self) -> dict[str, dict[str, str]]:
        """All settings, for the comparison at the end."""
        settings = {}
        for name in DEMANDS:
            with open(os.path.join(self._root, name, "cpu.max"), encoding="ascii") as file:
                settings[name] = {"cpu.max": file.read().strip()}
        return settings

    def close(self) -> None:
        """End the counters."""
        self._kernel.stop()


Host = RealHost | SimulatedHost


def remove_leftovers(directory: str) -> None:
    """Remove the trees of demos that were killed: ``cpumond-demo-PID`` of a dead process, without a process in it."""
    for top in glob.glob(os.path.join(glob.escape(directory), "cpumond-demo-*")):
        found = re.fullmatch(r"cpumond-demo-([1-9][0-9]*)", os.path.basename(top))
        # Our own process id is that of a dead one too: we have made nothing yet.
        if found is None or (int(found[1]) != os.getpid() and os.path.exists(f"/proc/{found[1]}")):
            continue
        places = [place for place, _, _ in os.walk(top, topdown=False)]
        # What is in use meanwhile, or not ours to remove, stays; the kernel removes only empty ones.
        with contextlib.suppress(OSError):
            if not any(_has_process(place) for place in places):
                for place in places:
                    os.rmdir(place)


def _has_process(cgroup: str) -> bool:
    with open(os.path.join(cgroup, "cgroup.procs"), encoding="ascii") as procs:
        return bool(procs.read(1))


def open_hierarchies() -> Hierarchies:
    """The hierarchies of this machine; what finds them is imported late, for quick help. Raises UnavailableError."""
    from cpumond.cgroup import mounts

    return mounts.open_hierarchies()


def _choose_host(directory: str) -> Host:
    """The most real host that can be had here; may start this command again in a scope of systemd."""
    try:
        hierarchies = open_hierarchies()
    except CpumondError as error:
        return SimulatedHost(directory, str(error))
    name = f"cpumond-demo-{os.getpid()}"
    if hierarchies.cpu_version == 1:
        roots = {hierarchies.cpu_root, hierarchies.cpuacct_root}
        if all(os.access(root, os.W_OK) for root in roots):
            return RealHost(hierarchies, name)
        return SimulatedHost(directory, f"no right to make cgroups in {' and '.join(sorted(roots))}; run it as root")
    scope = _own_scope(hierarchies)
    if os.environ.get(SCOPE_GUARD) and scope is not None:
        return RealHost(hierarchies, f"{scope}/{name}")
    if not os.environ.get(SCOPE_GUARD) and shutil.which("systemd-run"):
        _start_again_in_scope()
    return SimulatedHost(directory, "no delegated cgroup with the cpu controller; run it as root under systemd")


def _own_scope(hierarchies: Hierarchies) -> str | None:
    """Our own delegated scope with this process moved into a leaf of it and cpu handed down; None if that fails."""
    with open("/proc/self/cgroup", encoding="ascii") as file:
        paths = [line.rstrip("\n").split(":", 2)[2].strip("/") for line in file if line.startswith("0::")]
    if not paths:
        return None
    directory = os.path.join(hierarchies.cpu_root, paths[0])
    try:
        os.makedirs(os.path.join(directory, "demo"), exist_ok=True)
        with open(os.path.join(directory, "demo", "cgroup.procs"), "w", encoding="ascii") as procs:
            procs.write("0")
        with open(os.path.join(directory, "cgroup.subtree_control"), "w", encoding="ascii") as control:
            control.write("+cpu")
    except OSError:
        # Not delegated, or without the cpu controller: no real cgroup for us here.
        return None
    return paths[0]


def _start_again_in_scope() -> None:
    """Replace this process by itself in a transient scope with Delegate=yes, when the manager grants one."""
    manager = [] if os.geteuid() == 0 else ["--user"]
    scope = ["systemd-run", *manager, "--scope", "--quiet", "-p", "Delegate=yes", "-p", "CPUWeight=100"]
    probe = subprocess.run([*scope, "true"], capture_output=True, timeout=20, check=False)
    if probe.returncode == 0:
        command = [*scope, sys.executable, "-m", "cpumond", *sys.argv[1:]]
        os.execvpe(command[0], command, {**os.environ, SCOPE_GUARD: "1"})  # noqa: S606 - our own command line


def _run(host: Host, directory: str, duration_s: float, stopped: threading.Event, quiet: bool) -> Summary:
    import httpx2

    before = host.read_settings()
    with contextlib.ExitStack() as stack:
        receiver, url = _start_receiver(directory)
        stack.callback(_end, receiver)
        agent = _start_agent(host, directory, url)
        stack.callback(_end, agent)
        client = stack.enter_context(
            httpx2.Client(
                transport=httpx2.HTTPTransport(uds=os.path.join(directory, "run", "control.sock")), timeout=5.0
            )
        )
        _wait_ready(client, agent, directory)
        host.start()
        ran_s, wakeups = _watch(host, client, duration_s, stopped, quiet)
        jobs = {name: client.get(f"http://agent/v1/jobs/{name}/explain").json() for name in DEMANDS}
        limits = httpx2.get(f"{url}/v1/limits", trust_env=False, timeout=5.0).json()
    after = host.read_settings()
    figures = {
        name: {
            "ordered_cpu_s": job["aggregated"]["max_cpu_s"],
            "used_cpu_s": job["total_cpu_s"],
            "reclaimed_cpu_s": job["aggregated"]["preempted_cpu_s"],
            "throttled_s": job["throttled_s"],
        }
        for name, job in jobs.items()
    }
    totals = {key: sum(job[key] for job in figures.values()) for key in FIGURES}
    return Summary(
        kernel=host.kernel,
        duration_s=ran_s,
        give_back_s=[wakeup.back_s - wakeup.began_s for wakeup in wakeups if wakeup.back_s is not None],
        heartbeats=max((job["sequence"] for job in limits["jobs"]), default=0),
        restored=after == before,
        jobs=figures,
        **totals,
    )


def _tie_to_this_process() -> Callable[[], None]:
    """What a child calls before its program starts, to get SIGTERM when this process ends, in whatever way."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it ended before
            os._exit(1)

    return tie


def _start_receiver(directory: str) -> tuple[subprocess.Popen[str], str]:
    log = open(os.path.join(directory, "receiver.log"), "w", encoding="utf-8")  # noqa: SIM115 - the process keeps it
    with log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cpumond", "stub-scheduler", "--listen", "127.0.0.1:0", "--quiet"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=_tie_to_this_process(),  # noqa: PLW1509 - no other thread is running yet
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if "http://" not in line:
        _end(process)
        raise UnavailableError("the receiver did not start; try `cpumond stub-scheduler --listen 127.0.0.1:0`")
    return process, "http://" + line.split("http://")[1].strip()


def _start_agent(host: Host, directory: str, url: str) -> subprocess.Popen[str]:
    pattern = f"{host.top}/*" if host.top else "*"
    config = os.path.join(directory, "demo.toml")
    with open(config, "w", encoding="utf-8") as file:
        file.write(
            f'node_id = "demo"\nstate_dir = "{directory}/state"\nruntime_dir = "{directory}/run"\n'
            f'mountinfo = "{host.mountinfo}"\nmanaged_roots = ["{host.top}"]\n'
            f'[monitor]\nmode = "reclaim"\ncheck_period = "{CHECK_PERIOD_S}s"\nmin_cpu_limit = 0.2\n'
            f'[[source]]\nkind = "glob"\npattern = "{pattern}"\ncpu_limit = {ORDERED_CORES}\noperation = "demo"\n'
            f'[metrics]\nlisten = ""\n[report]\nkind = "http"\nurl = "{url}"\n'
        )
    with open(os.path.join(directory, "agent.log"), "w", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cpumond", "agent", "--config", config],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=_tie_to_this_process(),  # noqa: PLW1509 - no other thread is running yet
        )


def _wait_ready(client: httpx2.Client, agent: subprocess.Popen[str], directory: str) -> None:
    import httpx2

    pause = threading.Event()
    for _ in range(1500):
        with contextlib.suppress(httpx2.HTTPError):
            if client.get("http://agent/readyz").status_code == 200:
                return
        if agent.poll() is not None:
            break
        pause.wait(POLL_S)
    with open(os.path.join(directory, "agent.log"), encoding="utf-8") as log:
        raise UnavailableError(f"the agent did not start: {log.read()[-500:].strip()}")


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM and wait: the agent puts its limits back; SIGKILL only if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _watch(
    host: Host, client: httpx2.Client, duration_s: float, stopped: threading.Event, quiet: bool
) -> tuple[float, list[Wakeup]]:
    """Move the loads, show the table, take the time of each give-back, until the time is over or a signal came."""
    from rich.console import Console
    from rich.live import Live

    wakeups: list[Wakeup] = []
    console = Console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not quiet else None
    began_s = time.monotonic()
    shown_s = -10.0
    with live or contextlib.nullcontext():
        while not stopped.is_set():
            seconds = time.monotonic() - began_s
            if seconds >= duration_s:
                break
            bursting = demand_bursty(seconds) == BURST_CORES
            if bursting and (not wakeups or seconds - wakeups[-1].began_s > BURST_S):
                wakeups.append(Wakeup(seconds))
            host.move(seconds)
            if wakeups and wakeups[-1].back_s is None and bursting and host.quota_cores("bursty") >= ORDERED_CORES:
                wakeups[-1].back_s = time.monotonic() - began_s
            if seconds - shown_s >= (CHECK_PERIOD_S if live else 5.0) and not quiet:
                shown_s = seconds
                table = _table(client.get("http://agent/v1/status").json(), seconds, duration_s)
                if live:
                    live.update(table, refresh=True)
                else:
                    _print(table)
            stopped.wait(POLL_S)
    return time.monotonic() - began_s, wakeups


def _table(status: dict[str, Any], seconds: float, duration_s: float) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    totals = status["totals"]
    free = f"{totals['reclaimed']:.2f} of {totals['cpu_limit']:.2f} ordered cores are free"
    table = Table(title=f"{seconds:.0f} of {duration_s:.0f} s: {free}", title_justify="left", box=SIMPLE)
    for name in ("job", "ordered", "limit", "usage", "smoothed", "votes", ""):
        table.add_column(name, justify="left" if name in ("job", "") else "right", min_width=24 if name == "" else 0)
    for job in sorted(status["jobs"], key=lambda job: list(DEMANDS).index(job["job_id"])):
        limit, usage = job["current_cpu_limit"], job["usage"] or 0.0
        used, allowed = (min(round(24 * cores / job["cpu_limit"]), 24) for cores in (usage, limit))
        bar = "█" * used + "░" * max(allowed - used, 0) + "·" * (24 - max(allowed, used))
        table.add_row(
            job["job_id"],
            f"{job['cpu_limit']:.2f}",
            f"{limit:.2f}",
            f"{usage:.2f}",
            "" if job["smoothed_cpu_usage"] is None else f"{job['smoothed_cpu_usage']:.2f}",
            "" if job["votes_sum"] is None else f"{job['votes_sum']:+d}",
            bar,
        )
    return table


def _print(table: Table) -> None:
    """``table`` on standard output; unlike rich's own printing, a reader that went away is an error for the caller."""
    from rich.console import Console

    console = Console()
    with console.capture() as capture:
        console.print(table)
    click.echo(capture.get(), nl=False)


def _show_summary(summary: Summary) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=f"After {summary.duration_s:.0f} s ({summary.kernel} kernel)", title_justify="left", box=SIMPLE)
    for name in ("core-seconds", "ordered", "used", "reclaimed", "throttled"):
        table.add_column(name, justify="left" if name == "core-seconds" else "right")
    for name, job in summary.jobs.items():
        table.add_row(name, *(f"{job[key]:.1f}" for key in FIGURES))
    table.add_row("all", *(f"{getattr(summary, key):.1f}" for key in FIGURES))
    _print(table)
    if summary.give_back_s:
        times = ", ".join(f"{seconds:.2f}" for seconds in summary.give_back_s)
        click.echo(f"Time to give CPU back when bursty woke up: {times} s (a check each {CHECK_PERIOD_S:g} s).")
    click.echo(f"The receiver has heartbeat {summary.heartbeats} and every job's newest limit.")
    click.echo(
        "Every limit is back as it was found; all that the demo made is removed."
        if summary.restored
        else "Some limits are NOT as they were found; see above."
    )
