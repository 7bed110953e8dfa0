"""setuptools' build backend, whose wheels and source distributions are the same bytes whenever and wherever it ran.

Dates are SOURCE_DATE_EPOCH or that of the newest release in CHANGELOG.md; rights, owners and order tell nothing of the
host. As a program it prints that date, in seconds since 1970.
"""

from __future__ import annotations

import calendar
import contextlib
import gzip
import io
import os
import re
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ != "__main__":
    from setuptools import build_meta as setuptools_backend
    from setuptools.build_meta import *  # noqa: F403 - the hooks in which no file is written that is kept

FALLBACK = "2026-01-01"
"""Before the first release, and where only a part of the sources is (docs/deploy/Containerfile)."""


def find_date() -> int:
    """Seconds since 1970."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    changelog = Path(__file__).resolve().parents[1] / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8") if changelog.exists() else ""
    found = re.search(r"^## \[\d.*\] - (\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    return calendar.timegm(time.strptime(found[1] if found else FALLBACK, "%Y-%m-%d"))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    with _fresh_build_directory():
        name = setuptools_backend.build_wheel(wheel_directory, config_settings, metadata_directory)
    _settle_wheel(Path(wheel_directory, name), find_date())
    return name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    name = setuptools_backend.build_sdist(sdist_directory, config_settings)
    _settle_sdist(Path(sdist_directory, name), find_date())
    return name


@contextlib.contextmanager
def _fresh_build_directory() -> Iterator[None]:
    """What an earlier build left in ``build`` gets into no wheel."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "build.cfg")
        config.write_text(f"[build]\nbuild_base = {directory}/build\n", encoding="utf-8")
        os.environ["DIST_EXTRA_CONFIG"] = str(config)
        yield


def _settle_wheel(path: Path, date: int) -> None:
    with zipfile.ZipFile(path) as archive:
        content = [(member, archive.read(member)) for member in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in content:
            settled = zipfile.ZipInfo(member.filename, time.gmtime(date)[:6])
            settled.external_attr = (0o100000 | _settle_mode(member.external_attr >> 16)) << 16
            settled.create_system = 3
            archive.writestr(settled, data, zipfile.ZIP_DEFLATED)


def _settle_sdist(path: Path, date: int) -> None:
    with tarfile.open(path) as archive:
        content = [(member, _read(archive, member)) for member in archive.getmembers()]
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in sorted(content, key=lambda each: each[0].name):
            settled = tarfile.TarInfo(member.name)
            settled.type, settled.size, settled.mtime = member.type, len(data), date
            settled.mode = 0o755 if member.isdir() else _settle_mode(member.mode)
            archive.addfile(settled, io.BytesIO(data))
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=date) as packed:
        packed.write(raw.getvalue())


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member) if member.isfile() else None
    return b"" if file is None else file.read()


def _settle_mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644


if __name__ == "__main__":
    print(find_date())
