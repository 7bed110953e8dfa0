"""When a week's waste is sent, and how often: through failures, kills and restarts."""

import sys
from pathlib import Path

import msgspec
import pytest

from cpumond.scheduler.history.savings import WEEK_S, monday_before
from cpumond.scheduler.history.waste import WasteSummary, WasteView
from cpumond.scheduler.service import waste_notices
from cpumond.scheduler.service.waste_notices import AGAIN_S, KIND, MAX_TRIES, Notice, WasteNotices, run
from cpumond.scheduler.store import Change, StoreError

MONDAY = monday_before(1_780_000_000.0)
AT_S = 6 * 3600.0


class Site:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = MONDAY + AT_S
        self.records: dict[str, bytes] = {"of another": b"{"}
        self.answer, self.is_refused, self.sent, self.asked = "", False, [], []
        monkeypatch.setattr(waste_notices, "post", self.post)
        self.restart()

    def restart(self, command: tuple[str, ...] = ()) -> None:
        self.notices = WasteNotices(
            self, self.write, lambda: self.at, self.read, AT_S, "" if command else "http://x", command, "c"
        )

    def load(self):
        return ((KIND, key, value) for key, value in self.records.items())

    async def write(self, changes: list[Change]) -> None:
        if self.is_refused:
            raise StoreError("refused")
        for change in changes:
            if change.value is None:
                del self.records[change.key]
            else:
                self.records[change.key] = change.value

    async def read(self, now: float, weeks_ago: int) -> WasteView:
        since = monday_before(now) - weeks_ago * WEEK_S
        self.asked.append(since)
        users = [WasteSummary("default", name, 4.0, 1.0, 0.0, 0.0, [], 0, f"{name}.") for name in ("-x", "ann")]
        return WasteView(since, since + WEEK_S, WEEK_S, users, [])

    async def post(self, _: str, body: bytes) -> str:
        self.sent.append(msgspec.json.decode(body)["since"])
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    async def look(self, after_s: float = 0.0) -> None:
        self.at += after_s
        self.notices.take_if_due()
        if self.notices._running is not None:
            await self.notices._running


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


async def test_a_week_is_reported_once_when_its_hour_has_come(site):
    site.records["user:gone"] = msgspec.json.encode(Notice(MONDAY - 4 * WEEK_S))
    site.restart()
    site.at -= 1.0
    await site.look()
    assert site.sent == [MONDAY - 2 * WEEK_S], "the week before, whose hour is over"
    await site.look(1.0)
    await site.look(AGAIN_S)
    site.restart()
    await site.look()
    assert site.sent[1:] == [MONDAY - WEEK_S]
    site.restart()
    await site.look(3 * WEEK_S)
    assert site.sent[2:] == [MONDAY + 2 * WEEK_S]
    assert set(site.records) == {"webhook", "of another"}
    site.restart()
    await site.look(-WEEK_S)
    assert len(site.sent) == 3, "a clock that was set back tells nothing again"


@pytest.mark.parametrize("answer", ["status 500", TimeoutError(), OSError("no route")])
async def test_what_fails_is_tried_again_a_few_times_also_by_another_process(site, answer):
    site.answer = answer
    await site.look()
    await site.look(AGAIN_S - 1.0)
    assert len(site.sent) == 1
    for _ in range(2 * MAX_TRIES):
        site.restart()
        await site.look(AGAIN_S)
        await site.look(AGAIN_S)
    assert len(site.sent) == MAX_TRIES
    site.answer = ""
    await site.look(WEEK_S)
    assert len(site.sent) == MAX_TRIES + 1


async def test_what_was_under_way_at_a_kill_is_not_sent_again(site):
    site.answer = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        await site.notices._send_all(site.at)
    site.restart()
    await site.look()
    assert len(site.sent) == 1


async def test_nothing_is_sent_that_cannot_be_noted(site):
    site.is_refused = True
    await site.look()
    assert not site.sent
    site.is_refused = False
    await site.look(AGAIN_S)
    assert len(site.sent) == 1


async def test_a_command_gets_each_users_name_and_text(site, tmp_path: Path):
    script = "import sys, pathlib; pathlib.Path(sys.argv[1], sys.argv[-1]).write_text(sys.stdin.read())"
    site.restart((sys.executable, "-c", script, str(tmp_path)))
    await site.look()
    [told] = tmp_path.iterdir()
    assert (told.name, told.read_text().splitlines()[2]) == ("ann", 'ann. (tree "default")')
    assert set(site.records) == {"user:ann", "of another"}


def test_a_command_is_bounded_and_gets_no_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PGPASSWORD", "x")
    assert run([sys.executable, "-c", "import os; raise SystemExit('PGPASSWORD' in os.environ)"], "") == ""
    assert run([sys.executable, "-c", "raise SystemExit(3)"], "") == "exit code 3"
    monkeypatch.setattr(waste_notices, "TIMEOUT_S", 0.2)
    with pytest.raises(waste_notices.subprocess.TimeoutExpired):
        run([sys.executable, "-c", "import signal; signal.pause()"], "")
