"""Memory that a job reserves, computed from earlier jobs of its task: YTsaurus' digest of a task; pure (8.1).

A sample is the peak memory of a job as a fraction of its ``memory_limit``. Samples are counted in buckets. The first
bucket begins at the lower bound, and each is 1 % wider than the previous one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from cpumond.core.wire import MEMORY_OVERDRAFT
from cpumond.scheduler.model import JobRecord, OperationRecord, Task, TaskMemory

PRECISION: Final = 0.01
"""``user_job_memory_digest_precision`` of YTsaurus: how much wider each bucket is."""
QUANTILE: Final = 0.95
"""``user_job_memory_reserve_quantile``: fraction of the samples that do not exceed the reserve."""
DEFAULT_VALUE: Final = 0.5
"""``user_job_memory_digest_default_value``: fraction of ``memory_limit`` that is reserved before the first sample."""
LOWER_BOUND: Final = 0.05
"""``user_job_memory_digest_lower_bound``: minimum fraction that is reserved."""
OVERDRAFT_FACTOR: Final = 1.1
"""``memory_digest_resource_overdraft_factor``: multiplies the sample of a job that reached its limit."""
NOTHING: Final = TaskMemory()
_STEP: Final = math.log(1.0 + PRECISION)


def count_buckets(lower: float) -> int:
    return max(1, math.ceil(math.log(1.0 / lower) / _STEP))


def find_bucket(sample: float, lower: float) -> int:
    """Return the number of the bucket that contains a sample; the sample is above 0."""
    return min(max(math.trunc(math.log(sample / lower) / _STEP), 0), count_buckets(lower) - 1)


def find_quantile(counts: Mapping[int, int], lower: float, default: float) -> float:
    """Return the upper edge of the lowest bucket such that it and the buckets below have QUANTILE of the samples.
    ``counts``: bucket -> number of its samples."""
    enough, counted = QUANTILE * sum(counts.values()), 0
    for bucket in sorted(counts):
        counted += counts[bucket]
        if counted >= enough:
            return lower * (1.0 + PRECISION) ** (bucket + 1) if bucket + 1 < count_buckets(lower) else 1.0
    return default


def find_bounds(task: Task) -> tuple[float, float]:
    """Return the lower bound of a task's digest, and the digest's value before the first sample."""
    factor = task.memory_reserve_factor
    if factor is not None and (factor >= 1.0 or not task.ignore_memory_reserve_factor_less_than_one):
        return factor, factor
    default, lower = task.user_job_memory_digest_default_value, task.user_job_memory_digest_lower_bound
    lower = LOWER_BOUND if lower is None else lower
    return lower, max(DEFAULT_VALUE if default is None else default, lower)


def find_reserve(task: Task, memory: TaskMemory = NOTHING, is_taken: Callable[[int], bool] = lambda _: False) -> int:
    """Return the bytes that the next job of a task reserves. ``is_taken``: whether a live job has the cookie.

    While the place of a job that was aborted for lack of memory is free, the next job reserves enough for that place.
    """
    if memory is NOTHING:
        return round(task.memory_limit * find_bounds(task)[1])
    factor = find_quantile(memory.samples, *find_bounds(task))
    waiting = (share for cookie, share in memory.overdrafts.items() if not is_taken(cookie))
    return round(task.memory_limit * max(factor, *waiting, 0.0))


def set_reserves(
    record: OperationRecord, is_on: bool, is_taken: Callable[[str, int], bool] = lambda *_: False
) -> OperationRecord:
    """Return the record with the reserve of each task's next job; the same record if nothing changes."""
    if not is_on and not any(task.memory_reserve for task in record.tasks):
        return record
    memory, reserves = record.memory, [0] * len(record.tasks)
    if is_on:
        reserves = [
            find_reserve(task, memory[task.name], partial(is_taken, task.name))
            if task.name in memory
            else find_reserve(task)
            for task in record.tasks
        ]
    if reserves == [task.memory_reserve for task in record.tasks]:
        return record
    both = zip(record.tasks, reserves, strict=True)
    tasks = tuple(msgspec.structs.replace(task, memory_reserve=reserve) for task, reserve in both)
    return msgspec.structs.replace(record, tasks=tasks)


def note_end(record: OperationRecord, task: Task, job: JobRecord) -> OperationRecord:
    """Return the record after the end of a job with a reserve. Its usage is a new sample if it predicts later jobs."""
    used, limit = job.max_memory or 0, task.memory_limit
    is_overdraft = job.state == "aborted" and job.reason.startswith(MEMORY_OVERDRAFT)
    if not limit or not (is_overdraft or job.state == "completed"):
        return record
    memory = record.memory.get(task.name, NOTHING)
    samples, overdrafts, factor = dict(memory.samples), dict(memory.overdrafts), job.memory_reserve / limit
    sample = used / limit
    if is_overdraft and sample >= 1.0:
        sample = max(sample, factor * OVERDRAFT_FACTOR)
    if sample > 0.0:
        bucket = find_bucket(sample, find_bounds(task)[0])
        samples[bucket] = samples.get(bucket, 0) + 1
    before = overdrafts.pop(job.cookie, None)
    if is_overdraft:
        multiplier = task.user_job_resource_overdraft_memory_multiplier if before is None else None
        overdrafts[job.cookie] = 1.0 if multiplier is None else min(1.0, factor * multiplier)
    memory = TaskMemory(samples, overdrafts)
    return msgspec.structs.replace(record, memory={**record.memory, task.name: memory})
