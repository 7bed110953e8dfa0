"""Work on a copy of this process' memory, in a child process: frozen at this moment, made within milliseconds.

The kernel makes the copy (fork): nothing is encoded or walked, and changes by the child stay in the child. A child only
computes. It closes what it inherited, shares no thread, lock or connection, writes messages to a pipe, and ends without
the program's exit handlers. It ends when its parent does.

After a fork, the kernel copies a page on the first write to it. The parent's next update writes to nearly all of them:
in a large process that stops the event loop for a few tenths of a second. Therefore the parent has its pages copied by
a thread, for which the kernel does not need the interpreter's lock."""

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
from io import RawIOBase
from typing import Final, TypeVar

import msgspec

from cpumond.scheduler.model import RESOLVE, CommandError

Send = Callable[[bytes], None]
PR_SET_PDEATHSIG: Final = 1
_prctl: Final = ctypes.CDLL(None).prctl
MADV_POPULATE_WRITE: Final = 23
_madvise: Final = ctypes.CDLL(None).madvise
_LOOKED_AT_BYTES: Final = 2**18
_COPIED_BYTES: Final = 2**21
"""Maximum bytes copied at a time: about 2 ms, in which other threads that need new memory wait."""
NICENESS: Final = 19
ASKED_NICENESS: Final = 5
"""Niceness of a copy with little work that a caller waits for. The lowest could take minutes on a busy host."""
_SIZE: Final = struct.Struct("<I")
MAX_MESSAGE_BYTES: Final = 2**28


T = TypeVar("T")


class ChildError(CommandError):
    """No child can be made, or the child ended before its work was done; the caller may try again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, RESOLVE, {"try_again": True})


async def ask(compute: Callable[[], T], answer: object) -> tuple[T, float]:
    """Compute in a copy of the process while the loop continues. Return the result, which has the type ``answer``, and
    its CPU seconds. Raises CommandError."""
    child = Child(lambda send: send(msgspec.msgpack.encode(compute())), ASKED_NICENESS)
    [message] = [each async for each in child.messages()]
    found: T = msgspec.msgpack.decode(message, type=answer)
    return found, child.cpu_s


def ask_at_once(compute: Callable[[], T], answer: object, niceness: int | None = ASKED_NICENESS) -> T:
    """Compute in a copy of the process, for a caller without an event loop. Raises CommandError."""
    [message] = Child(lambda send: send(msgspec.msgpack.encode(compute())), niceness).read_all()
    found: T = msgspec.msgpack.decode(message, type=answer)
    return found


class Child:
    """A working child. Its messages are read with ``messages``, in the thread of the event loop."""

    def __init__(self, work: Callable[[Send], None], niceness: int | None = None) -> None:
        """Fork. ``work`` gets a function that sends a message; when ``work`` returns, the child ends. ``niceness``: if
        None, NICENESS. Raises ChildError."""
        reading, writing = os.pipe()
        parent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            raise ChildError(f"cannot start a process to compute it: {os.strerror(error.errno or 0)}") from None
        if not self.pid:
            _work(work, writing, parent, NICENESS if niceness is None else niceness)
        os.close(writing)
        self._reading = reading
        self.cpu_s = 0.0
        """CPU seconds of the child, once it has ended."""

    async def messages(self, silence_s: float | None = None) -> AsyncIterator[bytes]:
        """Yield the child's messages until the child is done; an empty message after each ``silence_s`` without a
        message. Raises ChildError. A caller that stops reading early ends the child."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
        file = os.fdopen(self._reading, "rb", buffering=0)
        copying = asyncio.ensure_future(asyncio.to_thread(copy_pages))
        pipe: RawIOBase | asyncio.ReadTransport = file
        try:
            pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        size = _SIZE.unpack(await reader.readexactly(_SIZE.size))[0]
                except TimeoutError:
                    yield b""
                    continue
                if not size:
                    break
                yield await reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise ChildError("the process that computes it ended before it was done; try again") from None
        finally:
            pipe.close()
            self._end()
            # One task does all that is left: a caller that is cancelled may be cancelled again at each step, and then a
            # dead child would stay.
            await asyncio.shield(asyncio.ensure_future(self._finish(copying)))

    async def _finish(self, copying: asyncio.Future[int]) -> None:
        try:
            await copying
        finally:
            await asyncio.to_thread(self._reap)

    def read_each(self) -> Iterator[bytes]:
        """Yield the child's messages, for a caller without an event loop. Raises ChildError."""
        try:
            with os.fdopen(self._reading, "rb") as file:
                while True:
                    head = file.read(_SIZE.size)
                    if len(head) < _SIZE.size:
                        raise ChildError("the process that computes it ended before it was done; try again")
                    if not (size := _SIZE.unpack(head)[0]):
                        return
                    yield file.read(size)
        finally:
            self._end()
            self._reap()

    def read_all(self) -> list[bytes]:
        """Return all messages at once. Raises ChildError."""
        return list(self.read_each())

    def stop(self) -> None:
        """End a child whose messages are no longer needed, or will not be read."""
        os.close(self._reading)
        self._end()
        self._reap()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # nothing has waited for this child, so its id is not reused

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            usage = os.wait4(self.pid, 0)[2]
            self.cpu_s = usage.ru_utime + usage.ru_stime


def copy_pages() -> int:
    """Copy the pages that this process shares with a forked copy of itself. Return the number of bytes covered; 0 if
    the kernel cannot do this (before 5.14)."""
    done = 0
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps, open("/proc/self/pagemap", "rb", 0) as present:
        for line in maps.readlines():
            span, rights, _, _, inode, *name = line.split()
            if not rights.startswith("rw-p") or inode != "0" or name not in ([], ["[heap]"]):
                continue
            begin, end = (int(each, 16) for each in span.split("-"))
            for at, size in _find_pages(present, begin, end):
                if _madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), MADV_POPULATE_WRITE):
                    break  # the region is no longer mapped, or the kernel does not know the request
                done += size
    return done


def _find_pages(present: RawIOBase, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield address and size of the parts of a region that are in memory; for a thread's stack only the used part."""
    page, start = os.sysconf("SC_PAGESIZE"), begin
    for at in range(begin, end, _LOOKED_AT_BYTES):
        size = min(_LOOKED_AT_BYTES, end - at)
        present.seek(at // page * 8)
        # The highest bit of an entry means that the page is in memory.
        is_there = max((present.read(size // page * 8) or b"")[7::8], default=0) >= 0x80
        over = at + size if is_there else at
        if start < over and (not is_there or over == end or over - start >= _COPIED_BYTES):
            yield start, over - start
            start = over
        if not is_there:
            start = at + size


def give_way(niceness: int) -> None:
    """Lower the priority; if a system call filter refuses this, nothing else changes. Not SCHED_IDLE: on a host that is
    always busy such a copy would make no progress."""
    with contextlib.suppress(OSError):
        os.nice(max(niceness - os.nice(0), 0))


def _work(work: Callable[[Send], None], writing: int, parent: int, niceness: int) -> None:
    code = 1
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent ended before prctl
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        give_way(niceness)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs short, this copy is killed first
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
        with contextlib.suppress(Exception):  # nothing may keep the copy from ending, not even an unusable log
            print(traceback.format_exc(), file=sys.__stderr__, flush=True)
    finally:
        os._exit(code)
