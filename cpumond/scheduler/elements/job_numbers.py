"""Numbers of a task's jobs: the place of each job, and how many jobs were started; pure (semantics.md 7.4)."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final, NamedTuple

UNKNOWN: Final = -1
"""Number of a job that an older version started, which did not number jobs."""


_NONE_DONE: Final = bytearray()
"""Value of ``_done`` of tasks of which no cookie is done. It is shared and never changed."""


class EndingJob(NamedTuple):
    """A job that is being stopped, and the node on which it may still work."""

    job_id: str
    node_id: str


class Returned:
    """Cookies of jobs that ended without completing, or that are being stopped."""

    __slots__ = ("free", "ending", "free_ending")

    def __init__(self) -> None:
        self.free: list[int] = []
        """A heap of returned cookies; some of these may have been taken or done since."""
        self.ending: dict[int, EndingJob] = {}
        """Cookie -> the last job that had the cookie, is being stopped and has not ended."""
        self.free_ending: dict[int, None] = {}
        """The returned cookies among those of ``ending``."""


class TaskNumbers:
    """A cookie is a job's place in its ``task``, 0 .. job_count - 1. One active job takes it; it is done when that job
    completes. A job that is being stopped has returned its cookie but may still work. Such a cookie is given to a new
    job only if no other cookie is free; the new job then waits for the old one to end. Each step has constant cost."""

    __slots__ = ("task", "next_index", "active_count", "_holders", "_done", "_returned")

    def __init__(self, task: str) -> None:
        self.task = task
        self.next_index = 0
        """``task_job_index`` of the next start."""
        self.active_count = 0
        """Number of active jobs, as in ``Operation.active``."""
        self._holders: list[str] = []
        """By cookie: id of the job that has the cookie, "" if none has it. Cookies beyond the list are free."""
        self._done = _NONE_DONE
        """One byte for each cookie, up to the highest cookie that is done: 1 if it is done, else 0."""
        self._returned: Returned | None = None
        """Returned cookies; None until a cookie is returned, which saves memory for most tasks."""

    def take(self, job_id: str, job_count: int, wanted: int = UNKNOWN) -> int:
        """Give a job the cookie ``wanted``, or the lowest free cookie if it is UNKNOWN. Returns the cookie."""
        if wanted < 0 and self._returned is None:
            self._holders.append(job_id)
            return len(self._holders) - 1
        cookie = wanted
        if cookie < 0 or not self.is_free(cookie):
            cookie = self._find_free(job_count)
        if self._returned is not None:
            self._returned.free_ending.pop(cookie, None)
        self._reach(cookie)
        self._holders[cookie] = job_id
        return cookie

    def give_back(self, cookie: int, job_id: str) -> None:
        """Return the cookie of a job that is no longer active."""
        if self._holder_of(cookie) != job_id:
            return
        self._holders[cookie] = ""
        if self.is_done(cookie):
            return
        returned = self._get_returned()
        if cookie in returned.ending:
            returned.free_ending[cookie] = None
        else:
            heappush(returned.free, cookie)

    def note_ending(self, cookie: int, ending: EndingJob) -> None:
        """Note that a job with the cookie is being stopped and returns it."""
        if self._holder_of(cookie) == ending.job_id:
            self._get_returned().ending[cookie] = ending

    def note_ended(self, cookie: int, job_id: str) -> None:
        ending, returned = self.find_ending(cookie), self._returned
        if returned is not None and ending is not None and ending.job_id == job_id:
            del returned.ending[cookie]
            if cookie in returned.free_ending:
                del returned.free_ending[cookie]
                heappush(returned.free, cookie)

    def finish(self, cookie: int, job_count: int) -> str:
        """Mark a cookie as done. Returns the id of the job that has it: the completed job or its replacement."""
        if cookie < 0:
            cookie = self._find_free(job_count)
        self._reach(cookie)
        self._done = self._done or bytearray()
        self._done += b"\0" * (cookie + 1 - len(self._done))
        self._done[cookie] = 1
        if self._returned is not None:
            self._returned.free_ending.pop(cookie, None)
        return self._holders[cookie]

    def begin_anew(self) -> None:
        """Restart all jobs: no cookie is done any more, and cookies of jobs that have not ended yet are free."""
        self._done = _NONE_DONE
        self._returned = Returned()
        self._returned.free = [cookie for cookie, job_id in enumerate(self._holders) if not job_id]

    def find_ending(self, cookie: int) -> EndingJob | None:
        """Return the last job that had the cookie, if it is being stopped and has not ended."""
        return None if self._returned is None else self._returned.ending.get(cookie)

    @property
    def done_count(self) -> int:
        return self._done.count(1)

    def is_free(self, cookie: int) -> bool:
        """Whether no active or completed job has the cookie; an unknown cookie is free."""
        return cookie < 0 or not (self.is_taken(cookie) or self.is_done(cookie))

    def is_taken(self, cookie: int) -> bool:
        """Whether an active job has the cookie."""
        return bool(self._holder_of(cookie))

    def is_done(self, cookie: int) -> bool:
        return 0 <= cookie < len(self._done) and bool(self._done[cookie])

    def _find_free(self, job_count: int) -> int:
        returned = self._returned
        while returned is not None and returned.free:
            cookie = heappop(returned.free)
            if not self._holders[cookie] and not self.is_done(cookie):
                return cookie
        if len(self._holders) >= job_count and returned is not None and returned.free_ending:
            return next(iter(returned.free_ending))
        return len(self._holders)

    def _get_returned(self) -> Returned:
        if self._returned is None:
            self._returned = Returned()
        return self._returned

    def _reach(self, cookie: int) -> None:
        while len(self._holders) <= cookie:
            if len(self._holders) < cookie:
                heappush(self._get_returned().free, len(self._holders))
            self._holders.append("")

    def _holder_of(self, cookie: int) -> str:
        return self._holders[cookie] if 0 <= cookie < len(self._holders) else ""
