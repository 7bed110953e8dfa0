"""What an agent's metrics offer, and the bounds of answers; the command as a process is in tests/integration."""

import contextlib
import socket
import threading

import httpx2
import pytest

from cpumond.cli.kubernetes import publish
from cpumond.cli.kubernetes.publish import KubernetesApi, Offer, ask, choose_figure, read_offer
from cpumond.core.errors import AccessError, UnavailableError


@pytest.mark.parametrize(("metrics", "offer"), [
    (b"cpumond_node_offered_cores 1.49\n", 1400),
    (b"# HELP cpumond_node_offered_cores 9\ncpumond_node_offered_cores 0.0999\nother 7\n", 0),
    (b'cpumond_job_info{job_id="a\\ncpumond_node_offered_cores 9"} 1\ncpumond_node_offered_cores 2.0\n', 2000),
    (b"cpumond_node_offered_cores -1.0\n", 0),
    (b"cpumond_build_info 1\n", 0),
])  # fmt: skip
def test_what_a_node_offers(metrics, offer):
    assert read_offer(metrics) == Offer(offer, 0)


def test_what_of_a_node_is_not_used():
    metrics = b"cpumond_node_offered_cores 1.1\ncpumond_node_unused_cores 1.79\n"
    assert read_offer(metrics) == Offer(1100, 1700)


@pytest.mark.parametrize(("offers", "figures"), [
    ([(0, 1900), (0, 1900), (1100, 1900)], [1100, 1100, 1100]),  # a pod that starts is counted, then measured
    ([(0, 1900)] * 3, [1100, 1100, 0]),
    ([(0, 600), (0, 600), (0, 600)], [600, 600, 0]),  # what is used is gone at once
    ([(0, 600), (600, 600), (200, 900), (200, 900), (200, 900)], [600, 600, 600, 600, 200]),
    ([(0, 0)], [0]),  # an agent that does not tell what is used
    ([(1900, 1900)], [1900]),
])  # fmt: skip
def test_a_figure_falls_at_once_where_cpu_is_used_else_after_two_rounds(offers, figures):
    found, figure, rounds = [], "1100", 0
    for offer in offers:
        number, rounds = choose_figure(figure, Offer(*offer), rounds)
        found.append(number)
        figure = str(number)
    assert found == figures


def test_a_figure_that_is_none_is_written_anew():
    assert choose_figure("many", Offer(300, 900), 0) == choose_figure(None, Offer(300, 900), 0) == (300, 0)
    assert choose_figure("2k", Offer(300, 2500), 0) == (2000, 1)


@pytest.mark.parametrize("number", [b"NaN", b"+Inf", b"x"])
def test_what_is_no_figure(number):
    with pytest.raises(UnavailableError, match="cannot be parsed"):
        read_offer(b"cpumond_node_offered_cores " + number + b"\n")


def ask_for(answer: bytes, *more: bytes) -> bytes:
    """What ``ask`` makes of an answer, and of what comes after it for as long as somebody reads it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while not connection.recv(65536).endswith(b"\r\n\r\n"):
                    pass
                connection.sendall(answer)
                while more:
                    connection.sendall(*more)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with httpx2.Client(verify=False, trust_env=False) as client:
                return ask(client, "GET", f"http://127.0.0.1:{listener.getsockname()[1]}/x")
        finally:
            thread.join()


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def test_an_answer_and_another_status():
    assert ask_for(HEAD + b"yes") == b"yes"
    with pytest.raises(UnavailableError, match="was answered with status 503"):
        ask_for(b"HTTP/1.1 503 No\r\n\r\nlater")


@pytest.mark.parametrize(("name", "bound"), [("MAX_BYTES", 1 << 20), ("DEADLINE_S", 0.1)])
def test_an_answer_without_end_is_not_waited_for(monkeypatch, name, bound):
    monkeypatch.setattr(publish, name, bound)
    with pytest.raises(UnavailableError, match="too large or too slow"):
        ask_for(HEAD, b" " * 4096)


def test_nobody_answers():
    with pytest.raises(UnavailableError, match=r"no answer \("):
        ask_for(b"")


def test_a_token_that_no_request_can_hold_is_not_told(tmp_path):
    (tmp_path / "token").write_bytes(b"secret\nsecond")
    with pytest.raises(AccessError, match="token: it does not contain a token on one line"):
        KubernetesApi("http://127.0.0.1:9", str(tmp_path)).list_all("/x")
