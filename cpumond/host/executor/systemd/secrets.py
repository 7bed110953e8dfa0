"""Pass secret variables of jobs to systemd in files, because every user can read a unit's ``Environment``. systemd
reads a file as root when it starts the job; the file is removed once the job has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from typing import Final

DIRECTORY: Final = "job-secrets"
_ESCAPED: Final = str.maketrans({sign: f"\\{sign}" for sign in '"\\$`'})
_CONTROL: Final = {chr(code) for code in (*range(32), 127)} - {"\t", "\n"}


def find_problem(secrets: Mapping[str, str]) -> str:
    """Return a sentence on why systemd would ignore a variable and log its value; "" if it accepts all variables."""
    if any(_CONTROL.intersection(value) for value in secrets.values()):
        return "a secret contains a control character, which systemd passes to no process; encode it in base64"
    return ""


def format_file(secrets: Mapping[str, str]) -> str:
    """Return the content of an ``EnvironmentFile``, see systemd.exec(5)."""
    return "".join(f'{name}="{value.translate(_ESCAPED)}"\n' for name, value in secrets.items())


class SecretFiles:
    """The files ``<runtime_dir>/job-secrets/<job_id>``, readable only by their owner."""

    def __init__(self, runtime_dir: str) -> None:
        self._directory = os.path.join(os.path.abspath(runtime_dir), DIRECTORY)

    def write(self, job_id: str, secrets: Mapping[str, str]) -> str:
        """Write the file and return its path. Raises OSError."""
        os.makedirs(self._directory, 0o700, exist_ok=True)
        os.chmod(self._directory, 0o700)
        path = self._path(job_id)
        self.remove(job_id)
        with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(format_file(secrets))
        return path

    def remove(self, job_id: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(job_id))

    def keep(self, job_ids: Collection[str]) -> None:
        """Remove the files of all jobs that are not in ``job_ids``."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                if name not in job_ids:
                    self.remove(name)

    def _path(self, job_id: str) -> str:
        return os.path.join(self._directory, job_id)
