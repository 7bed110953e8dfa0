"""Messages of a container runtime, read field by field; asking one is tested with a real gRPC server."""

import asyncio
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubelet_server import field

from cpumond.host.engine.cri import CriEngine, Message, WireError, encode_status_request, read_container
from cpumond.host.engine.model import EngineError

ID = "ab" * 32


def test_fields_of_all_types_are_read_and_unknown_ones_passed_over():
    data = (
        field(1, 300)
        + b"\x11" + bytes(8)  # 2: 64 bits
        + b"\x1d" + bytes(4)  # 3: 32 bits
        + field(4, "text")
        + field(5, field(1, 7))
        + field(6, field(1, "key") + field(2, "value"))
        + field(7, -1)
        + field(1, 301)
    )  # fmt: skip
    message = Message(data)
    assert message.number(1) == 301, "the last one counts"
    assert (message.number(7), message.text(4), message.message(5).number(1)) == (-1, "text", 7)
    assert message.mapping(6) == {"key": "value"}
    assert (message.number(99), message.text(99), message.many(99), message.has(99)) == (0, "", [], False)


@pytest.mark.parametrize("data", [
    b"\x08", b"\x0a\x05abc", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x0b", b"\x11123",
    b"\x08" + b"\xff" * 11,
])  # fmt: skip
def test_bytes_that_are_no_message(data):
    with pytest.raises(WireError):
        Message(data)


def test_a_field_of_another_type_than_expected():
    with pytest.raises(WireError):
        Message(field(1, "text")).number(1)
    with pytest.raises(WireError):
        Message(field(1, 7)).text(1)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_a_container_or_refused(listed, status):
    try:
        found = read_container(Message(listed), Message(status))
    except WireError:
        return
    assert found is None or found.container


LABELS = {"pod.uid": "u", "pod.namespace": "shop", "pod.name": "web-1", "container.name": "app"}


def entry(labels: dict[str, str]) -> Message:
    pairs = (field(8, field(1, f"io.kubernetes.{key}") + field(2, value)) for key, value in labels.items())
    return Message(field(1, ID) + field(4, field(1, "sha256:1")) + field(6, 1) + b"".join(pairs))


def status(*linux: bytes) -> Message:
    return Message(field(1, field(1, ID) + field(16, b"".join(field(1, each) for each in linux))))


@pytest.mark.parametrize(("linux", "cores", "tells"), [
    ([field(1, 50_000) + field(2, 75_000)], 1.5, True),
    ([field(2, 150_000)], 1.5, True),
    ([field(1, 100_000) + field(2, -1)], None, True),
    ([b""], None, True),
    ([], None, False),
])  # fmt: skip
def test_the_order_of_a_container(linux, cores, tells):
    found = read_container(entry(LABELS), status(*linux))
    assert found is not None
    assert (found.name, found.container_id, found.image) == ("shop/web-1/app", ID, "sha256:1")
    assert (found.ordered_cores, found.reports_request) == (cores, tells)


def test_a_container_of_no_pod_is_none():
    for key in LABELS:
        assert read_container(entry(LABELS | {key: ""}), status()) is None


def test_the_request_for_one_container():
    assert encode_status_request(ID) == field(1, ID)


def test_without_grpcio_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.setitem(sys.modules, "grpc.aio", None)
    engine = CriEngine("/run/containerd/containerd.sock", list)
    with pytest.raises(EngineError, match=r"pip install grpcio"):
        asyncio.run(engine.watch(print, asyncio.Event()))
