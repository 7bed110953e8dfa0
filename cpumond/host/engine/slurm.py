"""Slurm: the jobs of this host's slurmd, as reported by ``squeue``.

Jobs are found in cgroupfs, where Slurm names them by their numbers or, from 26.05 on, by their SLUIDs
(``CgroupJobIdPaths``); users always see numbers. ``squeue`` is called once about each job, and again if the job's
cgroup is replaced (``scontrol requeue``). ``squeue --json`` is not used: it always returns all jobs of the cluster, and
a thousand nodes would burden the controller with that."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import re
from typing import Final, NamedTuple

import msgspec

from cpumond.host.cgroup.files import read_cpus
from cpumond.host.cgroup.mounts import Hierarchies, read_identity
from cpumond.host.engine.model import SLUID, EngineError, EngineJob, EngineReply, Publish, clean, clean_labels
from cpumond.host.engine.nudge import wait_nudged

LOOK_S: Final = 10.0
ANSWER_TIMEOUT_S: Final = 10.0
KILLED_TIMEOUT_S: Final = 5.0
ASK_AGAIN_S: Final = 60.0
"""Seconds until the controller is asked again about a job that it did not know."""
MAX_ASKED: Final = 100
"""Maximum number of jobs queried in one look; the rest wait for the next look."""
MAX_ANSWER_BYTES: Final = 1 << 20
FORMAT: Final = "%A|%D|%C|%u|%a|%P|%j"
"""Job, nodes, CPUs, user, account, partition, and the name last, because a name may contain any text."""
FORMAT_BY_SLUID: Final = f"%s|{FORMAT}"
_JOB: Final = re.compile(rf"job_([0-9]+)|({SLUID})")
_UNKNOWN: Final = "Invalid job id"


class SlurmJob(msgspec.Struct, frozen=True):
    """Slurm's answer about one job; ``cpus`` is the number of CPUs on all of its ``nodes`` together."""

    number: str
    nodes: int
    cpus: int
    user: str
    account: str
    partition: str
    name: str


class SlurmPlace(NamedTuple):
    """The cgroup of a job: its path below a hierarchy, and its inode. ``key`` is the job's number or its SLUID."""

    key: str
    path: str
    inode: int


class SlurmEngine:
    """The client of Slurm on this node. The glob patterns ``places`` match the cgroups of its jobs."""

    kind = "slurm"

    def __init__(self, hierarchies: Hierarchies, places: tuple[str, ...]) -> None:
        self._hierarchies = hierarchies
        self._places = places
        self._known: dict[tuple[str, int], SlurmJob] = {}
        """Jobs by their key and the inode of their place."""
        self._unknown: dict[tuple[str, int], float] = {}
        """Job unknown to the controller -> when to ask again, on the clock of the event loop."""
        self._title = ""

    async def watch(self, publish: Publish, nudged: asyncio.Event) -> None:
        if not self._title:
            version = (await run_squeue("--version")).strip().removeprefix("slurm").removeprefix("-wlm").strip()
            self._title = f"slurmd {clean(version)}"
        while True:
            nudged.clear()
            places = {each.key: each for each in find_jobs(self._hierarchies.cpu_root, self._places)}
            apart = find_jobs(self._hierarchies.cpuacct_root, self._places)
            apart = [each for each in apart if each.key not in places]
            found = {(each.key, each.inode) for each in (*places.values(), *apart)}
            self._known = {key: job for key, job in self._known.items() if key in found}
            now_s = asyncio.get_running_loop().time()
            self._unknown = {key: at_s for key, at_s in self._unknown.items() if key in found and at_s > now_s}
            wanted = sorted(found - self._known.keys() - self._unknown.keys(), key=lambda key: (len(key[0]), key))
            for key in wanted[:MAX_ASKED]:
                columns = FORMAT if key[0].isdecimal() else FORMAT_BY_SLUID
                job = parse_job(await run_squeue("--noheader", f"--jobs={key[0]}", f"--format={columns}"), key[0])
                if job is None:
                    self._unknown[key] = now_s + ASK_AGAIN_S
                else:
                    self._known[key] = job
                if asyncio.get_running_loop().time() - now_s > LOOK_S:
                    break  # the controller is slow: ask about the rest in the next look
            named = ((each, self._known.get((each.key, each.inode))) for each in places.values())
            jobs = [self._make_job(place, job) for place, job in named if job is not None]
            publish(EngineReply(tuple(jobs), self._title, tuple(self._note(each) for each in apart)))
            await wait_nudged(nudged, LOOK_S)

    def _make_job(self, place: SlurmPlace, job: SlurmJob) -> EngineJob:
        labels = clean_labels({name: getattr(job, name) for name in ("name", "user", "account", "partition")})
        # CPUs of other nodes do not count: for a job on several nodes, take the CPUs that it may use on this node.
        cpus = job.cpus if job.nodes == 1 else read_cpus(self._hierarchies, place.path)
        return EngineJob(
            "slurm", job.number, f"job_{job.number}", place.path, labels, ordered_cores=float(cpus),
            reports_request=True, sets_quota=False,
        )  # fmt: skip

    def _note(self, place: SlurmPlace) -> str:
        """Return a sentence about a job without a cgroup in the hierarchy of cpu."""
        job = self._known.get((place.key, place.inode))
        who = "" if job is None else f" ({clean(job.name)!r} of {clean(job.user)}, account {clean(job.account) or '-'})"
        return (
            f"slurm: {os.path.basename(place.path)}{who} has a cgroup only in cpuacct, as Slurm creates them if cpu "
            "and cpuacct are mounted separately: its limit cannot be moved; mount both together, or use cgroup v2"
        )


def find_jobs(root: str, places: tuple[str, ...]) -> list[SlurmPlace]:
    """Return the jobs below ``root``, at glob patterns ``places``."""
    paths = sorted(os.path.relpath(each, root) for place in places for each in glob.glob(os.path.join(root, place)))
    named = ((match, path) for path in paths if (match := _JOB.fullmatch(path.rpartition("/")[2])))
    return [SlurmPlace(match[1] or match[2], path, read_identity(os.path.join(root, path))[1]) for match, path in named]


def parse_job(text: str, key: str) -> SlurmJob | None:
    """Parse the line about the job named by ``key``: in FORMAT for a number, in FORMAT_BY_SLUID for a SLUID. ``text``
    may contain other jobs of an array or heterogeneous job. Returns None if the line is missing or invalid."""
    line = next((each for each in text.split("\n") if each.startswith(f"{key}|")), "")
    fields = (line if key.isdecimal() else line[len(key) + 1 :]).split("|", 6)
    if len(fields) < 7 or not all(each.isascii() and each.isdecimal() and int(each) for each in fields[:3]):
        return None
    number, nodes, cpus, *texts = fields
    user, account, partition, name = ("" if each == "(null)" else each for each in texts)
    return SlurmJob(number, int(nodes), int(cpus), user, account, partition, name)


async def run_squeue(*arguments: str) -> str:
    """Return the output of ``squeue``, even if the controller does not know a job. Raises EngineError."""
    try:
        process = await asyncio.create_subprocess_exec(
            "squeue", *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        raise EngineError(
            f"slurm: squeue cannot be run ({error.strerror}); install Slurm's client commands (slurm-client)"
        ) from error
    assert process.stdout is not None
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            try:
                await process.stdout.readexactly(MAX_ANSWER_BYTES)
                raise EngineError(f"slurm: squeue printed more than {MAX_ANSWER_BYTES >> 20} MiB")
            except asyncio.IncompleteReadError as end:
                printed = end.partial.decode(errors="replace")
            await process.wait()
    except TimeoutError:
        raise EngineError(f"slurm: squeue gave no output within {ANSWER_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Read the rest of the pipe: if it is full, asyncio of Python 3.13 never reports the end of the process. Do
            # not wait for a child of squeue that holds the pipe open.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILLED_TIMEOUT_S):
                    await process.communicate()
    if process.returncode and _UNKNOWN not in printed:
        said = clean(" ".join(printed.split()))
        raise EngineError(f"slurm: squeue failed with exit code {process.returncode}: {said}")
    return printed
