"""A PostgreSQL server in a temporary directory, for tests and demonstrations."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time

from cpumond.cluster.ports import pick_port
from cpumond.core.errors import UnavailableError

START_TIMEOUT_S = 60.0


def find_postgresql() -> str | None:
    """Return the directory of ``initdb`` and ``postgres``, in PATH or where Debian installs them; None without one."""
    found = shutil.which("initdb")
    if found is not None and os.path.exists(os.path.join(os.path.dirname(os.path.realpath(found)), "postgres")):
        return os.path.dirname(os.path.realpath(found))
    versions = glob.glob("/usr/lib/postgresql/*/bin/initdb")
    return os.path.dirname(max(versions, key=lambda path: int(path.split("/")[-3]))) if versions else None


class PostgresServer:
    """A cluster made by ``initdb``, listening on a port of 127.0.0.1 and on a unix socket in its directory.

    Every client that reaches the server is its superuser; with ``is_private`` only its own account and root reach it,
    and only by the socket. Started by root, it runs as the user ``postgres``, because PostgreSQL refuses root. Raises
    UnavailableError if it is not installed or does not start."""

    def __init__(self, *options: str, is_private: bool = False) -> None:
        """``options``: lines of postgresql.conf."""
        programs = find_postgresql()
        if programs is None:
            raise UnavailableError("PostgreSQL is not installed: install Debian's postgresql")
        self.programs = programs
        self.prefix: tuple[str, ...] = ()
        """Words before the server's command, for example to enter a network namespace."""
        self._as_owner: tuple[str, ...] = ()
        entry = None
        if os.geteuid() == 0:
            self._as_owner = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
            try:
                entry = pwd.getpwnam("postgres")
            except KeyError:
                raise UnavailableError("PostgreSQL does not run as root, and there is no user postgres") from None
        self.directory = tempfile.mkdtemp(prefix="cpumond-pg-")
        if entry is not None:
            os.chown(self.directory, entry.pw_uid, entry.pw_gid)
        self.data = os.path.join(self.directory, "data")
        self.host = "" if is_private else "127.0.0.1"
        self.port = pick_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PostgresServer:
        try:
            self.make()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def conninfo(self, database: str = "postgres", host: str = "") -> str:
        """Return libpq's connection string of a database. Its user is ``cpumond``, without a password."""
        return f"host='{host or self.host or self.directory}' port={self.port} dbname={database} user=cpumond"

    def make(self) -> None:
        self.run("initdb", "-D", self.data, "-U", "cpumond", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self.configure(
            f"listen_addresses = '{self.host}'",
            f"port = {self.port}",
            f"unix_socket_directories = '{self.directory}'",
            "max_connections = 50",
            "shared_buffers = 32MB",
            *self._options,
        )

    def configure(self, *lines: str) -> None:
        """Add lines to postgresql.conf, which apply after a start or ``reload``; a setting's last line counts."""
        with open(os.path.join(self.data, "postgresql.conf"), "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

    def run(self, program: str, *arguments: str) -> str:
        """Return the output of a program of PostgreSQL. Raises UnavailableError with the end of its error output."""
        done = subprocess.run(  # a program found above
            [*self._as_owner, os.path.join(self.programs, program), *arguments], cwd=self.directory,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise UnavailableError(f"{program} failed: {done.stderr.strip()[-500:]}")
        return done.stdout

    def start(self) -> None:
        command = [*self.prefix, *self._as_owner]
        if self._as_owner or shutil.which("setpriv"):
            # The server ends with this process, even if this process is killed.
            command += ["setpriv", "--pdeathsig=INT"]
        with open(os.path.join(self.directory, "log"), "ab") as log:
            self._process = subprocess.Popen(
                [*command, os.path.join(self.programs, "postgres"), "-D", self.data], cwd=self.directory,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        status = os.path.join(self.data, "postmaster.pid")
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError), open(status, encoding="utf-8") as file:
                lines = file.read().splitlines()
                # The eighth line is what pg_ctl waits for.
                if len(lines) > 7 and lines[0] == str(self._process.pid) and lines[7].strip() in {"ready", "standby"}:
                    return
            time.sleep(0.02)
        with open(os.path.join(self.directory, "log"), encoding="utf-8", errors="replace") as file:
            raise UnavailableError(f"PostgreSQL does not start: {file.read().strip()[-500:]}")

    @property
    def pid(self) -> int:
        """Id of the server's main process; 0 if the server does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def reload(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGHUP)

    def kill(self) -> None:
        """Send SIGKILL to all of the server's processes at once, like a loss of power."""
        if self._process is not None:
            for pid in (self._process.pid, *_list_children(self._process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """End the server and its sessions; with SIGQUIT it does not write its memory to disk first."""
        if self.pid and self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process = None

    def close(self) -> None:
        """End the server; remove its files, and the shared memory that a killed server leaves behind."""
        self.stop(signal.SIGQUIT)
        with contextlib.suppress(OSError, IndexError), open(f"{self.data}/postmaster.pid", encoding="utf-8") as file:
            segment = file.read().splitlines()[6].split()[1]
            subprocess.run(["ipcrm", "-m", segment], check=False, capture_output=True)  # noqa: S607
        shutil.rmtree(self.directory, ignore_errors=True)


def _list_children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(each) for each in file.read().split()]
    except OSError:
        return []
