"""The unix socket's place, and which files a certificate is made of."""

import os
import socket
from pathlib import Path

import pytest

from cpumond.core.errors import CreateError
from cpumond.scheduler.program.config import Api
from cpumond.scheduler.program.listen import close_unix_socket, find_socket_path, open_unix_socket


@pytest.mark.parametrize(
    ("configured", "environment", "path"),
    [
        ("", {}, ""),
        ("/run/s", {}, "/run/s"),
        ("", {"RUNTIME_DIRECTORY": "/run/x"}, "/run/x/api.sock"),
        ("", {"RUNTIME_DIRECTORY": "/run/x:/run/y"}, "/run/x/api.sock"),
        ("/run/s", {"RUNTIME_DIRECTORY": "/run/x"}, "/run/s"),
    ],
)
def test_where_the_socket_is(configured: str, environment: dict[str, str], path: str) -> None:
    assert find_socket_path(Api(socket=configured), environment) == path


def test_a_socket_that_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    unix = open_unix_socket(path, 8)
    assert os.stat(path).st_mode & 0o777 == 0o666
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    close_unix_socket(unix, path)
    assert not os.path.exists(path)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "api.sock"
    if kind == "file":
        path.write_text("something")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CreateError, match="exists and is no socket"):
        open_unix_socket(str(path), 8)
    assert os.path.lexists(path)


def test_the_socket_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")
    with open_unix_socket(path, 8), pytest.raises(CreateError, match="another process listens there"):
        open_unix_socket(path, 8)
    assert os.path.exists(path)


def test_a_path_that_is_too_long_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CreateError, match="cannot create the socket"):
        open_unix_socket(str(tmp_path / ("x" * 200)), 8)
