"""README and its pictures are no older than what they show."""

import re
import shutil
from pathlib import Path

import pictures
import pytest
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
