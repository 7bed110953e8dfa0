"""Detection of parts of a write-ahead log that SQLite drops without an error."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import struct
from typing import BinaryIO, Final

import structlog

from cpumond.core.errors import describe

log = structlog.get_logger("cpumond.scheduler")

WAL_HEADER: Final = struct.Struct(">8I")
"""Magic number, version, size of a page, number of the checkpoint, two salts, two checksums."""
WAL_FRAME: Final = struct.Struct(">6I")
"""Page number, size of the database in pages (0 if no commit ends here), two salts, two checksums; then the page."""
WAL_INDEX: Final = struct.Struct("=3I2BHI")
"""The beginning of ``PATH-shm``; the last field is the number of the last frame."""
MAX_LOGS: Final = 2**24
"""A log is restarted fewer times than this before its file is removed at the end of a scheduler."""


def report_dropped_writes(path: str) -> None:
    """If SQLite will not read its whole write-ahead log, report this and keep a copy. SQLite gives no error when it
    drops everything after the first frame with a wrong checksum.

    A connection that has read something must be open: SQLite has then noted in the log's index which valid frame is the
    last. That connection must be closed before the writing one is opened: closing the index here releases all locks
    that this process has on it, and another program would then assume that the index is unused."""
    wal = f"{path}-wal"
    if not os.path.lexists(wal) or not os.path.getsize(wal):
        return
    with open(f"{path}-shm", "rb") as file:
        index = file.read(WAL_INDEX.size)
    taken = WAL_INDEX.unpack(index)[-1] if len(index) == WAL_INDEX.size else 0
    with open(wal, "rb") as file:
        dropped, is_tail = _count_dropped(file, taken)
    if not dropped:
        return
    aside = next(name for number in itertools.count(1) if not os.path.lexists(name := f"{wal}.damaged-{number}"))
    try:
        shutil.copyfile(wal, aside)
        os.chmod(aside, 0o600)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        aside = f"none: {describe(error)}"
    if is_tail:
        advice = (
            "nothing to do after a kill, a loss of power or a full disk: the last write was incomplete and not "
            "acknowledged"
        )
        log.warning("store_log_cut", path=wal, taken_frames=taken, dropped_frames=dropped, copy=aside, advice=advice)
    else:
        advice = "the log is damaged in the middle: the newest changes are lost; check the disk"
        log.error("store_log_damaged", path=wal, taken_frames=taken, dropped_frames=dropped, copy=aside, advice=advice)


def _count_dropped(file: BinaryIO, taken: int) -> tuple[int, bool]:
    """Count the frames after the first ``taken`` ones of a log, without those left from an older log or an uncommitted
    write. Also return whether they are just the last frame written, as after a kill or a loss of power. See "Database
    File Format" of SQLite, 4."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(WAL_HEADER.size)
    if len(head) < WAL_HEADER.size:
        return (1 if head else 0), False
    _, _, page_bytes, _, *salts, _, _ = WAL_HEADER.unpack(head)
    if not 512 <= page_bytes <= 65536:
        return 1, False
    frame_bytes = WAL_FRAME.size + page_bytes
    frames, rest = divmod(size - WAL_HEADER.size, frame_bytes)
    dropped = [frames] if rest else []
    last = -1
    for number in range(taken, frames):
        file.seek(WAL_HEADER.size + number * frame_bytes)
        _, pages, *found = WAL_FRAME.unpack(file.read(WAL_FRAME.size))
        # A new log overwrites the old one from the start, with a first salt higher by one; the old log's end stays.
        is_older = 0 < (salts[0] - found[0]) & 0xFFFFFFFF < MAX_LOGS and any(found)
        is_present = found[:2] == salts
        if pages if is_present else not is_older:
            dropped.append(number)
        last = number if is_present else last
    return len(dropped), len(dropped) == 1 and dropped[0] >= last and taken > 0
