"""Checks of ``cpumond doctor``: systemd's units and other managers of cgroups.

Each takes the facts it examines and returns findings; nothing is changed."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from cpumond.agent.discovery.glob import list_directories
from cpumond.cli.doctor.checks import Finding, advise_source
from cpumond.cli.doctor.host import POLKIT_UNIT, BusSeen
from cpumond.core.errors import CgroupReadError, CpumondError
from cpumond.core.measures import count_cores
from cpumond.core.words import count
from cpumond.host.cgroup.units import unit_of
from cpumond.monitor.protect import advise_without_pressure

if TYPE_CHECKING:
    from cpumond.host.cgroup.mounts import Hierarchies
    from cpumond.monitor.model import MonitorSettings

MANAGERS: Final = (
    ("kubelet", "kubernetes", re.compile(r"kubepods(?:-[\w-]+)?(?:\.slice)?")),
    ("docker", "docker", re.compile(r"docker|docker-[0-9a-f]+\.scope")),
    ("containerd", "kubernetes", re.compile(r"cri-containerd-[0-9a-f]+\.scope|nerdctl-[0-9a-f]+\.scope")),
    ("CRI-O", "kubernetes", re.compile(r"crio-(?:conmon-)?[0-9a-f]+(?:\.scope)?")),
    ("podman", "podman", re.compile(r"libpod_parent|libpod-[0-9a-f]+(?:\.scope)?")),
    ("Slurm", "slurm", re.compile(r"slurm|slurm_.+|.*slurmstepd\.scope")),
    ("LXC", "", re.compile(r"lxc|lxc\.(?:payload|monitor).*")),
    ("a user's own systemd", "", re.compile(r"user@\d+\.service")),
)
"""Managers that create and limit cgroups themselves, the kinds of sources that follow their requests ("": none), and
the names of their topmost cgroups."""

MANAGED_DEPTH: Final = 3


def check_unit_rights(paths: Iterable[str], seen: BusSeen, are_expected: bool = False) -> Finding:
    """Check that limits of units can be set through systemd (SetUnitProperties), which keeps them at daemon-reload.

    ``paths``: of the jobs. ``are_expected``: a source looks for units, even if no unit runs now. Only services and
    scopes count: the polkit rule does not allow slices."""
    units = sorted({unit for path in paths if (unit := unit_of(path)).endswith((".service", ".scope"))})
    check = "unit limits"
    if not (units or are_expected):
        return Finding(check, "ok", "no job is a service or scope of systemd itself: limits are only written to files")
    number = count(len(units), "job")
    about = f"{number} of systemd's units, for example {units[0]}" if units else "no unit is a job now"
    without = "; without it their limits are only written to files, and each daemon-reload removes them for a while"
    if not seen.has_library:
        return Finding(check, "warn", f"{about}: dbus-fast is not installed", "pip install dbus-fast" + without)
    if not seen.has_bus:
        return Finding(check, "warn", f"{about}: there is no system bus", "install and start dbus" + without)
    if seen.is_root:
        return Finding(check, "ok", f"{about}: the agent runs as root, systemd lets it set their limits")
    if not seen.has_polkit:
        text = f"{about}: there is no polkit, so systemd lets only root set their limits, not {seen.account}"
        return Finding(check, "warn", text, "install polkitd" + without)
    if seen.polkit_problem:
        text = f"{about}: {seen.polkit_problem}, so systemd lets only root set their limits, not {seen.account}"
        return Finding(check, "warn", text, f"see `systemctl status {POLKIT_UNIT}`" + without)
    if seen.rules:
        return Finding(check, "ok", f"{about}: {seen.rules[0]} lets {seen.account} set their limits")
    if seen.hidden_rules:
        rule = f"whether a polkit rule lets {seen.account} set their limits"
        text = f"{about}: {rule} is hidden in {seen.hidden_rules[0]}"
        return Finding(check, "warn", text, "run doctor as root; the rule to look for is cpumond.rules")
    text = f"{about}: no polkit rule lets {seen.account} set their limits"
    return Finding(check, "warn", text, "copy cpumond.rules to /etc/polkit-1/rules.d" + without)


def check_owners(
    paths: Sequence[str], cpu_version: int, is_delegated: Callable[[str], bool], own_roots: Sequence[str] = ()
) -> list[Finding]:
    """Find cgroups that are neither a unit nor in a delegated subtree.

    ``paths`` are relative; ``is_delegated`` is called for each of them and the cgroups above; cgroups below
    ``own_roots`` belong to the executor and are left out."""
    paths = [path for path in paths if not any(path == own or path.startswith(own + "/") for own in own_roots)]
    findings = []
    inside = [(path, unit) for path in paths if not unit_of(path) and (unit := _unit_above(path))]
    kept = [(path, unit) for path, unit in inside if not any(map(is_delegated, [path, *_above(path)]))]
    if kept:
        path, unit = kept[0]
        text = f"{count(len(kept), 'cgroup')} below units without delegation, for example {path!r}"
        advice = (
            f"set Delegate=yes for {unit.rpartition('/')[2]}, or follow the unit itself; otherwise systemd may remove "
            "the cpu controller and the cgroup"
        )
        findings.append(Finding("delegation", "warn", text, advice))
    outside = [path for path in paths if not unit_of(path) and not _unit_above(path)]
    if outside and cpu_version == 2:
        text = (
            f"{count(len(outside), 'cgroup')} outside of systemd's units, for example {outside[0]!r}: at "
            "daemon-reload, or when the last unit with a CPU setting ends, systemd may remove the cpu controller and "
            "with it the limit"
        )
        findings.append(Finding("delegation", "warn", text, "run the jobs below a unit with Delegate=yes"))
    if paths and not findings:
        findings.append(Finding("delegation", "ok", "managed cgroups are units, delegated, or not managed by systemd"))
    return findings


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _unit_above(path: str) -> str:
    """The path of the unit above a cgroup, "" if there is none."""
    return next((above for above in _above(path) if unit_of(above)), "")


def check_foreign_managers(roots: Iterable[str], cpu_root: str, kinds: Collection[str] = ()) -> list[Finding]:
    """Find cgroups in ``managed_roots`` that another manager creates and limits, unless its kind is among the ``kinds``
    of sources."""
    found: dict[str, list[str]] = {}
    for root in roots:
        tops = [root] if _find_manager(root) else list(_list_tops(cpu_root, root, MANAGED_DEPTH))
        for top in tops:
            found.setdefault(_find_manager(top), []).append(top)
    sources = {who: kind for who, kind, _ in MANAGERS}
    otherwise = "narrow managed_roots, or let that manager set no CPU limits: its writes count as requests of the job"
    return [
        Finding(
            "foreign cgroups",
            "warn",
            f"managed_roots has {count(len(tops), 'cgroup')} of {manager}, for example {tops[0]!r}",
            advise_source(sources[manager]) if sources[manager] else otherwise,
        )
        for manager, tops in sorted(found.items())
        if sources[manager] not in kinds
    ]


def _find_manager(path: str) -> str:
    """The manager of a cgroup by the names in its path, "" if unknown."""
    names = path.split("/")
    return next((who for who, _, pattern in MANAGERS if any(pattern.fullmatch(name) for name in names)), "")


def _list_tops(cpu_root: str, path: str, depth: int) -> Iterator[str]:
    """The topmost cgroups of managers below ``path``, at most ``depth`` levels down."""
    for name in sorted(list_directories(os.path.join(cpu_root, path))):
        below = f"{path}/{name}" if path else name
        if _find_manager(name):
            yield below
        elif depth > 1:
            yield from _list_tops(cpu_root, below, depth - 1)


def check_caps(hierarchies: Hierarchies, orders: Mapping[str, float | None]) -> list[Finding]:
    """Check quotas of cgroups above the jobs; ``orders`` : path of a job -> request in cores (None: its own quota)."""
    over: dict[str, list[str]] = {}
    caps: dict[str, float] = {}
    for path, ordered in orders.items():
        seen = _read_cap(hierarchies, path)
        if seen is not None and math.isfinite(seen[0]):
            cap, where, own = seen
            caps[where] = cap
            if cap + 1e-9 < (own if ordered is None else ordered) < math.inf:
                over.setdefault(where, []).append(path)
    findings = [
        Finding(
            "limits above",
            "warn",
            f"{where} has {count_cores(caps[where])}, less than {count(len(paths), 'job')} below it requested, for "
            f"example {paths[0]!r}: they never get more",
            f"raise the quota of {where}, or request less",
        )
        for where, paths in sorted(over.items())
    ]
    if findings or not orders:
        return findings
    shown = ", ".join(f"{where} {count_cores(cap)}" for where, cap in sorted(caps.items())[:3])
    return [Finding("limits above", "ok", f"quotas above the jobs: {shown or 'none'}")]


def _read_cap(hierarchies: Hierarchies, path: str) -> tuple[float, str, float] | None:
    """The lowest quota above a cgroup, the path that has it, and the cgroup's own quota, in cores; None: unreadable."""
    from cpumond.cli.agent.watch import read_own_quota
    from cpumond.host.cgroup import open_cgroup

    with contextlib.suppress(CpumondError):
        cgroup = open_cgroup(hierarchies, path)
        if cgroup is not None:
            with contextlib.closing(cgroup):
                cap = cgroup.read_ancestor_cap()
                return cap.cores, cap.path, read_own_quota(cgroup)
    return None


def check_job_pressure(
    unified_root: str | None, paths: Sequence[str], wanting: Sequence[MonitorSettings]
) -> list[Finding]:
    """Check that the jobs' own cgroups have PSI; no finding without jobs. ``wanting``: the settings that read it."""
    from cpumond.host.cgroup.files import open_pressure

    reasons: dict[str, str] = {}
    for path in paths:
        try:
            os.close(open_pressure(unified_root, path))
        except CgroupReadError as error:
            reasons[path] = str(error)
    if reasons and wanting:
        # With a weight, PSI is the only sign that a job lacks CPU, so the advice for weights comes first.
        advice = advise_without_pressure(max(wanting, key=lambda each: each.actuator == "weight"))
        text = f"missing for {len(reasons)} of {count(len(paths), 'job')}: {next(iter(reasons.values()))}"
        return [Finding("pressure of jobs", "warn", text, advice)]
    if not paths:
        return []
    here = len(paths) - len(reasons)
    asked = "pressure_restore_ratio is on" if wanting else "pressure_restore_ratio is off"
    why = f"; {next(iter(reasons.values()))}" if reasons else ""
    return [Finding("pressure of jobs", "ok", f"available for {here} of {count(len(paths), 'job')} ({asked}){why}")]
