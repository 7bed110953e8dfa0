"""Client of the agent's control socket: its path, single requests, and the agent's answers as values."""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import click
import msgspec
from click.core import ParameterSource

from cpumond.agent.config import load_config
from cpumond.cli.options import config_option
from cpumond.cli.output import print_json_and_end
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import (
    EXIT_UNAVAILABLE,
    AccessError,
    ConfigError,
    CpumondError,
    UnavailableError,
    UsageError,
    describe,
)

TIMEOUT_S = 15.0
"""Time-out of a request, longer than the 10 s that the agent's control thread waits for its tick thread."""

P = ParamSpec("P")
Result = TypeVar("Result")
Answer = TypeVar("Answer")


class AgentRefusedError(CpumondError):
    """The agent answered with an error; the exception contains the answer's sentence and exit code."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class AgentClient:
    """HTTP client of one agent over its unix socket; each request has its own connection.

    ``as_json``: ``fetch`` prints answers for programs and ends the command."""

    def __init__(self, socket_path: str, as_json: bool = False, timeout_s: float = TIMEOUT_S) -> None:
        self.socket_path = socket_path
        self.as_json = as_json
        self.timeout_s = timeout_s

    def request(self, method: str, path: str, body: object = None) -> bytes:
        """Return the JSON of a successful answer.

        Raises UnavailableError if no agent runs, AccessError without the rights, UsageError for a name that is not
        UTF-8, AgentRefusedError for an error answer of the agent."""
        from http.client import HTTPConnection, HTTPException

        try:
            content = None if body is None else msgspec.json.encode(body)
        except UnicodeEncodeError:
            raise UsageError(
                "a name on the command line is not readable text (UTF-8); the agent accepts only UTF-8 names"
            ) from None
        connection = HTTPConnection("agent")
        connection.sock = connect(self.socket_path, self.timeout_s)
        try:
            connection.request(method, path, content)
            answer = connection.getresponse()
            received = answer.read()
        except TimeoutError:
            raise UnavailableError(
                f"{self.socket_path}: the agent did not answer in {self.timeout_s:g} s; see its log"
            ) from None
        except (OSError, HTTPException):
            raise UnavailableError(f"{self.socket_path}: the agent ended before it answered; see its log") from None
        finally:
            connection.close()
        if 200 <= answer.status < 300:
            return received
        raise read_refusal(self.socket_path, answer.status, received)

    def status(self) -> bytes:
        return self.request("GET", "/v1/status")

    def fetch(self, content: bytes, kind: type[Answer], rows: str | None = None) -> Answer:
        """Return an answer as a value to format for people; with ``as_json``, print it and end the command."""
        if self.as_json:
            print_json_and_end(content, kind, rows)
        return self.decode(content, kind)

    def decode(self, content: bytes, kind: type[Answer]) -> Answer:
        """Decode an answer. Raises UnavailableError if it is no ``kind``, since the agent has a different version."""
        try:
            return decode_json(content, kind)
        except ContentError as error:
            raise UnavailableError(
                f"{self.socket_path}: the agent's answer cannot be decoded: {error}; restart the agent with this "
                "version of cpumond"
            ) from None


def connect(path: str, timeout_s: float) -> socket.socket:
    """Connect to the agent's unix socket. Raises UnavailableError or AccessError."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise explain_failure(path, error) from None
    return connection


def explain_failure(socket_path: str, error: OSError) -> CpumondError:
    """The error to raise for a connection to ``socket_path`` that failed with ``error``."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessError(
            f"{socket_path}: only root and the socket's group may connect to the agent; "
            "run as root, or join the group of [control] group"
        )
    return UnavailableError(
        f"no agent answers on {socket_path} ({describe(error)}); start it with `systemctl start cpumond` or "
        "`cpumond agent --config FILE`, or name another one with --config or --socket"
    )


def read_refusal(socket_path: str, status: int, content: bytes) -> AgentRefusedError:
    """The exception for an unsuccessful answer, with the agent's sentence and exit code."""
    try:
        answer = decode_json(content, dict[str, object])
    except ContentError:
        answer = {}
    sentence, code = answer.get("error"), answer.get("exit_code")
    return AgentRefusedError(
        sentence if isinstance(sentence, str) else f"{socket_path}: the agent answered with HTTP status {status}",
        code if isinstance(code, int) else EXIT_UNAVAILABLE,
    )


def is_given(parameter: str) -> bool:
    """Whether the user gave a parameter of the current command, on the command line or in the environment."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def find_socket(config_path: str, explicit: bool, socket_path: str | None) -> str:
    """Return the path of the control socket: ``socket_path``, else the one in the configuration, else the default one.

    ``explicit``: the user named the configuration, so the file must exist. Raises ConfigError or AccessError."""
    if socket_path:
        return socket_path
    if not explicit and not os.path.exists(config_path):
        return load_config(None).control_socket
    try:
        return load_config(config_path).control_socket
    except (ConfigError, AccessError) as error:
        # The agent may still run with an earlier configuration.
        raise type(error)(f"{error}; or name the agent's socket with --socket") from None


socket_option = click.option(
    "--socket", "socket_path", metavar="PATH", envvar="CPUMOND_SOCKET",
    help="The agent's control socket; default: control.sock in runtime_dir of the configuration.",
)  # fmt: skip


def agent_options(command: Callable[Concatenate[AgentClient, P], Result]) -> Callable[..., Result]:
    """Give a command ``--config`` and ``--socket``, and call it with a client made from them and ``--json``."""

    @config_option
    @socket_option
    @functools.wraps(command)
    def with_client(
        config_path: str, socket_path: str | None, as_json: bool, *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        path = find_socket(config_path, is_given("config_path"), socket_path)
        return command(AgentClient(path, as_json), *args, **kwargs)

    return with_client
