"""Runs inside the guest before and after an orderly reboot and a hard one, with a low limit and a reclaiming job."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guest_tools import install_files, journal_after, run, systemctl, wait, write_file
from systemd_executor import driver, left_over, read_idle
from units import AGENT, CPU_ROOT, PATIENCE_S, PROGRAM, RULES, SLICE, UNIT, VERSION, install, look, set_load, settle

FACTS = Path("/out/reboot/facts.json")
AGAIN = Path("/machine/again")
WITNESSED = Path("/var/lib/witness")
QUOTA_FILE = Path(CPU_ROOT, SLICE, UNIT, "cpu.max" if VERSION == 2 else "cpu.cfs_quota_us")
WITNESS_UNIT = f"""
[Unit]
Description=What the unit has before the agent comes, and after it has gone
After={UNIT}
Before={AGENT}
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=cp {QUOTA_FILE} {WITNESSED}/up
ExecStop=cp {QUOTA_FILE} {WITNESSED}/down
ExecStop=sh -c 'systemctl show --value --property CPUQuotaPerSecUSec {UNIT} >{WITNESSED}/down_property'
"""


def read_witness() -> dict[str, str]:
    seen = {path.name: path.read_text().strip() for path in WITNESSED.iterdir()}
    for name in seen:
        (WITNESSED / name).unlink()
    return seen


def start_reclaimed() -> dict[str, Any]:
    """What was left of jobs on reclaimed CPU and of their class, and what the next one finds."""
    was_idle, left = read_idle(), left_over()
    with driver("reclaimed") as d:
        recovered = d.recovered  # type: ignore[attr-defined]
        d.start("reclaimed", "sleep", "infinity", reclaimed=True)
        started = wait(lambda: left_over()["cgroups"])
    return {
        "was_idle": was_idle, "left": left, "recovered": recovered, "started": started, "is_idle": read_idle(),
        "cgroups": left_over()["cgroups"],
    }  # fmt: skip


def see() -> dict[str, Any]:
    """This boot, from before the agent came until it has lowered the unit's limit."""
    witness = read_witness()
    return {
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "witness": witness,
        "settled_s": settle(),
        "state": Path("/var/lib/cpumond/originals.state").read_text().partition("\n")[2],
        "failed_units": run("systemctl", "--failed", "--no-legend")["output"],
        "journal": journal_after("", AGENT),
        "reclaimed": start_reclaimed(),
        **look(),
    }


def go_down(how: str) -> None:
    """Have the guest begin anew after this. The disk has no journal: what is not on it yet would be anything."""
    os.sync()
    AGAIN.write_text(how)


def before() -> dict[str, Any]:
    """The agent and the unit come with every boot from now on."""
    if not PROGRAM.exists():
        install()
    install_files({"systemd/cpumond.rules": str(RULES)})
    WITNESSED.mkdir()
    write_file("/etc/systemd/system/witness.service", WITNESS_UNIT)
    set_load(False)
    answers = [
        systemctl("daemon-reload"),
        systemctl("restart", "polkit.service"),
        systemctl("set-property", "--runtime", UNIT, "CPUQuota=200%"),
        systemctl("add-wants", "multi-user.target", UNIT, "witness.service"),
        systemctl("enable", AGENT),
        systemctl("restart", UNIT, AGENT),
        systemctl("start", "witness.service"),
    ]
    fact = {"answers": answers, **see()}
    go_down("reboot")
    return fact


def rebooted() -> dict[str, Any]:
    fact = see()
    go_down("cut")
    return fact


def cut() -> dict[str, Any]:
    fact = see()
    fact["answers"] = [systemctl("disable", "--now", AGENT), systemctl("stop", UNIT)]
    fact["stopped"] = wait(lambda: not QUOTA_FILE.exists(), PATIENCE_S)
    return fact


STEPS: tuple[Callable[[], dict[str, Any]], ...] = (before, rebooted, cut)

if __name__ == "__main__":
    facts = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    step = STEPS[len(facts)]
    facts[step.__name__] = step()
    FACTS.write_text(json.dumps(facts, indent=1))
