"""``cpumond doctor``: what each check says about what it is shown, and the whole over a fake host."""

import contextlib
import errno
import json
import os
import pwd
import re
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cpumond.agent import state_file
from cpumond.agent.config import AgentConfig, Source, finish_config, load_config, parse_config_text
from cpumond.agent.limits.restore import RunLock
from cpumond.agent.state_file import Original, Originals, Registry, read_boot_id, save
from cpumond.cli import run
from cpumond.cli.agent.client import AgentClient
from cpumond.cli.doctor import cgroups as doctor_cgroups
from cpumond.cli.doctor import checks as doctor_checks
from cpumond.cli.doctor import command as doctor
from cpumond.cli.doctor import host as doctor_host
from cpumond.cli.doctor.checks import Finding
from cpumond.cli.doctor.host import AgentSeen, find_absent
from cpumond.core.answers import Counters, RegisteredJob, StatusAnswer, Sums
from cpumond.host.cgroup.mounts import Hierarchies, Mount
from cpumond.host.cgroup.settings import CpuSettings
from cpumond.testing import make_tree, make_v2_host, v2_cgroup

SETTINGS = CpuSettings(100000, 100000)


def mount(version: int, point: str, *controllers: str) -> Mount:
    return Mount(version, point, frozenset(controllers))


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    """The findings by name; a name with several keeps the last one."""
    return {finding.check: finding for finding in findings}


def hybrid(root: Path) -> Hierarchies:
    return Hierarchies(2, str(root), str(root), None, str(root))


# cgroups


V1 = [mount(1, f"/c/{name}", "rw", name) for name in ("cpu", "cpuacct", "cpuset")]


@pytest.mark.parametrize(("mounts", "said"), [
    ([*V1, mount(2, "/c/unified", "hugetlb")],
     {"cgroups": "ok layout hybrid, limits are written in version 1", "controller cpu": "ok /c/cpu (v1)",
      "controller cpuacct": "ok /c/cpuacct (v1)", "controller cpuset": "ok /c/cpuset (v1)",
      "cgroup2": "ok /c/unified, controllers: hugetlb"}),
    ([mount(2, "/c", "cpu", "memory")],
     {"cgroups": "ok layout v2, limits are written in version 2", "controller cpu": "ok /c (v2)",
      "controller cpuset": "warn not mounted: CPUs of a job without quota are taken from the agent's own affinity",
      "cgroup2": "ok /c, controllers: cpu memory"}),
    ([mount(1, "/c/cpu", "cpu"), mount(2, "/u", "cpuset")],
     {"cgroups": "ok layout hybrid, limits are written in version 1", "controller cpu": "ok /c/cpu (v1)",
      "controller cpuacct": "ok not mounted: CPU time is read from cpu.stat of /u",
      "controller cpuset": "ok /u (v2)", "cgroup2": "ok /u, controllers: cpuset"}),
    ([mount(2, "/c", "memory")], {"cgroups": "fail m: no mounted cgroup hierarchy has the cpu controller"}),
])  # fmt: skip
def test_each_controller_is_said_with_its_place_and_version(mounts, said):
    found = doctor_cgroups.check_mounts(mounts, "m")
    assert [each.check for each in found] == list(said)
    assert all(f"{each.level} {each.text}".startswith(said[each.check]) for each in found), found
    assert all(each.advice for each in found if each.level != "ok")


def test_limit_files_and_burst(tmp_path):
    root = make_tree(tmp_path, {"a": v2_cgroup(), "b": v2_cgroup()})
    found = doctor_cgroups.check_limit_files(2, [f"{root}/a", f"{root}/b", f"{root}/gone"], [])
    assert [(f.check, f.level) for f in found] == [("limit files", "ok"), ("burst", "ok")]
    assert found[0].text == "cpu.max in all of 2 cgroups"


@pytest.mark.parametrize(("more", "named"), [
    ("", False),
    ('[monitor]\nlimit_rule = "peak"\n', True),
    ('[monitor]\nlimit_rule = "peak"\nburst_ratio = 0.0\n', False),
    ('[monitor]\nlimit_rule = "peak"\nactuator = "weight"\n', False),
])  # fmt: skip
def test_a_missing_burst_matters_more_under_rule_peak(config, tmp_path, capsys, more, named):
    with open(config, "a") as file:
        file.write(more)
    for place in (tmp_path / "cgroup").rglob("cpu.max.burst"):
        place.unlink()
    assert run(["doctor", "--config", str(config), "--json"]) == 0
    [finding] = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["check"] == "burst"]
    relies = ', which limit_rule = "peak" relies on: ' if named else ""
    assert finding["level"] == "warn"
    assert finding["text"].partition(": ")[0] == f"the kernel has no cpu.max.burst{relies.removesuffix(': ')}"


def test_a_cgroup_without_a_limit_file_fails_with_what_to_do(tmp_path):
    root = make_tree(tmp_path, {"a": {"cpu.stat": ""}, "b": {"cpu.cfs_quota_us": "-1"}})

    def check(version: int, name: str) -> Finding:
        (finding,) = doctor_cgroups.check_limit_files(version, [f"{root}/{name}"], [])
        assert finding.level == "fail"
        return finding

    assert check(2, "a").text == f"1 of 1 cgroup without cpu.max: {root}/a"
    assert "cgroup.subtree_control" in check(2, "a").advice
    make_tree(root, {"a": {"cpu.weight": "100"}})
    assert 'actuator = "guarantee"' in check(2, "a").advice
    assert "CONFIG_CFS_BANDWIDTH" in check(1, "b").advice


def test_a_unit_without_a_limit_file_gets_one_with_its_first_limit(tmp_path):
    root = make_tree(tmp_path, {"a.service": {"cpu.stat": ""}, "b.service": v2_cgroup(), "c": {"cpu.stat": ""}})
    units = {f"{root}/a.service", f"{root}/b.service"}
    (alone,) = doctor_cgroups.check_limit_files(2, [f"{root}/a.service"], [], units)
    assert alone.level == "warn"
    assert alone.text == f"1 unit without cpu.max so far, for example {root}/a.service: its first limit creates it"
    assert "systemctl set-property --runtime a.service CPUWeight=100" in alone.advice
    found = doctor_cgroups.check_limit_files(2, sorted(units), [], units)
    assert [(f.check, f.level) for f in found] == [("limit files", "warn"), ("limit files", "ok"), ("burst", "ok")]
    found = doctor_cgroups.check_limit_files(2, [f"{root}/a.service", f"{root}/c"], [], units)
    assert [f.level for f in found] == ["warn", "fail"]
    assert found[1].text == f"1 of 1 cgroup without cpu.max: {root}/c"


def test_what_cgroup2_gives_on(tmp_path):
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    found = by_check(doctor_cgroups.check_mounts([mount(2, str(tmp_path), "cpu", "memory", "io")], "m"))
    assert found["cgroup2"].text == f"{tmp_path}, controllers: cpu io memory; enabled for the cgroups in it: cpu memory"
    (tmp_path / "cgroup.subtree_control").write_text("\n")
    found = by_check(doctor_cgroups.check_mounts([mount(2, str(tmp_path), "cpu")], "m"))
    assert found["cgroup2"].text.endswith("enabled for the cgroups in it: none")


def test_without_a_job_other_cgroups_show_what_the_kernel_has(tmp_path):
    root = make_tree(tmp_path, {"plain.service": {"cpu.stat": ""}, "user.slice": v2_cgroup()})
    plain, limited = f"{root}/plain.service", f"{root}/user.slice"
    (finding,) = doctor_cgroups.check_limit_files(2, ["/nowhere"], [plain])
    assert finding.level == "warn"
    assert [f.level for f in doctor_cgroups.check_limit_files(2, [], [plain, limited])] == ["ok", "ok"]
    assert doctor_cgroups.check_rights(2, ["/nowhere"]).level == "warn"


@pytest.mark.parametrize(("error", "unified", "level", "text"), [
    (None, "/u", "ok", "on; cgroups below /u have their own"),
    (None, None, "warn", "on, but only for the whole host: cgroup2 is not mounted"),
    (OSError(errno.EOPNOTSUPP, "x", "/p"), "/u", "warn", "the kernel has it, but it is turned off"),
    (OSError(errno.ENOENT, "x", "/p"), "/u", "warn", "not available (/p: No such file or directory)"),
])  # fmt: skip
def test_pressure_is_optional(error, unified, level, text):
    finding = doctor_cgroups.check_pressure(error, unified)
    assert (finding.level, finding.text) == (level, text)
    assert ("optional" in finding.advice) == (level == "warn")


def test_managed_roots(tmp_path):
    (tmp_path / "jobs").mkdir()
    assert doctor_cgroups.check_roots([], str(tmp_path))[0].text == "empty: no cgroup will ever be written"
    levels = [finding.level for finding in doctor_cgroups.check_roots(["jobs", "missing", ""], str(tmp_path))]
    assert levels == ["ok", "warn", "warn"]


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that every user can look into, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_missing_rights_are_a_warning_without_root(open_path, no_rights):
    root = make_tree(open_path, {"a": v2_cgroup(), "b": v2_cgroup()})
    os.chmod(f"{root}/a/cpu.max", 0o444)
    with no_rights():
        finding = doctor_cgroups.check_rights(2, [f"{root}/a"])
    assert finding.level == "warn"
    assert finding.text.endswith(f" may not write 1 of 1 limits, for example {root}/a/cpu.max")
    assert "root" in finding.advice


# sources


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Two jobs, one cgroup with a child, one that is no job."""
    jobs = {name: v2_cgroup() for name in ("op1_job-1", "op1_job-2", "stranger")}
    make_tree(tmp_path, {"jobs": {**jobs, "op2_job-3": {**v2_cgroup(), "inner": v2_cgroup()}}})
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "id_regex", "said"),
    [
        (
            "jobs/*_job-*",
            r"(?P<operation>[^/_]+)_(?P<id>job-\d+)$",
            """ok glob 'jobs/*_job-*' matches 3 cgroups: jobs/op1_job-1 -> job 'job-1' of operation 'op1'
            warn 1 of them will never be written, for example 'jobs/op2_job-3': it has child cgroups""",
        ),
        (
            "x/*",
            "",
            """ok glob 'x/*' matches 10 cgroups: x/0 -> job '0'; x/1 -> job '1'; x/2 -> job '2', and 7 more
            warn 10 of them will never be written, for example 'x/0': it is outside managed_roots -> add a cgroup""",
        ),
        ("none/*", "", "warn glob 'none/*' matches no cgroup in ROOT"),
        (
            "jobs/*",
            "^slurm",
            "warn 4 cgroups match 'jobs/*', but id_regex '^slurm' matches none of them -> correct id_regex; it is ",
        ),
        (
            "jobs/*",
            r"job-\d+",
            r"""ok glob 'jobs/*' matches 4 cgroups:
            warn id_regex 'job-\\d+' does not match 1 of them, for example 'jobs/stranger'
            warn 1 of them will never be written, for example 'jobs/op2_job-3': it has child cgroups""",
        ),
        (
            "jobs/op1*",
            r"op\d",
            """ok glob 'jobs/op1*' matches 2 cgroups:
            warn several cgroups become the job 'op1'""",
        ),
    ],
)
def test_what_a_source_finds_and_what_is_wrong_with_it(host, pattern, id_regex, said):
    for number in range(10):
        (host / "x" / str(number)).mkdir(parents=True)
    source = Source(kind="glob", pattern=pattern, **({"id_regex": id_regex} if id_regex else {}))
    found = doctor_cgroups.check_source(1, source, AgentConfig(managed_roots=["jobs"], source=[source]), hybrid(host))
    texts = [f"{each.level} {each.text} -> {each.advice}".replace(str(host), "ROOT") for each in found]
    begins = [line.strip() for line in said.split("\n")]
    assert [text.startswith(begin) for text, begin in zip(texts, begins, strict=True)] == [True] * len(begins), texts
    assert all(each.advice for each in found if each.level != "ok")


# limits of the host


@pytest.mark.parametrize(("hard", "jobs", "max_jobs", "per_job", "level", "enough"), [
    (30000, 10, 9000, 3, "ok", "9914"),
    (20000, 10, 9000, 3, "warn", "6581"),
    (4096, 10, 9000, 3, "warn", "1280"),
    (1024, 500, 400, 3, "fail", "256"),
    (resource.RLIM_INFINITY, 10**6, 10**6, 3, "ok", "any number of"),
    (1059, 201, 200, 4, "fail", "200"),  # one more for the pressure
])  # fmt: skip
def test_descriptors_are_some_for_each_job(hard, jobs, max_jobs, per_job, level, enough):
    (finding,) = doctor_checks.check_descriptors(1024, hard, "this shell", jobs, max_jobs, per_job)
    assert (finding.level, f"enough for {enough} jobs" in finding.text) == (level, True), finding.text
    assert (f"LimitNOFILE={per_job * max_jobs + 256}" in finding.advice) == (level != "ok")


@pytest.mark.parametrize(
    ("watches", "instances", "needed", "level"),
    [(8192, 128, 100, "ok"), (8192, 128, 9000, "warn"), (8192, 4, 100, "warn")],
)
def test_inotify_limits(watches, instances, needed, level):
    limits = {"max_user_watches": watches, "max_user_instances": instances}
    assert doctor_checks.check_inotify(limits, needed)[0].level == level
    assert doctor_checks.check_inotify({}, needed)[0].level == "warn"


def test_programs_that_change_quotas_are_named():
    found = doctor_checks.check_writers(["bash", "kubelet", "containerd", "kubelet"])
    told = [(f.text.split()[0], f.level, bool(f.advice)) for f in found]
    assert told == [("containerd", "warn", True), ("kubelet", "warn", True)]
    assert doctor_checks.check_writers(["bash"])[0].level == "ok"


@pytest.mark.parametrize(
    ("beside", "kind"), [("kubelet", "kubernetes"), ("k3s-agent", "kubernetes"), ("dockerd", "docker")]
)
def test_whose_runtime_containerd_is_decides_about_the_source(beside, kind):
    found = doctor_checks.check_writers(["containerd", beside])
    assert found[0].text.startswith("containerd")
    assert found[0].advice.endswith(f'kind = "{kind}"')


@pytest.mark.parametrize(("booted", "version", "level", "text"), [
    (True, "systemd 252 (252.39-1~deb12u2)", "ok", "systemd 252 (252.39-1~deb12u2)"),
    (True, "", "ok", "runs, its version is unknown"),
    (True, "systemd 219", "warn", "systemd 219"),
    (False, "systemd 252", "warn", "does not run this machine (systemd 252 is installed)"),
    (False, "", "warn", "does not run this machine"),
])  # fmt: skip
def test_systemd(booted, version, level, text):
    finding = doctor_checks.check_systemd(booted, version)
    assert (finding.level, finding.text) == (level, text)


@pytest.mark.parametrize(("source", "level"), [("tsc", "ok"), ("kvm-clock", "ok"), ("hpet", "warn")])
def test_clock_source(tmp_path, source, level):
    (tmp_path / "current_clocksource").write_text(f"{source}\n")
    (finding,) = doctor_checks.check_clock(str(tmp_path))
    assert finding.level == level
    assert source in finding.text


# directories and what lies in them


def test_directories_that_can_be_written_or_made(tmp_path):
    assert doctor_checks.check_directory("state_dir", str(tmp_path)).text == f"{tmp_path} can be written"
    finding = doctor_checks.check_directory("state_dir", f"{tmp_path}/a/b")
    assert finding == Finding("state_dir", "ok", f"{tmp_path}/a/b will be created in {tmp_path}")
    (tmp_path / "file").write_text("")
    assert doctor_checks.check_directory("state_dir", f"{tmp_path}/file/b").level == "fail"


def test_a_directory_without_rights_is_a_warning_for_who_is_not_root(open_path, no_rights):
    open_path.chmod(0o555)
    with no_rights():
        finding = doctor_checks.check_directory("runtime_dir", str(open_path))
    open_path.chmod(0o755)
    assert finding.level == "warn"
    assert "cannot be written by" in finding.text
    assert "root" in finding.advice


def test_leftovers_of_a_dead_agent_fail(tmp_path):
    (tmp_path / "job").mkdir()
    inode = (tmp_path / "job").stat().st_ino
    content = Originals("boot", {"job": Original(inode, SETTINGS), "gone": Original(1, SETTINGS)})
    hierarchies = Hierarchies(1, str(tmp_path), str(tmp_path))

    def check(content: Originals | None, running: bool = False, is_current: bool = True) -> Finding:
        return doctor_cgroups.check_leftovers("/s", content, running, is_current, hierarchies)

    finding = check(content)
    assert finding.level == "fail"
    assert finding.text == "a dead agent left the limits of 1 cgroup, for example 'job'"
    assert "cpumond restore" in finding.advice
    assert check(content, running=True).text == "/s holds the original limits of 1 cgroup"
    assert "earlier boot" in check(content, is_current=False).text
    assert check(None).text == "/s names no cgroup to restore"
    (tmp_path / "job").rename(tmp_path / "other")
    assert check(content).text == "a dead agent left the limits of 1 cgroup, for example 'job'"
    unseen = check(msgspec.structs.replace(content, root=(1, 1)))
    assert (unseen.level, "cannot see cgroup job" in unseen.text) == ("fail", True)
    assert check(Originals("boot", {"gone": Original(1, SETTINGS)})).text == "the cgroups of /s are gone"


@pytest.mark.parametrize("is_current", [True, False])
def test_leftovers_are_of_this_boot_by_the_rule_of_restore(config, tmp_path, monkeypatch, is_current):
    """In a container with a boot id of its own the service is shown another one than the shell of ``doctor``: then the
    copy in ``runtime_dir`` tells."""
    asked: list[tuple[str, str]] = []

    def is_of_this_boot(content: Originals, copy_path: str) -> bool:
        asked.append((content.boot_id, copy_path))
        return is_current

    monkeypatch.setattr(state_file, "is_of_this_boot", is_of_this_boot)
    loaded = load_config(str(config))
    os.mkdir(loaded.state_dir)
    inode = (tmp_path / "cgroup/jobs/job-1").stat().st_ino
    save(f"{loaded.state_dir}/originals.state", Originals("another", {"jobs/job-1": Original(inode, SETTINGS)}))
    (finding,) = doctor._examine_leftovers(loaded, hybrid(tmp_path / "cgroup"), AgentSeen(False))
    assert asked == [("another", f"{loaded.runtime_dir}/originals.state")]
    assert finding.level == ("fail" if is_current else "ok")
    assert ("earlier boot" in finding.text) is not is_current


def test_the_pause_file(tmp_path):
    assert doctor_checks.check_pause(str(tmp_path)).level == "ok"
    (tmp_path / "pause").write_text("")
    finding = doctor_checks.check_pause(str(tmp_path))
    assert (finding.level, finding.advice) == ("warn", f"rm {tmp_path}/pause")


# the agent


def test_the_holder_of_the_lock_is_found_without_taking_it(tmp_path):
    config = AgentConfig(runtime_dir=str(tmp_path))
    assert doctor_host.find_agent(config) == AgentSeen(False)
    with contextlib.closing(RunLock(str(tmp_path), "/etc/some.toml")):
        seen = doctor_host.find_agent(config)
    assert seen.running
    assert (seen.pid, seen.config) == (os.getpid(), "/etc/some.toml")
    assert doctor_host.find_agent(config) == AgentSeen(False)


def test_the_text_of_the_kernel_about_locks():
    locks = (
        "1: POSIX  ADVISORY  WRITE 11 fe:00:5 0 EOF\n"
        "2: FLOCK  ADVISORY  WRITE 12 fe:00:6 0 EOF\n"
        "2: -> FLOCK  ADVISORY  WRITE 13 fe:00:5 0 EOF\n"
        "3: FLOCK  ADVISORY  WRITE 14 fe:00:5 0 EOF\n"
    )
    device = os.makedev(0xFE, 0)
    assert doctor_host.find_lock_pid(locks, device, 5, None) == 14
    assert doctor_host.find_lock_pid(locks, device, 6, None) == 12
    assert doctor_host.find_lock_pid(locks, device, 7, None) is None
    # Another device is believed only when the file itself names the process.
    assert doctor_host.find_lock_pid(locks, os.makedev(1, 1), 5, None) is None
    assert doctor_host.find_lock_pid(locks, os.makedev(1, 1), 5, 14) == 14


def test_an_agent_that_runs_and_one_that_does_not(tmp_path):
    config = AgentConfig(runtime_dir="/run/x", path=str(tmp_path / "a.toml"))

    def check(seen: AgentSeen) -> list[str]:
        return [finding.text for finding in doctor_checks.check_agent(seen, config)]

    assert check(AgentSeen(False)) == ["none runs: no process holds /run/x/agent.lock"]
    [text] = check(AgentSeen(True, 7, 1.0, str(tmp_path / "a.toml")))
    assert text.startswith("an agent runs, pid 7, since 19")
    assert check(AgentSeen(True)) == ["an agent runs, with built-in defaults"]
    [_, other] = check(AgentSeen(True, 7, None, "/etc/b.toml"))
    assert other == f"it runs with /etc/b.toml, but {tmp_path}/a.toml is examined"


class ToldClient(AgentClient):
    def __init__(self, **changes: object) -> None:
        super().__init__("/s")
        self.answer = msgspec.structs.replace(STATUS, **changes)

    def request(self, method: str, path: str, body: object = None) -> bytes:
        return msgspec.json.encode(self.answer)


STATUS = StatusAnswer("n", "v2", 0.001, 1.0, False, Sums(0.0, 0.0, 0.0), Counters(), [], last_tick_age_s=0.5)


def test_what_the_agent_answers():
    assert [f.level for f in doctor_checks.check_answer(ToldClient())] == ["ok"]
    found = doctor_checks.check_answer(ToldClient(problems=["no cgroup matches"], last_tick_age_s=30.0))
    assert [(f.level, f.text) for f in found] == [
        ("ok", "it answers on /s and follows 0 jobs"),
        ("warn", "no cgroup matches"),
        ("fail", "its last check was 30 s ago, one is due every 1 s"),
    ]


# addresses


def answer_with(problem: str) -> Callable[[str, int], str]:
    return lambda *_: problem


def test_the_receiver_of_reports():
    assert doctor_checks.check_report("log", "", answer_with("must not be asked")).level == "ok"
    found = doctor_checks.check_report("http", "http://s:1/x", answer_with(""))
    assert found.text == "s port 1 of http://s:1/x accepts connections"
    finding = doctor_checks.check_report("http", "https://s/x", answer_with("Connection refused"))
    advice = "start the receiver or correct report.url; the agent continues without it and reports when it is back"
    assert finding == Finding("report", "fail", "s port 443 of https://s/x: Connection refused", advice)


@pytest.mark.parametrize(("running", "problem", "text", "level", "said"), [
    (False, "refused", "", "ok", "127.0.0.1:9 is free"),
    (True, "refused", "", "warn", "the agent runs, but nothing answers on 127.0.0.1:9"),
    (True, "", "cpumond_build_info 1", "ok", "the agent serves http://127.0.0.1:9/metrics"),
    (False, "", "cpumond_build_info 1", "fail", "127.0.0.1:9 is in use by another agent"),
    (False, "", "hello", "fail", "127.0.0.1:9 is in use by another program"),
    (True, "", "hello", "fail", "127.0.0.1:9 is in use by another program"),
])  # fmt: skip
def test_the_address_of_the_metrics(running, problem, text, level, said):
    finding = doctor_checks.check_metrics("127.0.0.1:9", running, answer_with(problem), lambda _: text, lambda _: "")
    assert (finding.level, finding.text) == (level, said)


def test_an_address_of_all_interfaces_is_asked_on_loopback():
    asked: list[str] = []
    for listen in ("0.0.0.0:9", "[::]:9"):
        doctor_checks.check_metrics(listen, True, answer_with(""), lambda url: asked.append(url) or "", find_absent)
    assert asked == ["http://127.0.0.1:9/metrics", "http://[::1]:9/metrics"]
    assert doctor_checks.check_metrics("", True, answer_with(""), lambda _: "", lambda _: "x").level == "ok"


@pytest.mark.parametrize("listen", ["192.0.2.1:9", "[2001:db8::1]:9"])
@pytest.mark.parametrize("running", [True, False])
def test_an_address_that_is_not_here_is_a_warning(listen, running):
    """Whoever has it elsewhere is not asked. These are kept for documentation."""
    finding = doctor_checks.check_metrics(listen, running, answer_with(""), lambda _: pytest.fail("asked"), find_absent)
    assert (finding.check, finding.level) == ("metrics", "warn")
    absent = f"this host does not have the address {listen[:-2].strip('[]')}"
    assert finding.text == f"{absent}; {listen} answers no request until it is added"
    assert "`ip address`" in finding.advice


def test_which_hosts_are_absent(monkeypatch):
    assert [find_absent(host) for host in ("127.0.0.1", "localhost", "::", "a..b")] == [""] * 4
    found = [(socket.AF_INET, 2, 17, "", (address, 0)) for address in ("192.0.2.1", "203.0.113.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert find_absent("node-7") == "192.0.2.1 and 203.0.113.1"
    found.append((socket.AF_INET, 2, 17, "", ("127.0.0.1", 0)))
    assert find_absent("node-7") == ""


def test_a_connection_is_tried_for_real():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert doctor_host.try_connect("127.0.0.1", port) == "Connection refused"
        listener.listen()
        assert doctor_host.try_connect("127.0.0.1", port) == ""
    assert doctor_host.try_connect("127.0.0.1", port) == "Connection refused"
    assert doctor_host.try_connect("a..b", 1) != ""
    assert doctor_host.read_metrics(f"http://127.0.0.1:{port}/metrics") == ""


# the whole


def test_one_read_is_measured(tmp_path):
    root = make_tree(tmp_path, {"job": v2_cgroup()})
    finding = doctor_cgroups.measure_read(hybrid(tmp_path), "job")
    assert re.match(r"[0-9.]+ us for job: 1000 jobs per second take [0-9.]+ % of a core", finding.text)
    assert "disappeared" in doctor_cgroups.measure_read(hybrid(tmp_path), "gone").text
    (tmp_path / "cpu/job").mkdir(parents=True)
    (tmp_path / "cpuacct").mkdir()
    apart = Hierarchies(1, str(tmp_path / "cpu"), str(tmp_path / "cpuacct"), None, None)
    assert f"cgroup 'job' is missing below {tmp_path}/cpuacct" in doctor_cgroups.measure_read(apart, "job").text
    assert root


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration over a fake host with one job."""
    jobs = {**v2_cgroup(), "job-1": v2_cgroup()}
    mountinfo = make_v2_host(tmp_path, {"jobs": jobs, "cgroup.subtree_control": "cpu\n"})
    path = tmp_path / "cpumond.toml"
    path.write_text(
        f'mountinfo = "{mountinfo}"\nstate_dir = "{tmp_path}/state"\nruntime_dir = "{tmp_path}/run"\n'
        f'managed_roots = ["jobs"]\n[metrics]\nlisten = ""\n[[source]]\nkind = "glob"\npattern = "jobs/job-*"\n'
    )
    return path


def test_json_has_all_findings_and_the_exit_code(config, capsys):
    assert run(["doctor", "--config", str(config), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == 0
    checks = {finding["check"] for finding in answer["findings"]}
    assert checks >= {
        "host", "configuration", "cgroups", "controller cpu", "pressure", "managed_roots", "source 1", "limit files",
        "burst", "rights", "counter read", "descriptors", "inotify", "agent", "other writers", "systemd", "clock",
        "state_dir", "runtime_dir", "leftovers", "pause file", "report", "metrics", "added jobs",
    }  # fmt: skip
    assert all(finding["advice"] for finding in answer["findings"] if finding["level"] != "ok")


def test_a_wrong_configuration_is_78_and_the_rest_is_still_checked(tmp_path, capsys):
    path = tmp_path / "cpumond.toml"
    path.write_text("nonsense = 1\n")
    assert run(["doctor", "--config", str(path)]) == 78
    out = capsys.readouterr().out
    assert f"fail  configuration  {path}:1: nonsense: unknown key" in re.sub(" +", lambda m: m[0][:2], out)
    assert "agent" in out
    assert run(["doctor", "--config", str(tmp_path / "missing.toml")]) == 78


def test_without_a_configuration_the_defaults_are_looked_at(tmp_path):
    config, findings = doctor_checks.check_config(str(tmp_path / "missing.toml"), explicit=False)
    assert config.path == ""
    assert [finding.level for finding in findings] == ["warn"]
    assert doctor.choose_exit_code(findings) == 0


def test_a_configuration_that_may_not_be_read_is_a_warning(tmp_path, config, no_rights):
    config.chmod(0)
    with no_rights():
        _, (finding,) = doctor_checks.check_config(str(config), explicit=True)
    assert finding.level == "warn"
    assert "the built-in defaults are examined" in finding.text


def test_a_host_without_cgroups_is_69_without_a_traceback(tmp_path, capsys):
    (tmp_path / "mountinfo").write_text("")
    path = tmp_path / "cpumond.toml"
    directories = f'state_dir = "{tmp_path}"\nruntime_dir = "{tmp_path}"\n'
    path.write_text(f'mountinfo = "{tmp_path}/mountinfo"\n{directories}[metrics]\nlisten = ""\n')
    assert run(["doctor", "--config", str(path)]) == 69
    (tmp_path / "mountinfo").unlink()
    assert run(["doctor", "--config", str(path)]) == 0
    assert "could not be checked" in capsys.readouterr().out


def test_jobs_added_at_run_time_are_looked_at_too(config, tmp_path, capsys):
    (tmp_path / "state").mkdir()
    make_tree(tmp_path / "cgroup", {"jobs": {"added": v2_cgroup()}})
    save(f"{tmp_path}/state/registered.state", Registry({"added": RegisteredJob("added", "jobs/added")}))
    save(f"{tmp_path}/state/originals.state", Originals(read_boot_id(), {}))
    assert run(["doctor", "--config", str(config)]) == 0
    out = re.sub(" +", " ", capsys.readouterr().out)
    assert "added jobs 1 job added by `cpumond job add`" in out
    assert "now 2, discovery.max_jobs" in out


def test_damaged_state_files_are_said(config, tmp_path, capsys):
    (tmp_path / "state").mkdir()
    for name in ("originals.state", "registered.state"):
        (tmp_path / "state" / name).write_text("nonsense\n")
    assert run(["doctor", "--config", str(config)]) == 69
    out = capsys.readouterr().out
    assert "originals.state: not a state file of version 1" in out
    assert "could not be checked" in out
    assert sorted(os.listdir(tmp_path / "state")) == ["originals.state", "registered.state"]


def test_a_state_that_may_not_be_read_is_a_warning(config, tmp_path, no_rights):
    (tmp_path / "state").mkdir(mode=0o700)
    save(f"{tmp_path}/state/originals.state", Originals("x", {}))
    loaded = load_config(str(config))
    os.chmod(tmp_path / "state", 0)
    with no_rights():
        (finding,) = doctor._examine_leftovers(loaded, None, AgentSeen(False))
    os.chmod(tmp_path / "state", 0o700)
    assert finding.level == "warn"


def test_an_agent_that_holds_the_lock_only(config, tmp_path, capsys):
    with contextlib.closing(RunLock(f"{tmp_path}/run", str(config))):
        assert run(["doctor", "--config", str(config)]) == 69
    out = capsys.readouterr().out
    assert f"an agent runs, pid {os.getpid()}" in out
    assert "no agent answers on" in out


def executor_config(tmp_path: Path, text: str) -> AgentConfig:
    return finish_config(parse_config_text(f'state_dir = "{tmp_path}/s"\n{text}', "t"), "t")


def test_a_node_of_a_scheduler_that_answers_or_not() -> None:
    def check(*urls: str, connect: Callable[[str, int], str] = lambda *_: "") -> list[doctor_checks.Finding]:
        return doctor_checks.check_schedulers(urls, connect, lambda _: '{"status":"ok"}')

    assert "no node of a scheduler" in check()[0].text
    [finding] = check("http://h:9757", connect=lambda host, port: f"{host} {port} refused")
    assert (finding.level, "h 9757 refused" in finding.text) == ("fail", True)
    assert [each.level for each in check("https://h/x", connect=lambda _, port: "" if port == 443 else "no")] == ["ok"]
    assert [each.level for each in check("http://h:99999999")] == ["fail"]
    assert [
        each.level for each in check("http://a", "http://b", connect=lambda host, _: "" if host == "a" else "no")
    ] == ["ok", "fail"]


@pytest.mark.parametrize(("answers", "levels", "words"), [
    ({"a": ("leader", 7), "b": ("standby", 7)}, ["ok", "ok"], ["; leader in term 7", "; standby in term 7"]),
    ({"a": None, "b": ("leader", 8)}, ["warn", "ok"], ["refused", "; leader in term 8"]),
    ({"a": ("standby", 8), "b": None}, ["ok"] + ["fail"] * 2, ["standby", "refused", "none of http://a, http://b"]),
    ({"a": None, "b": None}, ["fail", "fail"], ["refused", "refused"]),
])  # fmt: skip
def test_one_of_several_leads(answers: dict[str, tuple[str, int] | None], levels: list[str], words: list[str]) -> None:
    def read(url: str) -> str:
        role, term = answers[url.removeprefix("http://").removesuffix("/readyz")] or ("", 0)
        return f'{{"status":"ok","role":"{role}","term":{term}}}'

    def connect(host: str, port: int) -> str:
        return "" if answers[host] else "refused"

    findings = doctor_checks.check_schedulers([f"http://{host}" for host in answers], connect, read)
    assert [finding.level for finding in findings] == levels
    assert all(word in finding.text for word, finding in zip(words, findings, strict=True))


def test_a_scheduler_that_lets_everybody_in_is_a_warning() -> None:
    asked: list[str] = []

    def read(url: str) -> str:
        asked.append(url)
        return '{"user":"root","is_open":true}'

    [finding] = doctor_checks.check_scheduler_access("http://127.0.0.1:1/", read)
    assert asked == ["http://127.0.0.1:1/api/v1/me"]
    assert (finding.level, "every user of its host may run operations" in finding.text) == ("warn", True)
    assert "tokens_file" in finding.advice
    for answer in ('{"is_open":false}', '{"error":"Authentication failed","code":900}', "", "<html>", '{"is_open":3}'):
        assert doctor_checks.check_scheduler_access("http://h", lambda _, text=answer: text) == []


NODE = '[scheduler]\nurl = "http://h"\n'


@pytest.mark.parametrize(("text", "is_booted", "has_library", "levels", "words"), [
    ("", True, True, ["ok"], "no jobs are run"),
    (NODE, True, True, ["ok"], "without slots"),
    ('[executor]\nkind = "cgroup"', False, True, ["ok", "warn", "ok"], "no scheduler to get jobs from"),
    (f'{NODE}[executor]\nkind = "cgroup"', True, True, ["ok", "warn", "ok"], "systemd runs"),
    (f'{NODE}[executor]\nkind = "systemd"', False, False, ["ok", "fail", "fail", "ok"], "pip"),
    (f'{NODE}[executor]\nkind = "systemd"\nuser = "u"', True, True, ["ok"] * 3, "run as u: each job can read"),
])  # fmt: skip
def test_whether_jobs_can_be_run(tmp_path, monkeypatch, text, is_booted, has_library, levels, words):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = doctor_checks.check_executor(executor_config(tmp_path, text), is_booted, has_library)
    assert [finding.level for finding in found] == levels
    assert any(words in finding.text + finding.advice for finding in found)


def test_an_agent_that_is_not_root_runs_jobs_as_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: pwd.getpwnam("nobody").pw_uid)
    advice = "run the agent as root, or set [executor] user to the account it runs as"
    for user, advices in (("daemon", [advice]), ("nobody", [])):
        text = f'{NODE}[executor]\nkind = "systemd"\nuser = "{user}"'
        found = doctor_checks.check_executor(executor_config(tmp_path, text), True, True)
        assert [finding.advice for finding in found if finding.level == "warn"] == advices
