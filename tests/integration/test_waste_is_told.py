"""Waste of the last week, told once: a real scheduler with a history, a webhook that hangs and fails, a command."""

from __future__ import annotations

import csv
import io
import json
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from answering import Asked, listen
from commands import run_command
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment
from waiting import wait_until
from web_site import expect

from cpumond.scheduler.history.model import COVERED_KEY, DAY_S, HOUR_S, KINDS, POOL, USER, Amounts, Key, Tick
from cpumond.scheduler.history.savings import WEEK_S, monday_before
from cpumond.scheduler.history.store import HistoryStore
from cpumond.scheduler.store import Change
from cpumond.scheduler.store.sqlite import open_sqlite_store

if TYPE_CHECKING:
    from playwright.sync_api import Page

SCRIPT = "import sys; print('to', sys.argv[2], sys.stdin.read(), sep='|', file=open(sys.argv[1], 'a'))"


def play_last_week(scheduler: SchedulerProcess, since: float) -> str:
    """Jobs of 8 cores that used 1.9 and ended on Tuesday of the week before, and the history's totals of that day."""
    scheduler.start()
    scheduler.create_pool("ml")
    operation_id = scheduler.start_operation("ml", job_count=3, cpu=8.0, title="train 17")
    node = PlayedNode(scheduler, "n1", 24.0)
    node.register()
    node.beat_until(lambda: len(node.jobs) == 3, "three jobs")
    for job_id in list(node.jobs):
        node.end(job_id, cpu_seconds=1.9 * 3600, ordered_cpu_seconds=8.0 * 3600)
    node.beat_until(lambda: scheduler.state_of(operation_id) == "completed", "the operation has ended")
    user = str(scheduler.get(f"operations/{operation_id}")["user"])
    scheduler.stop()
    store = open_sqlite_store(str(scheduler.state_dir / "scheduler.db"))
    for kind, key, value in list(store.load()):
        if kind in ("job", "operation"):
            record = json.loads(value) | {"start_time": since + DAY_S, "finish_time": since + DAY_S + HOUR_S}
            store.write([Change(kind, key, json.dumps(record).encode())])
    store.close()
    history = HistoryStore(str(scheduler.state_dir / "history.db"), 400 * DAY_S, 60.0, 2**26, time.time())
    amounts = Amounts(used=5.7 * HOUR_S, ordered=24.0 * HOUR_S, reclaimed=9.0 * HOUR_S)
    totals = {
        Key(USER, "default", user): amounts,
        Key(POOL, "default", "ml"): amounts,
        COVERED_KEY: Amounts(seconds=60),
    }
    empty = tuple(array("f") for _ in KINDS)
    history.add(Tick(since + DAY_S + HOUR_S, 60.0, tuple([] for _ in KINDS), empty, totals=totals))
    history.close()
    return user


def test_each_owner_hears_once_while_a_webhook_hangs_and_fails(scheduler: SchedulerProcess, tmp_path: Path) -> None:
    since, told = monday_before(time.time()) - WEEK_S, tmp_path / "told"
    user = play_last_week(scheduler, since)
    posts: list[dict[str, Any]] = []
    is_let_go = threading.Event()

    def answer(asked: Asked) -> None:
        posts.append(json.loads(asked.body))
        assert is_let_go.wait(60.0)
        asked.reply(200 if len(posts) > 1 else 500)

    command = json.dumps([sys.executable, "-c", SCRIPT, str(told)])
    with listen(answer) as url:
        scheduler.write_config(f'[waste_summary]\nwebhook = "{url}/waste"\ncommand = {command}\nhour = 0\n')
        scheduler.start()
        wait_until(lambda: posts)
        scheduler.wait_updates(3)  # neither updates nor requests wait for it
        is_let_go.set()
        wait_until(lambda: told.exists() and "train" in told.read_text())
        assert scheduler.events("waste_notice_failed")[0]["error"] == "status 500"
        scheduler.kill()
        scheduler.start()
        wait_until(lambda: len(posts) == 2)
        scheduler.stop()
        scheduler.start()
        shown = scheduler.get("waste")
        scheduler.wait_updates(3)

        def report(*words: str) -> str:
            done = run_command(["report", "--scheduler", scheduler.url, "--waste", *words], clean_environment())
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert json.loads(report("--json")) == shown
        assert "request 2.5" in report("--pool", "ml")
        rows = list(csv.DictReader(io.StringIO(report("-o", "csv"))))
        scheduler.stop()
    assert len(posts) == 2
    assert posts[0] == posts[1] == {"cluster_name": "cpumond", **shown}
    text = told.read_text()
    assert text.count(f"to|{user}|") == 1
    sentence = f'"{user}" requested 24 core-hours and used 5.7 (23.8 %); limits were lowered by 9.0. (tree "default")'
    assert sentence in text.splitlines()
    assert '- "train #": 3 jobs requested 8 cores and used 1.9 on average: request 2.5.' in text.splitlines(), text
    found = [(row["kind"], row["name"], row["title"], row["better_cores"]) for row in rows]
    train = "train #", "2.5"
    assert found == [("user", user, "", ""), ("user", user, *train), ("pool", "ml", "", ""), ("pool", "ml", *train)]
    assert shown["users"][0]["known"] == 24.0


@pytest.mark.browser
def test_my_work_and_a_pools_page_show_it(page: Page, scheduler: SchedulerProcess) -> None:
    play_last_week(scheduler, monday_before(time.time()) - WEEK_S)
    scheduler.start()
    for place, name in (("mine", "My work"), ("pools/default/ml", "ml")):
        page.goto(f"{scheduler.url}/#/{place}")
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        part = page.get_by_role("region", name="Requested and not used in the last week")
        expect(part).to_contain_text("requested 24 core-hours and used 5.7 (23.8 %)")
        [cells] = [row.split("\t") for row in part.get_by_role("row").all_inner_texts()[1:]]
        assert [cells[0], cells[-1]] == ["train #", "2.5"]
