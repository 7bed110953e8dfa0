"""The unix socket, which accepts requests besides the TCP address, and the certificate for TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from typing import Final

from cpumond.core.errors import AccessError, ConfigError, CreateError, describe, from_os_error
from cpumond.core.settings import find_rights_of_others
from cpumond.scheduler.program.config import Api

SOCKET_NAME: Final = "api.sock"
CONNECT_S: Final = 1.0


def find_socket_path(api: Api, environment: Mapping[str, str]) -> str:
    """Return the path of the unix socket: the configured one, or one in the directory made by systemd; "" if none."""
    folder = environment.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return api.socket or (os.path.join(folder, SOCKET_NAME) if folder else "")


def open_unix_socket(path: str, backlog: int) -> socket.socket:
    """Open a unix socket to which every account may connect. A file left by a dead process is replaced. Raises
    CreateError or AccessError."""
    advice = "set [api] socket to a path of this scheduler alone"
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_left(path)
        unix.bind(path)
        os.chmod(path, 0o666)  # noqa: S103 - the kernel identifies callers
        unix.listen(backlog)
    except CreateError:
        unix.close()
        raise
    except OSError as error:
        unix.close()
        raise from_os_error(error, f"create the socket {path}", advice) from error
    return unix


def _remove_left(path: str) -> None:
    """Remove the socket of a process that no longer runs. Raises CreateError for any other file, and OSError."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise CreateError(f"{path}: exists and is no socket; remove it, or set [api] socket to another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise CreateError(f"{path}: another process listens there; stop it, or set [api] socket to another path")


def close_unix_socket(unix: socket.socket, path: str) -> None:
    unix.close()
    with contextlib.suppress(OSError):
        os.unlink(path)


class Certificate:
    """The certificate and key of the scheduler's address; ``context`` uses those that were loaded last."""

    def __init__(self, certificate: str, key: str) -> None:
        """Load the files. Raises ConfigError or AccessError."""
        self.certificate = certificate
        self.key = key
        self.context = self._load()

    def reload(self) -> None:
        """Use the present content of the files for new connections. If it cannot be used: keeps the old content, raises
        ConfigError or AccessError."""
        self._load()
        # The listening context stays the same object, so it is changed only after the new content was found good.
        _load_chain(self.context, self.certificate, self.key)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_chain(context, self.certificate, self.key)
        return context


def _load_chain(context: ssl.SSLContext, certificate: str, key: str) -> None:
    try:
        with open(key, "rb") as file:
            problem = find_rights_of_others(key, os.fstat(file.fileno()))
        with open(certificate, "rb"):
            pass
    except PermissionError as error:
        text = f"{error.filename}: cannot be read: {describe(error)}; give it to the scheduler's user"
        raise AccessError(text) from None
    except OSError as error:
        text = f"{error.filename}: cannot be read: {describe(error)}; set [api] certificate and key to files in PEM"
        raise ConfigError(text) from None
    if problem:
        raise ConfigError(f"{key}: {problem}, and make a new key if others may have read it")
    try:
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except _PassphraseError:
        raise ConfigError(f"{key}: has a passphrase, which a service cannot enter; store it without one") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            text = f"{key}: is not the key of the certificate in {certificate}; set a matching pair"
        else:
            reason = (error.reason or str(error)).replace("_", " ").lower()
            text = f"{certificate}, {key}: no certificate with its key in PEM: {reason}"
        raise ConfigError(text) from None


class _PassphraseError(Exception):
    """The key is encrypted."""


def _refuse_passphrase() -> str:
    raise _PassphraseError
