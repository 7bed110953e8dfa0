"""Write limits of the running agent: set limits, restore originals, and record the originals on disk.

The original settings of a cgroup are saved to disk before its first change (``secure``). From then on they can always
be restored, here or by ``cpumond restore``."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Container, Mapping

import msgspec

from cpumond.agent.config import AgentConfig
from cpumond.agent.limits.restore import restore_cgroup
from cpumond.agent.limits.units import UnitLimits
from cpumond.agent.limits.written import WRITTEN_FILE, LimitLog
from cpumond.agent.state_file import (
    STATE_FILE,
    Identity,
    Original,
    Originals,
    identify,
    is_of_this_boot,
    load_newest,
    make_directory,
    read_boot_id,
    save,
)
from cpumond.agent.totals import RunTotals
from cpumond.agent.tracked import Tracked, compute_full, find_refusal
from cpumond.core.errors import (
    AccessError,
    CgroupReadError,
    CgroupWriteError,
    CpumondError,
    CreateError,
    RefusedError,
    UnknownLimitsError,
)
from cpumond.core.measures import count_cores
from cpumond.host.cgroup import Cgroup
from cpumond.host.cgroup.files import count_threads
from cpumond.host.cgroup.find import CgroupFinder
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.cgroup.settings import (
    V1_SHARES,
    CpuSettings,
    LimitTarget,
    choose_restore,
    classify_change,
    compute_quota_target,
    compute_weight_target,
    is_external,
    is_raised_above,
    plan_steps,
)
from cpumond.host.systemd.properties import align_weight, round_up

GONE_S = 5.0
"""Seconds after the end of a unit's cgroup within which a restart of the unit is expected."""
ASK_AGAIN_S = 60.0
"""Seconds between attempts to send systemd an original that systemd or polkit refused: the next may be accepted."""


class Applied(msgspec.Struct, frozen=True):
    """Outcome of one write. ``cores``: the limit now in force, None if the cgroup is gone. ``notes``: the bounds that
    changed the limit. ``wrote``: whether anything had to be written."""

    cores: float | None
    notes: tuple[str, ...] = ()
    wrote: bool = False


class LimitWriter:
    """Writes limits of tracked jobs and keeps their originals on disk.

    ``damaged`` is the sentence about an unreadable state file, normally "". ``unknown``: no copy of that file could be
    read. ``writes_total`` counts writes. By cgroup path: ``gone`` is the time until which a unit may return (None: not
    set yet); ``returning`` are originals that were sent to systemd, which has not accepted them yet; ``unsaved`` are
    jobs whose new original is not on disk yet. ``log`` records the latest write into each cgroup. ``written``: paths of
    cgroups that the agent has written and whose events are not processed yet."""

    def __init__(self, config: AgentConfig, units: UnitLimits, totals: RunTotals) -> None:
        self.config = config
        self.units = units
        self.totals = totals
        self.covered: list[str] = []
        """Mount points that no longer show their hierarchy to other processes; meanwhile no limit is lowered."""
        self.gone: dict[str, float | None] = {}
        self.returning: dict[str, Original] = {}
        self._again_at_s = -math.inf
        self._inherited: set[str] = set()
        self.path = os.path.join(config.state_dir, STATE_FILE)
        self.boot_id = read_boot_id()
        self.originals: dict[str, Original] = {}
        self.copy_path = os.path.join(config.runtime_dir, STATE_FILE)
        self.damaged = ""
        self.unknown = False
        self.writes_total = 0
        self._stale = self._untidy = False
        self._number = 0
        self._is_loaded = False
        self.is_ousted = False
        """Whether another agent owns the state files; if so, this one no longer writes to them."""
        self._saved: Identity | None = None
        self._copied: Identity | None = None
        self.log = LimitLog(os.path.join(config.runtime_dir, WRITTEN_FILE))
        self.unsaved: set[str] = set()
        self.written: set[str] = set()
        self._root_id = (0, 0)

    def is_paused(self) -> bool:
        """Return whether an operator has created the pause file, which stops all writes."""
        return os.path.exists(os.path.join(self.config.runtime_dir, "pause"))

    def load(self, hierarchies: Hierarchies) -> None:
        """Read the originals of an earlier run. A damaged file is put aside and named in ``damaged``.

        Renamed cgroups are then stored by their new paths, and cgroups that are gone are forgotten. Raises
        UnknownLimitsError if the hierarchy is not visible, because then all cgroups would seem to be gone."""
        self._root_id = hierarchies.read_root_id()
        content, complaint = load_newest([self.path, self.copy_path])
        self.unknown = bool(complaint) and content is None
        if self.unknown:
            self.damaged = (
                f"{complaint}; jobs with a configured cpu_limit start from it, the others keep their present limits"
            )
        elif complaint:
            self.damaged = f"{complaint}; its copy in runtime_dir is intact; jobs start from their full limits"
        self._number = 0 if content is None else content.number
        if content is not None and is_of_this_boot(content, self.copy_path):
            self.originals = self._find_all(hierarchies, content)
            self._inherited = set(self.originals)
            self._stale = self.originals.keys() != content.cgroups.keys()
        self.log.load({original.inode for original in self.originals.values()})
        self._is_loaded = True

    def _find_all(self, hierarchies: Hierarchies, content: Originals) -> dict[str, Original]:
        finder, found = CgroupFinder(hierarchies, content.root), {}
        for path, original in content.cgroups.items():
            where: str | None = path
            try:
                where = finder.find(path, original.inode)
            except UnknownLimitsError:
                if not hierarchies.proves_gone(content.root):
                    raise
            if where is not None or original.unit:
                found[where or path] = original
        return found

    def find_original(self, cgroup: Cgroup) -> Original | None:
        """Return the original of ``cgroup``, not that of an earlier cgroup at its path; None if no agent changed it."""
        original = self.originals.get(cgroup.path)
        return original if original is not None and original.inode == cgroup.inode else None

    def list_moved(self, cgroup: Cgroup) -> tuple[str, ...]:
        """Return the actuators for which the original settings of this cgroup are on disk."""
        known = self.find_original(cgroup)
        return known.actuators if known is not None else ()

    def secure(self, jobs: list[Tracked]) -> None:
        """Save the originals of ``jobs`` before they are changed. Raises CreateError or AccessError."""
        added: dict[str, Original] = {}
        for job in jobs:
            # If systemd has not accepted an original yet, it is extended, not replaced.
            known = self.find_original(job.cgroup) or self.returning.get(job.cgroup.path)
            actuators = known.actuators if known else ()
            if new := [name for name in job.actuators if name not in actuators]:
                moved = (*actuators, *new)
                if known is None and "weight" in new and (found := read_settings_or_none(job)) is not None:
                    # When a cgroup leaves the idle class, its weight changes, and no event reports that.
                    job.original = msgspec.structs.replace(job.original, weight=found.weight)
                    job.in_force = msgspec.structs.replace(job.in_force, weight=found.weight)
                if known is not None or job.unit or job.cgroup.path not in self.originals:
                    added[job.cgroup.path] = Original(job.cgroup.inode, job.original, moved, job.unit)
        if added or self._stale:
            self._save({**self.originals, **added})
        for job in jobs:
            # Until the original of an earlier cgroup of this name has been restored, this cgroup is not changed.
            job.touched = self.find_original(job.cgroup) is not None

    def keep(self, job: Tracked) -> None:
        """Store a changed ``job.original`` with the next ``flush``."""
        known = self.find_original(job.cgroup)
        if known is not None and known.settings != job.original:
            self.originals[job.cgroup.path] = msgspec.structs.replace(known, settings=job.original)
            self.unsaved.add(job.cgroup.path)
            self._stale = True

    def forget(self, path: str, now: bool = True) -> None:
        """Drop an original that must not be restored any more; the next ``flush`` drops it on disk.

        ``now``: False if the cgroup is gone; its record may stay on disk until the next save, since it does no harm."""
        original = self.originals.pop(path, None)
        if original is not None:
            self.log.forget(original.inode)
            self._stale, self._untidy = self._stale or now, True

    def abandon(self, job: Tracked) -> None:
        """Leave a cgroup to the program that writes its limit. That limit stays, other settings that the agent moved
        are restored now, and no setting of the cgroup is restored later. Raises CgroupError."""
        known, current = self.find_original(job.cgroup), job.cgroup.read_settings()
        if known is None or current is None:
            self.forget(job.cgroup.path)
            return
        others = tuple(name for name in known.actuators if name != job.actuator)
        target = choose_restore(current, known.settings, others)
        if "quota" in known.actuators and known.settings.burst_us is not None:
            most_us = known.settings.burst_us if target.quota_us is None else target.quota_us
            target = msgspec.structs.replace(target, burst_us=min(known.settings.burst_us, most_us))
        # systemd is sent the same values: a value that is only in the file is lost with the unit.
        self.give_back(job.cgroup.path, choose_restore(current, known.settings, known.actuators))
        job.cgroup.write_settings(current, target)
        job.in_force = target

    def lose(self, job: Tracked) -> None:
        """Record that a cgroup is gone. A unit's original stays: systemd limits the next cgroup of the unit, too."""
        known = self.find_original(job.cgroup)
        if known is not None and known.unit:
            self.gone[job.cgroup.path] = None
        else:
            self.forget(job.cgroup.path, now=False)

    def is_expected_after_restart(self, path: str, unit: str, in_force: CpuSettings, assume_own: bool) -> bool:
        """Return whether systemd can have set ``in_force`` in a unit's new cgroup: the agent either never lowered the
        unit's limit, or sent systemd exactly this limit."""
        former = self._find_former(path, unit)
        original = None if former is None else self._find_unit_original(former)
        if former is None or original is None:
            return True
        if assume_own or self._is_unknown(former, unit):
            return not any(is_raised_above(in_force, original.settings, actuator) for actuator in original.actuators)
        return self.units.is_ours(unit, in_force, original.actuators)

    def _find_unit_original(self, path: str) -> Original | None:
        return self.originals.get(path) or self.returning.get(path)

    def _is_unknown(self, path: str, unit: str) -> bool:
        """Whether an earlier run may have sent systemd a limit of a unit, and no limit of this run was accepted yet."""
        return path in self._inherited and not self.units.read(unit).acknowledged

    def _find_former(self, path: str, unit: str) -> str | None:
        """Return the path by which a unit's original is stored: ``path``, or its path before its slice was changed."""
        if self._find_unit_original(path) is not None:
            return path
        former = ((old, self._find_unit_original(old)) for old in (*self.gone, *self.returning))
        return next((old for old, known in former if known is not None and known.unit == unit), None)

    def take_over(self, cgroup: Cgroup, in_force: CpuSettings, assume_own: bool) -> Original | None:
        """Return the original of a restarted unit, from its last cgroup, if ``in_force`` is a limit sent to systemd.

        Return None for a different limit: another program set it, so it is the new original. ``assume_own``: the limit
        in force counts as one that an earlier run sent to systemd."""
        path = cgroup.path
        former = self._find_former(path, self.units.name_unit(path)) or path
        original = self._find_unit_original(former)
        self.returning.pop(former, None)
        self.gone.pop(former, None)
        if original is None or not original.unit:
            return None
        if former != path:
            self.originals[path] = original
            self.forget(former)
            if former in self._inherited:
                self._inherited.add(path)
        self._stale = True
        is_ours = self.units.is_ours(original.unit, in_force, original.actuators)
        if not (is_ours or assume_own or self._is_unknown(path, original.unit)):
            self.forget(path)
            self.units.forget(original.unit)
            return None
        self.originals[path] = msgspec.structs.replace(original, inode=cgroup.inode)
        return self.originals[path]

    def is_inherited(self, path: str) -> bool:
        """Return whether an earlier run changed the cgroup at ``path``, or sent systemd a limit of its unit."""
        return path in self._inherited

    def claim_unit(self, job: Tracked) -> None:
        """Store that a job is a unit, which earlier versions did not record. After that, limits of the job may be sent
        to systemd. Raises CreateError or AccessError."""
        known = self.find_original(job.cgroup)
        if known is not None and job.unit and not known.unit:
            self._save({**self.originals, job.cgroup.path: msgspec.structs.replace(known, unit=job.unit)})

    def expire_gone(self, now_s: float, is_there: Callable[[str], bool], removed: Container[str] = ()) -> None:
        """Restore systemd's stored values of units that did not return in time, or were ``removed``.

        A unit that ``is_there`` again is left out: ``take_over`` decides by its new cgroup."""
        for path, until_s in list(self.gone.items()):
            if until_s is None:
                self.gone[path] = now_s + GONE_S
            if path not in self.originals:
                del self.gone[path]
            elif is_there(path):
                continue
            elif (until_s is not None and now_s >= until_s) or self.originals[path].unit in removed:
                del self.gone[path]
                self.give_back(path)

    def list_left(self, jobs: Mapping[str, Tracked]) -> dict[str, Original]:
        """Return the cgroups that the agent changed and that have no job in ``jobs``. Until such a cgroup is restored,
        a new cgroup of the same name is not changed."""
        return {
            path: original
            for path, original in self.originals.items()
            if (job := jobs.get(path)) is None or not (job.unit or job.cgroup.inode == original.inode)
        }

    def list_strays(self, now_s: float, jobs: Mapping[str, Tracked]) -> dict[str, Original]:
        """Return ``list_left`` without the units that may still return."""
        return {
            path: original
            for path, original in self.list_left(jobs).items()
            if (until_s := self.gone.get(path, -math.inf)) is not None and now_s >= until_s
        }

    def give_back(self, path: str, settings: CpuSettings | None = None) -> None:
        """Forget a cgroup that is gone or restored; for a unit, only after systemd has accepted the settings.

        ``settings``: the settings that systemd gets; None for the original ones."""
        original = self.originals.get(path)
        self.forget(path)
        if original is not None and original.unit:
            settings = settings or original.settings
            self.units.want(original.unit, settings, original.actuators, urgent=True)
            if not self.units.read(original.unit).is_settled:
                self.returning[path] = msgspec.structs.replace(original, settings=settings)
            else:
                self.units.forget(original.unit)

    def adopt_operator_values(self, unit: str, values: Mapping[str, object]) -> None:
        """Use as a unit's original the ``values`` that an operator has set for it. If the original is being restored
        already, systemd is sent the new one, and writes the file again."""
        for known in (self.originals, self.returning):
            for path, original in known.items():
                if original.unit == unit:
                    settings = self.units.read_values(values, original.settings)
                    known[path] = msgspec.structs.replace(original, settings=settings)
                    self._stale = True
                    if known is self.returning:
                        self.units.want(unit, settings, original.actuators, urgent=True)

    def ask_again(self, now_s: float, at_once: bool = False) -> None:
        """Every ASK_AGAIN_S, or ``at_once``, send systemd again the originals that it has not accepted."""
        if not self.returning:
            self._again_at_s = now_s + ASK_AGAIN_S
        elif at_once or now_s >= self._again_at_s:
            self._again_at_s = now_s + ASK_AGAIN_S
            for original in self.returning.values():
                if not self.units.read(original.unit).is_settled:
                    self.units.want_again(original.unit)

    def reap_acknowledged(self, final: bool = False) -> None:
        """Forget units whose originals systemd has accepted, and units for which systemd never got a lower limit."""
        for path, original in list(self.returning.items()):
            never = not (self.units.takes_limits(original.unit) or path in self._inherited)
            if path in self.originals or self.units.read(original.unit).is_settled or never:
                del self.returning[path]
                self._stale, self._untidy = self._stale or final, True
                if path not in self.originals:
                    self.units.forget(original.unit)

    def flush(self, tidy: bool = False) -> None:
        """Store the changes of ``keep`` and ``forget``. ``tidy``: also store those that can wait, or create the file if
        it is missing. If the originals could not be loaded, do nothing. Raises CreateError or AccessError."""
        if not self._is_loaded:
            return
        if self._stale or (tidy and (self._untidy or self._saved is None)):
            self._save(self.originals)

    def store(self, tidy: bool = False) -> None:
        """Call ``flush``; a failure is logged and retried."""
        try:
            self.flush(tidy)
        except CpumondError as error:
            self.totals.complain(None, error)

    def _save(self, originals: dict[str, Original]) -> None:
        if self.is_ousted:
            self.originals = originals
            return
        self._number += 1
        content = Originals(self.boot_id, {**self.returning, **originals}, self._number, self._root_id)
        try:
            self._saved = save(self.path, content)
        except (CreateError, AccessError):
            if originals is self.originals:
                # This save only drops originals. The copy, now the newest, is enough to prevent their restore.
                self._save_copy(content)
            raise
        self._save_copy(content)
        self.originals = originals
        self._stale = self._untidy = False
        self.unsaved.clear()

    def _save_copy(self, content: Originals) -> None:
        """Save the second copy, in case the first one is lost. A failure is ignored."""
        with contextlib.suppress(CreateError, AccessError):
            self._copied = save(self.copy_path, content, sync=False)

    def look_after_files(self) -> list[str]:
        """Rewrite files that were removed or replaced; return their paths. Raises CreateError or AccessError."""
        files = ((self.path, self._saved), (self.copy_path, self._copied))
        lost = [path for path, known in files if known is not None and identify(path) != known]
        if lost:
            make_directory(self.config.state_dir, 0o700, "state_dir")
            make_directory(self.config.runtime_dir, 0o755, "runtime_dir")
            self._save(self.originals)
        return lost

    def write(self, job: Tracked, cores: float) -> Applied:
        """Set a secured job's limit to ``cores``. Raises CgroupWriteError, CgroupReadError, RefusedError."""
        if not job.touched:
            raise RefusedError(f"{job.cgroup.path}: its original settings are not saved, so it is not changed")
        refusal = find_refusal(self.config, job.found, job.settings, job.cgroup.place)
        if refusal:
            job.refused = refusal
            self.restore(job)
            raise RefusedError(f"{job.cgroup.path}: {refusal}, so it is not changed")
        target, writes = self._compute_target(job, cores), self.writes_total
        try:
            written = self._write(job, target)
        except CgroupWriteError:
            # The cgroup or a quota above it may have changed since the last look: read them and try once more.
            current = job.cgroup.read_settings()
            job.ancestor = job.cgroup.read_ancestor_cap()
            if current is None:
                return Applied(None)
            assumed, job.in_force = job.in_force, current
            if current.burst_us not in (assumed.burst_us, target.settings.burst_us):
                self.follow_burst(job, current)
            again = self._compute_target(job, cores)
            if current == assumed and again.settings == target.settings:
                raise
            target = again
            try:
                written = self._write(job, target)
            except CgroupWriteError:
                # Some of the steps may be done: their result must not be taken for another program's write.
                job.in_force = job.cgroup.read_settings() or job.in_force
                raise
        if not written and job.unit and job.cgroup.is_there():
            raise RefusedError(
                f"{job.cgroup.path}: there is no limit file, and systemd did not create one "
                f"({self.units.problem or 'it refused the limit'}), so the limit is not changed"
            )
        return Applied(target.cores if written else None, target.notes, self.writes_total > writes)

    def follow_burst(self, job: Tracked, found: CpuSettings) -> None:
        """Adopt a burst that another program wrote. It is kept as far as the quota allows, and restored in the end. The
        next ``flush`` stores it."""
        job.original = msgspec.structs.replace(job.original, burst_us=found.burst_us)
        job.in_force = msgspec.structs.replace(job.in_force, burst_us=found.burst_us)
        self.keep(job)

    def has_other_burst(self, job: Tracked, cores: float) -> bool:
        """Return whether the burst in force differs from the burst that a limit of ``cores`` requires."""
        return self._compute_target(job, cores).settings.burst_us != job.in_force.burst_us

    def _compute_target(self, job: Tracked, cores: float) -> LimitTarget:
        """Compute the settings to write: the actuator moves one setting. The others stay as they are, since another
        program may have set them."""
        s, found = job.settings, job.in_force
        if job.actuator == "weight":
            target = _compute_weight(job, cores)
            settings = msgspec.structs.replace(found, weight=target.settings.weight)
            return msgspec.structs.replace(target, settings=settings)
        notes: tuple[str, ...] = ()
        if s.min_cores_per_thread and cores < found.cores:
            threads = count_threads(job.cgroup.place)
            floor = min(threads * s.min_cores_per_thread, job.state.hard_cores, found.cores)
            if cores < floor:
                cores, notes = floor, (f"held to {count_cores(floor)}, min_cores_per_thread of each thread",)
        if job.found.is_whole and cores < found.cores:
            # v1 accepts no quota below that of a child, and children of a container belong to the container.
            floor = min(job.cgroup.read_quota_below(), job.state.hard_cores, found.cores)
            if cores < floor:
                cores, notes = floor, (f"held to {count_cores(floor)}, a quota inside it",)
        wanted = cores
        full_cores = compute_full(job.found, job.original, job.ancestor)
        if wanted >= job.state.hard_cores and full_cores < math.inf:
            cores = full_cores  # a full limit above the number of CPUs is left as it is
        if job.unit:
            cores = min(round_up(cores), job.original.cores)
        # At its full limit a job has the original burst. A larger burst would keep other programs from lowering the
        # quota, because the kernel accepts no quota below the burst.
        burst_ratio = s.burst_ratio if wanted < job.state.hard_cores else None
        target = compute_quota_target(cores, job.original, job.ancestor, burst_ratio)
        if target.cores == cores:
            # The monitor continues from the value before rounding: otherwise a unit's small limit would never fall.
            target = msgspec.structs.replace(target, cores=wanted)
        weight = _compute_weight(job, wanted).settings.weight if "weight" in job.actuators else found.weight
        settings = msgspec.structs.replace(target.settings, weight=weight)
        return msgspec.structs.replace(target, settings=settings, notes=notes + target.notes)

    def _write(self, job: Tracked, target: LimitTarget) -> bool:
        """Write ``target`` to the file, or let systemd lower a unit's limit. Return False if file or cgroup is gone."""
        before, after = job.in_force, target.settings
        lowered = bool(job.unit) and classify_change(before, after, job.actuator, exact=True) == "lower"
        by_systemd = lowered and self.units.can_lower(job.unit)
        if by_systemd:
            # The kernel accepts no quota below the burst, even from systemd: the agent lowers the burst first.
            after = msgspec.structs.replace(before, burst_us=after.burst_us)
        steps = plan_steps(before, after)
        self.writes_total += len(steps)
        if steps:
            self.written.add(job.found.path)
        if steps and not job.unit:
            self._note(job, after)
        if not steps or job.cgroup.write_settings(before, after):
            job.in_force = after
        elif not (job.unit and self.units.can_tell and job.cgroup.is_there()):
            return False
        if job.unit:
            told = self.units.want(job.unit, target.settings, job.actuators, urgent=not lowered, again=by_systemd)
            self.writes_total += by_systemd and told
        return True

    def _note(self, job: Tracked, after: CpuSettings) -> None:
        """Log a write before it is made. Raises CreateError or AccessError if a decrease cannot be logged."""
        inode, before = job.cgroup.inode, job.in_force
        if after.cores < before.cores or (after.weight or 0) < (before.weight or 0):
            self.log.note(inode, before, after)
        else:
            self.note_raise(inode, before, after)

    def note_raise(self, inode: int, before: CpuSettings, after: CpuSettings) -> None:
        """Log a raise. A failure is ignored: if there is no record, every lower limit counts as the agent's."""
        with contextlib.suppress(CreateError, AccessError):
            self.log.note(inode, before, after)

    def has_external_limit(self, job: Tracked) -> bool:
        """Return whether an earlier run changed the job's cgroup and another program has set the limit since then."""
        known = self.find_original(job.cgroup)
        return known is not None and not known.unit and is_external(
            job.in_force, known.settings, self.log.records.get(known.inode), job.actuator
        )  # fmt: skip

    def restore(self, job: Tracked) -> None:
        """Restore a touched job's original settings, unless the cgroup is gone.

        Raises CgroupWriteError or CgroupReadError; then the original stays on disk for ``cpumond restore``."""
        if "quota" in self.list_moved(job.cgroup):
            found = job.cgroup.read_settings()
            if found is not None and found.burst_us != job.in_force.burst_us:
                self.follow_burst(job, found)  # no event reports a changed burst
        known = self.find_original(job.cgroup)
        if known is not None:
            try:
                current = restore_cgroup(job.cgroup, known, self.log.records.get(known.inode), self.note_raise)
            except CgroupWriteError:
                job.in_force = job.cgroup.read_settings() or job.in_force
                raise
            if current is not None:
                job.in_force = job.original = current
            self.give_back(job.cgroup.path, current)
        job.touched = False

    def put_back(self, job: Tracked, wrote: bool, now_s: float) -> None:
        """Restore the settings of a job whose limit is no longer written, or now written by a different actuator.

        If the job's limit was not written before and now is, the monitor continues from the limit in force, or from
        the job's guarantee, which is then written. ``wrote``: whether the job's limit was written before. A failure is
        retried at each look. Raises CgroupError."""
        moved = set(self.list_moved(job.cgroup))
        restored = job.touched and (not job.writes or not moved <= set(job.actuators))
        if restored:
            self.restore(job)
        if job.writes and not wrote and job.state.is_written:
            job.restart(job.state.limit_cores, now_s)
            job.hold = job.hold.write(now_s)
        elif restored or job.writes != wrote:
            job.restart(read_limit_cores(job, job.in_force), now_s)
        if job.writes != wrote:
            (job.begin_writes if job.writes else job.end_writes)()


def _compute_weight(job: Tracked, cores: float) -> LimitTarget:
    target = compute_weight_target(cores, job.state.hard_cores, job.original, job.cgroup.WEIGHT_BOUNDS)
    weight = target.settings.weight
    if job.unit and weight is not None and job.cgroup.WEIGHT_BOUNDS == V1_SHARES:
        weight = align_weight(weight)
    return msgspec.structs.replace(target, settings=msgspec.structs.replace(target.settings, weight=weight))


def read_limit_cores(job: Tracked, current: CpuSettings) -> float:
    """Return the cores that ``current`` means for the job's actuator; if that writes nothing, the job's guarantee."""
    if job.actuator == "guarantee":
        return job.state.limit_cores
    if job.actuator == "weight":
        if not job.original.weight or current.weight is None:
            return job.state.hard_cores
        return min(job.state.hard_cores * current.weight / job.original.weight, job.state.hard_cores)
    return min(current.cores, job.state.hard_cores)


def read_settings_or_none(job: Tracked) -> CpuSettings | None:
    """Return the settings in force; None if the cgroup is gone or unreadable (then ``job.last_error`` says why)."""
    try:
        return job.cgroup.read_settings()
    except CgroupReadError as error:
        job.last_error = str(error)
        return None
