"""The routes of the static files: what is served, with which headers, and what is not."""

import gzip
import re

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from cpumond.web import SECURITY_HEADERS, TYPES, accepts_gzip, make_web_routes, matches_etag, read_files

FILES = read_files()


@pytest.fixture(scope="module")
def client() -> TestClient:
    async def refuse(_: object, error: Exception) -> PlainTextResponse:
        assert isinstance(error, HTTPException)
        return PlainTextResponse(error.detail, error.status_code, error.headers)

    app = Starlette(routes=make_web_routes("scheduler.html"), exception_handlers={HTTPException: refuse})
    return TestClient(app, headers={"accept-encoding": "identity"})


def test_the_page_and_each_file_are_served_as_they_are_with_all_headers(client):
    assert client.get("/").content == FILES["scheduler.html"].content
    for name, file in FILES.items():
        answer = client.get(f"/web/{name}")
        assert (answer.status_code, answer.content) == (200, file.content)
        assert answer.headers["content-type"] == TYPES[name.rpartition(".")[2]]
        assert answer.headers["cache-control"] == "no-cache"
        assert {name: answer.headers.get(name) for name in SECURITY_HEADERS} == SECURITY_HEADERS


def test_the_policy_lets_nothing_in_from_elsewhere_and_text_is_no_markup(client):
    policy = client.get("/").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "'none'")
    assert "unsafe" not in policy
    assert "*" not in policy


def test_a_page_says_what_it_loads_by_names_that_are_there(client):
    for index in ("scheduler.html", "agent.html"):
        loaded = re.findall(r'(?:src|href)="([^"]*)"', FILES[index].content.decode())
        assert loaded
        assert {client.get(path).status_code for path in loaded} == {200}
    with pytest.raises(ValueError, match=r"no nothing\.html"):
        make_web_routes("nothing.html")


def test_whoever_takes_gzip_gets_it_where_it_is_smaller(client):
    for name, file in FILES.items():
        answer = client.get(f"/web/{name}", headers={"accept-encoding": "br, gzip"})
        assert answer.content == file.content
        length = int(answer.headers["content-length"])
        assert length == min(len(file.compressed), len(file.content))
        assert (answer.headers.get("content-encoding") == "gzip") == (length < len(file.content))
        assert answer.headers["vary"] == "Accept-Encoding"
        assert gzip.decompress(file.compressed) == file.content


def test_what_the_browser_has_is_not_sent_again(client):
    first = client.get("/")
    for given in (first.headers["etag"], f'"other", {first.headers["etag"]}', first.headers["etag"][2:], "*"):
        again = client.get("/", headers={"if-none-match": given})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert again.headers["content-security-policy"]
    assert client.get("/", headers={"if-none-match": 'W/"other"'}).status_code == 200
    assert len({file.etag for file in FILES.values()}) == len({file.content for file in FILES.values()})


def test_nothing_can_be_sent_there(client):
    answer = client.head("/")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) == len(FILES["scheduler.html"].content)
    for path in ("/", "/web/style.css"):
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            answer = client.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
            assert "use GET, HEAD" in answer.text


@pytest.mark.parametrize(
    "name",
    ["nothing.js", "..%2f__init__.py", "%2e%2e/static/style.css", "a/style.css", "style.css%00", "", "static", "style"],
)
def test_what_is_no_file_of_the_pages_is_not_found(client, name):
    answer = client.get(f"/web/{name}")
    assert (answer.status_code, answer.headers["x-content-type-options"]) == (404, "nosniff")


@pytest.mark.parametrize(("given", "accepted"), [
    ("", False), ("gzip", True), ("GZIP;q=1", True), ("br, gzip ; q=0.5", True), ("gzip;q=0", False),
    ("gzip; q=0.000", False), ("*", True), ("*;q=0", False), ("gzip;q=0, *", False), ("identity", False),
])  # fmt: skip
def test_gzip_is_taken_by_name_or_star_and_not_with_weight_0(given, accepted):
    assert accepts_gzip(Headers({"accept-encoding": given} if given else {})) == accepted


def test_tags_are_compared_weakly():
    assert matches_etag(Headers({"if-none-match": '"a"'}), 'W/"a"')
    assert matches_etag(Headers({"if-none-match": 'W/"b" , W/"a"'}), 'W/"a"')
    assert not matches_etag(Headers({"if-none-match": '"ab"'}), 'W/"a"')
    assert not matches_etag(Headers({}), 'W/"a"')
