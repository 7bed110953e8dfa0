"""What the settings of both programs share: layers of TOML files, who may read a secret, addresses, ``[log]``."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from cpumond.core.decode import ContentError, decode_text
from cpumond.core.errors import AccessError, ConfigError, describe


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[log]``: ``format`` auto = journald fields under systemd, console on a terminal, else JSON."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console", "journald"] = "auto"


def read_layers(path: str, folder: str, parse: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
    """``path`` and the ``*.toml`` in ``folder``, if there is one, in the order of their names, parsed and merged.

    ``parse`` takes a file's text and name. Raises ConfigError or AccessError.
    """
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    drop_ins = [name for name in names if is_drop_in(folder, name)]
    merged: dict[str, Any] = {}
    for name in [path, *(os.path.join(folder, drop_in) for drop_in in drop_ins)]:
        text, status = _read_text(name)
        table = parse(text, name)
        problem = find_rights_of_others(name, status) if table.get("scheduler", {}).get("token") else ""
        if problem:
            raise ConfigError(
                f"{name}: scheduler.token: {problem}, or put the token into a file of its own (token_file)"
            )
        merged = _merge(merged, table)
    return merged


def is_drop_in(folder: str, name: str) -> bool:
    """Whether a name in ``conf.d`` is a file that counts: what editors and systems leave there begins with a dot."""
    place = os.path.join(folder, name)
    # A file that is gone or may not be read is an error; it is what somebody wrote.
    return name.endswith(".toml") and not name.startswith(".") and (os.path.isfile(place) or not os.path.exists(place))


def _read_text(path: str) -> tuple[str, os.stat_result]:
    try:
        with open(path, "rb") as file:
            return decode_text(file.read()), os.fstat(file.fileno())
    except PermissionError as error:
        raise AccessError(f"{path}: cannot be read: {describe(error)}; run as root or fix its rights") from error
    except ContentError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {describe(error)}; give --config the path of a TOML file") from None


def find_rights_of_others(path: str, status: os.stat_result) -> str:
    """Why a file with secrets may not be used: users other than its owner have rights to it; a sentence, "" if none.

    ``status`` is that of the open file, so that the file cannot be replaced between this check and the reading.
    """
    mode = stat.S_IMODE(status.st_mode)
    # The copy of a credential that systemd makes belongs to root; its group bits are the mask of an access control
    # list that names the service's user.
    allowed = 0o040 if os.path.dirname(os.path.abspath(path)) == os.environ.get("CREDENTIALS_DIRECTORY") else 0
    if not mode & 0o077 & ~allowed:
        return ""
    return f"others than its owner have rights to it (mode {mode:04o}); run `chmod 600 {path}`"


def parse_listen(text: str, where: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'{where}: must be "host:port" with a port in [0, 65535], got {text!r}')
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``: a loopback address without brackets, or "localhost"."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        elif key == "source" and isinstance(value, list):
            merged[key] = [*merged.get(key, []), *value]
        else:
            merged[key] = value
    return merged
