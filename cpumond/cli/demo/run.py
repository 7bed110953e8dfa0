"""The sequence of ``cpumond demo``: start everything, wake the simulation, observe, remove everything, summarize.

As root on v1 the demo uses the real hierarchies. On v2 it restarts itself in a delegated systemd scope (without root:
of the user's session). If neither works, the demo simulates the kernel, and says so."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import click
import msgspec

from cpumond.cli.demo import host as demo_host
from cpumond.cli.demo.host import make_directory, stop_on_signals
from cpumond.cli.demo.jobs import (
    CHECK_PERIOD_S,
    MONITOR,
    OVERCOMMIT_S,
    WEIGHTS,
    WORDS,
    DemoPlan,
    Lever,
    Load,
    Sleeper,
    make_command,
    make_plan,
)
from cpumond.cli.demo.kernel import PlainKernel
from cpumond.cli.demo.story import Story
from cpumond.cli.demo.view import DemoSummary, Display, PoolSummary, StoppedJob, list_sentences
from cpumond.cli.ending import Ending
from cpumond.cli.output import print_line
from cpumond.cluster import Cluster
from cpumond.core.errors import EXIT_UNAVAILABLE, CpumondError, UnavailableError
from cpumond.host.cgroup import mounts

NAME = "cpumond-demo-"
CLOSE_LOOK_S = 0.02
LOOK_S = 0.25
MEMORY = 64 * 2**20
"""Memory request of each job in bytes."""


class DemoHost(NamedTuple):
    """Places of files and cgroups: ``prefix`` in the hierarchies of ``mountinfo``; ``kernel``: real or simulated."""

    directory: str
    kernel: str
    prefix: str
    mountinfo: str
    sentence: str


def run_demo(duration_s: float, actuator: Lever, as_json: bool) -> int:
    """Run ``cpumond demo`` and return the exit code. Raises CpumondError when a part of it does not start or dies."""
    plan = make_plan(float(len(os.sched_getaffinity(0))))
    with stop_on_signals() as stopped:
        with _make_host() as host:
            if not as_json:
                click.echo(f"{host.sentence}\n{plan.describe()}\n{WORDS[actuator].sentence}")
            summary = _run(host, plan, actuator, duration_s, stopped, Display(as_json))
        summary = msgspec.structs.replace(summary, removed=summary.removed and not os.path.exists(host.directory))
        if as_json:
            print_line(msgspec.to_builtins(summary))
        else:
            click.echo("\n".join(list_sentences(summary)))
    return 0 if summary.restored and summary.removed else EXIT_UNAVAILABLE


@contextlib.contextmanager
def _make_host() -> Iterator[DemoHost]:
    """Use real cgroups if possible; for this the command may be restarted in a systemd scope."""
    problem = place = None
    try:
        place = demo_host.make_place(NAME)
    except CpumondError as error:
        problem = error
    directory = make_directory(NAME)
    try:
        if place is not None:
            text = f"Real cgroups ({place.layout}) below {place.prefix}, real jobs, the real scheduler and agent."
            yield DemoHost(directory, "real", place.prefix, "/proc/self/mountinfo", text)
            return
        with PlainKernel(os.path.join(directory, "kernel")) as kernel:
            text = (
                f"SIMULATED kernel, quotas are not enforced ({problem}); scheduler, agent and jobs are real processes."
            )
            yield DemoHost(directory, "simulated", "demo", kernel.mountinfo, text)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(
    host: DemoHost, plan: DemoPlan, actuator: Lever, duration_s: float, stopped: Ending, display: Display
) -> DemoSummary:
    cluster = Cluster(
        host.directory, 1, cpu=plan.capacity, check_period=f"{CHECK_PERIOD_S}s",
        monitor=MONITOR | WORDS[actuator].options,
        scheduler_config=f'allowed_node_resources_overcommit_duration = "{OVERCOMMIT_S}s"\n',
        agent_config='[discovery]\nrescan_period = "1s"\n', cgroup_prefix=host.prefix, mountinfo=host.mountinfo,
        token=secrets.token_hex(24), web=True,
    )  # fmt: skip
    with cluster:
        display.announce(f"Pages to open while it runs:\n{cluster.describe_pages()}")
        story = Story(cluster, mounts.open_hierarchies(host.mountinfo), plan, display.report, actuator)
        with display, _naming_ended_process(cluster):
            ran_s = _play(story, os.path.join(host.directory, "wanted"), duration_s, stopped, display)
        restored = _stop_agent(story)
    return summarise(host.kernel, story, ran_s, restored, removed=not cluster.leftovers())


@contextlib.contextmanager
def _naming_ended_process(cluster: Cluster) -> Iterator[None]:
    """If a request gets no answer because a process has ended, raise the error that names the process."""
    try:
        yield
    except UnavailableError:
        # The end of a process is seen slightly later than its sockets close.
        with contextlib.suppress(TimeoutError):
            cluster.wait(lambda: cluster.check(), "a part of the demo has ended", 2.0)  # noqa: PLW0108 - it raises
        raise


def _play(story: Story, wanted_path: str, duration_s: float, stopped: Ending, display: Display) -> float:
    """Start the operations, and wake the simulation or let it sleep until the time is over or a signal comes; return
    the seconds that this took. The file ``wanted_path`` says how many cores the simulation's job should use."""
    _write_demand(wanted_path, story.plan.idle_cores)
    for pool, weight in WEIGHTS.items():
        story.cluster.create_pool(pool, weight=weight)
    sleeper = Sleeper()
    begun_s = time.monotonic()
    looked_s = -LOOK_S
    _start(story, "simulation", wanted_path)
    while not stopped.is_set() and (now_s := time.monotonic() - begun_s) < duration_s:
        story.look_closely(now_s)
        if now_s - looked_s >= LOOK_S:
            looked_s = now_s
            story.look_around(now_s)
            if len(story.operations) == 1 and story.living("simulation") is not None:
                _start(story, "render")
                _start(story, "frames")
            display.draw(story, now_s, duration_s)
        if sleeper.look(now_s, story.living("render") is not None, duration_s - now_s):
            _write_demand(wanted_path, story.plan.capacity if sleeper.is_awake else story.plan.idle_cores)
            (story.wake if sleeper.is_awake else story.sleep)(time.monotonic() - begun_s)
        stopped.wait(CLOSE_LOOK_S)
    ran_s = time.monotonic() - begun_s
    story.look_around(ran_s)
    return ran_s


def _write_demand(path: str, cores: float) -> None:
    """Replace the file atomically."""
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(str(cores))
    os.rename(f"{path}.new", path)


def _start(story: Story, load: Load, wanted_path: str = "") -> None:
    planned = story.plan.operations[load]
    limits = {"resource_limits": {"user_slots": planned.at_once}} if planned.at_once else {}
    operation_id = story.cluster.start_operation(
        planned.pool, make_command(planned, wanted_path), planned.job_count, planned.cpu_limit, MEMORY,
        planned.monitor, title=load, **limits,
    )  # fmt: skip
    story.operations[operation_id] = load


def _stop_agent(story: Story) -> bool:
    """End the agent as a service manager would; return whether the surviving jobs have their full request again."""
    story.node.stop()
    story.read_quotas()
    # A limit of 0: the job's cgroup disappeared while the agent ended.
    return all(job.limit >= job.ordered * 0.99 or job.limit == 0.0 for job in story.jobs.values() if job.lives)


def summarise(kernel: str, story: Story, ran_s: float, restored: bool, removed: bool) -> DemoSummary:
    jobs = list(story.jobs.values())
    now = time.time()
    wakeups = story.wakeups
    return DemoSummary(
        kernel=kernel,
        actuator=story.actuator,
        duration_s=ran_s,
        capacity_cores=story.plan.capacity,
        ordered_cpu_s=sum(job.ordered * max((job.ended_at or now) - job.started_at, 0.0) for job in jobs),
        used_cpu_s=sum(job.used_cpu_s for job in jobs),
        reclaimed_cpu_s=sum(job.reclaimed_cpu_s for job in jobs),
        given_cpu_s=sum(job.used_cpu_s for job in jobs if job.on_freed_cpu),
        wake_ups=len(wakeups),
        give_back_s=[each.back_s - each.began_s for each in wakeups if each.back_s is not None],
        full_use_s=[each.ran_s - each.began_s for each in wakeups if each.ran_s is not None],
        overcommits=story.overcommits,
        jobs_started=Counter(job.load for job in jobs),
        started_on_freed_cpu=Counter(job.load for job in jobs if job.on_freed_cpu),
        start_s=[job.since_heartbeat_s for job in jobs],
        stopped=[StoppedJob(job.name, job.kind, job.reason) for job in jobs if job.kind],
        pools={
            name: PoolSummary(
                pool.weight, sum(job.used_cpu_s for job in jobs if job.pool == name), pool.fair_share_cpu_s
            )
            for name, pool in story.pools.items()
        },
        heartbeats=story.heartbeats,
        not_reached=_find_not_reached(story),
        machine_load=os.getloadavg()[0] / len(os.sched_getaffinity(0)),
        restored=restored,
        removed=removed,
    )


def _find_not_reached(story: Story) -> list[str]:
    jobs = story.jobs.values()
    reached = {
        "simulation was started": any(job.load == "simulation" for job in jobs),
        f"simulation's {story.words.noun} went down": any(job.reclaimed_cpu_s > 0.0 for job in jobs),
        "render was started on the freed CPU": any(job.load == "render" and job.on_freed_cpu for job in jobs),
        "simulation woke up": bool(story.wakeups),
        "simulation had all its CPU back": any(each.back_s is not None for each in story.wakeups),
        "render was stopped because the node was overcommitted": any(
            job.load == "render" and job.kind == "overcommit" for job in jobs
        ),
        "render was started again": sum(job.load == "render" for job in jobs) > 1,
    }
    return [what for what, is_seen in reached.items() if not is_seen]
