"""Runs inside the guest: the scheduler as its unit and its shipped configuration have it, from first start to end."""

import hashlib
import json
import os
import re
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import guest_tools as guest

UNIT = "cpumond-scheduler"
ADDRESS = "http://127.0.0.1:9757"
STATE_DIR = Path("/var/lib/private/cpumond-scheduler")
CONF_D = Path("/etc/cpumond/scheduler.conf.d")
CREDENTIAL = f"/run/credentials/{UNIT}.service/tokens"
TOKEN = "a-token-of-this-test"  # noqa: S105
LATE_ADDRESS = "203.0.113.7"
"""Kept for documentation; the guest has no network at first."""
WATCHDOG_S = 2
"""A shorter watchdog than the unit's, only to wait less."""

acknowledged: list[str] = []
"""Operations whose start the scheduler has confirmed, over all its lives."""


def show(name: str) -> str:
    return guest.show(UNIT, name)


def order(timeout_s: float = 10.0) -> str:
    """Start an operation that nobody runs; its id, once that is confirmed."""
    spec = {"pool": "research", "tasks": {"t": {"job_count": 1, "cpu_limit": 1.0, "command": ["true"]}}}
    status, content = guest.ask("POST", f"{ADDRESS}/api/v1/operations", {"spec": spec}, timeout_s=timeout_s)
    if status != 201:
        raise OSError(f"{status}: {content!r}")
    found = str(json.loads(content)["id"])
    acknowledged.append(found)
    return found


def count_lost() -> int:
    return sum(guest.ask("GET", f"{ADDRESS}/api/v1/operations/{each}")[0] != 200 for each in acknowledged)


def count_updates() -> float:
    """Since the start of this process; -1 when it cannot say."""
    try:
        found = re.search(rb"(?m)^cpumond_scheduler_updates_total (\S+)", guest.ask("GET", f"{ADDRESS}/metrics")[1])
    except OSError:
        found = None
    return float(found[1]) if found else -1.0


def install() -> dict[str, Any]:
    guest.install_files(
        {
            "systemd/cpumond-scheduler.service": "/usr/lib/systemd/system/cpumond-scheduler.service",
            "config/scheduler.toml": "/etc/cpumond/scheduler.toml",
        }
    )
    guest.write_file("/usr/bin/cpumond", guest.WRAPPER, 0o755)
    return {
        "reload": guest.systemctl("daemon-reload"),
        "verify": guest.run("systemd-analyze", "verify", "--man=no", f"{UNIT}.service"),
    }


def start() -> dict[str, Any]:
    """``enable --now`` comes back when the first update is done; what the process may, and what it sees."""
    answer = guest.systemctl("enable", "--now", UNIT)
    pid = show("MainPID")
    root = Path(f"/proc/{pid}/root")
    return {
        "answer": answer,
        "enabled": guest.systemctl("is-enabled", UNIT)["output"].strip(),
        "rights": guest.read_rights(pid),
        "run": sorted(os.listdir(root / "run")),
        "read_only": sorted(path for path, is_ro in guest.read_mounts(pid).items() if is_ro),
        "writable": sorted(path for path, is_ro in guest.read_mounts(pid).items() if not is_ro),
        "credentials": os.path.exists(f"{root}{CREDENTIAL}"),
        "state": oct(STATE_DIR.stat().st_mode & 0o777),
        "files": sorted(os.listdir(STATE_DIR)),
        **{name: show(name) for name in ("ActiveState", "SubState", "StatusText", "DynamicUser", "WatchdogUSec")},
    }


def work() -> dict[str, Any]:
    """Commands, pages and metrics; the state's line in ``systemctl status`` follows."""
    status, content = guest.ask("POST", f"{ADDRESS}/api/v1/operations", {"spec": {"pool": "research", "tasks": {}}})
    order()
    said_s = guest.wait(lambda: show("StatusText").startswith("1 operation "))
    return {
        "refusal": [status, content.decode()],
        "said_s": said_s,
        "StatusText": show("StatusText"),
        "metrics": guest.ask("GET", f"{ADDRESS}/metrics")[1].decode(),
        "page": guest.ask("GET", f"{ADDRESS}/")[0],
        "history_s": guest.wait((STATE_DIR / "history.db").exists),
    }


def kill() -> dict[str, Any]:
    """SIGKILL; what was confirmed is there afterwards."""
    for _ in range(5):
        order()
    pid = show("MainPID")
    os.kill(int(pid), signal.SIGKILL)
    up_s = guest.wait(lambda: guest.is_up_again(UNIT, pid))
    return {"up_s": up_s, "lost": count_lost(), "restarts": show("NRestarts")}


def hang() -> dict[str, Any]:
    """A process that does nothing any more is ended by the watchdog; with the unit's own, that takes longer."""
    guest.write_file(f"/run/systemd/system/{UNIT}.service.d/test.conf", f"[Service]\nWatchdogSec={WATCHDOG_S}s\n")
    guest.systemctl("daemon-reload")
    restart = guest.systemctl("restart", UNIT)
    pid, cursor = show("MainPID"), guest.journal_cursor(UNIT)
    updates = count_updates() + 2 * WATCHDOG_S  # one a second: for twice as long as the watchdog waits
    fed_s = guest.wait(lambda: count_updates() >= updates)
    fed = fed_s is not None and show("MainPID") == pid
    os.kill(int(pid), signal.SIGSTOP)
    up_s = guest.wait(lambda: guest.is_up_again(UNIT, pid))
    return {
        "restart": restart,
        "fed": fed,
        "up_s": up_s,
        "journal": guest.journal_after(cursor, UNIT),
        "lost": count_lost(),
    }


def tokens() -> dict[str, Any]:
    line = f"ops:{hashlib.sha256(TOKEN.encode()).hexdigest()}\n"
    guest.write_file("/etc/credstore/cpumond.tokens", line, 0o600)
    guest.write_file(CONF_D / "tokens.toml", f'[api]\ntokens_file = "{CREDENTIAL}"\n')
    answer = guest.systemctl("restart", UNIT)
    path = f"/proc/{show('MainPID')}/root{CREDENTIAL}"
    result = {
        "answer": answer,
        "mode": oct(os.stat(path).st_mode & 0o777),
        "without": guest.ask("GET", f"{ADDRESS}/api/v1/operations")[0],
        "with": guest.ask("GET", f"{ADDRESS}/api/v1/operations", token=TOKEN)[0],
    }
    (CONF_D / "tokens.toml").unlink()
    return {**result, "back": guest.systemctl("restart", UNIT)}


def late_address() -> dict[str, Any]:
    """The address that the nodes know comes when the scheduler runs already; nobody restarts it."""
    listen = f'[api]\nlisten = "{LATE_ADDRESS}:9757"\ntokens_file = "{CREDENTIAL}"\n'
    guest.write_file(CONF_D / "late.toml", listen)
    cursor, answer = guest.journal_cursor(UNIT), guest.systemctl("restart", UNIT)
    pid = show("MainPID")
    guest.add_address(LATE_ADDRESS)
    try:
        status, _ = guest.ask("GET", f"http://{LATE_ADDRESS}:9757/api/v1/operations", token=TOKEN)
    finally:
        (CONF_D / "late.toml").unlink()
    result = {"answer": answer, "status": status, "same_pid": show("MainPID") == pid}
    return {**result, "journal": guest.journal_after(cursor, UNIT), "back": guest.systemctl("restart", UNIT)}


def stop() -> dict[str, Any]:
    """An orderly end: all is in the one file, which is sound."""
    order()
    cursor, begin_s = guest.journal_cursor(UNIT), time.monotonic()
    answer = guest.systemctl("stop", UNIT)
    took_s = time.monotonic() - begin_s
    with closing(sqlite3.connect(f"file:{STATE_DIR}/scheduler.db?mode=ro", uri=True)) as database:
        check = database.execute("PRAGMA integrity_check").fetchall()
        kept = {key for (key,) in database.execute("SELECT key FROM records WHERE kind = 'operation'")}
    return {
        "answer": answer,
        "took_s": took_s,
        "check": check,
        "lost": len(set(acknowledged) - kept),
        "confirmed": len(acknowledged),
        "files": {name: os.path.getsize(STATE_DIR / name) for name in sorted(os.listdir(STATE_DIR))},
        "Result": show("Result"),
        "ExecMainStatus": show("ExecMainStatus"),
        "journal": guest.journal_after(cursor, UNIT),
        "start": guest.systemctl("start", UNIT),
        "lost_after_start": count_lost(),
    }


guest.live_through(
    (install, start, work, kill, hang, tokens, late_address, stop),
    stop_after=lambda step: step is start and show("ActiveState") != "active",
)
