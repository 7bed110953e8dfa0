"""What is made of a kubelet's list of pods and of the cgroups that are there."""

import json
from typing import Any

import msgspec
import pytest

from cpumond.host.engine import kubernetes
from cpumond.host.engine.model import MAX_LABEL

UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
ONE, TWO, SANDBOX = "1" * 64, "2" * 64, "3" * 64
RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def read(pod: dict[str, Any], enforces_limits: bool = True) -> tuple[list[kubernetes.RunningContainer], list[str]]:
    pod = {"metadata": {"name": "web-1", "namespace": "shop", "uid": UID}, **pod}
    pods = msgspec.json.decode(json.dumps({"items": [pod]}), type=kubernetes.PodList)
    return kubernetes.list_running(pods, enforces_limits)


def status(name: str = "app", state: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "containerID": f"containerd://{ONE}", "state": RUNNING if state is None else state, **more}


def limits(**resources: Any) -> dict[str, Any]:
    return {"resources": {"limits": {key.replace("_", "-"): value for key, value in resources.items()}}}


def order_of(spec: dict[str, Any], told: dict[str, Any], enforces_limits: bool = True) -> float | None:
    pod = {"spec": {"containers": [{"name": "app", **spec}]}, "status": {"containerStatuses": [status(**told)]}}
    [[found], notes] = read(pod, enforces_limits)
    assert not notes
    return found.ordered_cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [("2", 2.0), ("500m", 0.5), ("1.5", 1.5), (".5", 0.5), ("2.", 2.0), ("+1", 1.0), ("250000u", 0.25),
     ("1000000000n", 1.0), ("1k", 1000.0), ("1e3", 1000.0), ("5E-1", 0.5), (0, 0.0), (1.5, 1.5)],
)  # fmt: skip
def test_quantities_of_cpu(text, cores):
    assert kubernetes.parse_cores(text) == pytest.approx(cores)


@pytest.mark.parametrize(
    "text", ["", "m", "-1", "1M", "1Ki", "nan", "inf", "1 ", "1e99", "1e400", "9" * 30, "1\n", "²"]
)
def test_what_is_no_quantity_of_cpu(text):
    with pytest.raises(ValueError, match="is invalid"):
        kubernetes.parse_cores(text)


def test_what_is_in_force_counts_before_what_was_asked_for():
    assert order_of(limits(cpu="2"), {}) == 2.0, "a kubelet that does not tell what is in force"
    assert order_of(limits(cpu="2"), limits(cpu="1500m")) == 1.5
    assert order_of(limits(cpu="2"), {"resources": {}}) is None
    assert order_of({}, {}) is None
    assert order_of(limits(cpu="0"), {}) is None
    assert order_of(limits(cpu="1m"), {}) == kubernetes.MIN_CORES
    assert order_of(limits(cpu="2"), {}, enforces_limits=False) is None


def test_the_limit_of_a_pod_as_a_whole_is_one_order():
    """The kubelet gives it to each container without a limit of its own, too."""
    pod = {
        "spec": {"containers": [{"name": "app"}, {"name": "proxy", **limits(cpu="500m")}], **limits(cpu="2")},
        "status": {
            "qosClass": "Burstable",
            "containerStatuses": [
                status(**limits(cpu="2")), {**status("proxy", **limits(cpu="500m")), "containerID": f"x://{TWO}"},
            ],
        },
    }  # fmt: skip
    running, _ = read(pod)
    paths = [f"{SLICE}/cri-containerd-{each}.scope" for each in (ONE, TWO, SANDBOX)]
    [job] = kubernetes.make_jobs(running, paths).jobs
    assert (job.job_id, job.name, job.path, job.group) == (UID, "shop/web-1", SLICE, "shop/web-1")
    assert (job.ordered_cores, job.labels) == (2.0, {"namespace": "shop", "pod": "web-1", "qos": "Burstable"})
    [early] = kubernetes.make_jobs(running, paths[1:]).jobs
    assert early == job, "also while one of them has no cgroup yet"
    pod["status"]["resources"] = limits(cpu="1500m")["resources"]
    [resized] = kubernetes.make_jobs(read(pod)[0], paths).jobs
    assert resized.ordered_cores == 1.5
    assert {each.pod_cores for each in read(pod, enforces_limits=False)[0]} == {None}


def test_containers_of_all_kinds_that_run_and_no_others():
    pod = {
        "spec": {
            "containers": [{"name": "app"}],
            "initContainers": [{"name": "sidecar", **limits(cpu="1")}],
            "ephemeralContainers": [{"name": "shell"}],
        },
        "status": {
            "qosClass": "Burstable",
            "containerStatuses": [
                status(),
                status("waits", {"waiting": {"reason": "CrashLoopBackOff"}}),
                status("ended", {"terminated": {"exitCode": 0}}),
                {"name": "new"},
            ],
            "initContainerStatuses": [status("sidecar"), status("setup", {"terminated": {}})],
            "ephemeralContainerStatuses": [status("shell")],
        },
    }
    found, notes = read(pod)
    assert [each.name for each in found] == ["shop/web-1/app", "shop/web-1/sidecar", "shop/web-1/shell"]
    assert [each.ordered_cores for each in found] == [None, 1.0, None]
    assert {each.qos for each in found} == {"Burstable"}
    assert not notes


def test_a_pod_of_which_nothing_is_told_has_no_containers():
    assert read({}) == ([], [])
    assert kubernetes.list_running(kubernetes.PodList()) == ([], [])


@pytest.mark.parametrize(
    "name", ["", "containerd://", "containerd://12ab", f"x://../{ONE}", f"x://{ONE.upper()[:-1]}G"]
)
def test_an_id_that_is_none_is_told_and_left_out(name):
    found, [note] = read({"status": {"containerStatuses": [{**status(), "containerID": name}, status("other")]}})
    assert [each.container for each in found] == ["other"]
    assert "web-1/app" in note


def test_who_runs_on_reclaimed_cpu():
    pod = {"spec": {"containers": [{"name": "app", "resources": {"limits": {"cpumond.io/reclaimed-cpu": "500"}}}]}}
    [[found], _] = read({**pod, "status": {"containerStatuses": [status()]}})
    assert found.reclaimed == "500"
    [job] = kubernetes.make_jobs([found], [f"kubepods/besteffort/pod{UID}/{ONE}"]).jobs
    assert job.labels["reclaimed_cpu"] == "500"


SLICE = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + UID.replace("-", "_") + ".slice"
ALONE = "kubepods.slice/kubepods-pod" + UID.replace("-", "_") + ".slice"


@pytest.mark.parametrize(("path", "qos"), [
    (f"{SLICE}/cri-containerd-{ONE}.scope", "Burstable"),
    (f"{SLICE}/crio-{ONE}.scope", "Burstable"),
    (f"{SLICE}/crio-{ONE}.scope/container", "Burstable"),
    (f"{SLICE}/docker-{ONE}.scope", "Burstable"),
    (f"{ALONE}/cri-containerd-{ONE}.scope", "Guaranteed"),
    (f"kubepods/burstable/pod{UID}/{ONE}", "Burstable"),
    (f"kubepods/besteffort/pod{UID}/{ONE}", "BestEffort"),
    (f"kubepods/besteffort/pod{UID}/crio-{ONE}", "BestEffort"),
    (f"kubepods/pod{UID}/{ONE}", "Guaranteed"),
])  # fmt: skip
def test_ids_and_class_by_the_path(path, qos):
    assert kubernetes.find_ids(path) == (UID, ONE)
    assert kubernetes.find_qos(path) == qos


def test_the_uid_of_a_static_pod_is_a_hash():
    uid = "ab" * 16
    assert kubernetes.find_ids(f"kubepods/burstable/pod{uid}/{ONE}") == (uid, ONE)


@pytest.mark.parametrize(
    "path",
    ["", ONE, f"docker/{ONE}", f"{SLICE}/crio-conmon-{ONE}.scope", f"{SLICE}/{ONE[:-1]}", f"{SLICE}/{ONE}1", SLICE,
     f"{SLICE}/cri-containerd-{ONE}.scope/inner", f"user.slice/xpod{UID}/{ONE}"],
)  # fmt: skip
def test_what_is_no_container_of_a_pod(path):
    assert kubernetes.find_ids(path) is None


def container(container_id: str = ONE, **more: Any) -> kubernetes.RunningContainer:
    given = {"pod_uid": UID, "namespace": "shop", "pod": "web-1", "container": "app", "qos": "Burstable", **more}
    return kubernetes.RunningContainer(container_id, **given)


def test_a_job_by_its_cgroup():
    path = f"{SLICE}/cri-containerd-{ONE}.scope"
    answer = kubernetes.make_jobs([container(image="a/b:1", ordered_cores=1.5)], [path], "kubelet", ["b", "a", "b"])
    [job] = answer.jobs
    assert (job.job_id, job.name, job.path, job.group) == (ONE, "shop/web-1/app", path, "shop/web-1")
    assert (job.ordered_cores, job.reports_request, job.left_out, job.is_job) == (1.5, True, "", True)
    assert (answer.title, answer.notes) == ("kubelet", ("a", "b"))


@pytest.mark.parametrize(
    ("qos", "path"),
    [("Guaranteed", f"{ALONE}/{ONE}"), ("", f"{ALONE}/{ONE}"), ("Burstable", f"{ALONE}/{ONE}"),
     ("Guaranteed", f"{SLICE}/{ONE}")],
)  # fmt: skip
def test_guaranteed_by_either_is_left_out(qos, path):
    [job] = kubernetes.make_jobs([container(qos=qos)], [path]).jobs
    assert job.left_out == kubernetes.GUARANTEED


def test_a_container_is_not_named_by_another_pod_or_before_its_cgroup():
    path = f"{SLICE}/{ONE}"
    assert kubernetes.make_jobs([container(pod_uid="f" * 32)], [path, f"{SLICE}/{TWO}"]).jobs == ()
    assert kubernetes.make_jobs([container(TWO)], [path]).jobs == ()


def test_the_sandbox_is_what_is_left_when_all_others_have_a_name():
    paths = [f"{SLICE}/{each}" for each in (ONE, SANDBOX)]
    named, sandbox = kubernetes.make_jobs([container()], paths).jobs
    assert (named.is_job, sandbox.is_job, sandbox.path) == (True, False, paths[1])
    late = kubernetes.make_jobs([container(), container(TWO, container="late")], paths).jobs
    assert [each.job_id for each in late] == [ONE], "what is left may be the container that has no cgroup yet"
    more = kubernetes.make_jobs([container()], [*paths, f"{SLICE}/{TWO}"]).jobs
    assert [each.job_id for each in more] == [ONE], "one of the two is a container that nobody told of"
    assert kubernetes.make_jobs([], paths).jobs == (), "a pod that nobody told of"


@pytest.mark.parametrize(("name", "is_found"), [(SANDBOX, True), (f"crio-{SANDBOX}", False)])
def test_the_sandbox_of_a_pod_of_which_nothing_runs_is_none_of_its_jobs(name, is_found):
    """It waits for an image or to be started again. CRI-O makes no sandbox for most pods: what is there may be new."""
    jobs = kubernetes.make_jobs([], [f"{SLICE}/{name}"]).jobs
    assert [(each.job_id, each.is_job) for each in jobs] == [(SANDBOX, False)] * is_found


def test_texts_of_users_are_printable_and_short():
    job = kubernetes.make_jobs([container(pod="a\nb\x1b" + "c" * 400)], [f"{SLICE}/{ONE}"]).jobs[0]
    for text in (job.name, job.group, *job.labels.values()):
        assert text.isprintable()
        assert len(text) <= MAX_LABEL
