"""Recognise by their paths the cgroups that look like workloads; pure, independent of the configuration.

Engines and schedulers name cgroups by conventions that have been stable for years: a name contains a container's id, a
Slurm job's number, or a pod's uid. Facts that are not in the path (a container's name, a job's user) are left out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from cpumond.agent.discovery.units import slice_path
from cpumond.core.job_cgroups import list_above
from cpumond.host.engine.model import SHORT_ID, SLUID

Kind = Literal[
    "docker", "podman", "containerd", "cri-o", "container", "kubernetes", "slurm", "lxc", "machine", "unit", "cgroup"
]


class Workload(msgspec.Struct, frozen=True):
    """One cgroup that is a workload.

    ``path`` is relative to the root of the hierarchy. ``name`` comes from the path: 12 digits of a container's id, the
    uid of its pod and 12 digits, "job 7", a unit, or the last component. ``detail`` says more in words ("uid 1000",
    "burstable")."""

    path: str
    kind: Kind
    name: str
    detail: str = ""


class SourceSketch(msgspec.Struct, frozen=True):
    """A ``[[source]]`` that finds workloads like those of ``paths``: keys and values as in the configuration.

    ``keep_shadow``: an operator should think before lowering their limits, for example of services of the system."""

    keys: dict[str, str | list[str]]
    kind: Kind
    paths: tuple[str, ...]
    keep_shadow: bool = False


_HEX: Final = r"[0-9a-f]{6,64}"
_ENGINES: Final[tuple[tuple[Kind, re.Pattern[str]], ...]] = (
    ("docker", re.compile(rf"docker-({_HEX})\.scope")),
    ("podman", re.compile(rf"libpod-(?:payload-)?({_HEX})(?:\.scope)?")),
    ("containerd", re.compile(rf"(?:cri-containerd|nerdctl)-({_HEX})\.scope")),
    ("cri-o", re.compile(rf"crio-({_HEX})(?:\.scope)?")),
    ("container", re.compile(r"(?:.*[-:])?([0-9a-f]{64})(?:\.scope)?")),
)
"""Patterns of the names of containers' cgroups, wherever these are; the last pattern is for unknown engines."""
_MONITORS: Final = re.compile(
    rf"conmon|(?:libpod|crio)-conmon-{_HEX}(?:\.scope)?|lxc\.monitor(?:\..+)?|init\.scope|\.lxc"
)
"""Pattern of cgroups that are no workloads: those of PID 1 and of processes that supervise a workload."""
_POD: Final = re.compile(r"(?:.*-)?pod([0-9a-f]{8}[0-9a-f_-]*)(?:\.slice)?(?::[\w-]+:([0-9a-f]+))?")
_QOS: Final = re.compile(r"besteffort|burstable")
_SLURM_JOB: Final = re.compile(rf"job_([0-9]+)|({SLUID})")
_SLURM: Final = re.compile(r"slurm|slurm_.+|(?:.+_)?slurmstepd\.scope")
_UID: Final = re.compile(r"uid_([0-9]+)")
_USER_SLICE: Final = re.compile(r"user-([0-9]+)\.slice")
_USER_MANAGER: Final = re.compile(r"user@([0-9]+)\.service")
_MACHINE: Final = re.compile(r"machine-(.+)\.scope|systemd-nspawn@(.+)\.service")
_UNIT_SUFFIXES: Final = (".service", ".scope")
_SYSTEM_SLICES: Final = ("system.slice", "user.slice")
_FULL: Final = 2
"""Rank of a cgroup that is certainly a single workload. A pod or unit, which may contain such cgroups, has rank 1."""


def classify(path: str) -> tuple[Workload, int] | None:
    """Return the workload whose own cgroup is at ``path``, and its rank; None if ``path`` is no workload, even if it is
    inside or above one. For some leaf cgroups the path does not show this; ``pick_workloads`` decides."""
    *parents, last = path.split("/")
    if not last or _MONITORS.fullmatch(last):
        return None
    parent = parents[-1] if parents else ""
    for find in (_find_kubernetes, _find_slurm, _find_container):
        found = find(parents, parent, last)
        if found is not None:
            kind, name, detail, rank = found
            return Workload(path, kind, name, detail), rank
    return _find_unit(path, parents, parent, last)


_Found = tuple[Kind, str, str, int]


def _find_kubernetes(parents: list[str], parent: str, last: str) -> _Found | None:
    if not any("kubepods" in each for each in (*parents, last)):
        return None
    own, of_parent = _POD.fullmatch(last), _POD.fullmatch(parent)
    pod = own if of_parent is None else of_parent
    if pod is None:
        return None
    uid = pod[1].replace("_", "-")
    qos = next((found[0] for each in (*parents, last) if (found := _QOS.search(each))), "guaranteed")
    if of_parent is not None:
        return "kubernetes", f"{uid}/{_shorten(last)}", qos, _FULL
    if pod[2]:
        return "kubernetes", f"{uid}/{pod[2][:SHORT_ID]}", qos, _FULL
    return "kubernetes", uid, qos, 1


def _find_slurm(parents: list[str], parent: str, last: str) -> _Found | None:
    job = _SLURM_JOB.fullmatch(last)
    uid = _UID.fullmatch(parent)
    if job is None or not (uid or any(_SLURM.fullmatch(each) for each in parents)):
        return None
    if job[2] and not _SLURM.fullmatch(parent):
        return None
    return "slurm", f"job {job[1] or job[2]}", f"uid {uid[1]}" if uid else "", _FULL


def _find_container(parents: list[str], parent: str, last: str) -> _Found | None:
    if parent == "docker" and re.fullmatch(_HEX, last):
        return "docker", last[:SHORT_ID], "", _FULL
    if parent in ("lxc", "lxc.payload"):
        return "lxc", last, "", _FULL
    if last.startswith("lxc.payload."):
        return "lxc", last.removeprefix("lxc.payload."), "", _FULL
    machine = _MACHINE.fullmatch(last)
    if machine is not None:
        return "machine", _unescape(machine[1] or machine[2]), "", _FULL
    for kind, pattern in _ENGINES:
        found = pattern.fullmatch(last)
        if found is not None:
            user = next((each[1] for name in parents if (each := _USER_SLICE.fullmatch(name))), "")
            return kind, found[1][:SHORT_ID], f"uid {user}" if user else "", _FULL
    return None


def _find_unit(path: str, parents: list[str], parent: str, last: str) -> tuple[Workload, int] | None:
    """Return a service or scope in a slice of the system or of a user; None for a user's manager and all the rest."""
    if not last.endswith(_UNIT_SUFFIXES) or _USER_MANAGER.fullmatch(last) or not parent.endswith(".slice"):
        return None
    user = next((each[1] for name in reversed(parents) if (each := _USER_SLICE.fullmatch(name))), "")
    return Workload(path, "unit", _unescape(last), f"uid {user}" if user else ""), 1


def _shorten(name: str) -> str:
    found = next(filter(None, (pattern.fullmatch(name) for _, pattern in _ENGINES)), None)
    return name if found is None else found[1][:SHORT_ID]


def _unescape(name: str) -> str:
    r"""Return a unit's original name: systemd writes "-" within a part of a name as ``\x2d``."""
    return re.sub(r"\\x([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), name)


def pick_workloads(
    paths: Iterable[str], is_populated: Callable[[str], bool], left_out: Iterable[str] = ()
) -> list[Workload]:
    """Return the workloads among all cgroups ``paths`` (relative), sorted by path. No workload is inside another one.

    Workloads are the outermost containers, Slurm jobs and virtual machines, the outermost units and pods that contain
    none of these, and leaf cgroups elsewhere that have processes (``is_populated`` is only called for leaves).
    ``left_out`` are never workloads."""
    every = sorted(set(paths) - {""})
    inner = {above for path in every for above in list_above(path)}
    chosen: dict[str, Workload] = {}
    holders = set(left_out)
    named = [found for path in every if (found := classify(path)) is not None]
    for rank in (_FULL, 1):
        for workload, own_rank in named:
            path = workload.path
            if own_rank == rank and path not in holders and chosen.keys().isdisjoint(list_above(path)):
                chosen[path] = workload
        holders |= {above for path in chosen for above in list_above(path)}
    for path in every:
        last = path.rpartition("/")[2]
        if path in inner or path in chosen or path in holders or _MONITORS.fullmatch(last):
            continue
        if path.endswith("slurmstepd.scope/system") or not chosen.keys().isdisjoint(list_above(path)):
            continue
        if is_populated(path):
            chosen[path] = Workload(path, "cgroup", last, path.rpartition("/")[0])
    present = set(every)
    # crun puts a container's processes, and the container's limit, into a child of the container's scope.
    moved = (
        msgspec.structs.replace(each, path=f"{path}/container") if f"{path}/container" in present else each
        for path, each in chosen.items()
    )
    return sorted(moved, key=lambda workload: workload.path)


_ANY_HEX: Final = "[0-9a-f][0-9a-f]*"
"""Glob for an id. With one digit in place of two, it would match ``libpod-conmon-ID.scope``, ``docker/buildkit``."""
_VARIABLE: Final = (
    (re.compile(r"(?<=pod)[0-9a-f][0-9a-f_-]{7,}"), "*"),
    (re.compile(r"[0-9a-f]{8}[-_](?:[0-9a-f]{4}[-_]){3}[0-9a-f]{12}|[0-9a-f]{12,64}"), _ANY_HEX),
    (re.compile(r"^(uid_|job_|task_|user-|user@|session-)[0-9]+(?=$|\.)"), r"\1*"),
    (re.compile(f"^{SLUID}$"), SLUID),
    (re.compile(r"^(step_|lxc\.payload\.|systemd-nspawn@).+?(\.service)?$"), r"\1*\2"),
    (re.compile(r"^machine-.+\.scope$"), "machine-*.scope"),
)
"""Patterns of the parts in which names of the same kind of workload differ, and a glob in place of each part."""
_NO_GLOB: Final = re.compile(r"[*?\[\]]")
_IDS: Final[dict[str, str]] = {
    "kubernetes": rf"pod(?P<operation>[0-9a-f_-]+).*[/:-](?P<id>[0-9a-f]{{{SHORT_ID}}})[0-9a-f]*(\.scope)?$",
    "slurm": rf"(?P<id>(?:job_)?(?P<operation>(?<=job_)[0-9]+|{SLUID}).*)",
    **dict.fromkeys(
        ("docker", "podman", "containerd", "cri-o", "container"),
        rf"(?P<id>[0-9a-f]{{{SHORT_ID}}})[0-9a-f]*(\.scope)?(/container)?$",
    ),
}
"""``id_regex`` of a source for each kind of workload whose ids all have the same length."""


def list_sources(workloads: Iterable[Workload], leaves: Callable[[str], list[str]]) -> list[SourceSketch]:
    """Return sources that find ``workloads`` and similar ones. The most specific sources come first, because a cgroup
    that several sources find is a job of the first one.

    ``leaves`` returns the leaf cgroups below a path, or the path itself if there are none. The agent changes only leaf
    cgroups, which for a Slurm job are its tasks."""
    globs: dict[tuple[Kind, str], list[str]] = {}
    units: dict[tuple[str, str], list[str]] = {}
    plain: dict[str, list[str]] = {}
    for workload in workloads:
        path = workload.path
        if workload.kind == "unit" and _is_in_slices(path):
            units.setdefault((path.rpartition("/")[0], path[path.rindex(".") :]), []).append(path)
        elif workload.kind == "cgroup":
            plain.setdefault(path.rpartition("/")[0], []).append(path)
        else:
            for leaf in leaves(path) if workload.kind == "slurm" else [path]:
                globs.setdefault((workload.kind, generalise(leaf)), []).append(leaf)
    # A short pattern may match the parents of what a longer one matches, such as scopes in which crun made a child.
    ordered = sorted(globs.items(), key=lambda item: (item[0][0], -item[0][1].count("/"), item[0][1]))
    found = [_sketch_glob(kind, pattern, paths) for (kind, pattern), paths in ordered]
    for (place, suffix), paths in sorted(units.items()):
        # A source for a slice above this one also finds these units.
        outer = next((above for above in list_above(place) if (above, suffix) in units), None)
        if outer is not None:
            units[outer, suffix] += paths
    for (place, suffix), paths in sorted(units.items()):
        if not any((above, suffix) in units for above in list_above(place)):
            keys: dict[str, str | list[str]] = {"kind": "systemd", "slices": [place.rpartition("/")[2]]}
            keys["pattern"] = f"*{suffix}"
            found.append(SourceSketch(keys, "unit", tuple(paths), _is_of_system(place)))
    for parent, paths in sorted(plain.items()):
        if parent and len(paths) > 1:
            keys = {"kind": "glob", "pattern": f"{_escape(parent)}/*"}
            found.append(SourceSketch(keys, "cgroup", tuple(paths), _is_of_system(parent)))
        else:
            for path in paths:
                keys = {"kind": "glob" if _NO_GLOB.search(path) else "static", "pattern": _escape(path)}
                found.append(SourceSketch(keys, "cgroup", (path,), _is_of_system(path)))
    return found


def _sketch_glob(kind: Kind, pattern: str, paths: list[str]) -> SourceSketch:
    keys: dict[str, str | list[str]] = {"kind": "glob", "pattern": pattern}
    expression = _IDS.get(kind)
    if expression is not None:
        ids = {match["id"] for path in paths if (match := re.search(expression, path))}
        if len(ids) == len(set(paths)):
            keys["id_regex"] = expression
    return SourceSketch(keys, kind, tuple(paths), kind == "unit" and _is_of_system(paths[0]))


def _is_of_system(path: str) -> bool:
    return path.partition("/")[0] in _SYSTEM_SLICES


def generalise(path: str) -> str:
    """Return a glob for ``path`` and similar paths: wildcards replace ids, uids, job numbers and the like."""
    parts = [_escape(part) for part in path.split("/")]
    for pattern, sign in _VARIABLE:
        parts = [pattern.sub(sign, part) for part in parts]
    return "/".join(parts)


def find_roots(sketches: Iterable[SourceSketch]) -> list[str]:
    """Return ``managed_roots`` for the sources: the part of their paths before the first wildcard."""
    roots = set()
    for sketch in sketches:
        slices = sketch.keys.get("slices", [])
        if slices:
            roots.add(slice_path(slices[0]))
            continue
        for path in sketch.paths:
            pairs = zip(path.split("/"), str(sketch.keys["pattern"]).split("/"), strict=True)
            # A "?" only stands for a character that has a meaning in globs.
            fixed = itertools.takewhile(lambda pair: not re.search(r"[*\[]", pair[1]), pairs)
            roots.add("/".join(part for part, _ in fixed) or path.partition("/")[0])
    return sorted(root for root in roots if roots.isdisjoint(list_above(root)))


def _is_in_slices(path: str) -> bool:
    """Return whether all cgroups above the unit at ``path`` are slices; if so, source ``systemd`` finds the unit."""
    *above, _ = path.split("/")
    stem = ""
    for part in above:
        if not part.endswith(".slice") or (stem and not part.startswith(f"{stem}-")):
            return False
        stem = part.removesuffix(".slice")
    return bool(above)


def _escape(part: str) -> str:
    return _NO_GLOB.sub("?", part)
