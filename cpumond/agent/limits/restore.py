"""``cpumond restore``: restore the limits that a dead agent left lowered: first the files, then systemd's values.

This must be quick, also on a slow machine, because jobs may be throttled until it is done. So it imports only what it
needs, and imports the library for the bus only after all files are restored."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Final

import msgspec

from cpumond.agent.limits.written import WRITTEN_FILE, append_written, read_written
from cpumond.agent.state_file import (
    STATE_FILE,
    Original,
    Originals,
    count_service_end,
    identify,
    is_of_this_boot,
    load_newest,
    make_directory,
    overwrite,
    save,
)
from cpumond.core.decode import ContentError, decode_json, decode_toml
from cpumond.core.errors import (
    EXIT_TRY_AGAIN,
    EXIT_UNAVAILABLE,
    CgroupWriteError,
    CpumondError,
    StateFileError,
    UnavailableError,
    UnknownLimitsError,
    from_os_error,
)
from cpumond.core.settings import is_drop_in
from cpumond.host.cgroup import Cgroup, open_cgroup
from cpumond.host.cgroup.files import is_idle
from cpumond.host.cgroup.find import CgroupFinder
from cpumond.host.cgroup.mounts import Hierarchies, hold, open_hierarchies, read_identity
from cpumond.host.cgroup.settings import CpuSettings, Written, choose_restore, compute_quota_target
from cpumond.host.cgroup.units import unit_of
from cpumond.host.systemd.properties import (
    NO_LIMIT,
    QUOTA,
    WEIGHT,
    UnitProperties,
    is_booted,
    is_same_value,
    list_properties,
)

LOCK_FILE = "agent.lock"
DEFAULT_CONFIG_PATH = "/etc/cpumond/cpumond.toml"
NAMESAKES_TIMEOUT_S = 5.0
DROP_INS: Final = {"quota": "50-CPUQuota.conf", "weight": "50-CPUWeight.conf"}
"""Drop-in files that SetUnitProperties creates for a unit."""
UNITS_TIMEOUT_S = 15.0
"""Seconds for all units together: once to read their values, once to set them. Quotas in force are restored before."""


class LockHolder(msgspec.Struct):
    """Owner of the lock; the lock file contains it, for the error message of a second agent."""

    pid: int
    since: float
    config: str


class RunLock:
    """The lock of a runtime directory: only one agent or ``restore`` may hold it. The process's end frees it."""

    def __init__(self, runtime_dir: str, config_path: str) -> None:
        """Take the lock. Raises CreateError, AccessError, or UnavailableError, which names the agent that holds it."""
        self.path = os.path.join(runtime_dir, LOCK_FILE)
        self._runtime_dir = runtime_dir
        self._holder = msgspec.json.encode(LockHolder(os.getpid(), time.time(), config_path))
        self._fd = self._take()

    def _take(self) -> int:
        make_directory(self._runtime_dir, 0o755, "runtime_dir")
        try:
            # The directory belongs to the agent's user, and root may run this: no link may be followed.
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise from_os_error(error, f"open the lock {self.path}", "fix runtime_dir or run as root") from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UnavailableError(f"{self.path}: {_describe_holder(os.read(fd, 4096))}; stop it first") from None
            # Any user who can read the file can lock it, and so keep limits lowered. Version 0.2 created the file with
            # mode 0644.
            with contextlib.suppress(OSError):
                os.fchmod(fd, 0o600)
            # If the disk is full, the error message of a second agent has fewer facts about this one.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.write(fd, self._holder)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def look_after(self) -> list[str]:
        """If the lock file was removed or replaced, so that a second agent could start, take the lock again and return
        the path. Raises UnavailableError if another agent holds the lock. May raise CreateError or AccessError."""
        held = os.fstat(self._fd)
        if identify(self.path) == (held.st_dev, held.st_ino):
            return []
        fd = self._take()
        os.close(self._fd)
        self._fd = fd
        return [self.path]

    def close(self) -> None:
        os.close(self._fd)


def _describe_holder(content: bytes) -> str:
    try:
        holder = decode_json(content, LockHolder)
    except ContentError:
        return "another agent is running (its pid is unknown)"
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(holder.since))
    return f"another agent is running: pid {holder.pid}, since {since}, with {holder.config or 'built-in defaults'}"


def restore_cgroup(
    cgroup: Cgroup,
    original: Original,
    written: Written | None = None,
    note: Callable[[int, CpuSettings, CpuSettings], None] | None = None,
) -> CpuSettings | None:
    """Restore the settings of one cgroup; return the settings in force after that, None if the cgroup is gone.

    If a quota above the cgroup is below the original now, v1 refuses the original. Then the cgroup gets as much as that
    quota allows, ``note`` records that limit as the agent's, and the error is raised. ``written`` is passed to
    ``choose_restore``, but not for units, whose limits systemd writes itself. Raises CgroupError."""
    current = cgroup.read_settings()
    if current is None:
        return None
    target = choose_restore(current, original.settings, original.actuators, None if original.unit else written)
    if is_idle(cgroup.place):
        target = msgspec.structs.replace(target, weight=current.weight)  # in the idle class the kernel fixes the weight
    try:
        return target if cgroup.write_settings(current, target) else None
    except CgroupWriteError:
        allowed = _choose_allowed(cgroup, target)
        if allowed is not None:
            if note is not None:
                note(cgroup.inode, *allowed)
            cgroup.write_settings(*allowed)
        raise


def _choose_allowed(cgroup: Cgroup, target: CpuSettings) -> tuple[CpuSettings, CpuSettings] | None:
    """Return the settings in force, and the highest settings towards ``target`` that the quotas above allow. Return
    None if the quotas above allow no raise, or are not the obstacle."""
    current, cap = cgroup.read_settings(), cgroup.read_ancestor_cap()
    if current is None or not current.cores < cap.cores < target.cores:
        return None
    allowed = compute_quota_target(cap.cores, target, cap).settings
    return current, msgspec.structs.replace(allowed, weight=current.weight)


class RestoreReport(msgspec.Struct):
    """Result of ``restore_all``: restored paths, paths that are gone, errors in sentences. By path: ``settings`` now in
    force, properties to send to systemd for ``units``, new paths of ``renamed`` cgroups, reasons why the ``unseen``
    cgroups cannot be seen."""

    restored: list[str] = []
    gone: list[str] = []
    errors: list[str] = []
    settings: dict[str, CpuSettings] = {}
    units: dict[str, UnitProperties] = {}
    renamed: dict[str, str] = {}
    unseen: dict[str, str] = {}


def open_original(hierarchies: Hierarchies, finder: CgroupFinder, path: str, original: Original) -> Cgroup | None:
    """Open the cgroup of ``original``, even if it was renamed; return None if it is gone. For a unit, open its present
    cgroup, whenever that was created; ``find_namesakes`` finds different units of the same name.

    Raises CgroupReadError, UnknownLimitsError."""
    where = finder.find(path, original.inode) or (path if original.unit else None)
    cgroup = None if where is None else open_cgroup(hierarchies.without_counters(), where)
    if cgroup is None or cgroup.inode == original.inode or original.unit:
        return cgroup
    cgroup.close()
    return None


def restore_all(
    hierarchies: Hierarchies,
    originals: Mapping[str, Original],
    root_id: tuple[int, int] = (0, 0),
    written: Mapping[int, Written] | None = None,
    note: Callable[[int, CpuSettings, CpuSettings], None] | None = None,
    report: RestoreReport | None = None,
) -> RestoreReport:
    """Restore every cgroup of ``originals`` that still exists. Errors are collected: the other cgroups are restored.

    ``root_id`` is passed to ``CgroupFinder``; ``written`` (by inode) and ``note`` to ``restore_cgroup``; ``report``, if
    given, gets the results."""
    report, finder, known = report or RestoreReport(), CgroupFinder(hierarchies, root_id), written or {}
    # Cgroups at their old place are restored first: finding the renamed ones takes longer.
    there = {path for path, original in originals.items() if finder.is_at(path, original.inode)}
    for path, original in sorted(originals.items(), key=lambda item: (item[0] not in there, item[0].count("/"))):
        cgroup = None
        settings: CpuSettings | None = None
        try:
            cgroup = open_original(hierarchies, finder, path, original)
            if cgroup is not None:
                settings = restore_cgroup(cgroup, original, known.get(original.inode), note)
            if cgroup is None or settings is None:
                report.gone.append(path)
            else:
                report.restored.append(path)
                report.settings[path] = settings
                if cgroup.path != path:
                    report.renamed[path] = cgroup.path
        except UnknownLimitsError as error:
            report.unseen[path] = str(error)
        except CpumondError as error:
            report.errors.append(str(error))
        finally:
            if cgroup is not None:
                cgroup.close()
        if original.unit:
            wanted = original.settings if settings is None else settings
            report.units[path] = list_properties(wanted, original.actuators, hierarchies.cpu_version)
    return report


def find_anew(hierarchies: Hierarchies, originals: Mapping[str, Original]) -> dict[str, Original]:
    """Return those ``originals`` whose unit has a new cgroup: the unit was restarted, or is a new unit of that name."""
    return {
        path: original
        for path, original in originals.items()
        if original.unit and read_identity(os.path.join(hierarchies.cpu_root, path))[1] not in (0, original.inode)
    }


def find_namesakes(anew: Mapping[str, Original]) -> set[str]:
    """Return those paths in ``anew`` whose unit is a different one with the name of a unit that the agent changed.

    SetUnitProperties creates a drop-in, which gives a restarted unit the agent's limit; a new unit of that name has no
    drop-in. If systemd does not answer, no unit counts as a namesake: too much CPU is better than too little. Takes up
    to NAMESAKES_TIMEOUT_S."""
    if not anew or not is_booted():
        return set()
    from cpumond.host.systemd.bus import UnitBus  # costs more than everything before

    with contextlib.closing(UnitBus(lambda: None)) as bus:
        for original in anew.values():
            bus.ask(original.unit, ("DropInPaths",))
        bus.flush(NAMESAKES_TIMEOUT_S)
        told = {event.unit: event.values.get("DropInPaths") for event in bus.poll() if event.kind == "answer"}
    namesakes = set()
    for path, original in anew.items():
        files, ours = told.get(original.unit), {DROP_INS[actuator] for actuator in original.actuators}
        if isinstance(files, list) and not ours & {os.path.basename(file) for file in files}:
            namesakes.add(path)
    return namesakes


def restore_units(units: Mapping[str, UnitProperties], restored: Collection[str] = ()) -> dict[str, str]:
    """Make systemd store the limits that are in force now; return sentences about failures.

    ``units`` and the result are by cgroup path; ``restored`` are the paths that exist. Units for which systemd has
    stored these values already are skipped. If systemd is not PID 1, all units are skipped."""
    if not units or not is_booted():
        return {}
    from cpumond.host.systemd.bus import UnitBus  # costs more than everything before

    # A unit whose slice was changed has several paths; use the values of one that exists.
    paths = {unit_of(path): path for path in sorted(units, key=lambda path: path in restored)}
    left = {path: units[path] for path in paths.values()}
    problem = "systemd did not answer in time"
    with contextlib.closing(UnitBus(lambda: None)) as bus:
        for unit, path in paths.items():
            bus.ask(unit, tuple(name for name, _ in left[path]))
        bus.flush(UNITS_TIMEOUT_S)
        for event in bus.poll():
            path = paths.get(event.unit, "")
            problem = event.text if event.kind == "away" else problem
            if event.kind == "answer" and path in left and _has(event.values, left[path]):
                del left[path]
        for path, properties in left.items():
            bus.set(unit_of(path), properties, urgent=True)
        bus.flush(UNITS_TIMEOUT_S)
        for event in bus.poll():
            if event.kind in ("done", "no-unit"):
                left.pop(paths.get(event.unit, ""), None)
            elif event.kind in ("denied", "refused", "away"):
                problem = event.text
    return {
        path: f"{path}: systemd still stores the lowered limit ({problem}); "
        f"run `systemctl set-property --runtime {unit_of(path)} {_format_assignments(properties)}`"
        for path, properties in left.items()
    }


def _has(values: Mapping[str, object], properties: UnitProperties) -> bool:
    told = [(name, values.get(name), value) for name, value in properties if name in (QUOTA, WEIGHT)]
    return all(isinstance(value, int) and is_same_value(name, value, other) for name, value, other in told)


def _format_assignments(properties: UnitProperties) -> str:
    words = {QUOTA: "CPUQuota", WEIGHT: WEIGHT}
    said = []
    for name, value in properties:
        if name in words:
            text = "" if value == NO_LIMIT else f"{value / 1e4:g}%" if name == QUOTA else str(value)
            said.append(f"{words[name]}={text}")
    return " ".join(said)


DEFAULT_PATHS: Final = {
    "state_dir": "/var/lib/cpumond", "runtime_dir": "/run/cpumond", "mountinfo": "/proc/self/mountinfo",
}  # fmt: skip
"""Settings that ``restore`` needs. The defaults are those of ``AgentConfig``, which takes too long to import."""
ENVIRONMENT: Final = {"state_dir": "STATE_DIRECTORY", "runtime_dir": "RUNTIME_DIRECTORY"}
"""Setting -> environment variable in which systemd passes the path."""


def find_paths(config_path: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the directories that a configuration names, ignoring its other content.

    A bad file on disk must not keep a dead agent's limits lowered. So the directories in the file count even if a
    different line of the file is wrong. If a bad file does not name one of the directories, that from systemd
    counts or, without one, the built-in one."""
    named: dict[str, str] = {}
    damaged = False
    for path in _list_files(config_path):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read().removeprefix("\ufeff")
        except (OSError, ValueError):
            # The file cannot be read: use the directories from systemd, or the built-in ones.
            damaged = True
            continue
        try:
            table = decode_toml(text)
        except ContentError:
            damaged = True
            table = dict(re.findall(r"""(?m)^[ \t]*([a-z_-]+)[ \t]*=[ \t]*["']([^"'\x00-\x1f]+)["']""", text))
        named.update({key.replace("-", "_"): value for key, value in table.items() if isinstance(value, str) and value})
    told = {key: environment[name].partition(":")[0] for key, name in ENVIRONMENT.items() if environment.get(name)}
    paths = {**DEFAULT_PATHS, **(told if damaged else {}), **named}
    return {key: os.path.abspath(paths[key]) for key in DEFAULT_PATHS}


def _list_files(config_path: str | None) -> list[str]:
    if config_path is None:
        return []
    folder = os.path.join(os.path.dirname(os.path.abspath(config_path)), "conf.d")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [config_path, *(os.path.join(folder, name) for name in names if is_drop_in(folder, name))]


class Restored(msgspec.Struct, frozen=True):
    """Result of ``cpumond restore``: the report, the file that was read, the error of rewriting this file, the error of
    the configuration, and a sentence about an unreadable copy."""

    report: RestoreReport
    path: str
    file_error: CpumondError | None = None
    config_error: CpumondError | None = None
    complaint: str = ""


def run_restore(config_path: str | None) -> Restored:
    """Run ``cpumond restore``: restore what a dead agent left, from the state file or its copy in ``runtime_dir``.

    If systemd reports how the service ended, that end is counted. Raises UnavailableError while an agent runs,
    StateFileError if all copies are damaged, UnknownLimitsError if there is no copy although an agent may have run."""
    paths = find_paths(config_path, os.environ)
    try:
        done = _restore(paths, config_path)
    finally:
        result = os.environ.get("SERVICE_RESULT")
        if result:
            with contextlib.suppress(CpumondError):  # a missed count matters less than the limits
                count_service_end(paths["state_dir"], result)
    return msgspec.structs.replace(done, config_error=_check_config(config_path))


def _restore(paths: Mapping[str, str], config_path: str | None) -> Restored:
    copies = [os.path.join(paths[key], STATE_FILE) for key in ("state_dir", "runtime_dir")]
    with contextlib.closing(RunLock(paths["runtime_dir"], f"{config_path or ''} (restore)")):
        content, complaint = load_newest(copies, keep_damaged=True)
        if content is None and complaint:
            raise StateFileError(f"{complaint}; no copy of it is intact; set the limits by hand")
        report = RestoreReport()
        if content is None:
            if _may_have_written(config_path):
                raise UnknownLimitsError(
                    f"neither {copies[0]} nor {copies[1]} exists: if an agent has run here since the boot, they were "
                    "removed, and the limits that it lowered are unknown; check the limits and set them by hand"
                )
            return Restored(report, copies[0], complaint=complaint)
        file_error = None
        if not is_of_this_boot(content, copies[1]):
            report.gone = sorted(content.cgroups)
        elif content.cgroups:
            report = _restore_cgroups(paths, content)
        if content.cgroups:
            problems = restore_units(report.units, report.settings)
            report.errors += problems.values()
            done = {*report.restored, *report.gone} - problems.keys()
            left = {name: original for name, original in content.cgroups.items() if name not in done}
            if len(left) < len(content.cgroups):
                file_error = _rewrite(copies, Originals(content.boot_id, left, content.number + 1, content.root))
        return Restored(report, copies[0], file_error, complaint=complaint)


def _may_have_written(config_path: str | None) -> bool:
    """Return whether an agent with this configuration records its changes in a file in ``state_dir``."""
    from cpumond.agent.config import load_config

    try:
        config = load_config(config_path)
    except CpumondError:
        return False  # ``run_restore`` reports it as an error
    return bool(config.find_roots(is_engines=any(source.is_engine for source in config.source)))


def _rewrite(copies: Sequence[str], content: Originals) -> CpumondError | None:
    """Store in the state files what is still to be restored. It is enough if one copy becomes newer than the others.

    If no copy does, return the error: the next ``restore`` would overwrite limits that were set meanwhile."""
    problem: CpumondError | None = None
    for path in copies:
        try:
            if os.path.isdir(os.path.dirname(path)):
                save(path, content)
        except CpumondError as error:
            try:
                overwrite(path, content)
            except OSError:
                problem = problem or error
    if problem is None or load_newest(list(copies), keep_damaged=True)[0] == content:
        return None
    return type(problem)(f"{problem}; until then another `cpumond restore` would undo limits that were set meanwhile")


def _restore_cgroups(paths: Mapping[str, str], content: Originals) -> RestoreReport:
    log = os.path.join(paths["runtime_dir"], WRITTEN_FILE)
    written, note, report = read_written(log), functools.partial(append_written, log), RestoreReport()
    with contextlib.ExitStack() as stack:
        try:
            hierarchies = stack.enter_context(hold(open_hierarchies(paths["mountinfo"])))
        except UnavailableError as error:
            report.unseen = dict.fromkeys(content.cgroups, f"the lowered limits are unknown: {error}")
            return report
        anew = find_anew(hierarchies, content.cgroups)
        restore_all(hierarchies, _leave_out(anew, content.cgroups), content.root, written, note, report)
        namesakes = find_namesakes(anew)
        restore_all(hierarchies, _leave_out(namesakes, anew), content.root, written, note, report)
        report.gone += namesakes
    return report


def _leave_out(paths: Container[str], originals: Mapping[str, Original]) -> dict[str, Original]:
    return {path: original for path, original in originals.items() if path not in paths}


def _check_config(config_path: str | None) -> CpumondError | None:
    """Return the error of the configuration, if any. The caller has restored the limits before this check."""
    from cpumond.agent.config import load_config  # takes as long as everything before

    try:
        load_config(config_path)
    except CpumondError as error:
        return error
    return None


def print_restored(done: Restored) -> int:
    """Print the result on stdout and stderr; return the exit code.

    The code is EXIT_TRY_AGAIN if some cgroup cannot be seen, EXIT_UNAVAILABLE if some limit is not restored. If all
    limits are restored, raises the error of the configuration, if any."""
    report = done.report
    for name in report.restored:
        print(f"restored {name}" + (f", now {report.renamed[name]}" if name in report.renamed else ""))
    if not (report.restored or report.gone or report.errors or report.unseen):
        print(f"nothing to restore in {done.path}")
    elif report.gone:
        print(f"{len(report.gone)} cgroups of {done.path} are gone")
    for error in [*report.errors, *dict.fromkeys(report.unseen.values()), done.complaint, done.file_error]:
        if error:
            print(f"cpumond: {error}", file=sys.stderr)
    if report.unseen:
        print(f"cpumond: {len(report.unseen)} limits may still be lowered; they stay in {done.path}", file=sys.stderr)
    if report.errors or report.unseen or done.file_error is not None:
        # This is worse than a wrong configuration: package scripts need this exit code.
        if done.config_error is not None:
            print(f"cpumond: {done.config_error}", file=sys.stderr)
        if report.unseen:
            return EXIT_TRY_AGAIN
        return EXIT_UNAVAILABLE if report.errors or done.file_error is None else done.file_error.exit_code
    if done.config_error is not None:
        raise done.config_error
    return 0


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Run ``cpumond restore`` without the command line's libraries; return the exit code.

    Returns None if there are arguments different from ``--config FILE``: ``cpumond.cli`` handles these."""
    if arguments and (len(arguments) != 2 or arguments[0] != "--config"):
        return None
    config_path = arguments[1] if arguments else environment.get("CPUMOND_CONFIG") or DEFAULT_CONFIG_PATH
    try:
        return print_restored(run_restore(config_path))
    except CpumondError as error:
        print(f"cpumond: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
