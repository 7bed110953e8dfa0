"""README and its pictures are no older than what they show."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pictures
import pytest
import terminal
from bench.peers import compare

from cpumond.monitor.model import MonitorSettings

MAX_LINES = 120
README = pictures.README.read_text(encoding="utf-8")


def test_pictures_are_no_older_than_what_they_show(tmp_path: Path) -> None:
    """One that is older is named with the command that makes it; another comment in what it shows is no change."""
    assert pictures.find_older() == []
    for source in (path.partition(":")[0] for paths in pictures.SOURCES.values() for path in paths):
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pictures.ROOT / source, tmp_path / source)
    view = tmp_path / "cpumond/cli/demo/view.py"
    text = view.read_text(encoding="utf-8")
    view.write_text(f"# an idea\n\n{text}", encoding="utf-8")
    assert pictures.find_older(tmp_path) == []
    view.write_text(f"TEXT = 'else'\n{text}", encoding="utf-8")
    [said] = pictures.find_older(tmp_path)
    assert re.search(r"demo\.svg.*older than .*view\.py.*`python tests/pictures\.py demo`", said)


def test_the_figures_of_the_rules_are_those_that_they_give_now() -> None:
    seconds, seeds = pictures.PROBE
    figures, run = pictures.load("peers.json"), "run `python tests/pictures.py peers`"
    assert compare(seconds, seeds)["rows"] == figures["probe"], run
    assert pictures.draw_peers(figures) == (pictures.PICTURES / "peers.svg").read_text(encoding="utf-8"), run
    shown = (pictures.PICTURES / "real-servers.svg").read_text(encoding="utf-8")
    assert pictures.draw_servers(pictures.load("real-servers.json")) == shown


def test_the_figures_in_readme_are_the_measured_ones() -> None:
    assert pictures.fill(README) == README, "run `python tests/pictures.py readme`"
    with pytest.raises(ValueError, match="'trust'"):
        pictures.fill(README.replace("<!-- trust -->", ""))


def test_the_other_figures_in_readme_are_those_of_the_sources() -> None:
    def read(path: str) -> str:
        return (pictures.ROOT / path).read_text(encoding="utf-8")

    [watchdog] = re.findall(r"WatchdogSec=\w+", README)
    assert watchdog in read("systemd/cpumond.service").splitlines()
    [size] = re.findall(r"(\d+ MB) in `\.venv`", README)
    assert [size] == re.findall(r"cpumond and its libraries: (\d+ MB)", read("packaging/venv.sh"))
    assert "systemd >= 252" in README
    assert "systemd 252 or later" in read("docs/install.md")
    default, peak = MonitorSettings(), MonitorSettings(limit_rule="peak")
    assert f"check ({default.check_period_s:g} s by default; rule `peak` looks each {peak.poll_s:g} s" in README


def test_readme_is_short_and_shows_what_is_in_the_repository() -> None:
    assert len(README.splitlines()) <= MAX_LINES
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert len(shown) >= 3
    sizes = {path: (pictures.ROOT / path).stat().st_size for path in shown}
    assert {path: size for path, size in sizes.items() if size > 200_000} == {}


# the recording


def show(*texts: str) -> list[str]:
    screen = terminal.Screen()
    for text in texts:
        screen.feed(text)
    rows = screen.show()
    while rows and not rows[-1]:
        rows = rows[:-1]
    return ["|".join(f"{column}:{style}:{text}" for column, style, text in row) for row in rows]


def test_a_line_that_is_drawn_again_stands_there_once() -> None:
    assert show("a\r\nold\r\nb", "\r\x1b[2K\x1b[1A\x1b[2Knew\r\nc") == ["0::a", "0::new", "0::c"]


def test_columns_styles_and_bars_are_runs_of_their_own() -> None:
    assert show("\x1b[1mpool  job\x1b[0m x y  ██░·") == ["0:b:pool|6:b:job|10::x y|15:used:██|17:may:░|18:order:·"]


def test_a_full_screen_scrolls_and_a_long_line_wraps() -> None:
    assert show("\r\n".join(map(str, range(terminal.ROWS + 2))))[0] == "0::2"
    assert show("x" * (terminal.COLUMNS + 1)) == [f"0::{'x' * terminal.COLUMNS}", "0::x"]


def test_pictures_are_taken_between_changes_that_belong_together() -> None:
    chunks = [terminal.Chunk(*each) for each in ((0.0, "a"), (0.01, "b"), (1.0, "c"), (1.3, "d"), (2.5, "e"))]
    frames = terminal.list_frames(chunks, 0.9)
    assert [(frame.at_s, frame.rows[0][0][2]) for frame in frames] == [(0.01, "ab"), (1.0, "abc"), (2.5, "abcde")]


def test_who_wants_less_motion_sees_the_end() -> None:
    frames = terminal.list_frames([terminal.Chunk(0.0, "a"), terminal.Chunk(2.0, "b")], 0.5)
    drawn = terminal.draw(frames, "title", 2.0, 1.0)
    [last] = re.findall(r"\.film\{transform:translateX\((-\d+)px\)", drawn)
    assert f'<g transform="translate({-int(last)})"><use href="#r1"' in drawn
    assert "@media (prefers-reduced-motion:reduce){.film{animation:none}}" in drawn
    assert "0%{transform:translateX(0px)}50%" in drawn


def test_a_recording_that_does_not_show_the_demo_is_not_kept() -> None:
    text = (pictures.PICTURES / "demo.svg").read_bytes()
    told = (
        "\nAfter 60 s on a node of 1 core (real kernel), core-seconds by its counters:\n"
        "  requested 80.4, used 21.2, reclaimed 18.0, used by jobs that were started on freed CPU 9.1\n"
        "simulation had its whole guarantee back 2 times, 0.41, {} s after it woke up\n"
        "It used its whole request 0.1 s after it woke up.\nfrom heartbeat to process 28 ms\n{}"
    )
    for late, rest in (("9.1", ""), ("0.4", "Not seen: simulation woke up.\n")):
        with pytest.raises(SystemExit, match="Nothing was written"):
            pictures.keep_demo([terminal.Chunk(0.0, told.format(late, rest))])
    assert (pictures.PICTURES / "demo.svg").read_bytes() == text
