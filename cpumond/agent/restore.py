"""``cpumond restore``: what a dead agent left lowered is put back. Files first, then what systemd believes.

It must be quick, also on a slow machine: a job may be held down until it is done. So this imports no more than it
needs, and the library for the bus only when all files are right again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import time
import tomllib
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from cpumond.agent.state_file import (
    STATE_FILE,
    Original,
    Originals,
    count_service_end,
    is_of_this_boot,
    load_first,
    make_directory,
    save,
)
from cpumond.cgroup import Cgroup, open_cgroup
from cpumond.cgroup.mounts import Hierarchies, open_hierarchies
from cpumond.cgroup.settings import CpuSettings, choose_restore, compute_quota_target
from cpumond.cgroup.systemd import (
    NO_LIMIT,
    QUOTA,
    WEIGHT,
    UnitProperties,
    is_booted,
    is_quota,
    list_properties,
    read_quota_cores,
    unit_of,
)
from cpumond.errors import (
    EXIT_UNAVAILABLE,
    CgroupWriteError,
    CpumondError,
    StateFileError,
    UnavailableError,
    from_os_error,
)

LOCK_FILE = "agent.lock"
DEFAULT_CONFIG_PATH = "/etc/cpumond/cpumond.toml"
STRANGERS_TIMEOUT_S = 5.0
DROP_INS: Final = {"quota": "50-CPUQuota.conf", "weight": "50-CPUWeight.conf"}
"""What SetUnitProperties leaves in the folder of a unit's drop-ins."""
UNITS_TIMEOUT_S = 15.0
"""For all units together; the quotas in force are right by then."""


class LockHolder(msgspec.Struct):
    """Who holds the lock: written into the lock file for the message of the second agent."""

    pid: int
    since: float
    config: str


@contextlib.contextmanager
def hold_lock(runtime_dir: str, config_path: str) -> Iterator[None]:
    """The one agent of a runtime directory. Raises UnavailableError that names the first agent."""
    make_directory(runtime_dir, 0o755, "runtime_dir")
    path = os.path.join(runtime_dir, LOCK_FILE)
    try:
        # The directory is the agent's, and root may be the one who runs this: no link is followed.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise from_os_error(error, f"open the lock {path}", "fix runtime_dir or run as root") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UnavailableError(f"{path}: {_describe_holder(os.read(fd, 4096))}; stop it first") from None
        try:
            os.ftruncate(fd, 0)
            os.write(fd, msgspec.json.encode(LockHolder(os.getpid(), time.time(), config_path)))
        except OSError as error:
            raise from_os_error(error, f"write the lock {path}", "free space in runtime_dir") from error
        yield
    finally:
        os.close(fd)


def _describe_holder(content: bytes) -> str:
    try:
        holder = msgspec.json.decode(content, type=LockHolder)
    except msgspec.DecodeError:
        return "another agent is running (it did not say its pid)"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    return f"another agent is running: pid {holder.pid}, since {since}, with {holder.config or 'built-in defaults'}"


# ---- one cgroup


def restore_cgroup(cgroup: Cgroup, original: Original) -> CpuSettings | None:
    """Put the settings of one cgroup back; what is in force then, None when it is gone. Raises CgroupError.

    Where a quota above it was lowered meanwhile v1 refuses: then it gets as much as that one allows before the raise.
    """
    current = cgroup.read_settings()
    if current is None:
        return None
    target = choose_restore(current, original.settings, original.actuators)
    try:
        return target if cgroup.write_settings(current, target) else None
    except CgroupWriteError:
        _give_what_is_allowed(cgroup, target)
        raise


def _give_what_is_allowed(cgroup: Cgroup, target: CpuSettings) -> None:
    current, cap = cgroup.read_settings(), cgroup.read_ancestor_cap()
    if current is not None and current.cores < cap.cores < target.cores:
        allowed = compute_quota_target(cap.cores, target, cap).settings
        cgroup.write_settings(current, msgspec.structs.replace(allowed, weight=current.weight))


# ---- all of them


class RestoreReport(msgspec.Struct):
    """What ``restore_all`` did: paths put back, gone since, errors in sentences; by path what is in force now, and of
    those that are units what systemd is to be told."""

    restored: list[str] = []
    gone: list[str] = []
    errors: list[str] = []
    settings: dict[str, CpuSettings] = {}
    units: dict[str, UnitProperties] = {}

    def add(self, other: RestoreReport) -> None:
        """Take in the report about other cgroups."""
        self.restored += other.restored
        self.gone += other.gone
        self.errors += other.errors
        self.settings.update(other.settings)
        self.units.update(other.units)


def restore_all(hierarchies: Hierarchies, originals: Mapping[str, Original]) -> RestoreReport:
    """Put every cgroup of ``originals`` back that still is the same one; errors are collected, none stops the rest.

    The cgroup of a unit is the unit's, whenever it was made; ``find_strangers`` tells of which that is not so.
    """
    report = RestoreReport(restored=[], gone=[], errors=[], settings={}, units={})
    for path, original in sorted(originals.items(), key=lambda item: item[0].count("/")):
        cgroup = None
        settings: CpuSettings | None = None
        try:
            cgroup = open_cgroup(hierarchies.without_counters(), path)
            if cgroup is not None and (cgroup.inode == original.inode or original.unit):
                settings = restore_cgroup(cgroup, original)
            if settings is None:
                report.gone.append(path)
            else:
                report.restored.append(path)
                report.settings[path] = settings
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
    """Those of ``originals`` that are units with another cgroup now: restarted, or new ones of an old name."""
    anew = {}
    for path, original in originals.items():
        with contextlib.suppress(OSError):
            if original.unit and os.stat(os.path.join(hierarchies.cpu_root, path)).st_ino != original.inode:
                anew[path] = original
    return anew


def find_strangers(anew: Mapping[str, Original]) -> set[str]:
    """Those of ``anew`` that systemd was never told a limit of: what they have is what they ordered.

    SetUnitProperties leaves a drop-in, by which a restarted unit comes with our limit; a new one of that name has none.
    Where systemd does not answer nobody is a stranger: rather too much CPU than too little. Takes up to
    STRANGERS_TIMEOUT_S.
    """
    if not anew or not is_booted():
        return set()
    from cpumond.cgroup.unit_bus import UnitBus  # costs more than all that was done before

    bus = UnitBus(lambda: None)
    try:
        for original in anew.values():
            bus.ask(original.unit, ("DropInPaths",))
        bus.flush(STRANGERS_TIMEOUT_S)
        told = {event.unit: event.values.get("DropInPaths") for event in bus.poll() if event.kind == "answer"}
    finally:
        bus.close()
    strangers = set()
    for path, original in anew.items():
        files, ours = told.get(original.unit), {DROP_INS[actuator] for actuator in original.actuators}
        if isinstance(files, list) and not ours & {os.path.basename(file) for file in files}:
            strangers.add(path)
    return strangers


def restore_units(units: Mapping[str, UnitProperties], restored: Collection[str] = ()) -> dict[str, str]:
    """Have systemd believe in what is in force again; ``units`` by cgroup path, as are the sentences about failures and
    ``restored``, those that are there.

    Units that have it already are left alone, so are all where systemd is not PID 1.
    """
    if not units or not is_booted():
        return {}
    from cpumond.cgroup.unit_bus import UnitBus  # costs more than all that was done before

    # The slice of a unit may have changed: the path that came last, and is there, tells what it is to have.
    paths = {unit_of(path): path for path in sorted(units, key=lambda path: path in restored)}
    left = {path: units[path] for path in paths.values()}
    problem = "systemd did not answer in time"
    bus = UnitBus(lambda: None)
    try:
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
    finally:
        bus.close()
    return {path: _describe_unit(path, properties, problem) for path, properties in left.items()}


def _describe_unit(path: str, properties: UnitProperties, problem: str) -> str:
    unit = unit_of(path)
    return (
        f"{path}: systemd still believes in the lowered limit ({problem}); "
        f"run `systemctl set-property --runtime {unit} {_say(properties)}`"
    )


def _has(values: Mapping[str, object], properties: UnitProperties) -> bool:
    told = tuple((name, value) for name, value in values.items() if isinstance(value, int))
    quotas = [read_quota_cores(value) for name, value in properties if name == QUOTA]
    others = [(name, value) for name, value in properties if name == WEIGHT]
    return all(is_quota(told, cores) for cores in quotas) and all(values.get(name) == value for name, value in others)


def _say(properties: UnitProperties) -> str:
    words = {QUOTA: "CPUQuota", WEIGHT: WEIGHT}
    said = []
    for name, value in properties:
        if name in words:
            text = "" if value == NO_LIMIT else f"{value / 1e4:g}%" if name == QUOTA else str(value)
            said.append(f"{words[name]}={text}")
    return " ".join(said)


# ---- the command

DEFAULT_PATHS: Final = {
    "state_dir": "/var/lib/cpumond", "runtime_dir": "/run/cpumond", "mountinfo": "/proc/self/mountinfo",
}  # fmt: skip
"""What ``restore`` needs of a configuration; the defaults are those of ``AgentConfig``, which costs more to import."""
ENVIRONMENT: Final = {"state_dir": "STATE_DIRECTORY", "runtime_dir": "RUNTIME_DIRECTORY"}
"""The environment in which systemd says the same."""


def find_paths(config_path: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The directories that a configuration names, without a look at what else is in it.

    A bad file on disk must not keep the limits of a dead agent lowered: the directories it names count though another
    line of it is wrong, then those that systemd names, then the built-in ones.
    """
    named: dict[str, str] = {}
    damaged = False
    for path in _list_files(config_path):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except (OSError, ValueError):
            # Not even readable: what systemd or the built-in defaults say has to do.
            damaged = True
            continue
        try:
            table = tomllib.loads(text)
        except ValueError:
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
    return [config_path, *(os.path.join(folder, name) for name in names if name.endswith(".toml"))]


class Restored(msgspec.Struct, frozen=True):
    """What ``cpumond restore`` did: the report, the file it read, and sentences about the configuration or the file."""

    report: RestoreReport
    path: str
    config_error: CpumondError | None = None
    complaint: str = ""


def run_restore(config_path: str | None) -> Restored:
    """``cpumond restore``: put back what a dead agent left, from the state file or its copy in ``runtime_dir``.

    Where systemd says how the service ended, that is counted. Raises UnavailableError while an agent runs,
    StateFileError when no copy of the file is intact.
    """
    paths = find_paths(config_path, os.environ)
    try:
        report, path, complaint = _restore(paths, config_path)
    finally:
        result = os.environ.get("SERVICE_RESULT")
        if result:
            with contextlib.suppress(CpumondError):  # a number less; the limits are what matters here
                count_service_end(paths["state_dir"], result)
    return Restored(report, path, _check_config(config_path), complaint)


def _restore(paths: Mapping[str, str], config_path: str | None) -> tuple[RestoreReport, str, str]:
    copies = [os.path.join(paths[key], STATE_FILE) for key in ("state_dir", "runtime_dir")]
    with hold_lock(paths["runtime_dir"], f"{config_path or ''} (restore)"):
        content, complaint = load_first(copies, Originals, keep_damaged=True)
        if content is None and complaint:
            raise StateFileError(f"{complaint}; no copy of it is intact, set the limits by hand")
        report = RestoreReport(restored=[], gone=[], errors=[], settings={}, units={})
        if content is not None and not is_of_this_boot(content, copies[1]):
            report.gone = sorted(content.cgroups)
        elif content is not None and content.cgroups:
            hierarchies = open_hierarchies(paths["mountinfo"])
            anew = find_anew(hierarchies, content.cgroups)
            report = restore_all(hierarchies, _leave_out(anew, content.cgroups))
            strangers = find_strangers(anew)
            report.add(restore_all(hierarchies, _leave_out(strangers, anew)))
            report.gone += strangers
        if content is not None and content.cgroups:
            problems = restore_units(report.units, report.settings)
            report.errors += problems.values()
            done = {*report.restored, *report.gone} - problems.keys()
            left = {name: original for name, original in content.cgroups.items() if name not in done}
            for path in copies:
                if path == copies[0] or os.path.exists(path):
                    save(path, Originals(content.boot_id, left))
        return report, copies[0], complaint


def _leave_out(paths: Container[str], originals: Mapping[str, Original]) -> dict[str, Original]:
    return {path: original for path, original in originals.items() if path not in paths}


def _check_config(config_path: str | None) -> CpumondError | None:
    """What is wrong with the configuration; looked at when the limits are right again."""
    from cpumond.config import load_config  # takes as long as all the rest

    try:
        load_config(config_path)
    except CpumondError as error:
        return error
    return None


def print_restored(done: Restored) -> int:
    """Say what was done on stdout and stderr; the exit code, EXIT_UNAVAILABLE when some limit is not back.

    Raises the configuration's error, if it has one, when all are.
    """
    report = done.report
    for name in report.restored:
        print(f"restored {name}")
    if not (report.restored or report.gone or report.errors):
        print(f"nothing to restore in {done.path}")
    elif report.gone:
        print(f"{len(report.gone)} cgroups of {done.path} are gone")
    for error in [*report.errors, done.complaint]:
        if error:
            print(f"cpumond: {error}", file=sys.stderr)
    if report.errors:
        # Worse than a wrong configuration, and what a package's scripts must hear of.
        if done.config_error is not None:
            print(f"cpumond: {done.config_error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    if done.config_error is not None:
        raise done.config_error
    return 0


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """``cpumond restore`` without the command line's libraries; the exit code.

    None for other arguments than ``--config FILE`` or none at all: those are for ``cpumond.cli``.
    """
    config_path = environment.get("CPUMOND_CONFIG") or DEFAULT_CONFIG_PATH
    match list(arguments):
        case []:
            pass
        case ["--config", path]:
            config_path = path
        case _:
            return None
    try:
        return print_restored(run_restore(config_path))
    except CpumondError as error:
        print(f"cpumond: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
