"""inotify: cgroups that appear, disappear or are renamed, and writes to the limit files of followed jobs."""

from __future__ import annotations

import contextlib
import errno
import os

import structlog
from asyncinotify import Inotify, Mask, Watch

from cpumond.core.errors import describe
from cpumond.host.cgroup.mounts import read_identity

log = structlog.get_logger("cpumond.agent")


class Watcher:
    """Watches directories for children and limit files for writes; ``drain`` returns the changes since its last call.

    ``problem``: the kernel gives no inotify instance or no more watches; then rescans find jobs and read all limits."""

    def __init__(self) -> None:
        self._inotify: Inotify | None = None
        self._directories: dict[str, tuple[tuple[int, int], Watch]] = {}
        self._owners: dict[Watch, str] = {}
        self.problem = ""
        try:
            self._inotify = Inotify(sync_timeout=0)
        except OSError as error:
            self._note_problem(f"no inotify instance is left ({describe(error)})", "fs.inotify.max_user_instances")

    def watch_directories(self, paths: set[str]) -> bool:
        """Watch exactly these directories for children that appear, disappear, or get a new name or xattr.

        Returns True if one of the directories was not watched before. If so, the caller must look at the directories
        again, because the watch does not report children that had appeared before."""
        found = {path: read_identity(path) for path in paths}
        for path, (known, watch) in list(self._directories.items()):
            # A directory that was recreated needs a new watch; cgroupfs does not report that the old watch is dead.
            if found.get(path) != known:
                self._remove(watch)
                del self._directories[path]
        new = paths - set(self._directories)
        for path in new:
            added = self._add(path, Mask.CREATE | Mask.DELETE | Mask.MOVE | Mask.ATTRIB | Mask.ONLYDIR)
            if added is not None:
                self._directories[path] = (found[path], added)
        return any(path in self._directories for path in new)

    def watch_limits(self, owner: str, paths: list[str]) -> list[object]:
        """Watch the limit files of one job; ``drain`` reports writes by ``owner``. Return handles for ``unwatch``."""
        handles: list[object] = []
        for path in paths:
            watch = self._add(path, Mask.MODIFY)
            if watch is not None:
                self._owners[watch] = owner
                handles.append(watch)
        return handles

    def unwatch(self, handles: list[object]) -> None:
        for handle in handles:
            if isinstance(handle, Watch):
                self._owners.pop(handle, None)
                self._remove(handle)

    def _add(self, path: str, mask: Mask) -> Watch | None:
        if self._inotify is None:
            return None
        try:
            return self._inotify.add_watch(path, mask)
        except OSError as error:
            # A missing path is no problem: it needs no watch.
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                self._note_problem("no inotify watches are left", "fs.inotify.max_user_watches")
            return None

    def _note_problem(self, what: str, sysctl: str) -> None:
        """Record the first problem. It stays until the agent ends, since missing watches are not added later."""
        if not self.problem:
            advice = f"raise the sysctl {sysctl} and restart the agent"
            self.problem = f"{what}: new jobs and writes of other programs are only seen at rescans; {advice}"
            log.warning("inotify_used_up", error=what, advice=advice)

    def _remove(self, watch: Watch) -> None:
        if self._inotify is not None:
            # If the file was removed, the kernel has already dropped the watch.
            with contextlib.suppress(OSError):
                self._inotify.rm_watch(watch)

    def drain(self) -> tuple[set[str], set[str], bool]:
        """Return paths that came, went or changed, the owners of written limit files, and whether events were lost."""
        children: set[str] = set()
        owners: set[str] = set()
        lost = False
        while True:
            event = None if self._inotify is None else self._inotify.sync_get()
            if event is None:
                return children, owners, lost
            if event.mask & Mask.Q_OVERFLOW:
                lost = True
            elif event.watch is None or event.mask & Mask.IGNORED:
                continue
            elif event.watch in self._owners:
                owners.add(self._owners[event.watch])
            else:
                children.add(str(event.path))

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()


def existing_directories(root: str, relative: set[str]) -> set[str]:
    return {path for name in relative if os.path.isdir(path := os.path.join(root, name) if name else root)}
