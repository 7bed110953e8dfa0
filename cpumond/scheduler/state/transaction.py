"""What a change of the state is made of, and the rules that decisions read. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cpumond.fairshare.resources import Vector
from cpumond.scheduler.decide.admission import PoolRules
from cpumond.scheduler.model import Config, JobRecord, NodeRecord, OperationRecord


@dataclass(frozen=True, slots=True)
class Rules:
    """The part of the scheduler's configuration that decisions read; times in seconds."""

    max_operation_count: int = 5000
    pools: PoolRules = PoolRules()  # noqa: RUF009 - frozen
    pool_name_regex: str = "[-_a-z0-9:A-Z]+"
    erase_trees_with_pool_limit_violations: bool = False
    heartbeat_period_s: float = 1.0
    node_heartbeat_timeout_s: float = 60.0
    waiting_job_timeout_s: float = 30.0
    overcommit_duration_s: float = 15.0
    spare: Vector = (1.0, 1.0, 0.0, 268_435_456.0, 0.0)
    finished_operation_retention_count: int = 1000
    max_specification_memory: int = 67_108_864
    read_monitor: Callable[[Any], dict[str, Any]] = dict
    """Checks a section ``job_cpu_monitor``."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """A change that is stored before it is applied. Records replace those of the same key.

    ``id`` and ``warnings`` are for who asked.
    """

    config: Config | None = None
    operations: tuple[OperationRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    removed_nodes: tuple[str, ...] = ()
    id: str = ""
    warnings: tuple[str, ...] = ()
    abort_jobs_of: str = ""
    """Operation whose running jobs are stopped."""

    @property
    def is_empty(self) -> bool:
        return self.config is None and not (
            self.operations or self.jobs or self.nodes or self.removed_nodes or self.abort_jobs_of
        )


NOTHING = Transaction()
