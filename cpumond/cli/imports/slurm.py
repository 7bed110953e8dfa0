"""Slurm: associations of ``sacctmgr dump`` or ``sacctmgr -P show assoc tree``, ``show qos``, and slurm.conf. Pure."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, Final, NamedTuple

from cpumond.cli.imports.making import At, Making
from cpumond.cli.imports.options import find_option
from cpumond.core.errors import ConfigError
from cpumond.scheduler.model import ROOT_POOL

SHARES: Final = ("share", "fairshare")
DUMPED: Final = re.compile(r"\s*(Cluster|Parent|Account|User) - ")


class _Association(NamedTuple):
    """The association of an account, or, with ``user``, of a user in it. ``parent``: the account above."""

    account: str
    user: str
    parent: str
    at: At
    options: dict[str, str]

    @property
    def share(self) -> str:
        return next((value.strip() for name, value in self.options.items() if name.lower() in SHARES), "1")


def _read_s(text: str) -> float:
    """Parse ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours...``."""
    days, dash, rest = text.rpartition("-")
    parts = [float(part) for part in rest.split(":")]
    units = (3600.0, 60.0, 1.0) if dash or len(parts) == 3 else (60.0, 1.0)
    return float(days or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def read(texts: Mapping[str, str], total: Mapping[str, float]) -> Making:
    """Read pools of associations, and notes of all files. Raises ConfigError."""
    making = Making("slurm", total, read_s=_read_s)
    found: list[_Association] = []
    for file, text in texts.items():
        head = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
        try:
            if DUMPED.match(head):
                found += _read_dump(text, file)
            elif "Account" in head.split("|"):
                found += _read_listed(text, file)
            elif "|" in head:
                for at, row in _rows(text, file):
                    for option, value in row.items():
                        making.set_option("QOS", option, value, At(at, f"QOS {row.get('Name', '')}"), making.options)
            else:
                _read_conf(making, text, file)
        except ValueError as error:
            raise ConfigError(f"{file}: a quotation mark is not closed: {error}") from None
    if not found:
        raise ConfigError(f"{', '.join(texts)}: no accounts; add the output of `sacctmgr dump CLUSTER`")
    _make_pools(making, found)
    return making


def _read_conf(making: Making, text: str, file: str) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        if line.endswith("\\"):
            raise ConfigError(f"{file}:{number}: a continued line is not supported: write it on one line")
        words = [word.partition("=")[::2] for word in shlex.split(line, comments=True)]
        first = words[0][0].lower() if words else ""
        place = "partition" if first == "partitionname" else "slurm.conf"
        for key, value in words[:1] if first == "nodename" else words:
            subject = f"partition {words[0][1]}" if place == "partition" else "the cluster"
            making.set_option(place, key, value, At(f"{file}:{number}", subject), making.options)


def _rows(text: str, file: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place of each line of ``sacctmgr -P show`` and its values that are not empty, by column."""
    columns: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.split("|")
        if columns and line.strip():
            yield f"{file}:{number}", {name: cell for name, cell in zip(columns, cells, strict=False) if name and cell}
        columns = columns or [cell.strip() for cell in cells]


def _read_listed(text: str, file: str) -> Iterator[_Association]:
    path: list[str] = []
    for where, row in _rows(text, file):
        indented, user = row.pop("Account", ""), row.pop("User", "").strip()
        account, depth = indented.strip(), len(indented) - len(indented.lstrip())
        parent = row.pop("ParentName", "")
        if not user and not parent:
            if depth == 0 and account != "root":
                raise ConfigError(
                    f"{where}: the cluster of account {account} is unknown; use `sacctmgr -P show assoc tree` or `dump`"
                )
            path[depth:] = [account]
            parent = path[max(depth - 1, 0)]
        yield _make(account, user, parent, where, row)


def _read_dump(text: str, file: str) -> Iterator[_Association]:
    parent = "root"
    for number, line in enumerate(text.splitlines(), 1):
        match = DUMPED.match(line)
        if match is None:
            if line.strip() and not line.lstrip().startswith("#"):
                raise ConfigError(f"{file}:{number}: expected Cluster, Parent, Account or User, as in a dump")
            continue
        words = shlex.shlex(line[match.end() :], posix=True)
        words.whitespace, words.whitespace_split, words.commenters = ":", True, ""
        name, *options = words
        row = dict(word.partition("=")[::2] for word in options)
        if match[1] == "Parent":
            parent = name
        elif match[1] == "User":
            yield _make(parent, name, "", f"{file}:{number}", row)
        else:
            yield _make("root" if match[1] == "Cluster" else name, "", parent, f"{file}:{number}", row)


def _make(account: str, user: str, parent: str, where: str, row: dict[str, str]) -> _Association:
    subject = f"account {account}" + f", user {user}" * (user != "")
    found = _Association(account, user, account if user else parent, At(where, subject), row)
    if not re.fullmatch(r"parent|\d+(\.\d+)?", found.share):
        raise ConfigError(f"{where}: {subject}: Fairshare must be a number or parent, got {found.share}")
    return found


def _make_pools(making: Making, found: list[_Association]) -> None:
    pools: dict[str, tuple[str, dict[str, Any]]] = {"root": (ROOT_POOL, {})}
    shares: dict[str, Counter[str]] = {}
    for each in found:
        shares.setdefault(each.parent, Counter())[each.share] += each.user != ""
    for each in found:
        if each.parent not in pools:
            raise ConfigError(f"{each.at.where}: {each.at.subject}: account {each.parent} is not defined before it")
        usual, above = max(shares[each.parent].items(), key=itemgetter(1)), pools[each.parent]
        options = making.options if each.account == "root" else above[1]
        bounded = any(re.match("(grp|maxjobs|maxsubmit)", name.lower()) for name in each.options)
        if each.user and each.account == "root":
            making.note("not expressible", "User", "operations are in pools, not in the root itself", each.at)
            continue
        if each.user and not bounded and each.share == usual[0]:
            options["create_ephemeral_subpools"] = True
            options = {}
        elif each.account != "root":
            pool = making.add_pool((each.parent, each.user or each.account), above[0], each.at)
            options = pool.options
            if each.user:
                making.note("approximated", "User", "a pool of its own: operations of this user must name it", each.at)
            else:
                pools[each.account] = (pool.name, options)
        for name, value in each.options.items():
            place = "user" if each.user and find_option("slurm", "user", name, value) else "association"
            making.set_option(place, name, value, each.at, options)
        # Pools created for the first operation of a user have weight 1.
        if usual[1] and usual[0] != "parent" and "weight" in options:
            options["weight"] /= float(usual[0]) or 1.0
