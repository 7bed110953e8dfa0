"""The image and the Kubernetes example of docs/deploy without a cluster: their programs are run for real."""

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from agent_process import AgentProcess
from configs import at_floor, lower, make
from real_cgroups import CgroupTree
from waiting import wait_until

from cpumond import __version__
from cpumond.agent.config import AgentConfig, load_config
from cpumond.agent.engines import SERVICE_ACCOUNT
from cpumond.cli import COMMANDS
from cpumond.cli.kubernetes.publish import publish_command
from cpumond.core.errors import EXIT_PERMISSION
from cpumond.core.settings import parse_listen
from cpumond.scheduler.program.config import SchedulerConfig, load_scheduler_config
from cpumond.scheduler.rights.tokens import load_tokens

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "docs" / "deploy"
OF_THE_SOURCE = REPOSITORY / "docs" / "engines.md"
NO_RIGHTS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
"""Root as the containers have it: `capabilities: {drop: [ALL]}`."""

Manifest = dict[str, Any]


# ---- the manifests


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    texts = [(DEPLOY / name).read_text(encoding="utf-8") for name in ("daemonset.yaml", "reclaimed-cpu.yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    [found] = [each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod_owners(manifests: list[Manifest]) -> list[Manifest]:
    """The manifests that make pods."""
    return [each for each in manifests if "template" in each.get("spec", {})]


def containers(owner: Manifest) -> list[Manifest]:
    spec = owner["spec"]["template"]["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def find_container(owner: Manifest, name: str) -> Manifest:
    [found] = [each for each in containers(owner) if each["name"] == name]
    return found


def test_selectors_find_their_own_pods_only(manifests):
    owners = pod_owners(manifests)
    selectors = [each["spec"]["selector"]["matchLabels"] for each in owners]
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in owners]
    for number, selector in enumerate(selectors):
        assert [selector.items() <= each.items() for each in labels] == [number == n for n in range(len(owners))]
    service = find(manifests, "Service", "cpumond-scheduler")
    chosen = [each for each in owners if service["spec"]["selector"].items() <= labels[owners.index(each)].items()]
    scheduler = find(manifests, "StatefulSet", "cpumond-scheduler")
    assert chosen == [scheduler]
    assert scheduler["spec"]["serviceName"] == service["metadata"]["name"]
    ports = {each["name"]: each["containerPort"] for each in find_container(scheduler, "scheduler")["ports"]}
    [port] = service["spec"]["ports"]
    assert ports[port["targetPort"]] == port["port"]


def test_mounts_lead_to_volumes_and_volumes_to_what_is_there(manifests):
    for owner in pod_owners(manifests):
        spec = owner["spec"]["template"]["spec"]
        claims = [each["metadata"]["name"] for each in owner["spec"].get("volumeClaimTemplates", [])]
        volumes = [*(each["name"] for each in spec["volumes"]), *claims]
        assert len(volumes) == len(set(volumes))
        mounted = set()
        for container in containers(owner):
            places = [each["mountPath"] for each in container["volumeMounts"]]
            assert len(places) == len(set(places))
            mounted |= {each["name"] for each in container["volumeMounts"]}
        assert mounted == set(volumes)
        for volume in spec["volumes"]:
            if "configMap" in volume:
                find(manifests, "ConfigMap", volume["configMap"]["name"])
            if "secret" in volume:
                find(manifests, "Secret", volume["secret"]["secretName"])


def test_ports_and_probes_are_those_of_the_program(manifests):
    defaults = {
        "DaemonSet": parse_listen(AgentConfig().metrics.listen, "")[1],
        "StatefulSet": parse_listen(SchedulerConfig().api.address, "")[1],
    }
    for owner in pod_owners(manifests):
        template = owner["spec"]["template"]
        annotated = template["metadata"].get("annotations", {}).get("prometheus.io/port")
        assert annotated in (None, str(defaults.get(owner["kind"])))
        for container in template["spec"]["containers"]:
            ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
            assert set(ports.values()) <= {defaults.get(owner["kind"])}
            probes = [container[name] for name in container if name.endswith("Probe")]
            assert {each["httpGet"]["port"] for each in probes} <= set(ports)
            assert len(probes) == (3 if ports else 0)


def test_every_probed_path_answers(manifests, agent: AgentProcess):
    agent.start('[monitor]\nmode = "shadow"\n')
    probed = find_container(find(manifests, "DaemonSet", "cpumond"), "agent")
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = probed[name]["httpGet"]["path"]
        wait_until(lambda path=path: agent.get(path)["status"] == "ok", "on a busy machine ticks come late")
    annotations = find(manifests, "DaemonSet", "cpumond")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] == "/metrics"
    assert "cpumond_build_info" in agent.metrics()


def test_no_container_has_more_rights_than_it_needs(manifests):
    for owner in pod_owners(manifests):
        spec = owner["spec"]["template"]["spec"]
        assert not {"hostPID", "hostIPC", "hostNetwork", "hostUsers"} & spec.keys()
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(owner):
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in rights
            assert "memory" in container["resources"]["limits"]
            assert "cpu" not in container["resources"]["limits"], "a throttled agent gives CPU back late"


def test_the_scheduler_runs_as_the_user_of_the_image(manifests, steps):
    context = find(manifests, "StatefulSet", "cpumond-scheduler")["spec"]["template"]["spec"]["securityContext"]
    [user] = [argument for name, argument in steps if name == "USER"]
    assert context["runAsNonRoot"] is True
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    assert context["fsGroup"] == context["runAsGroup"]


def test_images_and_commands(manifests):
    for owner in pod_owners(manifests):
        for container in containers(owner):
            assert container["image"] == f"cpumond:{__version__}"
            if "command" not in container:
                assert container["args"][0] in COMMANDS
            elif container["command"][0] == "/bin/sh":
                [program] = container["args"]
                check = subprocess.run(["sh", "-n", "-c", program], capture_output=True, text=True, check=False)
                assert (check.returncode, check.stderr) == (0, "")
                assert set(re.findall(r"^\s*cpumond (\S+)", program, re.MULTILINE)) == {"restore"}


# ---- the configurations in them


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """/etc/cpumond of the image."""
    place = tmp_path / "etc"
    for name in ("conf.d", "scheduler.conf.d"):
        (place / name).mkdir(parents=True)
    for name in ("cpumond.toml", "scheduler.toml"):
        shutil.copy(REPOSITORY / "config" / name, place)
    return place


@pytest.fixture
def agent_config(manifests: list[Manifest], etc: Path) -> AgentConfig:
    """The agent's configuration as it is in the pod, after its first container."""
    write_drop_ins(manifests, etc)
    container = find_container(find(manifests, "DaemonSet", "cpumond"), "restore")
    [program] = container["args"]
    program, _, _ = program.replace("/etc/cpumond", str(etc)).partition("flock")
    environment = {**os.environ, "NODE_NAME": "worker-7", "HOST_IP": "2001:db8::7"}
    subprocess.run([*container["command"], program], env=environment, check=True, timeout=100)
    return load_config(str(etc / "cpumond.toml"))


def write_drop_ins(manifests: list[Manifest], etc: Path) -> None:
    for name, text in find(manifests, "ConfigMap", "cpumond-agent")["data"].items():
        (etc / "conf.d").mkdir(exist_ok=True)
        (etc / "conf.d" / name).write_text(text, encoding="utf-8")


def test_the_agent_comes_up_in_shadow_mode(agent_config: AgentConfig):
    assert agent_config.node_settings().mode == "shadow"
    assert {each.mode for each in agent_config.source} == {None}
    assert agent_config.executor.kind == "none"
    assert agent_config.metrics.listen == "0.0.0.0:9756"
    assert (agent_config.state_dir, agent_config.runtime_dir) == ("/var/lib/cpumond", "/run/cpumond")


def test_the_agent_asks_the_kubelet_of_its_node_with_its_own_account(
    manifests: list[Manifest], agent_config: AgentConfig
):
    [source] = agent_config.source
    assert agent_config.node_id == "worker-7"
    assert (source.kind, source.socket, source.unlimited) == ("kubernetes", "https://[2001:db8::7]:10250", "")
    assert (source.token_file, source.ca_file) == ("", ""), "those of a pod's service account"
    owner = find(manifests, "DaemonSet", "cpumond")
    given = {
        container["name"]
        for container in containers(owner)
        for mount in container["volumeMounts"]
        if mount["mountPath"] == SERVICE_ACCOUNT
    }
    assert given == {"agent"}, "nobody else needs the token"
    assert rights_of(manifests, owner) == {("get", "nodes/pods"), ("get", "nodes/configz")}


def test_the_publisher_may_list_and_write_figures_of_nodes_only(manifests: list[Manifest]):
    owner = find(manifests, "Deployment", "cpumond-publisher")
    assert rights_of(manifests, owner) == {("list", "nodes"), ("patch", "nodes/status"), ("list", "pods")}
    [container] = containers(owner)
    assert [each["mountPath"] for each in container["volumeMounts"]] == [SERVICE_ACCOUNT]
    agents = find(manifests, "DaemonSet", "cpumond")
    options = dict(itertools.pairwise(container["args"]))
    assert options["--namespace"] == agents["metadata"]["namespace"]
    chosen = {each.name: each.default for each in publish_command.params}
    label, _, wanted = str(chosen["selector"]).partition("=")
    assert agents["spec"]["template"]["metadata"]["labels"][label] == wanted
    assert owner["spec"]["template"]["metadata"]["labels"][label] != wanted
    [port] = find_container(agents, "agent")["ports"]
    assert chosen["port"] == port["containerPort"]


def rights_of(manifests: list[Manifest], owner: Manifest) -> set[tuple[str, str]]:
    """Verb and resource of all that the pods' service account may do."""
    account = owner["spec"]["template"]["spec"]["serviceAccountName"]
    assert find(manifests, "ServiceAccount", account)["automountServiceAccountToken"] is False
    found = set()
    for binding in manifests:
        if {"kind": "ServiceAccount", "name": account, "namespace": "cpumond"} in binding.get("subjects", []):
            role = find(manifests, binding["roleRef"]["kind"], binding["roleRef"]["name"])
            assert "*" not in str(role["rules"])
            found |= {(verb, name) for rule in role["rules"] for verb in rule["verbs"] for name in rule["resources"]}
    return found


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.36"])
def test_the_manifests_are_as_kubernetes_published_schemas_say(manifests: list[Manifest], version: str):
    token, resources = re.findall(
        r"^```yaml\n(.*?)^```", OF_THE_SOURCE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    for manifest in [*manifests, *yaml.safe_load_all(token)]:
        kubernetes_validate.validate(manifest, version, strict=True)
    container = {"name": "work", "image": "work", **yaml.safe_load(resources)}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "work"}, "spec": {"containers": [container]}}
    kubernetes_validate.validate(pod, version, strict=True)
    broken = {**manifests[0], "kid": "Namespace"}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


def test_the_scheduler_takes_its_configuration_and_tokens(manifests: list[Manifest], etc: Path, tmp_path: Path):
    [(name, text)] = find(manifests, "ConfigMap", "cpumond-scheduler")["data"].items()
    (etc / "scheduler.conf.d" / name).write_text(text, encoding="utf-8")
    config = load_scheduler_config(str(etc / "scheduler.toml"))
    assert config.api.listen == "0.0.0.0:9757"

    # As in the pod: the file of a Secret is readable by a group, which the scheduler does not take.
    secret, target = tmp_path / "secret", tmp_path / "tokens"
    secret.mkdir()
    target.mkdir()
    (secret / "tokens").write_text(find(manifests, "Secret", "cpumond-tokens")["stringData"]["tokens"])
    (secret / "tokens").chmod(0o440)
    owner = find(manifests, "StatefulSet", "cpumond-scheduler")
    copy = find_container(owner, "tokens")
    mounts = {each["name"]: each["mountPath"] for each in copy["volumeMounts"]}
    places = {mounts["secret"]: str(secret), mounts["tokens"]: str(target)}
    command = [re.sub("|".join(places), lambda match: places[match[0]], each) for each in copy["command"]]
    subprocess.run(command, check=True, timeout=100)
    assert Path(config.api.tokens_file).parent == Path(mounts["tokens"])
    assert len(load_tokens(str(target / "tokens"))) == 1

    state = {each["name"]: each["mountPath"] for each in find_container(owner, "scheduler")["volumeMounts"]}["state"]
    assert state == config.state_dir


# ---- what stands between the end of an agent and lowered limits


class Pod:
    """The shell programs of the agent's pod, with this test's directories in place of the pod's."""

    def __init__(self, manifests: list[Manifest], agent: AgentProcess) -> None:
        self._owner = find(manifests, "DaemonSet", "cpumond")
        self._agent = agent
        self.etc = agent.directory / "etc"
        self.etc.mkdir()
        write_drop_ins(manifests, self.etc)
        tools = agent.directory / "bin"
        tools.mkdir()
        wrapper = tools / "cpumond"
        wrapper.write_text(
            f"#!/bin/sh\ndate +%s.%N >>{agent.directory}/calls\n"
            f'exec {sys.executable} -m cpumond "$@" --config {agent.config_path}\n'
        )
        wrapper.chmod(0o755)
        self.log_path = agent.directory / "pod.log"
        self.calls_path = agent.directory / "calls"
        self.environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "NODE_NAME": "worker-7"}
        self.environment["HOST_IP"] = "192.0.2.7"
        self._running: list[subprocess.Popen[bytes]] = []
        agent.prefix = NO_RIGHTS

    def start(self, name: str) -> subprocess.Popen[bytes]:
        container = find_container(self._owner, name)
        [program] = container["args"]
        program = program.replace("/run/cpumond", str(self._agent.directory / "run"))
        program = program.replace("/etc/cpumond", str(self.etc))
        command = [*NO_RIGHTS, *container["command"], program]
        with open(self.log_path, "ab") as log:
            process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._running.append(process)
        return process

    def calls(self) -> list[float]:
        """When `cpumond` was called, in seconds since the epoch."""
        return [float(each) for each in self.calls_path.read_text().split()] if self.calls_path.exists() else []

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def pod(manifests: list[Manifest], agent: AgentProcess) -> Iterator[Pod]:
    """The agent's pod; its agent is started by the test, with as few rights."""
    for tool in ("flock", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} of util-linux, which the image has")
    if os.geteuid() != 0:
        pytest.skip("only root can give rights away as the pod does")
    pod = Pod(manifests, agent)
    yield pod
    pod.close()


@pytest.mark.cgroup
def test_the_guard_gives_back_what_a_killed_agent_had_lowered(cgroups: CgroupTree, agent: AgentProcess, pod: Pod):
    if cgroups.hierarchies.cpu_version != 1:
        pytest.skip("needs the cpu controller in a version 1 hierarchy")
    make(cgroups, "a")
    guard = pod.start("guard")
    lower(agent, cgroups, "a")
    agent.stop(signal.SIGKILL)
    wait_until(lambda: cgroups.quota_cores("a") == 1.5, "the guard gave it back")
    assert guard.poll() is None
    wait_until(lambda: not agent.socket_path.exists(), "the old socket is gone")
    # As the kubelet does, until the guard's `restore` has let go of the lock.
    wait_until(lambda: agent.run("restore").returncode == 0, "nobody holds the lock")
    agent.start()
    wait_until(lambda: at_floor(cgroups, "a"), "the quota is down at the floor")
    # The end of the pod: everybody gets SIGTERM at once; the guard stays until the agent is gone.
    guard.send_signal(signal.SIGTERM)
    assert agent.stop() == 0
    assert cgroups.quota_cores("a") == 1.5
    assert guard.wait(100) == 0


def test_a_guard_that_can_do_nothing_does_not_spin(pod: Pod, agent: AgentProcess):
    """The socket is not its own to remove."""
    run_dir = agent.directory / "run"
    run_dir.mkdir()
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(run_dir / "control.sock"))
    os.chown(run_dir, 12345, 12345)
    agent.write_config("")
    pod.start("guard")
    wait_until(lambda: len(pod.calls()) > 2, "it tried three times", 30)
    times = pod.calls()
    assert all(later - earlier > 1.0 for earlier, later in itertools.pairwise(times)), times


def test_beside_the_package_the_agent_of_the_pod_explains_why_it_stops(pod: Pod, agent: AgentProcess):
    """The lock in /run/cpumond is the package's user's, who alone can open it."""
    run_dir = agent.directory / "run"
    run_dir.mkdir()
    lock = run_dir / "agent.lock"
    lock.touch(0o600)
    for path in (lock, run_dir):
        os.chown(path, 12345, 12345)
    agent.write_config("")
    assert pod.start("restore").wait(100) == 0, "what it cannot do is no reason to hide the agent's own sentence"
    agent.start(wait=False)
    assert agent.process is not None
    assert agent.process.wait(100) == EXIT_PERMISSION
    [said] = re.findall(r'"(cannot open the lock [^"]*)"', (DEPLOY / "README.md").read_text().replace("\n", " "))
    assert said.replace("/run/cpumond", str(run_dir)) in agent.log()


@pytest.mark.cgroup
def test_the_next_pod_gives_back_what_a_killed_one_had_lowered(cgroups: CgroupTree, agent: AgentProcess, pod: Pod):
    if cgroups.hierarchies.cpu_version != 1:
        pytest.skip("needs the cpu controller in a version 1 hierarchy")
    make(cgroups, "a")
    lower(agent, cgroups, "a")
    agent.stop(signal.SIGKILL)
    assert pod.start("restore").wait(100) == 0
    assert cgroups.quota_cores("a") == 1.5
    assert not agent.socket_path.exists()
    config = load_config(str(pod.etc / "cpumond.toml"))
    assert (config.node_id, config.source[0].socket) == ("worker-7", "https://192.0.2.7:10250")


# ---- the image


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """The instructions of the Containerfile in their order: name and argument, continued lines joined."""
    lines = (DEPLOY / "Containerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if line and not line.startswith("#")).replace("\\\n", " ")
    return [(name, argument.strip()) for name, _, argument in (line.partition(" ") for line in text.splitlines())]


def test_the_base_is_pinned_and_nothing_unchecked_is_fetched(steps):
    [base] = [argument for name, argument in steps if name == "ARG" and argument.startswith("BASE=")]
    assert base == "BASE=debian:bookworm-slim"
    assert [argument.split()[0] for name, argument in steps if name == "FROM"] == ["${BASE}"] * 2
    programs = [argument for name, argument in steps if name == "RUN"]
    assert not any(re.search(r"\b(curl|wget|git)\b", each) for each in programs)
    assert "ADD" not in {name for name, _ in steps}
    for program in programs:
        assert program.count("apt-get install") == program.count("apt-get install -y --no-install-recommends")
        assert len(re.findall(r"pip\S* (?:--python \S+ )?(?:wheel|install)", program)) == program.count(
            "--no-cache-dir"
        )
        check = subprocess.run(["sh", "-n", "-c", program], capture_output=True, text=True, check=False)
        assert (check.returncode, check.stderr) == (0, "")


def test_nothing_else_goes_along_into_the_build(steps):
    """Not the history, environments and results of builds in a checkout."""
    lines = (REPOSITORY / ".containerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    copied = {
        each.rstrip("/")
        for name, argument in steps
        if name == "COPY" and not argument.startswith("--from=")
        for each in argument.split()[:-1]
    }
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied
    assert all((REPOSITORY / each).exists() for each in copied)
