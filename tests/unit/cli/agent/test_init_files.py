"""The files of ``cpumond init``: what they say, and which of them are its own."""

import tomllib
from pathlib import Path

import pytest

from cpumond.agent.config import ENGINE_KINDS, Source, finish_config, load_config
from cpumond.agent.discovery.engines import SOCKETS
from cpumond.cli.agent import init_files
from cpumond.core.errors import UsageError

FOLDER = Path(__file__).resolve().parents[4] / "systemd" / "cpumond.service.d"
CRI = ["/run/containerd/containerd.sock", "/run/crio/crio.sock"]
SHIPPED = {"docker": [SOCKETS["docker"]], "podman": [SOCKETS["podman"]], "slurm": [], "kubernetes": CRI}


def settings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_a_file_is_ours_until_a_letter_changes(tmp_path):
    text = init_files.sign("a = 1\n")
    assert init_files.is_ours(text)
    assert not init_files.is_ours(text.replace("1\n", "2\n"))
    assert not init_files.is_ours("a = 1\n")
    assert not init_files.is_ours("")


def test_how_a_file_compares_with_what_is_there(tmp_path):
    path = tmp_path / "engines.toml"

    def plan(body: str) -> str:
        return init_files.plan_file(str(path), body).state

    assert plan("a = 1\n") == "new"
    path.write_text(init_files.sign("a = 1\n"))
    assert (plan("a = 1\n"), plan("a = 2\n")) == ("same", "changed")
    path.write_text("b = 1\n")
    assert plan("a = 1\n") == "foreign"
    # Somebody's own that says all that is needed.
    path.write_text("b = 1\na = 1\n")
    assert plan("# why\n[section]\na = 1\n") == "same"


def test_sources_are_in_shadow_mode_and_are_read_back(tmp_path):
    """One of a file of before keeps its options; what is new has those of new installations."""
    [new] = init_files.parse_sockets(['podman=/run/a"b.sock'])
    assert (new.kind, new.socket) == ("podman", '/run/a"b.sock')
    sources = [Source(kind="docker", mode="shadow"), new]
    found = [finish_config({"source": [source]}, "").resolve_settings(source, "", {}) for source in sources]
    told = [(each.actuator, each.limit_rule, each.min_cpu_limit) for each in found]
    assert told == [("quota", "document", 0.1), ("guarantee", "peak", 0.1)]
    text = init_files.sign(init_files.render_sources(sources))
    tables = tomllib.loads(text)["source"]
    assert [table["mode"] for table in tables] == ["shadow", "shadow"]
    path = tmp_path / "engines.toml"
    path.write_text(text)
    assert load_config(str(path)).source == sources
    assert init_files.read_own_sources(str(path)) == sources
    path.write_text(text.replace("shadow", "reclaim"))
    assert init_files.read_own_sources(str(path)) == []
    assert init_files.read_own_sources(str(tmp_path / "missing")) == []
    assert init_files.render_sources([]) == ""


@pytest.mark.parametrize("given", ["docker", "docker=", "lxc=/run/lxc.sock", "=x", "docker=relative", "slurm=/run/s"])
def test_wrong_sockets_are_refused(given):
    with pytest.raises(UsageError, match=r"for example --socket docker=/run/docker-2\.sock"):
        init_files.parse_sockets([given])


@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_a_drop_in_is_shipped_for_each_kind(kind):
    """What ``init`` would write for that kind alone, where everything is in its own place."""
    shipped = (FOLDER / f"{kind}.conf").read_text(encoding="utf-8")
    assert settings(shipped) == settings(init_files.render_drop_in({kind: SHIPPED[kind]}))
    assert f"cpumond.service.d/{kind}.conf" in shipped.splitlines()[0]


def test_a_drop_in_opens_what_is_needed_and_no_more():
    text = init_files.render_drop_in({"slurm": [], "docker": ["/var/run/docker.sock"]})
    assert settings(text) == [
        "[Unit]", "After=docker.socket docker.service munge.service", "[Service]", "ProtectProc=default",
        "BindReadOnlyPaths=-/run/docker.sock", "BindReadOnlyPaths=-/run/munge -/run/slurm",
    ]  # fmt: skip
    # A service starts without an engine, too.
    assert all(word.startswith("-") for line in settings(text) for word in line.partition("Paths=")[2].split())


def test_a_users_podman_needs_the_users_directories():
    text = init_files.render_drop_in({"podman": ["/run/podman/podman.sock", "/run/user/1000/podman/podman.sock"]})
    assert "ProtectHome=tmpfs" in settings(text)
    assert "BindReadOnlyPaths=-/run/podman -/run/user/1000/podman" in settings(text)
    assert "ProtectHome" not in init_files.render_drop_in({"podman": ["/run/podman/podman.sock"]})


def test_nothing_is_opened_where_nothing_is_needed():
    assert (init_files.render_drop_in({}), init_files.render_drop_in({"kubernetes": []})) == ("", "")


def test_a_path_that_would_be_more_than_one_is_left_out():
    assert init_files.list_opened("docker", ["/run/a b.sock", "/run/a:b", "/run/c.sock\nUser=root"]) == []


def test_a_user_who_is_away_keeps_the_place(tmp_path):
    path = tmp_path / "engines.conf"
    sockets = ["/run/podman/podman.sock", "/run/user/1000/podman/podman.sock"]
    text = init_files.sign(init_files.render_drop_in({"podman": sockets}))
    path.write_text(text)
    assert init_files.read_own_user_sockets(str(path)) == sockets[1:]
    path.write_text(text.replace("1000", "1001"))
    assert init_files.read_own_user_sockets(str(path)) == []
    assert init_files.read_own_user_sockets(str(tmp_path / "missing")) == []
