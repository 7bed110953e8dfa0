"""Work on a copy of this process' memory, in a child of its own: frozen as it is now, in milliseconds.

The copy is the kernel's (fork): nothing is encoded or walked, and what the child changes is only its own. A child does
nothing but compute: it closes what it inherited, shares no thread, lock or connection, writes messages to a pipe and
ends without the exit handlers of the program. It ends when its parent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import struct
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

Send = Callable[[bytes], None]
PR_SET_PDEATHSIG: Final = 1
_prctl: Final = ctypes.CDLL(None).prctl
NICENESS: Final = 19
_SIZE: Final = struct.Struct("<I")
MAX_MESSAGE_BYTES: Final = 2**28


class ChildError(Exception):
    """The child ended without an end of its work; the message is its own last words, where it had some."""


class Child:
    """A child that works; its messages are read with ``messages``. Used by the thread of the event loop."""

    def __init__(self, work: Callable[[Send], None]) -> None:
        """Fork. ``work`` gets a function that sends a message; when it returns, the child ends. Raises ChildError."""
        reading, writing = os.pipe()
        parent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            raise ChildError(f"no process can be made for it: {os.strerror(error.errno or 0)}") from None
        if not self.pid:
            _work(work, writing, parent)
        os.close(writing)
        self._reading = reading
        self.cpu_s = 0.0
        """What the child cost, once it has ended."""

    async def messages(self) -> AsyncIterator[bytes]:
        """What the child sends, until it is done. Raises ChildError. Whoever stops reading before ends the child."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
        file = os.fdopen(self._reading, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        try:
            while True:
                size = _SIZE.unpack(await reader.readexactly(_SIZE.size))[0]
                if not size:
                    break
                yield await reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise ChildError("the process that computes it has ended before it was done") from None
        finally:
            transport.close()
            self._end()
            await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(self._reap)))

    def read_each(self) -> Iterator[bytes]:
        """The messages, for a caller without an event loop. Raises ChildError."""
        try:
            with os.fdopen(self._reading, "rb") as file:
                while True:
                    head = file.read(_SIZE.size)
                    if len(head) < _SIZE.size:
                        raise ChildError("the process that computes it has ended before it was done")
                    if not (size := _SIZE.unpack(head)[0]):
                        return
                    yield file.read(size)
        finally:
            self._end()
            self._reap()

    def read_all(self) -> list[bytes]:
        """All messages at once. Raises ChildError."""
        return list(self.read_each())

    def stop(self) -> None:
        """End a child whose messages nobody wants any more, and was never asked for."""
        os.close(self._reading)
        self._end()
        self._reap()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # it has not been waited for: its id is nobody else's

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            usage = os.wait4(self.pid, 0)[2]
            self.cpu_s = usage.ru_utime + usage.ru_stime


def _work(work: Callable[[Send], None], writing: int, parent: int) -> None:
    code = 1
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it ended before this was said
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.nice(NICENESS)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory is short it is this copy that goes
        kept = os.dup2(writing, 3) if writing != 3 else 3
        os.closerange(4, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 2**20 else 2**20)

        def send(message: bytes) -> None:
            data = memoryview(_SIZE.pack(len(message)) + message)
            while data:
                data = data[os.write(kept, data) :]

        work(send)
        send(b"")
        code = 0
    except BaseException:
        with contextlib.suppress(Exception):  # nothing may keep the copy from its end, a lost log neither
            print(traceback.format_exc(), file=sys.__stderr__, flush=True)
    finally:
        os._exit(code)
