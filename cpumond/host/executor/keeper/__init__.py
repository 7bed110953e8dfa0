"""The keeper: the parent of the jobs of kind "cgroup", a small process that outlives the agent.

It starts jobs, copies their output from FIFOs into log files, waits for them, kills their leftovers, and keeps exit
codes. ``PROGRAM RUNTIME_DIR`` runs without site, so this package and its imports may need only the standard library.

Agents connect to ``keeper.sock`` in RUNTIME_DIR; only root and the keeper's own user may connect. Both sides send lines
of JSON, each an object with one key. The keeper's first line is ``hello``, with its version and all its jobs; a ``job``
line follows whenever a job changes. The agent sends ``start`` for a new job, ``adopt`` for a job of a killed keeper,
``kill`` for a job's main process, ``forget`` for a job that is over, and ``listen`` if the socket was removed. A
``job`` line has ``JOB_FIELDS``; when a job is over, these are first written to ``result.json`` in the job's directory.
The states are starting, running, ended and failed.

The directory of a job contains for stdout, and likewise for stderr: the FIFO ``stdout.fifo``; the log ``stdout``; the
part of the log before that, ``stdout.1``; ``stdout.total``, the number of bytes before the first byte of ``stdout``."""

from __future__ import annotations

import os
from typing import Final

PROGRAM: Final = os.path.join(os.path.dirname(__file__), "__main__.py")
VERSION: Final = 4
SOCKET_NAME: Final = "keeper.sock"
LOCK_NAME: Final = "keeper.lock"
RESULT_NAME: Final = "result.json"
STREAMS: Final = ("stdout", "stderr")
RECLAIMED_OOM_SCORE: Final = 1000
"""``oom_score_adj`` of jobs on reclaimed CPU: if memory is short, the kernel kills them before all others."""
LOST: Final = "its exit code was lost: the process that waited for it was killed"
IDLE_S: Final = 3.0
"""Seconds without agents and jobs after which a keeper ends."""

JOB_FIELDS: Final = (
    "id", "directory", "state", "pid", "start_time", "finish_time", "exit_code", "signal", "problem", "node_fault",
)  # fmt: skip
"""The keys of a job line."""
