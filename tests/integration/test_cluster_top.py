"""``cpumond top --cluster`` on a real terminal: each key, the ends, and the terminal as it was."""

import re
from collections.abc import Iterator

import pytest
from own_terminal import MAIN, Terminal
from scheduler_process import terminal_environment
from test_json_api import LiveScheduler, make_node
from waiting import wait_until


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Pool big uses most, pool small wants most."""
    with LiveScheduler(tmp_path_factory.mktemp("site")) as server:
        for name, limits in (("big", {}), ("small", {"resource_limits": {"cpu": 1}})):
            server.post("/trees/default/pools", {"name": name, "attributes": limits}, 201)
        node = make_node(server, "host-1")
        node.register()
        server.wait_for_update()
        server.start("big", job_count=2, title="of big")
        server.start("small", job_count=90, title="of small")
        wait_until(lambda: node.beat() and len(node.jobs) >= 3, "jobs")
        node.beat()
        yield server.url


@pytest.fixture
def terminal(url: str) -> Iterator[Terminal]:
    made = Terminal(terminal_environment(url), 100, 24, "top", "--cluster")
    yield made
    made.close()


def test_each_key_shows_another_table_or_order(terminal):
    first = terminal.wait("pools by allocated.")
    assert first.index("big") < first.index("small")
    assert terminal.settings() != terminal.before
    for key, title in (("d", "pools by demand."), ("o", "operations by demand."), ("n", "nodes by demand.")):
        terminal.press(key)
        shown = terminal.wait(title)
        if key == "d":
            assert shown.index("small") < shown.index("big")
    assert "host-1" in shown
    terminal.press("o")
    assert "of small" in terminal.wait("operations by demand.")
    for key, title in (("s", "operations by share."), ("a", "operations by name."), ("u", "operations by allocated.")):
        terminal.press(key)
        terminal.wait(title)
    terminal.press("\x1b[Ax?")  # an arrow and what has no meaning
    terminal.press("p")
    terminal.wait("pools by allocated.")
    terminal.press("q")
    assert terminal.wait_end() == 0
    assert MAIN in terminal.text
    assert terminal.settings() == terminal.before


def test_ctrl_c_leaves_the_terminal_as_it_was(terminal):
    terminal.wait("pools by allocated.")
    terminal.press("\x03")
    assert terminal.wait_end() == 0
    assert MAIN in terminal.text
    assert "Traceback" not in terminal.text
    assert terminal.settings() == terminal.before


def test_a_narrower_terminal_is_filled_anew(terminal):
    terminal.wait("pools by allocated.")
    terminal.resize(40)
    terminal.press("n")
    terminal.wait("nodes by allocated.")
    terminal.press("p")  # what it had drawn before, and was not read yet, is behind it now
    terminal.wait("pools by allocated.")
    lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", terminal.text).replace("\r", "").split("\n")
    assert max(map(len, lines)) <= 40
