"""A change of the state as a value. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from cpumond.scheduler.model import Config, JobRecord, LostNode, NodeRecord, OperationRecord
from cpumond.scheduler.model.budget import BudgetRecord, CorePair
from cpumond.scheduler.rights.token_records import TokenRecord
from cpumond.scheduler.rights.vaults import SealedVault
from cpumond.scheduler.settings.rollout import Stage


@dataclass(frozen=True, slots=True)
class Stops:
    """Jobs of an operation that a command stops: all; one; or those of each task beyond the number in ``most``, which
    includes completed jobs.

    ``why`` is a sentence, ``cause`` the reason of ``yt``. ``timeout_s``: seconds that the jobs have to end, None for
    the value of their tree."""

    operation_id: str
    why: str
    cause: str = ""
    job_id: str = ""
    timeout_s: float | None = None
    most: Mapping[str, int] | None = None


class Transaction(msgspec.Struct, frozen=True):
    """A change that is stored before it is applied. Its records replace those with the same key. It is a struct, since
    several are made for each command, and a dataclass would set each field by a call.

    ``id`` and ``warnings`` are only for the caller."""

    config: Config | None = None
    operations: tuple[OperationRecord, ...] = ()
    vaults: tuple[SealedVault, ...] = ()
    """Secrets of new operations in ``operations``. The end of an operation removes its secrets."""
    jobs: tuple[JobRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    removed_nodes: tuple[str, ...] = ()
    lost_nodes: tuple[LostNode, ...] = ()
    """Records of ``removed_nodes`` that stay visible."""
    kept_nodes: tuple[NodeRecord, ...] = ()
    """Known nodes of which only ``cordon`` and ``user_tags`` change."""
    tokens: tuple[TokenRecord, ...] = ()
    forgotten_tokens: tuple[str, ...] = ()
    """Hashes of invalid tokens to drop."""
    stages: tuple[Stage, ...] = ()
    removed_stages: tuple[str, ...] = ()
    """Filters of removed stages."""
    id: str = ""
    warnings: tuple[str, ...] = ()
    stops: Stops | None = None
    budgets: tuple[BudgetRecord, ...] = ()
    settled: Mapping[str, CorePair] = {}
    """Live job -> the part of its amount that ``budgets`` contains (2.15)."""

    @property
    def is_empty(self) -> bool:
        return self.config is None and not (
            self.operations or self.jobs or self.nodes or self.removed_nodes or self.lost_nodes or self.kept_nodes
            or self.tokens or self.forgotten_tokens or self.stages or self.removed_stages or self.stops or self.budgets
            or self.settled
        )  # fmt: skip


NOTHING = Transaction()
