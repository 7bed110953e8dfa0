"""The transport of the ``yt`` protocol by raw requests: what clients of all kinds send and want."""

import asyncio
import base64
import gzip
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest
import structlog
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.testclient import TestClient

from cpumond.api.yt.parameters import YtRequest
from cpumond.api.yt.replies import ReplyCache, YtLimits, export_reply
from cpumond.api.yt.transport import COMMANDS, make_yt_routes
from cpumond.api.yt.values import Attributed, Uint, YtError
from cpumond.api.yt.yson import read_yson, write_yson
from cpumond.core.errors import CpumondError, UnavailableError
from cpumond.scheduler.rights.tokens import User

NONE = YtError("Error resolving path //sys/none", 500, {}, [YtError('Node //sys has no child with key "none"', 500)])


class Toy:
    """What stands behind the transport: it notes each request and gives the answer of its command, or raises it."""

    def __init__(self) -> None:
        self.seen: list[YtRequest] = []
        self.answers: dict[str, Any] = {
            "get": {"value": 2.5}, "list": {"value": ["research"]}, "exists": {"value": True}, "set": {},
            "multiset_attributes": {}, "remove": {}, "get_version": ZeroDivisionError("a bug in the backend"),
        }  # fmt: skip
        self.gate: asyncio.Event | None = None

    async def __call__(self, request: YtRequest) -> Any:
        self.seen.append(request)
        made = {"object_id": f"1-2-3-{len(self.seen)}"}
        if request.command == "create" and self.gate is not None:
            await self.gate.wait()
        unknown = UnavailableError(f"the toy has no {request.command}")
        answer = {"create": made, **self.answers}.get(request.command, unknown)
        if request.parameters.get("path") == "//sys/none":
            answer = NONE
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class Served:
    """What a test has of the application, and what is behind it."""

    toy: Toy
    app: Starlette

    def client(self, **options: Any) -> TestClient:
        return TestClient(self.app, **options)


class LateError(CpumondError):
    code = 900


def authenticate(request: Request) -> User:
    given = request.headers.get("authorization", "")
    if given in ("", "OAuth good"):
        return User("root")
    if given == "OAuth other":
        return User("other")
    if given.startswith("OAuth user-"):
        return User(given.removeprefix("OAuth "))
    if given == "OAuth late":
        raise LateError("the token is too old")
    raise YtError("the token is unknown", 900)


LIMITS = YtLimits(max_body_bytes=64 * 1024, max_batch_requests=20, requests_per_s=1000.0, burst_requests=1000.0)


def serve(limits: YtLimits) -> Served:
    toy = Toy()
    return Served(toy, Starlette(routes=make_yt_routes(toy, authenticate, limits, ReplyCache(lambda: 1000.0))))


@pytest.fixture
def served() -> Served:
    return serve(LIMITS)


def parameters(**values: Any) -> dict[str, str]:
    """The headers of a command as a client sends them."""
    return {"X-YT-Header-Format": "<format=text>yson", "X-YT-Parameters": write_yson(values).decode()}


def test_a_batch_is_answered_request_by_request(served):
    requests = (
        '{requests=[{command=get;parameters={path="//sys/pools/research/@weight"}};{command=get;parameters='
        '{path="//sys/none"}};{command=list;parameters={path="//sys/pools";return_only_value=%true}};{command=set;'
        'parameters={path="//sys/pools/research/@x"};input=5};{command=nonsense;parameters={}};]}'
    )
    with served.client(headers={"X-YT-Header-Format": "yson"}) as http:
        results = read_yson(http.post("/api/v4/execute_batch", content=requests.encode()).content)["results"]
    assert results[0] == {"output": {"value": 2.5}}
    assert results[1]["error"]["code"] == 500
    assert results[1]["error"]["inner_errors"][0]["message"] == 'Node //sys has no child with key "none"'
    assert results[2] == {"output": ["research"]}
    assert results[3] == {"output": {}}
    assert 'unknown command "nonsense"' in results[4]["error"]["message"]
    assert served.toy.seen[-1].value == 5


# --- raw requests: finding commands ----------------------------------------------------------------------------------


def test_the_list_of_commands_has_five_keys_each_and_needs_no_token(served):
    with served.client(headers={"Authorization": "OAuth bad"}) as http:
        listed = http.get("/api/v4").json()
        assert http.get("/api").json() == ["v4"]
    assert {item["name"] for item in listed} == set(COMMANDS)
    keys = {"name", "input_type", "output_type", "is_volatile", "is_heavy"}
    assert all(set(item) == keys for item in listed)
    by_name = {item.pop("name"): item for item in listed}
    assert by_name["get"] == {
        "input_type": "null", "output_type": "structured", "is_volatile": False, "is_heavy": False,
    }  # fmt: skip
    assert by_name["set"]["input_type"] == "structured"
    assert by_name["create"]["is_volatile"]


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/api/v3", 404, "there is no /api/v3 here; the API is at /api/v4"),
        ("GET", "/api/v3/get", 404, "there is no /api/v3/get here"),
        ("GET", "/api/v4/", 404, "there is no /api/v4/ here"),
        ("GET", "/api/v4/lst", 404, 'unknown command "lst"; did you mean list?'),
        ("GET", "/api/v4/zzz", 404, "GET /api/v4 lists the commands"),
        ("GET", "/api/v4/remove?path=//sys", 405, "GET /api/v4/remove: use POST or PUT"),
        ("DELETE", "/api/v4/get", 405, "use GET or POST or PUT"),
        ("POST", "/hosts", 405, "use GET"),
        ("GET", "/api/v4/get?path=//a&path=//b", 400, '"path" is given twice in the URL'),
        ("GET", "/api/v4/get?attributes=[a", 400, '"attributes" in the URL: expected ";" or "]"'),
        ("GET", "/api/v4/get?path=//sys&output_format=dsv", 400, 'output_format: unknown format "dsv"'),
        ("GET", "/api/v4/get?path=//sys/none", 400, "Error resolving path //sys/none"),
        ("GET", "/api/v4/get?" + "&".join(f"a{number}=1" for number in range(101)), 400, "more than 100 parameters"),
        ("GET", "/api/v4/check_permission", 400, "the toy has no check_permission"),
    ],
)
def test_a_refused_request_is_told_in_the_body_and_in_the_headers(served, method, path, status, message):
    with served.client() as http:
        answer = http.request(method, path)
    assert answer.status_code == status
    assert message in answer.json()["message"]
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.headers["x-yt-error"]) == answer.json()
    assert answer.headers["x-yt-response-code"] == str(answer.json()["code"])
    assert json.loads(answer.headers["x-yt-response-message"]) == answer.json()["message"]


def test_small_questions_are_answered(served):
    with served.client() as http:
        assert http.post("/auth/whoami", headers={"Authorization": "OAuth other"}).json()["login"] == "other"
        assert http.get("/hosts").json() == ["testserver"]
        assert http.get("/version").text.endswith("-cpumond")
        assert http.get("/ping").status_code == 200
        answer = http.get("/ping")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-yt-proxy"] == "cpumond"
        assert answer.headers["x-yt-request-id"].count("-") == 3
        assert "x-yt-response-code" not in answer.headers


def test_a_wrong_token_is_refused_with_401(served):
    with served.client(headers={"Authorization": "OAuth bad"}) as http:
        answer = http.put("/api/v4/set", headers=parameters(path="//sys/@a"), content=b"5")
        assert (answer.status_code, answer.json()["code"]) == (401, 900)
        assert http.post("/auth/whoami").status_code == 401
        late = http.get("/api/v4/get", headers={"Authorization": "OAuth late"})
        assert (late.status_code, late.json()["message"]) == (401, "the token is too old")
    assert served.toy.seen == []


# --- raw requests: parameters and formats ----------------------------------------------------------------------------


def test_a_client_with_bindings_is_answered_in_binary(served):
    binary = Attributed("yson", {"format": "binary", "lazy": False})
    path = "//sys/pools/research/@weight"
    with served.client() as http:
        got = http.get("/api/v4/get", headers=parameters(path=path, return_only_value=True, output_format=binary))
        listed = http.get(
            "/api/v4/list", headers=parameters(path="//sys/pools", return_only_value=True, output_format=binary)
        )
        exists = http.get("/api/v4/exists", headers=parameters(path=path, output_format=binary))
        body = {"type": "scheduler_pool", "attributes": {"name": "new"}, "output_format": binary}
        made = http.post("/api/v4/create", headers={"X-YT-Header-Format": "yson"}, content=write_yson(body, "binary"))
        put = http.put(
            "/api/v4/set", headers=parameters(path="//sys/pools/new/@mix", input_format=binary),
            content=b"{\x01\x02a=<b=1>\x01\x04\xd0\xbf;c=[5.;]}",
        )  # fmt: skip
    assert got.content == b"\x03\x00\x00\x00\x00\x00\x00\x04\x40"
    assert got.headers["content-type"] == "application/x-yt-yson-binary"
    assert listed.content == b"[\x01\x10research;]"
    assert exists.content == b"{\x01\x0avalue=\x05;}"
    assert made.content == b"{\x01\x12object_id=\x01\x0e1-2-3-4;}"
    assert put.content == b"{}"
    assert served.toy.seen[-1].value == {"a": Attributed("п", {"b": 1}), "c": [5.0]}


def test_a_browser_and_curl_are_answered(served):
    with served.client() as http:
        assert http.get("/api/v4/list?path=//sys/pools").text == '{\n    "value" = [\n        "research";\n    ];\n}'
        only = http.get("/api/v4/list?path=//sys/pools&return_only_value=true&output_format=json")
        assert only.json() == ["research"]
        pretty = http.get('/api/v4/list?path=//sys&output_format=<format=pretty>json&attributes=["a"]')
        assert pretty.text == '{\n    "value": [\n        "research"\n    ]\n}'
        assert http.get("/api/v4/list?path=//sys", headers={"Accept": "text/html, application/json;q=0.9"}).json()
        text = http.get("/api/v4/list?path=//sys", headers={"X-YT-Output-Format": "<format=text>yson"})
        assert text.text == '{"value"=["research";];}'
        body = {"path": "//sys/pools", "return_only_value": True, "output_format": "json"}
        assert http.post("/api/v4/list", json=body).json() == ["research"]
        http.put(
            "/api/v4/set?path=//sys/pools/@a", content='{"имя": [1]}', headers={"Content-Type": "application/json"}
        )
        http.post("/api/v4/set?path=//sys/pools/@b", content='{"имя"=[1]}', headers={"X-YT-Input-Format": "yson"})
        http.get("/api/v4/get?path=//sys/пул&limit=10&name=%FF&x=&y=007")
    assert [request.value for request in served.toy.seen[-3:-1]] == [{"имя": [1]}] * 2
    assert served.toy.seen[-1].parameters == {
        "path": "//sys/пул", "limit": 10, "name": "\udcff", "x": "", "y": "007",
    }  # fmt: skip


def test_the_parameters_of_the_body_come_before_the_header_and_the_url(served):
    with served.client() as http:
        http.post(
            "/api/v4/exists?path=//url&a=url&b=url&c=url",
            headers={**parameters(path="//header", b="header", c="header"), "X-YT-Output-Format": "json"},
            content=b'{path="//body"; c=body; output_format=<format=text>yson}',
        )
    seen = served.toy.seen[-1].parameters
    assert {name: seen[name] for name in ("path", "a", "b", "c")} == {
        "path": "//body", "a": "url", "b": "header", "c": "body",
    }  # fmt: skip


def test_parameters_arrive_in_any_dress(served):
    text = '{"path"="//sys/пул"}'.encode()
    whole = base64.b64encode(text).decode()
    apart = [base64.b64encode(text[:7]).decode(), base64.b64encode(text[7:]).decode()]
    dresses = [
        {"X-YT-Parameters": text},
        {"X-YT-Parameters": '{"path"="//sys/\\xD0\\xBF\\xD1\\x83\\xD0\\xBB"}'},
        {"X-YT-Header-Format": "json", "X-YT-Parameters": json.dumps({"path": "//sys/пул".encode().decode("latin-1")})},
        {"X-YT-Parameters0": whole[:9], "X-YT-Parameters1": whole[9:]},
        {"X-YT-Parameters-1": apart[0], "X-YT-Parameters-2": apart[1]},
    ]
    with served.client() as http:
        for dress in dresses:
            assert http.get("/api/v4/exists", headers=dress).status_code == 200
            assert served.toy.seen[-1].parameters == {"path": "//sys/пул"}, dress
        gap = http.get("/api/v4/exists", headers={"X-YT-Parameters0": "aaaa", "X-YT-Parameters2": "aaaa"})
        assert "a piece of the header X-YT-Parameters is missing" in gap.json()["message"]
        broken = http.get("/api/v4/exists", headers={"X-YT-Parameters0": "a*aa"})
        assert "are not base64" in broken.json()["message"]
        broken = http.get("/api/v4/exists", headers={"X-YT-Parameters": "{path=}"})
        assert broken.json()["message"] == (
            'Error parsing request: header X-YT-Parameters: expected a value, not "}" at offset 6'
        )
        listed = http.get("/api/v4/exists", headers={"X-YT-Parameters": "[]"})
        assert "header X-YT-Parameters: the parameters must be a map" in listed.json()["message"]


def test_bodies_arrive_in_pieces_and_packed(served):
    target = "/api/v4/set?path=//sys/pools/@note"
    with served.client() as http:
        assert http.put(target, content=iter([b"{a=", b"5", b"}"])).status_code == 200
        packed = {"Content-Encoding": "gzip"}
        assert http.put(target, content=gzip.compress(b"{b=6}"), headers=packed).status_code == 200
        answer = http.put(target, content=b"{b=7}", headers=packed)
        assert (answer.status_code, "is not gzip" in answer.json()["message"]) == (400, True)
        answer = http.put(target, content=b"{b=7}", headers={"Content-Encoding": "br"})
        assert answer.status_code == 415
        answer = http.put(target, content=b" ")
        assert "set: the body of the request must be the value, and is empty" in answer.json()["message"]
        answer = http.put("/api/v4/multiset_attributes?path=//sys/pools/@", content=b"[]")
        assert "the value must be a map of attributes" in answer.json()["message"]
    assert [request.value for request in served.toy.seen] == [{"a": 5}, {"b": 6}]


def test_what_is_too_large_or_too_deep_is_refused(served):
    target = "/api/v4/set?path=//sys/pools/@note"
    large = b'"' + b"a" * LIMITS.max_body_bytes + b'"'
    with served.client() as http:
        answers = [
            http.put(target, content=large),
            http.put(target, content=iter([large[:1000], large[1000:]])),
            http.put(target, content=gzip.compress(b"a" * 50_000_000), headers={"Content-Encoding": "gzip"}),
        ]
        for answer in answers:
            assert answer.status_code == 413
            assert "larger than the limit of 65536 bytes" in answer.json()["message"]
            assert answer.headers["connection"] == "close"
        deep = http.put(target, content=b"[" * 65 + b"]" * 65)
        assert "value: nested deeper than the limit of 64 levels at offset 64" in deep.json()["message"]
        deep = http.put(target, content=b"[" * 60_000, headers={"Content-Type": "application/json"})
        assert (deep.status_code, deep.json()["code"]) == (400, 1)
    assert served.toy.seen == []


# --- raw requests: errors --------------------------------------------------------------------------------------------


def test_a_bug_in_the_backend_is_an_answer_and_a_log_entry(served):
    with structlog.testing.capture_logs() as logged, served.client(headers={"X-YT-Correlation-Id": "1-2-3-4"}) as http:
        answer = http.get("/api/v4/get_version")
        batch = http.post("/api/v4/execute_batch", content=b"{requests=[{command=get_version};{command=list_jobs};5]}")
    assert (answer.status_code, answer.json()["code"]) == (400, 1)
    assert answer.json()["attributes"] == {"correlation_id": "1-2-3-4"}
    assert "a bug in the backend" not in answer.text
    failures = {entry["event"]: entry for entry in logged if entry["log_level"] == "error"}
    assert set(failures) == {"request_failed", "batch_request_failed"}
    assert all(entry["correlation_id"] == "1-2-3-4" and entry["exc_info"] for entry in failures.values())
    errors = [item["error"]["message"] for item in read_yson(batch.content)["results"]]
    assert "the scheduler failed at this request" in errors[0]
    assert errors[1] == "the toy has no list_jobs"
    assert "request 2 is not a map" in errors[2]


def test_a_long_or_strange_error_fits_its_headers(served):
    message = "слишком\n" * 4000 + "\udcff"
    inner = [YtError("inner", 500, {"value": Uint(5), "inf": float("inf")})]

    served.toy.answers["get"] = YtError(message, 501, {"path": "//пул"}, inner)
    with served.client() as http:
        answer = http.get("/api/v4/get?path=//sys")
    assert answer.json()["message"] == message.replace("\udcff", "\\udcff")
    assert answer.json()["attributes"] == {"path": "//пул"}
    assert answer.json()["inner_errors"][0]["attributes"] == {"value": 5, "inf": "inf"}
    header = answer.headers["x-yt-error"]
    assert len(header) < 32_768
    assert json.loads(header)["code"] == 501
    assert json.loads(answer.headers["x-yt-response-message"]).startswith("слишком")


def test_what_cannot_be_written_is_told(served):
    served.toy.answers |= {"get": {"value": object()}, "list": YtError("refused", 500, {"cause": object()})}
    with served.client() as http:
        got = http.get("/api/v4/get?path=//sys")
        assert (got.status_code, got.json()["code"]) == (400, 1)
        assert "a value of type object cannot be written as YSON" in got.json()["message"]
        assert http.get("/api/v4/list?path=//sys").json() == {
            "code": 500, "message": "refused", "attributes": {}, "inner_errors": [],
        }  # fmt: skip


def test_pages_of_other_sites_change_nothing(served):
    with served.client() as http:
        target = "/api/v4/remove?path=//sys/pools/research/a"
        foreign = http.post(target, headers={"Origin": "http://evil.example"})
        assert (foreign.status_code, foreign.json()["code"]) == (403, 901)
        assert served.toy.seen == []
        assert http.post(target, headers={"Origin": "http://testserver"}).status_code == 200


def test_a_user_with_too_many_requests_waits():
    now = [0.0]
    limits = YtLimits(requests_per_s=1.0, burst_requests=3.0, max_users=2, now=lambda: now[0])
    with serve(limits).client() as http:
        ask = "/api/v4/exists?path=//sys"
        assert [http.get(ask).status_code for _ in range(4)] == [200, 200, 200, 429]
        refused = http.get(ask)
        assert refused.json()["code"] == 904
        assert 'too many requests of user "root"' in refused.json()["message"]
        assert http.get(ask, headers={"Authorization": "OAuth other"}).status_code == 200
        now[0] = 1.5
        assert [http.get(ask).status_code for _ in range(3)] == [200, 200, 429]
        now[0] = 100.0
        batch = {"requests": [{"command": "exists", "parameters": {"path": "//sys"}}] * 10}
        assert http.post("/api/v4/execute_batch", json=batch).status_code == 200
        assert http.get(ask).status_code == 429
        now[0] = 108.1
        assert http.get(ask).status_code == 200
        for number in range(3):
            http.get(ask, headers={"Authorization": f"OAuth user-{number}"})
        assert [http.get(ask).status_code for _ in range(3)] == [200] * 3, "only two users are remembered"


# --- requests without a socket ---------------------------------------------------------------------------------------


Message = dict[str, Any]


async def call(toy: Toy, messages: list[Message], path: str, method: str = "PUT", **headers: bytes) -> list[Message]:
    app = Starlette(routes=make_yt_routes(toy, authenticate, LIMITS, ReplyCache(lambda: 0.0)))
    sent: list[Message] = []
    waiting = list(messages)

    async def receive() -> Message:
        return waiting.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    target, _, query = path.partition("?")
    names = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": target, "query_string": query.encode(), "headers": names}
    await app(scope, receive, send)
    return sent


def test_a_client_that_goes_away_leaves_nothing_behind():
    toy = Toy()
    with structlog.testing.capture_logs() as logged:
        messages = [{"type": "http.request", "body": b"{a=", "more_body": True}, {"type": "http.disconnect"}]
        asyncio.run(call(toy, messages, "/api/v4/set?path=//@a"))
    assert toy.seen == []
    assert logged == []


def test_a_request_that_the_end_of_the_server_cuts_off_is_to_be_repeated():
    async def scenario() -> list[Message]:
        toy = Toy()
        toy.gate = asyncio.Event()
        body = create("x", "1-1-1-1")
        task = asyncio.ensure_future(call(toy, [{"type": "http.request", "body": body}], "/api/v4/create", "POST"))
        while not toy.seen:
            await asyncio.sleep(0)
        task.cancel()
        return await task

    start, body = asyncio.run(scenario())
    assert start["status"] == 503
    assert json.loads(body["body"])["code"] == 105


@examples(200)
@given(
    st.binary(max_size=40) | st.just(b"{a=1}"), st.binary(max_size=40) | st.just(b"{b=1}"),
    st.sampled_from([b"yson", b"json", b"<format=text>yson", b"{", b"\xff"]), st.text(max_size=20),
    st.sampled_from(["exists", "create", "set", "multiset_attributes", "execute_batch", "list"]),
)  # fmt: skip
def test_a_random_request_is_answered_in_form(header, body, form, query, command):
    start, content = asyncio.run(
        call(
            Toy(), [{"type": "http.request", "body": body}], f"/api/v4/{command}?{quote(query)}", "POST",
            x_yt_parameters=header, x_yt_header_format=form, x_yt_output_format=b"json",
        )
    )  # fmt: skip
    answer = json.loads(content["body"])
    if start["status"] != 200:
        assert start["status"] == 400
        assert set(answer) == {"code", "message", "attributes", "inner_errors"}


# --- raw requests: repeats -------------------------------------------------------------------------------------------


def create(name: str, mutation_id: str, **more: Any) -> bytes:
    return write_yson({"type": "scheduler_pool", "attributes": {"name": name}, "mutation_id": mutation_id, **more})


def test_a_repeated_command_is_answered_and_not_run(served):
    with served.client() as http:
        first = http.post("/api/v4/create", content=create("x", "1-1-1-1", retry=False))
        again = http.post("/api/v4/create", content=create("x", "1-1-1-1", retry=True))
        assert first.content == again.content
        assert first.status_code == 200
        served.toy.answers["create"] = YtError("Pool 'x' already exists", 501)
        failed = http.post("/api/v4/create", content=create("x", "2-2-2-2"))
        assert (failed.status_code, failed.json()["code"]) == (400, 501)
        del served.toy.answers["create"]
        assert http.post("/api/v4/create", content=create("x", "2-2-2-2")).json() == failed.json()
        assert len(served.toy.seen) == 2
        other = http.post("/api/v4/create", content=create("x", "1-1-1-1"), headers={"Authorization": "OAuth other"})
        assert other.status_code == 200, "another user's id is another id"
        mixed = http.post("/api/v4/remove", content=b'{path="//sys/pools/x";mutation_id="1-1-1-1"}')
        assert "mutation id 1-1-1-1 was used for create before" in mixed.json()["message"]
        strange = http.post("/api/v4/remove", content=b'{path="//sys/pools/x";mutation_id=5}')
        assert 'mutation_id: "5" is not an id' in strange.json()["message"]
        read = [http.get("/api/v4/exists", headers=parameters(path="//sys", mutation_id="3-3-3-3")) for _ in range(2)]
        assert [answer.status_code for answer in read] == [200, 200]
    assert len(served.toy.seen) == 5


def test_a_repeated_batch_changes_nothing_twice(served):
    requests = [
        {"command": "create", "parameters": {"type": "scheduler_pool", "attributes": {"name": "x"}}},
        {"command": "remove", "parameters": {"path": "//sys/none"}},
        {"command": "start_transaction", "parameters": {}},
        {"command": "commit_transaction", "parameters": {"transaction_id": "1-2-3-4"}},
        {"command": "execute_batch", "parameters": {"requests": []}},
        {"command": "set", "parameters": {"path": "//sys/pools/x/@a"}},
    ]
    body = write_yson({"requests": requests, "mutation_id": "1-1-1-1"})
    with served.client() as http:
        first = read_yson(http.post("/api/v4/execute_batch", content=body).content)["results"]
        again = read_yson(http.post("/api/v4/execute_batch", content=body).content)["results"]
        long = http.post("/api/v4/execute_batch", json={"requests": [{}] * 21})
        assert "21 requests are more than the limit of 20" in long.json()["message"]
        assert "must be a list of" in http.post("/api/v4/execute_batch", content=b"{}").json()["message"]
    assert first == again
    assert first[0] == {"output": {"object_id": "1-2-3-1"}}
    assert first[1]["error"]["code"] == 500
    assert first[2]["output"]["transaction_id"].count("-") == 3
    assert first[3] == {"output": {}}
    assert "execute_batch" in first[4]["error"]["message"]
    assert 'set needs "input"' in first[5]["error"]["message"]
    assert len(served.toy.seen) == 2


def run_reply(cache: ReplyCache, mutation_id: str, outcome: Any, command: str = "create", user: str = "root") -> Any:
    """What the cache answers, when the work would give ``outcome``."""

    async def work() -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return asyncio.run(cache.run(user, mutation_id, command, work))


def test_replies_are_forgotten_by_age_and_by_number():
    now = [0.0]
    cache = ReplyCache(lambda: now[0], max_replies=3, max_age_s=10.0)
    for number in range(5):
        assert run_reply(cache, f"{number}", {"n": number}) == {"n": number}
    assert len(cache) == 3
    assert run_reply(cache, "2", "again") == {"n": 2}
    assert run_reply(cache, "1", "again") == "again"
    now[0] = 11.0
    assert run_reply(cache, "4", "new") == "new"
    assert len(cache) == 1
    later = ReplyCache(lambda: 10_000.0)
    later.restore([export_reply("root", "of an earlier run", "create", 100.0, {})])
    assert len(later) == 0


def test_errors_that_ask_for_another_try_and_bugs_are_not_kept():
    cache = ReplyCache(lambda: 0.0)
    for error in (YtError("later", 105), YtError("many", 1, inner=[YtError("limit", 202)]), ZeroDivisionError("bug")):
        with pytest.raises(type(error)):
            run_reply(cache, "a", error)
        assert len(cache) == 0
    with pytest.raises(YtError):
        run_reply(cache, "a", YtError("no", 500))
    with pytest.raises(YtError, match="no"):
        run_reply(cache, "a", {"fine": 1})


def test_work_goes_on_without_its_client_and_a_repeat_waits_for_it():
    cache = ReplyCache(lambda: 0.0)

    async def scenario() -> list[Any]:
        gate, begun = asyncio.Event(), []

        async def work() -> str:
            begun.append("once")
            await gate.wait()
            return "done"

        first = asyncio.ensure_future(cache.run("root", "a", "create", work))
        while not begun:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        repeat = asyncio.ensure_future(cache.run("root", "a", "create", work))
        await asyncio.sleep(0)
        gate.set()
        return [await repeat, *begun]

    assert asyncio.run(scenario()) == ["done", "once"]
