"""Runs inside the guest: the service asks Podman at three sockets, as Docker's too, with a drop-in and without."""

import json
import shutil
from pathlib import Path
from typing import Any

from guest_tools import WRAPPER, install_files, live_through, run, show, systemctl, wait, write_file

UNIT = "cpumond.service"
DROP_IN = Path("/etc/systemd/system/cpumond.service.d/engines.conf")
SOURCES = Path("/etc/cpumond/conf.d/engines.toml")
DOCKER, PODMAN, OF_USER = "/run/docker.sock", "/run/podman/podman.sock", "/run/user/1000/podman/podman.sock"
SOCKETS = (DOCKER, PODMAN, OF_USER)
SECRET = "/run/other/other.sock"  # noqa: S105
ENGINE = "[Service]\nExecStart=/usr/bin/podman system service --time=0 unix://{socket}\n"


def cpumond(*arguments: str) -> dict[str, Any]:
    return run("cpumond", *arguments)


def ask_doctor() -> list[dict[str, str]]:
    """What it finds about engines."""
    # A finding that is an error has a line on standard error, too, which comes after the answer.
    answer, _ = json.JSONDecoder().raw_decode(cpumond("doctor", "--json")["output"])
    findings = answer["findings"]
    return [each for each in findings if each["check"].startswith("engine ")]


def ask_agent() -> list[str]:
    """The running agent's problems, once each engine has answered or refused."""
    answer = run("cpumond", "status", "--json")
    return list(json.loads(answer["output"])["problems"]) if answer["code"] == 0 else [answer["output"]]


def look() -> dict[str, Any]:
    """What the service sees of the sockets, with its rights, and what is said about it."""
    pid = show(UNIT, "MainPID")
    rights = [f"--{which}-caps=+dac_override" for which in ("inh", "ambient")]
    inside = ("nsenter", f"--target={pid}", "--mount", "setpriv", "--reuid=cpumond", "--clear-groups", *rights)
    return {
        "state": show(UNIT, "ActiveState"),
        "seen": [path for path in (*SOCKETS, SECRET) if run(*inside, "stat", path)["code"] == 0],
        "problems": ask_agent(),
        "doctor": ask_doctor(),
    }


def restart() -> None:
    systemctl("daemon-reload")
    systemctl("restart", UNIT)
    wait(lambda: show(UNIT, "ActiveState") == "active")


def install() -> dict[str, Any]:
    write_file("/usr/bin/cpumond", WRAPPER, 0o755)
    install_files(
        {
            "systemd/cpumond.service": "/usr/lib/systemd/system/cpumond.service",
            "systemd/cpumond.sysusers.conf": "/usr/lib/sysusers.d/cpumond.conf",
            "systemd/cpumond.tmpfiles.conf": "/usr/lib/tmpfiles.d/cpumond.conf",
            "config/cpumond.toml": "/etc/cpumond/cpumond.toml",
        }
    )
    # The guest's files lie on an overlay already.
    storage = '[storage]\ndriver = "vfs"\ngraphroot = "/var/lib/containers/storage"\nrunroot = "/run/containers"\n'
    write_file("/etc/containers/storage.conf", storage)
    run("systemd-sysusers")
    run("systemd-tmpfiles", "--create", "cpumond.conf")
    for name, path in (("docker", DOCKER), ("of-user", OF_USER), ("other", SECRET)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_file(f"/etc/systemd/system/{name}.service", ENGINE.format(socket=path))
    systemctl("daemon-reload")
    started = [systemctl("start", each) for each in ("podman.socket", "docker", "of-user", "other")]
    took_s = wait(lambda: all(Path(path).is_socket() for path in (*SOCKETS, SECRET)))
    return {"started": started, "took_s": took_s}


def before() -> dict[str, Any]:
    """Sources alone: the unit hides all sockets."""
    written = cpumond("init", "--yes")
    drop_in = DROP_IN.read_text() if DROP_IN.exists() else ""
    shutil.rmtree(DROP_IN.parent, ignore_errors=True)
    restart()
    return {"written": written, "sources": SOURCES.read_text(), "drop_in": drop_in, **look()}


def opened() -> dict[str, Any]:
    """With the drop-in that a second run writes again."""
    written = cpumond("init", "--yes")
    verified = run("systemd-analyze", "verify", "--man=no", UNIT)
    restart()
    again = cpumond("init", "--yes")
    return {"written": written, "again": again, "verified": verified, **look()}


live_through([install, before, opened])
