"""The files of ``systemd/``: systemd's own checks accept them, and they say what the program relies on."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cpumond.agent.config import DEFAULT_CONFIG_PATH, AgentConfig
from cpumond.cli import COMMANDS
from cpumond.cli.doctor.engines import DROP_IN_ADVICE
from cpumond.core.errors import EXIT_CONFIG, EXIT_USAGE
from cpumond.core.job_cgroups import IDLE_SLICE, JOBS_SLICE
from cpumond.host.executor.systemd.idle import ADVICE, SEE
from cpumond.host.service import OTHER_DESCRIPTORS
from cpumond.scheduler.program.config import DEFAULT_SCHEDULER_CONFIG_PATH, SchedulerConfig

FOLDER = Path(__file__).resolve().parents[2] / "systemd"
SERVICE = FOLDER / "cpumond.service"
SCHEDULER = FOLDER / "cpumond-scheduler.service"
SLICE = FOLDER / JOBS_SLICE
RECLAIMED = FOLDER / IDLE_SLICE
EXECUTOR = FOLDER / "executor.conf"
ENGINES = sorted((FOLDER / "cpumond.service.d").glob("*.conf"))
SYSUSERS = FOLDER / "cpumond.sysusers.conf"
TMPFILES = FOLDER / "cpumond.tmpfiles.conf"

Settings = dict[str, list[str]]
"""Setting -> its values in their order. Each name occurs in one section only in our files."""
PROGRAM = "/usr/bin/cpumond"
BAD_LINE_EXIT = 65
"""EX_DATAERR: what systemd-tmpfiles answers to a line it does not understand; 73 is about missing rights."""


def need(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is missing; Debian's package systemd has it")
    return path


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """The command with its output as text, in the language of the messages below."""
    env = {**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": "cat"}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, check=False)


def read_unit(path: Path) -> Settings:
    settings: Settings = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#;[":
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


@pytest.fixture(scope="module")
def service() -> Settings:
    return read_unit(SERVICE)


def seconds(text: str) -> float:
    """A time span as the units write it: "10s" or "5min"."""
    number, unit = re.fullmatch(r"(\d+)(s|min)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1.0, "min": 60.0}[unit]


@pytest.fixture(scope="module")
def scheduler() -> Settings:
    return read_unit(SCHEDULER)


def copy_of(unit: Path, folder: Path, drop_ins: tuple[Path, ...] = (), more: str = "") -> str:
    text = unit.read_text(encoding="utf-8").replace(f"={PROGRAM} ", "=/bin/true ")
    text = text.replace(f"=+{PROGRAM} ", "=+/bin/true ") + more
    added = "\n".join(path.read_text(encoding="utf-8") for path in drop_ins)
    copy = folder / unit.name
    copy.write_text(text.replace("[Install]", f"{added}\n[Install]") if added else text, encoding="utf-8")
    return str(copy)


@pytest.mark.parametrize(("unit", "drop_ins"), [
    *((unit, ()) for unit in (SERVICE, SCHEDULER, SLICE, RECLAIMED)),
    *((SERVICE, (drop_in,)) for drop_in in (*ENGINES, EXECUTOR)),
], ids=lambda each: each.name if isinstance(each, Path) else "+".join(path.stem for path in each))  # fmt: skip
def test_systemd_accepts_units_and_drop_ins(unit: Path, drop_ins: tuple[Path, ...], tmp_path: Path) -> None:
    """``systemd-analyze verify`` has nothing to say, but that of a misspelled setting."""
    verify = (need("systemd-analyze"), "verify", "--man=no", "--recursive-errors=no")
    answer = run(*verify, copy_of(unit, tmp_path, drop_ins))
    assert (answer.returncode, answer.stdout + answer.stderr) == (0, "")
    if unit == SLICE:
        assert "CPUWait" in run(*verify, copy_of(unit, tmp_path, more="CPUWait=100\n")).stderr


def test_the_slice_of_jobs_on_reclaimed_cpu_is_behind_all_others() -> None:
    """A child of the root, as idle counts among siblings; a dash in its name would be a level."""
    assert read_unit(RECLAIMED)["CPUWeight"] == ["idle"]
    assert "-" not in RECLAIMED.stem


@pytest.mark.parametrize(("unit", "drop_ins", "least", "most"), [
    # What remains is mostly the network (0.5); the agent's one capability and its writable cgroup tree (0.8).
    (SERVICE, (), 0.0, 2.0),
    (SCHEDULER, (), 0.0, 1.4),
    # The agent sees other processes (0.2).
    (SERVICE, tuple(ENGINES), 0.0, 2.3),
    # Root itself (0.4) and the capability to give files away (0.2), without which no job could be started.
    (SERVICE, (EXECUTOR,), 2.0, 2.3),
], ids=["agent", "scheduler", "engines", "executor"])  # fmt: skip
def test_exposure_is_low(unit: Path, drop_ins: tuple[Path, ...], least: float, most: float, tmp_path: Path) -> None:
    """``systemd-analyze security`` sums up what a process that was taken over could reach, from 0 (nothing) to 10.

    A drop-in takes back no more of the sandbox than it must.
    """
    assert len(ENGINES) == 4
    copy = copy_of(unit, tmp_path, drop_ins)
    answer = run(need("systemd-analyze"), "security", "--offline=true", "--no-pager", copy)
    figure = re.search(r"Overall exposure level for \S+: ([\d.]+)", answer.stdout)
    assert figure is not None, answer.stdout + answer.stderr
    assert least <= float(figure[1]) <= most, answer.stdout


def test_sysusers_makes_the_user_of_the_service(service: Settings) -> None:
    """Dry run: user and group of the service, nothing else."""
    answer = run(need("systemd-sysusers"), "--dry-run", "--root=/nonexistent", str(SYSUSERS))
    assert answer.returncode == 0, answer.stderr
    made = re.findall(r"^Creating (group|user) '([^']+)'", answer.stdout + answer.stderr, re.MULTILINE)
    assert made == [("group", service["Group"][0]), ("user", service["User"][0])]


def test_tmpfiles_are_understood(tmp_path: Path) -> None:
    """The directories are made below another root; without root's rights each line is at least understood."""
    tmpfiles = need("systemd-tmpfiles")
    (tmp_path / "etc").mkdir()
    for name, line in {"passwd": "cpumond:x:990:990::/:/bin/false", "group": "cpumond:x:990:"}.items():
        (tmp_path / "etc" / name).write_text(f"root:x:0:0::/:/bin/false\n{line}\n", encoding="utf-8")
    answer = run(tmpfiles, "--create", f"--root={tmp_path}", str(TMPFILES))
    assert answer.returncode != BAD_LINE_EXIT, answer.stderr
    if os.geteuid() == 0:
        assert (answer.returncode, answer.stderr) == (0, "")
        assert (tmp_path / "etc/cpumond/conf.d").is_dir()
        assert (tmp_path / "run/cpumond").stat().st_uid == 990


AGENT_SAYS = {
    "Type": "notify", "NotifyAccess": "main", "ExecStart": f"{PROGRAM} agent --config {DEFAULT_CONFIG_PATH}",
    "Restart": "on-failure", "User": "cpumond", "Group": "cpumond", "AmbientCapabilities": "CAP_DAC_OVERRIDE",
    "CapabilityBoundingSet": "CAP_DAC_OVERRIDE", "NoNewPrivileges": "yes", "ProtectSystem": "strict",
    "OOMScoreAdjust": "-900", "ConfigurationDirectory": "cpumond", "RuntimeDirectoryPreserve": "yes",
    "WantedBy": "multi-user.target",
}  # fmt: skip
SCHEDULER_SAYS = {
    "Type": "notify", "NotifyAccess": "main",
    "ExecStart": f"{PROGRAM} scheduler --config {DEFAULT_SCHEDULER_CONFIG_PATH}", "Restart": "on-failure",
    "DynamicUser": "yes", "CapabilityBoundingSet": "", "NoNewPrivileges": "yes", "ProtectSystem": "strict",
    "PrivateUsers": "yes", "MemoryMax": "2G", "OOMPolicy": "continue", "WantedBy": "multi-user.target",
}  # fmt: skip
"""No rights at all, and started again however it ended."""


def test_units_say_once_each_on_what_the_design_depends(service: Settings, scheduler: Settings) -> None:
    for unit, says in ((service, AGENT_SAYS), (scheduler, SCHEDULER_SAYS)):
        assert {name: unit.get(name) for name in says} == {name: [value] for name, value in says.items()}
    for name in ("WatchdogSec", "TimeoutStartSec", "TimeoutStopSec", "RestartSec", "UMask"):
        assert len(service[name]) == 1
    assert "AmbientCapabilities" not in scheduler
    assert "OOMScoreAdjust" not in scheduler, "anybody who can connect makes it work; other services go on"


def test_a_reload_checks_the_files_of_the_start_first(service: Settings, scheduler: Settings) -> None:
    """Where the check fails systemd goes no further, and `systemctl reload` fails."""
    check = f"{PROGRAM} check-config --quiet --config {DEFAULT_CONFIG_PATH}"
    assert service["ExecReload"] == [check, "/bin/kill -HUP $MAINPID"]
    check = scheduler["ExecStart"][0].replace(" scheduler ", " scheduler --check ")
    assert scheduler["ExecReload"] == [check, "/bin/kill -HUP $MAINPID"]


def test_the_bus_outlives_the_agent(service: Settings) -> None:
    """At the host's end too: systemd is told over the bus, with polkit's leave, that units have their limits back."""
    (after,) = service["After"]
    assert {"dbus.service", "polkit.service"} <= set(after.split())
    assert not {"Requires", "BindsTo", "PartOf", "Requisite"} & set(service), "it works without them"


def test_passwords_and_keys_are_closed(service: Settings) -> None:
    """What CAP_DAC_OVERRIDE would open. A place that a host does not have must not keep the agent from its start."""
    closed = [path for line in service["InaccessiblePaths"] for path in line.split()]
    assert set(closed) >= {
        f"-{path}"
        for path in (
            "/etc/shadow", "/etc/gshadow", "/etc/ssh", "/etc/ssl/private", "/etc/krb5.keytab", "/etc/credstore",
            "/etc/credstore.encrypted", "/var/lib/systemd/credential.secret", "/var/lib/kubelet", "/var/lib/docker",
            "/var/lib/containers",
        )
    }  # fmt: skip
    assert all(path.startswith("-") for path in closed)


def test_limits_go_back_however_the_agent_ended(service: Settings) -> None:
    """Quotas first, and without the sandbox, which takes longer to set up; then everything."""
    quick, full = f"+{PROGRAM} restore --quick", f"{PROGRAM} restore --config {DEFAULT_CONFIG_PATH}"
    assert service["ExecStopPost"] == [quick, full]


@pytest.mark.parametrize("name", ["ProtectControlGroups", "PrivateUsers", "ProcSubset", "PrivateNetwork"])
def test_service_leaves_off(service: Settings, name: str) -> None:
    """With any of these the agent could not do its work; the reasons are in the unit."""
    assert name not in service
    assert f"#   {name}=" in SERVICE.read_text(encoding="utf-8")


def test_a_copy_of_the_scheduler_may_lower_its_priority(scheduler: Settings) -> None:
    refused, given_back = scheduler["SystemCallFilter"][-2:]
    assert "@resources" in refused
    assert given_back == "setpriority"


def test_commands_exist(service: Settings, scheduler: Settings) -> None:
    for line in service["ExecStart"] + service["ExecStopPost"] + service["ExecReload"][:1] + scheduler["ExecStart"]:
        assert line.split()[1] in COMMANDS


def test_directories_are_those_of_the_configuration(service: Settings, scheduler: Settings) -> None:
    config = AgentConfig()
    assert f"/var/lib/{service['StateDirectory'][0]}" == config.state_dir
    assert f"/run/{service['RuntimeDirectory'][0]}" == config.runtime_dir
    assert config.runtime_dir in service["BindPaths"]
    assert f"/var/lib/{scheduler['StateDirectory'][0]}" == SchedulerConfig().state_dir


def test_watchdogs_leave_room_for_late_ticks_and_updates(service: Settings, scheduler: Settings) -> None:
    """WATCHDOG=1 comes once per tick: three default periods fit, and a dead agent is found within 10 s."""
    check_period_s = AgentConfig().node_settings().check_period_s
    assert 3 * check_period_s <= seconds(service["WatchdogSec"][0]) <= 10.0
    assert 10 * SchedulerConfig().fair_share_update_period_s <= seconds(scheduler["WatchdogSec"][0])


@pytest.mark.parametrize("path", [SERVICE, SCHEDULER], ids=lambda path: path.name)
def test_restart_stops_at_errors_that_stay(path: Path) -> None:
    """Another try does not mend a wrong command line or configuration; and tries at others, such as a port in use, end.

    An address that comes late is none of them: it is listened on before it is here (tests/unit/host/test_service.py).
    That systemd gives up after so many deaths is seen in tests/machine/test_service_life.py.
    """
    unit = read_unit(path)
    assert unit["RestartPreventExitStatus"] == [f"{EXIT_USAGE} {EXIT_CONFIG}"]
    burst = int(unit["StartLimitBurst"][0])
    assert burst == 10
    assert burst * (seconds(unit["RestartSec"][0]) + 1.0) < seconds(unit["StartLimitIntervalSec"][0])


def test_drop_ins_that_texts_name_are_installed_outside_of_documentation() -> None:
    """Minimal images leave /usr/share/doc out; a bare systemd/executor.conf is a path of a checkout alone."""
    root = FOLDER.parent
    rules = (root / "packaging/debian/rules").read_text(encoding="utf-8")
    files = re.findall(r"install -Dm644 -t \$\(ROOT\)(/\S+) (systemd/\S+)", rules)
    installed = {f"{place}/{path.name}" for place, pattern in files for path in root.glob(pattern)}
    places = [root / "README.md", *root.glob("docs/*.md"), *root.glob("config/*.toml"), *root.glob("cpumond/**/*.py")]
    texts = [path.read_text(encoding="utf-8") for path in places]
    texts += [ADVICE, SEE, *(DROP_IN_ADVICE.format(kind=path.stem) for path in ENGINES)]
    named = set(re.findall(r"/usr/share/cpumond/systemd/[\w./-]*\.conf", "\n".join(texts)))
    assert named == {path for path in installed if not path.startswith("/usr/share/doc")}
    bare = re.compile(r"(?<!/usr/share/cpumond/)systemd/(?:executor|cpumond\.service\.d)")
    for text in texts:
        for found in bare.finditer(text):
            assert re.search(r"in\s(#\s)?a\scheckout:\s(#\s)?`?$", text[: found.start()]), found


def test_descriptors_suffice(service: Settings) -> None:
    """Three descriptors for each of ``discovery.max_jobs``, and some for the agent."""
    assert int(service["LimitNOFILE"][0]) >= 3 * AgentConfig().discovery.max_jobs + OTHER_DESCRIPTORS
