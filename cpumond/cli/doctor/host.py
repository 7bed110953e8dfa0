"""The facts of the host for ``cpumond doctor``: processes, locks, kernel limits, systemd, addresses.

Nothing is written and no lock is taken. Facts that this user may not see are left out."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from cpumond.agent.config import AgentConfig
from cpumond.core.decode import ContentError, decode_json

if TYPE_CHECKING:
    from cpumond.agent.discovery import FoundJob

CONNECT_S = 2.0
RULE_PLACES: Final = (
    "/etc/polkit-1/rules.d",
    "/run/polkit-1/rules.d",
    "/usr/local/share/polkit-1/rules.d",
    "/usr/share/polkit-1/rules.d",
)
POLKIT_ACTION: Final = "org.freedesktop.systemd1.manage-units"
POLKIT_SERVICE: Final = "/usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service"
POLKIT_UNIT: Final = "polkit.service"
POLKIT_BACKEND: Final = (
    "get-property", "org.freedesktop.PolicyKit1", "/org/freedesktop/PolicyKit1/Authority",
    "org.freedesktop.PolicyKit1.Authority", "BackendName",
)  # fmt: skip
ANSWER_S: Final = 5
BUS_SOCKETS: Final = ("/run/dbus/system_bus_socket", "/var/run/dbus/system_bus_socket")


class AgentSeen(msgspec.Struct, frozen=True):
    """The agent: whether one runs (holds the lock), its pid (None: unknown), its start time and configuration file."""

    running: bool
    pid: int | None = None
    since: float | None = None
    config: str = ""


class BusSeen(msgspec.Struct, frozen=True):
    """The facts that decide whether the agent may set properties of units.

    ``account``: the agent's user; ``rules``: files whose polkit rules about units name it; ``hidden_rules``: files and
    directories of rules that may not be read; ``polkit_problem``: why an installed polkit does not apply rules."""

    account: str
    is_root: bool
    has_library: bool
    has_bus: bool
    has_polkit: bool
    rules: tuple[str, ...] = ()
    hidden_rules: tuple[str, ...] = ()
    polkit_problem: str = ""


def find_agent(config: AgentConfig) -> AgentSeen:
    """Find the agent that holds the lock of ``runtime_dir``, without taking the lock: an agent that starts at that
    moment would find it taken and fail."""
    from cpumond.agent.limits.restore import LOCK_FILE, LockHolder

    path = os.path.join(config.runtime_dir, LOCK_FILE)
    content = b""
    # Only the agent's account may read the file; every user sees that it is locked.
    with contextlib.suppress(OSError), open(path, "rb") as file:
        content = file.read(4096)
    try:
        status = os.stat(path)
        with open("/proc/locks", encoding="ascii") as file:
            locks = file.read()
    except OSError:
        return AgentSeen(False)  # the findings about the directories report a missing or invisible lock file
    try:
        holder = decode_json(content, LockHolder)
    except ContentError:
        holder = None
    pid = find_lock_pid(locks, status.st_dev, status.st_ino, None if holder is None else holder.pid)
    if pid is None:
        return AgentSeen(False)
    return AgentSeen(True, pid) if holder is None else AgentSeen(True, holder.pid, holder.since, holder.config)


def find_lock_pid(locks: str, device: int, inode: int, told_pid: int | None) -> int | None:
    """The process that holds a flock on a file, by the text of /proc/locks; None without a holder.

    On btrfs and overlayfs the device in /proc/locks is wrong; there the inode and the file's ``told_pid`` decide."""
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK" or not fields[4].lstrip("-").isdigit():
            continue
        pid, place = int(fields[4]), fields[5]
        if place == wanted or (pid == told_pid and place.endswith(f":{inode}")):
            return pid
    return None


def read_registered(state_dir: str) -> list[FoundJob]:
    """The jobs that were added over the control socket. Raises AccessError or StateFileError."""
    from cpumond.agent.registry import RegisteredJobs
    from cpumond.agent.state_file import Registry, load

    registered = RegisteredJobs(state_dir)
    registered.content = load(registered.path, Registry) or Registry()
    return registered.found_jobs()


def read_descriptor_limit(seen: AgentSeen) -> tuple[int, int, str]:
    import psutil

    if seen.pid is not None:
        # Only root and the agent's own user may read the agent's limit; otherwise this shell's limit is shown.
        with contextlib.suppress(psutil.Error, OSError):
            return *psutil.Process(seen.pid).rlimit(psutil.RLIMIT_NOFILE), "the agent"
    return *resource.getrlimit(resource.RLIMIT_NOFILE), "this shell"


def read_inotify() -> dict[str, int]:
    limits = {}
    for name in ("max_user_watches", "max_user_instances"):
        text = read_line(f"/proc/sys/fs/inotify/{name}") or ""
        if not text.isdecimal():
            return {}  # a container may hide one of the two limits; then neither is shown
        limits[name] = int(text)
    return limits


def list_process_names() -> list[str]:
    import psutil

    return [str(process.info["name"]) for process in psutil.process_iter(["name"])]


def read_systemd_version() -> str:
    """The first line of ``systemctl --version``; "" if there is none."""
    code, text = _ask("systemctl", "--version")
    return text.partition("\n")[0] if code == 0 else ""


def _ask(name: str, *arguments: str) -> tuple[int, str]:
    """Run a program that changes nothing; return its exit code and output, -1 if it is missing or takes too long."""
    program = shutil.which(name)
    if program is None:
        return -1, ""
    command = [program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)  # noqa: S603 - found on PATH, no input
    except (OSError, subprocess.SubprocessError):
        return -1, ""
    return done.returncode, (done.stdout or done.stderr).strip()


def read_account(seen: AgentSeen) -> tuple[str, bool]:
    """The user of a running agent, otherwise of its service, otherwise of this process, and whether that is root."""
    import psutil

    if seen.pid is not None:
        with contextlib.suppress(psutil.Error):  # the process may have ended in the meantime
            process = psutil.Process(seen.pid)
            return process.username(), process.uids().effective == 0
    name = _read_property("cpumond.service", "User")
    return (name, name == "root") if name else (find_user(), os.geteuid() == 0)


def _read_property(unit: str, name: str) -> str:
    """A property of a unit from ``systemctl show``; "" if systemd does not run or has no such unit."""
    if not os.path.isdir("/run/systemd/system"):
        return ""
    code, text = _ask("systemctl", "show", "--value", "--property", name, unit)
    return text if code == 0 else ""


def read_mounts() -> dict[str, str]:
    """The properties of the agent's unit that hide and open files; none if systemd does not run this machine."""
    names = ("TemporaryFileSystem", "BindPaths", "BindReadOnlyPaths", "ProtectHome")
    return {name: _read_property("cpumond.service", name) for name in names}


def find_polkit_problem() -> str:
    """The reason why an installed polkit does not apply its rules, as a clause; "" if it does, or will once started.

    A running polkit reports the name of its backend; a polkit that does not run is not started for this."""
    loaded = _read_property(POLKIT_UNIT, "LoadState")
    if loaded == "masked":
        return f"{POLKIT_UNIT} is masked"
    if loaded == "not-found":
        return f"there is no {POLKIT_UNIT}"
    state = _read_property(POLKIT_UNIT, "ActiveState")
    if state == "failed":
        return f"{POLKIT_UNIT} has failed"
    if state != "active" or shutil.which("busctl") is None:
        return ""
    code, text = _ask("busctl", "--system", "--auto-start=no", f"--timeout={CONNECT_S:g}", *POLKIT_BACKEND)
    if code != 0:
        return f"{POLKIT_UNIT} does not answer" + (f" ({text.splitlines()[0]})" if text else "")
    # Before version 0.106 polkit had another backend, which does not read files of rules.
    return "" if text == 's "js"' else f"this polkit ({text.partition(' ')[2]}) reads no rules"


def find_rules(account: str, places: Iterable[str] = RULE_PLACES) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files whose polkit rules about units name ``account``, and those of ``places`` that may not be read."""
    found: list[str] = []
    hidden: list[str] = []
    for place in places:
        try:
            names = sorted(name for name in os.listdir(place) if name.endswith(".rules"))
        except PermissionError:
            hidden.append(place)
            continue
        except OSError:
            continue  # the directory does not exist, so there are no rules
        for path in (os.path.join(place, name) for name in names):
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    text = file.read()
            except OSError:
                hidden.append(path)
                continue
            if POLKIT_ACTION in text and (f'"{account}"' in text or f"'{account}'" in text):
                found.append(path)
    return tuple(found), tuple(hidden)


def see_bus(seen: AgentSeen) -> BusSeen:
    """Collect the facts of ``BusSeen`` without setting a property."""
    account, is_root = read_account(seen)
    rules, hidden = find_rules(account)
    has_polkit = os.path.exists(POLKIT_SERVICE)
    has_library, has_bus = importlib.util.find_spec("dbus_fast") is not None, any(map(os.path.exists, BUS_SOCKETS))
    problem = find_polkit_problem() if has_polkit else ""
    return BusSeen(account, is_root, has_library, has_bus, has_polkit, rules, hidden, problem)


def try_connect(host: str, port: int) -> str:
    """Make a TCP connection and close it; return "" or the reason why it failed."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except TimeoutError:
        return f"no answer in {CONNECT_S:g} s"
    except (OSError, UnicodeError) as error:
        return error.strerror or str(error) if isinstance(error, OSError) else "not a host name"
    return ""


def find_absent(host: str) -> str:
    """Return the addresses of ``host`` if this machine has none of them; "" if it has one, or if this is unknown."""
    from cpumond.host.service import ABSENT_ERRNOS  # loads structlog, too slow for `--help`

    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return ""
    absent = []
    for family, _, _, _, address in found:
        try:
            # Nothing is sent, and no port is taken from another program.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
        except OSError as error:
            if error.errno not in ABSENT_ERRNOS:
                return ""
            absent.append(str(address[0]))
        else:
            return ""
    return " and ".join(absent)


def read_metrics(url: str) -> str:
    """The text that a URL serves; "" if there is no answer."""
    import httpx2

    try:
        return httpx2.get(url, timeout=CONNECT_S, trust_env=False).text
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return ""


def may(path: str, mode: int) -> bool:
    """Whether this process has the rights ``mode`` (os.R_OK, ...) on a file; nothing is opened."""
    return os.access(path, mode, effective_ids=True)


def try_read(path: str) -> OSError | None:
    try:
        with open(path, "rb") as file:
            file.read()
    except OSError as error:
        return error
    return None


def read_line(path: str) -> str | None:
    """The first line of a file, stripped; None if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return None


def is_delegated(directory: str) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        # OSError: the directory is not marked, or attributes are not supported or not readable by this user.
        with contextlib.suppress(OSError):
            if os.getxattr(directory, name) == b"1":
                return True
    return False


def find_user() -> str:
    try:
        return getpass.getuser() if os.geteuid() == os.getuid() else f"uid {os.geteuid()}"
    except (KeyError, OSError):
        return f"uid {os.geteuid()}"


def suggest_root() -> str:
    return "run it as root to see more" if os.geteuid() != 0 else "find out why root may not"
