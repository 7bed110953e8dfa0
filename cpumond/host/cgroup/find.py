"""Find where a cgroup that was changed under an old name is now: v1 allows renames, and mounts come and go."""

from __future__ import annotations

import contextlib
import os

from cpumond.core.errors import UnknownLimitsError
from cpumond.core.job_cgroups import list_above
from cpumond.host.cgroup.mounts import Hierarchies, read_identity


class CgroupFinder:
    """Looks for cgroups by their inodes. ``root_id``: result of ``Hierarchies.read_root_id`` when they were changed.

    Make a new finder for each pass over the cgroups, because it caches directory listings."""

    def __init__(self, hierarchies: Hierarchies, root_id: tuple[int, int] = (0, 0)) -> None:
        self._hierarchies = hierarchies
        self._root = hierarchies.cpu_root
        self._dev = hierarchies.read_root_id()[0]
        self._proves_gone = hierarchies.proves_gone(root_id)
        self._levels: dict[int, dict[int, str]] = {}

    def is_at(self, path: str, inode: int) -> bool:
        """Return whether the cgroup is at its old place."""
        return self._proves_gone and self._identify(path) == (self._dev, inode)

    def find(self, path: str, inode: int) -> str | None:
        """Return the path of the cgroup that was at ``path``; None if it is gone.

        A renamed cgroup stays under its parent, which may have been renamed, too. Raises UnknownLimitsError if the
        hierarchy, or its part with ``path``, is not visible."""
        if not self._proves_gone:
            raise self._complain(path, "")
        if self.is_at(path, inode):
            return path
        if self._hierarchies.cpu_version == 1:
            # v2 refuses renames.
            found = self._list_level(path.count("/") + 1).get(inode)
            if found is not None:
                return found
        for place in (path, *list_above(path)):
            dev = self._identify(place)[0]
            if dev:
                if dev != self._dev:
                    raise self._complain(path, place)
                break
        return None

    def _complain(self, path: str, place: str) -> UnknownLimitsError:
        covered = self._hierarchies.name(os.path.join(self._root, place)).rstrip("/")
        return UnknownLimitsError(
            f"cannot see cgroup {path}: {covered} no longer shows its cgroups: "
            "it was unmounted or something is mounted over it; mount it again, then run `cpumond restore`"
        )

    def _identify(self, path: str) -> tuple[int, int]:
        return read_identity(os.path.join(self._root, path))

    def _list_level(self, depth: int) -> dict[int, str]:
        if depth == 0:
            return {0: ""}
        if depth not in self._levels:
            self._levels[depth] = level = {}
            for parent in self._list_level(depth - 1).values():
                with contextlib.suppress(OSError), os.scandir(os.path.join(self._root, parent)) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            level[entry.inode()] = os.path.join(parent, entry.name)
        return self._levels[depth]
