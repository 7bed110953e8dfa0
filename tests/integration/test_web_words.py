"""A job's page says of its limit what ``cpumond explain`` says: both tell the same answers of an agent."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

import msgspec
import pytest

from cpumond.cli import explain
from cpumond.cli.client import ExplainAnswer

pytestmark = pytest.mark.browser

COUNT = 600
TELL = """async (answers) => {
  const words = await import('/job_words.js');
  return answers.map((e) => ({
    why: words.describeWhy(e), next: words.describeNext(e), facts: Object.fromEntries(words.listFacts(e)),
    reasons: e.decisions.map(words.describeReason),
  }));
}"""
PAGE_ONLY = {"limit now", "used in the last check", "smoothed use", "throttled", "source"}
"""Facts that the command line has in one line, ``use``, or in the sentence above."""


class StaticFiles(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name of the base class
        pass


@pytest.fixture
def url() -> Iterator[str]:
    """The files of the pages."""
    directory = str(resources.files("cpumond.web") / "static")
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(StaticFiles, directory=directory)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def make_answer(r: random.Random) -> dict[str, Any]:
    """An explain answer; also such as an agent would hardly give."""

    def maybe(value: object) -> object:
        return r.choice([None, value])

    def cores() -> float:
        # Some lie just between two numbers of the precision that is shown.
        known = (0.00005, 0.004, 0.05, 0.0625, 0.125, 0.3125, 0.8125, 1.125, 1.0, 2.5, 3.25, 10.0, 12.345, 1024.5)
        return r.choice([*known, r.uniform(0, 20), r.uniform(0, 1), r.uniform(0, 0.01), r.randrange(800) / 16])

    mode = r.choice(["off", "shadow", "up-only", "reclaim"])
    cap = cores()
    limit = r.choice([cap, min(cap, cores())])
    options: dict[str, Any] = {
        "relative_lower_bound": r.choice([0.6, 0.55, 0.1 + 0.2]), "relative_upper_bound": 0.9,
        "increase_coefficient": 1.45, "decrease_coefficient": r.choice([0.97, 1e-5, 2 / 3]),
        "min_cpu_limit": r.choice([1.0, 0.1, 0.05, 0.0, 2.5, 1_000_000.0]), "min_limit_ratio": r.choice([0.0, 0.25]),
        "headroom_ratio": r.choice([0.0, 0.0, 0.2]), "vote_mode": r.choice(["document", "ytsaurus"]),
        "direction": r.choice(["both", "both", "up-only", "down-only"]), "actuator": r.choice(["quota", "weight"]),
    }  # fmt: skip
    floor = min(cap, max(options["min_cpu_limit"], options["min_limit_ratio"] * cap))
    size = r.choice([3, 5])
    votes = [r.choice([-1, -1, 0, 1, 1]) for _ in range(r.choice([0, size - 1, size, size]))]
    if r.random() < 0.6:
        votes = [r.choice([-1, 1])] * len(votes)
    kinds = ("grow", "shrink", "restore", "foreign-raise", "foreign-lower", "reapply", "adopt", "pin", "mode", "new")
    decisions = [
        {
            "at": 1.7e9 + r.randrange(10**6), "kind": r.choice(kinds), "old_cores": maybe(cores()),
            "new_cores": maybe(cores()), "applied_cores": maybe(cores()), "usage_cores": maybe(cores()),
            "smoothed_cores": maybe(cores()), "throttled_ratio": r.choice([0.0, 0.255, 0.125, 1.0]),
            "votes_sum": maybe(r.randint(-5, 5)), "result": r.choice(["applied", "failed", "shadow"]),
            "pressure_ratio": r.choice([0.0, 0.0, 0.125, 1.0]), "by_look": r.choice([False, True]),
        }
        for _ in range(r.randrange(4))
    ]  # fmt: skip

    def quota() -> dict[str, Any]:
        return {
            "quota_us": maybe(r.randrange(1000, 400_000)), "period_us": 100_000, "burst_us": r.choice([None, 0, 500]),
            "weight": maybe(1024), "cores": None,
        }  # fmt: skip

    peak = {
        "peak_cores": maybe(cores()), "target_cores": maybe(cores()), "caution": r.choice([0.0, 0.125, 7.0]),
        "half_life_s": r.choice([5.0, 18.0625, 640.0]), "watched_s": r.choice([0.0, 61.5, 1e6]),
        "held_count": r.choice([0, 1, 9]), "held_s": r.choice([0.0, 1.9]), "held_ratio": r.choice([0.0, 0.0031, 1.0]),
        "throttle_budget": r.choice([0.0, 0.004]), "because": "3.2 = 3.05 + 5 %.", "next": "lower it to 3",
    }  # fmt: skip
    return {
        "peak": r.choice([None, peak]),
        "job_id": r.choice(["a", "job <b>", "é"]), "cgroup": "c/d", "operation_id": "", "mode": mode,
        "status": r.choice([mode, mode, "refused", "contested", "overridden", "pinned"]),
        "cpu_limit": r.choice([cap, max(cap, cores())]), "current_cpu_limit": limit, "monitor_cpu_limit": limit,
        "refused": r.choice(["", "", "", "it is a slice"]), "usage": maybe(cores()),
        "smoothed_cpu_usage": maybe(cores()), "votes_sum": None, "throttled_ratio": r.choice([0.0, 0.125, 0.5, 1.0]),
        "last_result": r.choice(["", "applied"]), "last_error": r.choice(["", "EIO"]),
        "override_left_s": r.choice([None, None, None, 0.0, 570.5, 3601.5]),
        "override_by": r.choice(["", "systemctl set-property"]),
        "pinned_cpu_limit": r.choice([None, None, None, 1.0]), "pinned_until": maybe(1.7e9),
        "fast_restores": r.choice([0, 2]), "write_errors": r.choice([0, 1, 3]), "job_cpu_monitor": options,
        "bounds": {
            "floor": r.choice([floor, min(cap, cores()), cap]), "cap": cap, "lower_bound": 0.6 * limit,
            "upper_bound": 0.9 * limit, "quota_found": maybe(cap), "ancestor_cap": maybe(cap),
            "ancestor": r.choice(["", "x"]),
        },
        "window": {
            "size": size, "threshold": r.choice([1, 2, 3]), "values": [maybe(cores()) for _ in votes], "votes": votes,
            "votes_sum": None,
        },
        "in_force": quota(), "found": quota(), "notes": r.choice([[], ["one", "two"]]),
        "contested_losses": r.choice([0, 3]),
        "pressure": maybe({"some_10s_ratio": 0.0625, "some_60s_ratio": 0.5, "some_total_s": 1.0}),
        "aggregated": maybe({
            "smoothed_cpu_s": 10.5, "preemptible_cpu_s": 2.0, "preempted_cpu_s": 3.2, "max_cpu_s": 100.25,
            "throttled_cpu_s": r.choice([0.0, 2.25]), "late_cpu_s": r.choice([0.0, 0.25]),
        }),
        "decisions": decisions, "directory": r.choice(["", "/d"]),
        "source": r.choice(["", "/p/*", "ordered by the scheduler: pool x, task y"]), "cpu_limit_given": maybe(1.0),
        "xattr_mode": r.choice([None, "off"]), "paused": r.random() < 0.2, "held_s": r.choice([0.0, 0.0, 12.5]),
        "start_left_s": r.choice([0.0, 0.0, 0.0, 5.0]),
    }  # fmt: skip


def set_alike(text: str) -> str:
    """The page sets a space before the percent sign, and writes what is not known as a long dash."""
    return text.replace(" %", "%").replace("\N{EN DASH}", "-")


def test_the_page_says_the_same_as_the_command_line(page, url):
    r = random.Random(5)
    answers = [make_answer(r) for _ in range(COUNT)]
    page.goto(f"{url}/icon.svg")
    shown = page.evaluate(TELL, answers)
    starts = set()
    for answer, told in zip(answers, shown, strict=True):
        e = msgspec.convert(answer, ExplainAnswer)
        facts = {name: set_alike(text) for name, text in explain.list_facts(e)}
        page_facts = {name.lower(): set_alike(text) for name, text in told["facts"].items()}
        assert set_alike(told["why"]) == set_alike(explain.describe_why(e))
        assert set_alike(told["next"]) == explain.describe_next(e)
        assert [set_alike(text) for text in told["reasons"]] == [explain.describe_reason(d) for d in e.decisions]
        assert {name: text for name, text in page_facts.items() if name not in PAGE_ONLY} == {
            name: text for name, text in facts.items() if name not in ("job", "use")
        }
        assert facts["job"].endswith(f", {page_facts['source']}")
        assert f"{page_facts['throttled'].partition(' ')[0]} of the periods throttled" in facts["use"]
        assert f"smoothed {page_facts['smoothed use'].removesuffix(' cores')}," in facts["use"]
        starts.add(told["why"].partition("cores")[2][:30])
    assert len(starts) >= 8  # nothing is ever written, contested, overridden, pinned, off, shadow, ...
