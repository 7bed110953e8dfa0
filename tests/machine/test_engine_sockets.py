"""The unit hides sockets of engines, a drop-in opens them; each test judges facts of ``guest/engine_sockets.py``."""

import pytest
from guest_host import Facts, assert_quiet, boot, of

LIMIT_S = 300
SOCKETS = ["/run/docker.sock", "/run/podman/podman.sock", "/run/user/1000/podman/podman.sock"]

pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MACHINE_PACKAGES", "podman")
        return boot("engine_sockets.py", tmp_path_factory.mktemp("machine"), LIMIT_S)


def find_sentences(facts: Facts, step: str, word: str) -> list[str]:
    return [each["text"] for each in of(facts, step)["doctor"] if word in each["text"]]


def test_engines_answer(facts: Facts) -> None:
    fact = of(facts, "install")
    assert [each["code"] for each in fact["started"]] == [0, 0, 0, 0], fact
    assert fact["took_s"] is not None


def test_init_writes_a_source_for_each_kind(facts: Facts) -> None:
    fact = of(facts, "before")
    assert fact["written"]["code"] == 0, fact["written"]
    assert fact["sources"].count("[[source]]") == 2
    assert 'kind = "docker"' in fact["sources"]
    assert 'kind = "podman"' in fact["sources"]
    lines = fact["drop_in"].splitlines()
    assert [line for line in lines if line.startswith("BindReadOnlyPaths")] == [
        "BindReadOnlyPaths=-/run/docker.sock",
        "BindReadOnlyPaths=-/run/podman -/run/user/1000/podman",
    ]


def test_without_the_drop_in_the_service_sees_no_engine(facts: Facts) -> None:
    fact = of(facts, "before")
    assert (fact["state"], fact["seen"]) == ("active", [])
    assert any("the socket does not exist" in problem for problem in fact["problems"]), fact["problems"]
    hidden = find_sentences(facts, "before", "is hidden from the service")
    assert [text.split()[0] for text in hidden] == SOCKETS


def test_with_the_drop_in_it_sees_them_and_nothing_else(facts: Facts) -> None:
    fact = of(facts, "opened")
    assert fact["written"]["code"] == fact["again"]["code"] == 0, fact
    assert (fact["state"], fact["seen"]) == ("active", SOCKETS)
    assert fact["problems"] == []
    assert not find_sentences(facts, "opened", "hidden")
    assert fact["again"]["output"].count("is up to date") == 2
    assert_quiet(fact["verified"])
