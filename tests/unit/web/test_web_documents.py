"""The runbook as a page and the glossary as a document: both are as their sources, and links find their place."""

import re
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest
import yaml
from packaging_script import load_script
from starlette.applications import Starlette
from starlette.testclient import TestClient

from cpumond.web import make_web_routes, read_files

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("web_documents")


def test_what_is_made_of_the_sources_is_there(script: ModuleType) -> None:
    for path, text in script.make_all().items():
        assert path.read_text(encoding="utf-8") == text, "run: python packaging/web_documents.py"


def test_each_alert_leads_to_a_section_that_is_served() -> None:
    client = TestClient(Starlette(routes=make_web_routes("scheduler.html")))
    groups = yaml.safe_load((ROOT / "config" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"]: rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"]}
    assert len(alerts) > 20
    for alert, url in alerts.items():
        address = urlsplit(url)
        assert address.scheme in ("http", "https"), url
        assert address.netloc, url
        page = client.get(address.path)
        assert page.status_code == 200
        assert f'<h3 id="{address.fragment}">{alert}</h3>' in page.text


def test_links_within_the_runbook_find_their_place(script: ModuleType) -> None:
    page = read_files()["runbook.html"].content.decode()
    places = re.findall(r' id="([^"]*)"', page)
    assert len(set(places)) == len(places)
    links = re.findall(r'<a href="([^"]*)"', page)
    assert len(links) >= 10
    assert {link.removeprefix("#") for link in links} <= set(places)
    assert "<script" not in page
    assert "**" not in page


def test_markup_in_a_document_is_text(script: ModuleType) -> None:
    text = "# A & B\n\nUse `<b>` and **x**, [there](#a--b),\n[beside](other.md) <i>.\n\n- one `a*b`\n- two"
    page = script.make_page(text)
    assert '<h1 id="a--b">A &amp; B</h1>' in page
    assert (
        '<p>Use <code>&lt;b&gt;</code> and <strong>x</strong>, <a href="#a--b">there</a>, beside &lt;i&gt;.</p>' in page
    )
    assert "<li>one <code>a*b</code></li>\n<li>two</li>" in page
    with pytest.raises(SystemExit, match="which is all there may be"):
        script.make_page("# A\n\n| a | b |")


WORDS = (
    "fair share", "demand", "allocated", "used", "guarantee", "integral guarantee", "volume", "starving", "reclaimed",
    "late", "throttled", "held back", "gang", "shadow", "reclaim", "weight", "quota", "waiting", "requested", "limit",
)  # fmt: skip


def test_the_glossary_has_each_word_once(script: ModuleType) -> None:
    entries = script.read_glossary(read_files()["glossary.js"].content.decode())
    names = [name.lower() for group, _ in entries for name in group]
    assert len(set(names)) == len(names)
    assert set(WORDS) <= set(names)
    assert [group[0] for group, _ in entries] == sorted((group[0] for group, _ in entries), key=str.lower)
    for group, text in entries:
        assert group[0][0].isupper(), group
        assert text.endswith("."), text
        assert "`" not in text, "a tip is plain text"
