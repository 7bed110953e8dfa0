"""The answers of an engine about its jobs, and the methods of every engine's client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from cpumond.core.errors import CpumondError

if TYPE_CHECKING:
    import asyncio

Key = tuple[str, str]
"""The kind of an engine and its socket."""
SLUID: Final = "s" + "[0-9A-HJKMNP-TV-Z]" * 13
"""What Slurm names a job by besides its number, for its whole life; a glob as well as a regular expression."""
SHORT_ID: Final = 12
MAX_LABEL: Final = 128
"""Characters of a label, and of a job's name: image names with digests are longer."""
RECLAIMED_LABEL: Final = "reclaimed_cpu"
"""On jobs that run on CPU reclaimed from others: what they asked for of it, in thousandths of a core."""
NO_ENTRIES: Final[Mapping[str, str]] = {}


class EngineJob(msgspec.Struct, frozen=True):
    """A container or a job as its engine names it.

    ``path`` the cgroup of the whole job, relative to the hierarchy of the cpu controller: what is below it is the
    job's own. ``labels`` name -> text for people; ``group`` names what it belongs to (compose project, pod, "").
    ``ordered_cores``: what it ordered, None = nothing, or the engine does not tell; ``tells_order``: the engine tells
    each new order, so that ``ordered_cores`` is the newest; ``sets_quota``: it is the quota of the job's cgroup, too.
    ``left_out``: why its limit must never be moved, "" where it may be. ``is_named`` False: only its cgroup is known.
    ``is_job`` False: a cgroup of the engine's own, such as the one that holds a pod together; it is not shown.
    """

    kind: str
    job_id: str
    name: str
    path: str
    labels: Mapping[str, str] = NO_ENTRIES
    group: str = ""
    ordered_cores: float | None = None
    tells_order: bool = False
    sets_quota: bool = True
    left_out: str = ""
    is_named: bool = True
    is_job: bool = True


class EngineView(msgspec.Struct, frozen=True):
    """The latest answer of one engine.

    ``jobs`` by path, the last known ones while it is away; ``asked_at_s``: when it was last asked for all of them, on
    the monotonic clock, None before its first answer; ``problem``: a sentence, "" while it answers; ``title``: name and
    version. ``notes``: sentences about jobs that it describes wrongly.
    """

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
        """The number of jobs that it has named; the cgroups that hold pods together are none."""
        return sum(job.is_job for job in self.jobs.values())


class EngineReply(msgspec.Struct, frozen=True):
    """All jobs of an engine after one look; ``notes`` and ``title`` as in ``EngineView``."""

    jobs: tuple[EngineJob, ...]
    title: str = ""
    notes: tuple[str, ...] = ()


class EngineError(CpumondError):
    """An engine that does not answer, or not as it should, in a sentence."""


Publish = Callable[[EngineReply], None]


class Engine(Protocol):
    """The client of one engine. It is only ever asked: nothing is started, stopped or changed."""

    kind: str

    async def watch(self, publish: Publish, nudged: asyncio.Event) -> None:
        """Publish all jobs, and again whenever they change, until cancelled. A look is due at once when ``nudged``.

        Raises EngineError when the engine is away or answers what it should not; it may be called again then.
        """


def clean_labels(labels: Iterable[tuple[str, object]]) -> dict[str, str]:
    """The labels that say something, as short printable texts: an engine's users choose them."""
    return {name: clean(str(value)) for name, value in labels if value not in (None, "")}


def clean(text: str) -> str:
    """Text of an engine's users in one printable line of at most MAX_LABEL characters."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:MAX_LABEL])
