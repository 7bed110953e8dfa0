"""Which cgroups are workloads, what they are called, and the sources that find them."""

import pytest

from cpumond.agent.config import Source
from cpumond.agent.discovery import list_jobs
from cpumond.agent.discovery.workloads import classify, find_roots, generalise, list_sources, pick_workloads
from cpumond.core.job_cgroups import list_above
from cpumond.testing import make_tree

ID = "3f9ab1c2d4e5" + "0" * 52
OTHER = "0a1b2c3d4e5f" + "1" * 52
SHORT = ID[:12]
UID = "8f0d1234-0a1b-4c2d-9e3f-123456789abc"
LOW = UID.replace("-", "_")
POD = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{LOW}.slice"


def populated(_: str) -> bool:
    return True


@pytest.mark.parametrize(("path", "kind", "name", "detail"), [
    (f"docker/{ID}", "docker", SHORT, ""),
    (f"system.slice/docker-{ID}.scope", "docker", SHORT, ""),
    (f"top/docker/{ID}", "docker", SHORT, ""),
    (f"user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope", "docker", SHORT, "uid 1000"),
    (f"machine.slice/libpod-{ID}.scope", "podman", SHORT, ""),
    (f"libpod_parent/libpod-{ID}", "podman", SHORT, ""),
    (f"system.slice/web.service/libpod-payload-{ID}", "podman", SHORT, ""),
    (f"user.slice/user-7.slice/user@7.service/user.slice/libpod-{ID}.scope", "podman", SHORT, "uid 7"),
    (f"system.slice/cri-containerd-{ID}.scope", "containerd", SHORT, ""),
    (f"system.slice/nerdctl-{ID}.scope", "containerd", SHORT, ""),
    (f"default/{ID}", "container", SHORT, ""),
    (f"pods.slice/crio-{ID}.scope", "cri-o", SHORT, ""),
    (f"x.slice/newengine-{ID}.scope", "container", SHORT, ""),
    (f"{POD}/cri-containerd-{ID}.scope", "kubernetes", f"{UID}/{SHORT}", "burstable"),
    (f"{POD}/crio-{ID}.scope", "kubernetes", f"{UID}/{SHORT}", "burstable"),
    (POD, "kubernetes", UID, "burstable"),
    (f"kubepods.slice/kubepods-pod{LOW}.slice/docker-{ID}.scope", "kubernetes", f"{UID}/{SHORT}", "guaranteed"),
    (f"kubepods/besteffort/pod{UID}/{ID}", "kubernetes", f"{UID}/{SHORT}", "besteffort"),
    (f"kubepods/pod{UID}/x", "kubernetes", f"{UID}/x", "guaranteed"),
    (f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope", "kubernetes",
     f"{UID}/{SHORT}", "guaranteed"),
    (f"system.slice/containerd.service/kubepods-burstable-pod{LOW}.slice:cri-containerd:{ID}", "kubernetes",
     f"{UID}/{SHORT}", "burstable"),
    ("slurm/uid_1000/job_17", "slurm", "job 17", "uid 1000"),
    ("slurm_node7/uid_0/job_2", "slurm", "job 2", "uid 0"),
    ("system.slice/slurmstepd.scope/job_3", "slurm", "job 3", ""),
    ("system.slice/node7_slurmstepd.scope/job_3", "slurm", "job 3", ""),
    ("hpc.slice/slurmstepd.scope/sEKNKTV3WPV500", "slurm", "job sEKNKTV3WPV500", ""),
    ("lxc/web", "lxc", "web", ""),
    ("lxc.payload.web", "lxc", "web", ""),
    ("lxc.payload/web", "lxc", "web", ""),
    ("machine.slice/machine-qemu\\x2d1\\x2dvm.scope", "machine", "qemu-1-vm", ""),
    ("machine.slice/systemd-nspawn@deb.service", "machine", "deb", ""),
    ("system.slice/sshd.service", "unit", "sshd.service", ""),
    ("system.slice/system-getty.slice/getty@tty1.service", "unit", "getty@tty1.service", ""),
    ("batch.slice/batch-night.slice/run-7.scope", "unit", "run-7.scope", ""),
    ("user.slice/user-1000.slice/session-3.scope", "unit", "session-3.scope", "uid 1000"),
    ("user.slice/user-5.slice/user@5.service/app.slice/a.service", "unit", "a.service", "uid 5"),
])  # fmt: skip
def test_what_a_path_tells(path: str, kind: str, name: str, detail: str) -> None:
    found = classify(path)
    assert found is not None
    assert (found[0].path, found[0].kind, found[0].name, found[0].detail) == (path, kind, name, detail)


@pytest.mark.parametrize("path", [
    "", "docker", "system.slice", "init.scope", "kubepods", "kubepods.slice/kubepods-burstable.slice", "slurm",
    "slurm/uid_0", "slurm/uid_0/job_7/step_0", "slurm/uid_0/job_x", "a/sEKNKTV3WPV500", "jobs/job_7", "jobs/a",
    f"machine.slice/libpod-conmon-{ID}.scope", f"{POD}/crio-conmon-{ID}.scope", "lxc.monitor.web",
    "user.slice/user-1000.slice/user@1000.service", "user.slice/user-1000.slice/user@1000.service/init.scope",
    "batch/x.service", "docker/buildkit", "libpod_parent/conmon",
])  # fmt: skip
def test_what_is_no_workload_by_its_path(path: str) -> None:
    assert classify(path) is None


def pick(*paths: str, **options: object) -> list[str]:
    every = {path for each in paths for path in ("/".join(each.split("/")[:n]) for n in range(1, each.count("/") + 2))}
    return [found.path for found in pick_workloads(every, populated, **options)]


def test_containers_are_workloads_and_the_units_around_them_are_not() -> None:
    held = f"system.slice/containerd.service/kubepods-burstable-pod{LOW}.slice:cri-containerd:{ID}"
    container = f"{POD}/cri-containerd-{ID}.scope"
    job = "system.slice/slurmstepd.scope/job_3"
    told = pick(held, container, f"{job}/step_0", "system.slice/slurmstepd.scope/system", "system.slice/a.service")
    assert told == [container, "system.slice/a.service", held, job]
    assert pick(POD) == [POD]
    assert pick(POD, "jobs/a", left_out=[POD, "jobs/a"]) == [], "what must not be lowered"


@pytest.mark.parametrize(("paths", "found"), [
    ([f"slurm/uid_0/job_7/step_{name}/task_0" for name in ("batch", "extern", "0")] + ["slurm/uid_0/job_8"],
     ["slurm/uid_0/job_7", "slurm/uid_0/job_8"]),
    ([f"docker/{ID}/kubelet/kubepods/pod{UID}/{OTHER}", f"docker/{ID}/system.slice/cron.service"], [f"docker/{ID}"]),
    (["lxc/web/system.slice/cron.service"], ["lxc/web"]),
    ([f"machine.slice/libpod-{ID}.scope/container"], [f"machine.slice/libpod-{ID}.scope/container"]),
], ids=["a job of Slurm", "a container", "a system container", "the limit is on the child by crun"])  # fmt: skip
def test_the_level_of_a_workload_is_taken_once(paths: list[str], found: list[str]) -> None:
    assert pick(*paths) == found


def test_other_leaf_cgroups_count_where_there_are_processes() -> None:
    paths = ["jobs/a", "jobs/b", "jobs", "init.scope", "alone", "libpod_parent/conmon"]
    found = pick_workloads(paths, {"jobs/a", "alone", "init.scope", "libpod_parent/conmon"}.__contains__)
    told = [(each.path, each.kind, each.name, each.detail) for each in found]
    assert told == [("alone", "cgroup", "alone", ""), ("jobs/a", "cgroup", "a", "jobs")]


@pytest.mark.parametrize(("path", "pattern"), [
    (f"docker/{ID}", "docker/[0-9a-f][0-9a-f]*"),
    (f"system.slice/docker-{ID}.scope", "system.slice/docker-[0-9a-f][0-9a-f]*.scope"),
    (f"machine.slice/libpod-{ID}.scope/container", "machine.slice/libpod-[0-9a-f][0-9a-f]*.scope/container"),
    (f"{POD}/cri-containerd-{ID}.scope",
     "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod*.slice/cri-containerd-[0-9a-f][0-9a-f]*.scope"),
    (f"kubepods/pod{UID}/{ID}", "kubepods/pod*/[0-9a-f][0-9a-f]*"),
    ("slurm/uid_0/job_7/step_batch/task_0", "slurm/uid_*/job_*/step_*/task_*"),
    ("lxc.payload.web", "lxc.payload.*"),
    ("machine.slice/machine-qemu.scope", "machine.slice/machine-*.scope"),
    ("user.slice/user-1000.slice/session-3.scope", "user.slice/user-*.slice/session-*.scope"),
    ("batch-1/x*y", "batch-1/x?y"),
])  # fmt: skip
def test_a_glob_for_a_path_and_its_like(path: str, pattern: str) -> None:
    assert generalise(path) == pattern


def test_sources_find_what_they_are_made_of(tmp_path) -> None:
    paths = [
        f"docker/{ID}", f"docker/{OTHER}", "slurm/uid_0/job_7/step_0/task_0", "slurm/uid_0/job_7/step_0/task_1",
        "slurm/uid_5/job_8/step_batch/task_0",
        "hpc.slice/slurmstepd.scope/sEKNKTV3WPV500/step_0/user/task_0",
        f"{POD}/cri-containerd-{'a' * 64}.scope", "system.slice/a.service",
        "system.slice/b.service", "batch.slice/batch-night.slice/run-1.scope", "jobs/a", "jobs/b", "alone",
        "user.slice/user-1000.slice/user@1000.service/app.slice/c.service", f"system.slice/docker-{'b' * 64}.scope",
    ]  # fmt: skip
    one, other = "c0" * 32, "e1" * 32
    paths += [f"machine.slice/libpod-{one}.scope", f"{POD}/crio-{other}.scope"]
    no_workloads = [
        f"machine.slice/libpod-conmon-{one}.scope", f"{POD}/crio-conmon-{other}.scope", "docker/buildkit",
    ]  # fmt: skip
    tree: dict[str, dict] = {}
    every = set()
    for path in paths + no_workloads:
        place, so_far = tree, ""
        for part in path.split("/"):
            place = place.setdefault(part, {})
            so_far = f"{so_far}/{part}" if so_far else part
            every.add(so_far)
    root = make_tree(tmp_path, tree)
    workloads = pick_workloads(every, lambda path: path not in no_workloads)
    sketches = list_sources(workloads, lambda path: [each for each in paths if f"{each}/".startswith(f"{path}/")])
    scan = list_jobs([Source(**sketch.keys) for sketch in sketches], [], root)
    assert scan.problems == []
    assert sorted(job.path for job in scan.jobs) == sorted(paths)
    named = {job.path: (job.job_id, job.operation_id) for job in scan.jobs}
    assert named[f"docker/{ID}"] == (SHORT, "")
    assert named["slurm/uid_0/job_7/step_0/task_1"] == ("job_7/step_0/task_1", "7")
    sluid = "sEKNKTV3WPV500"
    assert named[f"hpc.slice/slurmstepd.scope/{sluid}/step_0/user/task_0"] == (f"{sluid}/step_0/user/task_0", sluid)
    assert named[f"{POD}/cri-containerd-{'a' * 64}.scope"] == ("a" * 12, LOW)
    kept = [sketch.keys.get("slices") or sketch.keys["pattern"] for sketch in sketches if sketch.keep_shadow]
    assert kept == ["user.slice/user-*.slice/user@*.service/app.slice/c.service", ["system.slice"]]
    assert find_roots(sketches) == [
        "alone", "batch.slice/batch-night.slice", "docker", "hpc.slice/slurmstepd.scope", "jobs",
        "kubepods.slice/kubepods-burstable.slice",
        "machine.slice", "slurm", "system.slice", "user.slice",
    ]  # fmt: skip


def test_containers_of_two_runtimes_are_found_where_their_limits_are(tmp_path) -> None:
    paths = [f"machine.slice/libpod-{ID}.scope/container", f"machine.slice/libpod-{OTHER}.scope"]
    scopes = {f"libpod-{ID}.scope": {"container": {}}, f"libpod-{OTHER}.scope": {}}
    root = make_tree(tmp_path, {"machine.slice": scopes})
    every = {above for path in paths for above in (path, *list_above(path))}
    sketches = list_sources(pick_workloads(every, populated), lambda path: [path])
    scan = list_jobs([Source(**sketch.keys) for sketch in sketches], [], root)
    assert sorted(job.path for job in scan.jobs) == sorted(paths)


def test_no_more_is_managed_than_what_was_found() -> None:
    work = "work.slice/work-a.slice"
    units = [f"{work}/x.service", f"{work}/work-a-b.slice/y.service", "system.slice/system-getty.slice/g.service"]
    plain = ["system.slice/a.service/inner", "lxc.payload.web", "deep/inner/a*b"]
    odd = ["system.slice/odd", "user.slice/user-1000.slice/user@1000.service/odd"]
    every = {above for path in (*units, *plain, *odd) for above in (path, *list_above(path))}
    sketches = list_sources(pick_workloads(every, populated), lambda path: [path])
    found = {path: sketch for sketch in sketches for path in sketch.paths}
    assert found[units[0]] is found[units[1]]
    assert found[units[0]].keys["slices"] == ["work-a.slice"]
    assert find_roots(sketches) == ["deep/inner/a*b", "lxc.payload.web", "system.slice", odd[1], work]
    of_the_systems = {units[2], "system.slice/a.service", *odd}
    assert {path for path, sketch in found.items() if sketch.keep_shadow} == of_the_systems
