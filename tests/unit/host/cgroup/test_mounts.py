"""Which hierarchy serves what, from the mountinfo of real kinds of hosts."""

import os

import pytest

from cpumond.core.errors import CgroupReadError, CgroupWriteError, UnavailableError, from_os_error
from cpumond.host.cgroup.mounts import (
    Hierarchies,
    Mount,
    find_hierarchies,
    hold,
    open_hierarchies,
    parse_mountinfo,
    relative_path,
)
from cpumond.testing import make_v2_host, write_mountinfo

# Debian 9, CentOS 7: cpu and cpuacct together under a name that is a symbolic link's target, systemd's own hierarchy.
V1_TOGETHER = """\
17 60 0:17 / /sys rw,nosuid,nodev,noexec,relatime shared:6 - sysfs sysfs rw
18 60 0:3 / /proc rw,nosuid,nodev,noexec,relatime shared:5 - proc proc rw
24 17 0:20 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:8 - tmpfs tmpfs ro,mode=755
25 24 0:21 / /sys/fs/cgroup/systemd rw,nosuid,nodev,noexec,relatime shared:9 - cgroup cgroup \
rw,xattr,release_agent=/usr/lib/systemd/systemd-cgroups-agent,name=systemd
27 24 0:23 / /sys/fs/cgroup/cpuset rw,nosuid,nodev,noexec,relatime shared:10 - cgroup cgroup rw,cpuset
28 24 0:24 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid,nodev,noexec,relatime shared:11 - cgroup cgroup rw,cpuacct,cpu
29 24 0:25 / /sys/fs/cgroup/memory rw,nosuid,nodev,noexec,relatime shared:12 - cgroup cgroup rw,memory
"""
# Ubuntu 20.04: v1 controllers, a cgroup2 mount without controllers beside them.
HYBRID = """\
24 30 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
33 24 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755
34 33 0:29 / /sys/fs/cgroup/unified rw,nosuid,nodev,noexec,relatime shared:10 - cgroup2 cgroup2 rw
35 33 0:30 / /sys/fs/cgroup/systemd rw,nosuid,nodev,noexec,relatime shared:11 - cgroup cgroup rw,xattr,name=systemd
38 33 0:33 / /sys/fs/cgroup/cpuset rw,nosuid,nodev,noexec,relatime shared:15 - cgroup cgroup rw,cpuset
41 33 0:36 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid,nodev,noexec,relatime shared:18 - cgroup cgroup rw,cpu,cpuacct
"""
# Debian 12.
V2 = """\
22 28 0:20 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
23 28 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:14 - proc proc rw
29 22 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 \
rw,nsdelegate,memory_recursiveprot
30 22 0:27 / /sys/fs/pstore rw,nosuid,nodev,noexec,relatime shared:5 - pstore pstore rw
"""
# In a container: the root of the mount is not /, the host's tree is bound elsewhere too.
DOCKER_V1 = """\
1213 1180 0:85 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - tmpfs tmpfs rw,mode=755
1214 1213 0:30 /docker/3f9c /sys/fs/cgroup/systemd ro,nosuid - cgroup cgroup rw,xattr,name=systemd
1218 1213 0:34 /docker/3f9c /sys/fs/cgroup/cpu,cpuacct ro,nosuid,nodev,noexec master:16 - cgroup cgroup rw,cpu,cpuacct
1219 1213 0:35 /docker/3f9c /sys/fs/cgroup/cpuset ro,nosuid,nodev,noexec master:17 - cgroup cgroup rw,cpuset
1230 1180 0:34 / /host/sys/fs/cgroup/cpu,cpuacct rw,nosuid,nodev,noexec - cgroup cgroup rw,cpu,cpuacct
"""
APART = """\
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
ALL = "cpuset cpu io memory hugetlb pids rdma misc\n"


def find(text: str, **controllers: str) -> Hierarchies:
    points = {point.replace("_", "/"): names for point, names in controllers.items()}
    return find_hierarchies(parse_mountinfo(text, points), "mountinfo")


def without(text: str, word: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if word not in line)


CGROUP = "/sys/fs/cgroup"
BOTH, UNIFIED, CPUSET = f"{CGROUP}/cpu,cpuacct", f"{CGROUP}/unified", f"{CGROUP}/cpuset"


@pytest.mark.parametrize(("text", "controllers", "found", "layout"), [
    (V1_TOGETHER, {}, Hierarchies(1, BOTH, BOTH, CPUSET, None), "v1"),
    (APART, {}, Hierarchies(1, f"{CGROUP}/cpu", f"{CGROUP}/cpuacct", None, UNIFIED), "hybrid"),
    (HYBRID, {UNIFIED: ""}, Hierarchies(1, BOTH, BOTH, CPUSET, UNIFIED), "hybrid"),
    (without(HYBRID, "cpuacct"), {UNIFIED: "cpu io memory\n"}, Hierarchies(2, UNIFIED, UNIFIED, CPUSET, UNIFIED), "v2"),
    (without(APART, "cpuacct"), {}, Hierarchies(1, f"{CGROUP}/cpu", UNIFIED, None, UNIFIED), "hybrid"),
    (V2, {CGROUP: ALL}, Hierarchies(2, *[CGROUP] * 4), "v2"),
    (V2, {CGROUP: "cpu memory\n"}, Hierarchies(2, CGROUP, CGROUP, None, CGROUP), "v2"),
    (DOCKER_V1, {}, Hierarchies(1, BOTH, BOTH, CPUSET, None), "v1"),
])  # fmt: skip
def test_which_hierarchy_serves_what(text, controllers, found, layout):
    assert find_hierarchies(parse_mountinfo(text, controllers), "mountinfo") == found
    assert found.layout == layout


@pytest.mark.parametrize(
    ("text", "controllers"),
    [("", ""), (V2, ""), (V2, "memory pids\n"), (V1_TOGETHER.replace("cpuacct,cpu", "cpuacct"), "")],
    ids=["nothing", "v2 hidden", "v2 without cpu", "v1 without cpu"],
)
def test_no_cpu_controller_is_an_error_that_says_what_to_do(text, controllers):
    with pytest.raises(UnavailableError, match=r"mountinfo.*cpu controller.*mount cgroup2"):
        find(text, _sys_fs_cgroup=controllers)


def test_no_cpu_time_is_an_error():
    with pytest.raises(UnavailableError, match="no cpuacct"):
        find("32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n")


def test_controllers_are_whole_words():
    mounts = parse_mountinfo("34 33 0:29 / /c rw - cgroup cgroup rw,cpuset,name=cpu\n")
    assert mounts == [Mount(1, "/c", frozenset({"rw", "cpuset", "name=cpu"}), os.makedev(0, 29))]
    with pytest.raises(UnavailableError):
        find_hierarchies(mounts, "mountinfo")


@pytest.mark.parametrize(("written", "point"), [
    (r"/mnt/with\040space", "/mnt/with space"),
    (r"/mnt/tab\011new\012line", "/mnt/tab\tnew\nline"),
    (r"/mnt/back\134slash", "/mnt/back\\slash"),
    (r"/mnt/back\134040", r"/mnt/back\040"),
    (r"/mnt/hash\043", "/mnt/hash#"),
    ("/mnt/-", "/mnt/-"),
])  # fmt: skip
def test_a_mount_point_as_it_is_written(written, point):
    [mount] = parse_mountinfo(f"34 33 0:29 / {written} rw shared:1 - cgroup cgroup rw,cpu\n")
    assert mount.mount_point == point


def test_a_mount_point_of_bytes_that_are_no_text(tmp_path):
    place = tmp_path / "mountinfo"
    place.write_bytes(b"34 33 0:29 / /mnt/\xff rw - cgroup cgroup rw,cpu,cpuacct\n")
    assert open_hierarchies(str(place)).cpu_root == "/mnt/\udcff"


@pytest.mark.parametrize("line", [
    "", "x", "34 33 0:29 / /c rw", "34 33 0:29 / /c rw -", "34 33 0:29 / /c rw - cgroup",
    "34 33 0:29 / /c rw - cgroup c",
])  # fmt: skip
def test_lines_that_are_cut_off_are_left_out(line):
    mount = Mount(1, "/c", frozenset({"rw", "cpu"}), os.makedev(0, 29))
    assert parse_mountinfo(f"{line}\n34 33 0:29 / /c rw a:1 b:2 c - cgroup x rw,cpu\n") == [mount]


def test_the_machines_own_mountinfo_is_read(tmp_path):
    assert open_hierarchies(make_v2_host(tmp_path, {})).cpu_version == 2
    with pytest.raises(UnavailableError, match="cannot be read"):
        open_hierarchies(str(tmp_path / "none"))


def test_a_hidden_unified_hierarchy_offers_nothing(tmp_path):
    source = write_mountinfo(tmp_path / "mountinfo", {str(tmp_path / "gone"): "cgroup2", str(tmp_path): "cpu,cpuacct"})
    assert open_hierarchies(source).layout == "hybrid"


@pytest.mark.parametrize(("given", "relative"), [
    ("/sys/fs/cgroup/cpu/jobs/a", "jobs/a"),
    ("/sys/fs/cgroup/cpuacct/jobs/a/", "jobs/a"),
    ("/sys/fs/cgroup/unified/jobs/a", "jobs/a"),
    ("/jobs/a", "jobs/a"),
    ("jobs//a/.", "jobs/a"),
    ("/sys/fs/cgroup/cpu", ""),
    ("/sys/fs/cgroup/cpuset/jobs", "sys/fs/cgroup/cpuset/jobs"),
    ("/sys/fs/cgroup/cpu2/jobs", "sys/fs/cgroup/cpu2/jobs"),
    ("", ""),
    ("jobs/../a", "jobs/../a"),
])  # fmt: skip
def test_paths_as_people_give_them(given, relative):
    assert relative_path(find(APART), given) == relative


def test_sentences_name_held_directories_as_people_know_them(tmp_path):
    with hold(Hierarchies(1, str(tmp_path), str(tmp_path))) as held:
        place = f"{held.cpu_root}/job"
        assert place.startswith("/proc/self/fd/")
        refused = from_os_error(OSError(13, ""), f"make the cgroup {place}", "run as root")
        for error in (CgroupReadError(place, "why"), CgroupWriteError(place, "1", OSError(5, "")), refused):
            assert f"{tmp_path}/job" in str(error)
