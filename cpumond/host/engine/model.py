"""Answers of an engine about its jobs, and the interface of every engine's client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from cpumond.core.errors import CpumondError

if TYPE_CHECKING:
    import asyncio

Key = tuple[str, str]
"""The kind of an engine and its socket."""
SLUID: Final = "s" + "[0-9A-HJKMNP-TV-Z]" * 13
"""Pattern of a SLUID, Slurm's second name of a job, which never changes; valid as a glob and a regular expression."""
SHORT_ID: Final = 12
MAX_LABEL: Final = 128
"""Maximum characters of a label and of a job's name; image names with digests are longer."""
RECLAIMED_LABEL: Final = "reclaimed_cpu"
"""Label of jobs on CPU reclaimed from others. Its value is the job's request for such CPU, in thousandths of a core."""
NO_ENTRIES: Final[Mapping[str, str]] = {}


class EngineJob(msgspec.Struct, frozen=True):
    """A container or a job as its engine names it.

    ``path`` is the cgroup of the whole job, relative to the hierarchy of the cpu controller; cgroups below belong to
    the job. ``labels``: name -> text for people. ``group`` names its group (compose project, pod, "").
    ``ordered_cores`` is the job's request; None: there is none, or the engine does not report it. ``reports_request``:
    the engine reports changes of the request, so ``ordered_cores`` is the newest. ``sets_quota``: the request is also
    the quota of the job's cgroup. ``left_out``: why its limit must never be moved, "" if it may be moved. ``is_named``
    False: only its cgroup is known. ``is_job`` False: a cgroup of the engine itself, for example one that keeps a pod
    together; it is not shown."""

    kind: str
    job_id: str
    name: str
    path: str
    labels: Mapping[str, str] = NO_ENTRIES
    group: str = ""
    ordered_cores: float | None = None
    reports_request: bool = False
    sets_quota: bool = True
    left_out: str = ""
    is_named: bool = True
    is_job: bool = True


class EngineView(msgspec.Struct, frozen=True):
    """The latest answer of one engine.

    ``jobs`` are by path; while the engine is down, they are those known last. ``asked_at_s`` is the time of the last
    complete query on the monotonic clock, None before the first answer. ``problem`` is a sentence, "" while the engine
    answers. ``title`` is name and version. ``notes`` are sentences about jobs with invalid descriptions."""

    kind: str
    jobs: Mapping[str, EngineJob] = {}
    asked_at_s: float | None = None
    problem: str = ""
    title: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_up(self) -> bool:
        return self.asked_at_s is not None and not self.problem

    def count_jobs(self) -> int:
        """Count the engine's jobs; cgroups of the engine itself do not count."""
        return sum(job.is_job for job in self.jobs.values())


class EngineReply(msgspec.Struct, frozen=True):
    """All jobs of an engine after one look; ``notes`` and ``title`` are those of ``EngineView``."""

    jobs: tuple[EngineJob, ...]
    title: str = ""
    notes: tuple[str, ...] = ()


class EngineError(CpumondError):
    """A sentence about an engine that does not answer, or gives an invalid answer."""


Publish = Callable[[EngineReply], None]


class Engine(Protocol):
    """The client of one engine. It only reads: nothing is started, stopped or changed."""

    kind: str

    async def watch(self, publish: Publish, nudged: asyncio.Event) -> None:
        """Publish all jobs now and whenever they change, until cancelled. Look at once when ``nudged`` is set.

        Raises EngineError if the engine is down or gives an invalid answer; then it may be called again."""


def clean_labels(labels: Mapping[str, object]) -> dict[str, str]:
    """Return the labels that have values, as short printable texts, because an engine's users choose them."""
    return {name: clean(str(value)) for name, value in labels.items() if value not in (None, "")}


def clean(text: str) -> str:
    """Return text of an engine's users as one printable line of at most MAX_LABEL characters."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:MAX_LABEL])
