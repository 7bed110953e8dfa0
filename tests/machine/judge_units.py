"""What the facts of ``guest/units.py`` must say; ``slow``: how many times slower than natively the machine is."""

import json
import re
from collections.abc import Callable
from typing import Final

from guest_host import Facts, assert_came, assert_quiet, of

QUOTA_US = 200_000
FLOOR_US = 40_000
"""``min_cpu_limit`` = 0.4 in a period of 100 ms."""
CHECK_PERIOD_S = 0.1
SIGKILL_TO_QUOTA_S = 2.0


def assert_same(fact: Facts, quota_us: int) -> None:
    """The kernel and systemd have this quota."""
    assert (fact["quota_us"], fact["property_us"]) == (quota_us, 10 * quota_us)


def check_installed(facts: Facts, slow: float) -> None:
    fact = of(facts, "install")
    assert all(answer["code"] == 0 for answer in fact["answers"]), fact["answers"]
    assert fact["verify"]["code"] == 0, fact["verify"]
    assert fact["check"]["code"] == 0, fact["check"]
    assert fact["quota_us"] == QUOTA_US


def check_quota_goes_down(facts: Facts, slow: float) -> None:
    """Under light load, and ``systemctl show`` and the kernel agree about it; the source's labels are told."""
    fact = of(facts, "lowers")
    assert_quiet(fact["answer"])
    assert_came(fact, "lowered_s", "settled_s", "told_s")
    assert_same(fact, FLOOR_US)
    [(path, text)] = fact["drop_ins"].items()
    assert path.startswith("/run/"), "a property of this boot"
    assert re.search(r"CPUQuota=40(\.00)?%", text), "systemd 257 writes two digits"
    job = fact["job"]
    assert (job["status"], job["unit"], job["cpu_limit"], job["current_cpu_limit"]) == (
        "reclaim",
        "work.service",
        2.0,
        0.4,
    )
    assert job["labels"] == {"User": "nobody", "Description": "Work of the night"}
    assert job["problems"] == []


def check_reload_changes_nothing(facts: Facts, slow: float) -> None:
    fact = of(facts, "reloads")
    assert set(fact["seen"].values()) == {FLOOR_US}, (fact["seen"], fact["journal"])
    assert (fact["quota_us"], fact["property_us"]) == (FLOOR_US, 10 * FLOOR_US), fact["journal"]
    assert fact["job"]["counters"]["foreign_writes"] == {"raise": 0, "lower": 0}
    assert (fact["job"]["status"], fact["job"]["override_by"]) == ("reclaim", "")


def check_load_wakes_up(facts: Facts, slow: float) -> None:
    """Two checks, and a third for what is not the agent's time: the load sees its file each 50 ms."""
    fact = of(facts, "wakes")
    assert fact["full_s"] is not None
    # On a host that is busy with other work checks are late.
    assert fact["full_s"] < (3 * CHECK_PERIOD_S + 0.2) * slow or fact["checks"] <= 3
    assert fact["agreed_s"] is not None
    assert fact["job"]["cpu_limit"] == 2.0


def check_restart_of_the_unit(facts: Facts, slow: float) -> None:
    """A new cgroup comes with the lowered limit, which is not taken for an order."""
    fact = of(facts, "restarts")
    assert_quiet(fact["answer"])
    assert fact["after"] == {"quota_us": FLOOR_US, "other": True}
    assert fact["followed_s"] is not None
    assert fact["job"]["cpu_limit"] == 2.0
    assert fact["full_s"] is not None


def check_stopped_unit_starts_with_its_own_quota(facts: Facts, slow: float) -> None:
    fact = of(facts, "stops")
    assert_quiet(fact["answer"])
    assert fact["back_s"] is not None
    assert_quiet(fact["start"])
    assert fact["quota_us"] == QUOTA_US


def check_orders_by_hand_are_respected(facts: Facts, slow: float) -> None:
    """``systemctl set-property`` up and down: shown in ``cpumond status``, held, and left in force in the end."""
    fact = of(facts, "orders")
    for name, cores in (("up", 1.5), ("down", 0.5)):
        one = fact[name]
        assert_quiet(one["answer"])
        assert one["seen_s"] is not None
        held = one["held"]
        assert (held["status"], held["override_by"]) == ("overridden", "systemctl set-property")
        assert (held["cpu_limit"], held["current_cpu_limit"]) == (cores, cores)
        assert f"work.service: systemctl set-property set {cores:g} cores" in one["table"]
        assert "unit_ordered" in one["journal"], one["journal"]
        assert one["held_us"] == cores * 100_000
        assert one["held_s"] is not None, "after its time, or `cpumond unpin`, the monitor goes on"
        assert one["job"]["cpu_limit"] == cores, "from the new order"
    assert_quiet(fact["stopped"])
    assert (fact["left_us"], fact["left_property_us"]) == (50_000, 500_000)


def check_killed_agent(facts: Facts, slow: float) -> None:
    fact = of(facts, "kill")
    assert fact["full_s"] is not None
    assert fact["full_s"] < SIGKILL_TO_QUOTA_S * slow
    assert fact["property_s"] is not None, "systemd believes in it again, too"
    assert_came(fact, "up_s", "lowered_s")
    assert fact["job"]["cpu_limit"] == 2.0


def check_weight(facts: Facts, slow: float) -> None:
    fact = of(facts, "weighs")
    assert_quiet(fact["answer"])
    assert_came(fact, "lowered_s", "agreed_s")
    assert fact["seen"][0] >= fact["seen"][1], "a reload gives nothing back"
    assert max(fact["seen"]) < fact["before"] / 4
    assert fact["quota_us"] == 100_000
    assert fact["job"]["counters"]["foreign_writes"]["raise"] == 0


def check_unit_without_a_limit(facts: Facts, slow: float) -> None:
    """What it may use is all CPUs. On v2 its limit file comes with the first order, and is watched from then on."""
    fact = of(facts, "unlimited")
    assert_quiet(fact["answer"])
    assert fact["before"]["quota_us"] in (-1, 0)
    assert fact["before"]["property_us"] == -1
    assert fact["lowered_s"] is not None
    assert_same(fact, FLOOR_US)
    assert fact["by_hand_s"] is not None


def check_orderly_stop(facts: Facts, slow: float) -> None:
    """Files and beliefs are as they were found, and nothing is left for ``cpumond restore``."""
    fact = of(facts, "leaves")
    assert_quiet(fact["answer"])
    assert_same(fact, QUOTA_US)
    assert fact["plain_us"] in (-1, 0)
    assert fact["plain_property_us"] == -1
    assert fact["CPUWeight"] == "200"
    assert json.loads(fact["state"].partition("\n")[2])["cgroups"] == {}
    assert fact["result"] == "success"


def check_without_polkit(facts: Facts, slow: float) -> None:
    """By file alone, one warning; what a reload gave back is taken again, as nobody asked for it."""
    fact = of(facts, "without_polkit")
    assert_quiet(fact["start"])
    assert fact["lowered_s"] is not None
    assert "does not let this user set properties" in fact["denied"]["problems"][0]
    assert fact["journal"].count("units_by_file") == 1
    assert fact["property_us"] == 10 * QUOTA_US
    assert fact["reloaded_us"] == QUOTA_US
    assert fact["again_s"] is not None
    assert fact["after"]["override_by"] == ""
    assert fact["after"]["cpu_limit"] == 2.0
    assert_quiet(fact["stop"])
    assert fact["left_us"] == QUOTA_US
    assert fact["result"] == "success"


CHECKS: Final[tuple[Callable[[Facts, float], None], ...]] = (
    check_installed, check_quota_goes_down, check_reload_changes_nothing, check_load_wakes_up,
    check_restart_of_the_unit, check_stopped_unit_starts_with_its_own_quota, check_orders_by_hand_are_respected,
    check_killed_agent, check_weight, check_unit_without_a_limit, check_orderly_stop,
    check_without_polkit,
)  # fmt: skip
