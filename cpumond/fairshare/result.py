"""The result of a fair-share update: the shares of every element, the state for the next update, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cpumond.fairshare.resources import ZERO, Vector

NESTED_PROMISED_GUARANTEES: Final = 29001
PRIORITY_WITHOUT_DONOR: Final = 29002
GUARANTEES_EXCEED_CLUSTER: Final = 29000


@dataclass(frozen=True, slots=True)
class UpdateError:
    """An inconsistency in the tree's configuration; the update was made in spite of it (15)."""

    code: int
    message: str


@dataclass(frozen=True, slots=True)
class FairShare:
    """A share, as a fraction of the cluster for each resource, and the three parts that add up to it (12)."""

    total: Vector = ZERO
    strong_guarantee: Vector = ZERO
    integral_guarantee: Vector = ZERO
    weight_proportional: Vector = ZERO


NO_SHARE: Final = FairShare()


@dataclass(frozen=True, slots=True)
class ElementShares:
    """All results of an update for one element (2 to 14). ``..._share``: fractions of the cluster, by resource.
    ``..._ratio``: scalar fractions. ``..._volume``: resource*seconds. ``..._resources``: absolute. For operations, the
    fields that only pools have are 0."""

    kind: str
    """One of root, pool and operation."""
    fair_share: FairShare
    promised_guarantee_fair_share: FairShare
    demand_share: Vector
    usage_share: Vector
    limits_share: Vector
    strong_guarantee_share: Vector
    """The share after adjustment (6)."""
    strong_guarantee_share_priority_tier: Vector
    strong_guarantee_share_regular_tier: Vector
    proposed_integral_share: Vector
    estimated_guarantee_share: Vector
    inferred_strong_guarantee_resources: Vector
    dominant_resource: str
    fifo_index: int | None = None
    effective_fifo_index: int | None = None
    burst_ratio: float = 0.0
    """The ratio, scaled down if the cluster is overcommitted (6)."""
    total_burst_ratio: float = 0.0
    resource_flow_ratio: float = 0.0
    total_resource_flow_ratio: float = 0.0
    last_share_ratio: float = 0.0
    accumulated_volume: Vector = ZERO
    """The next update's input, together with ``last_share_ratio``."""
    volume_overflow: Vector = ZERO
    acceptable_volume: Vector = ZERO
    accepted_free_volume: Vector = ZERO
    children_volume_overflow: Vector = ZERO


PoolShares = tuple[str, Vector, Vector, Vector, Vector, Vector, float]
"""Name, fair share, demand share, strong and estimated guarantee share, accumulated volume and last share ratio."""


class Elements(Mapping[str, ElementShares]):
    """Name -> shares: the root, pools in pre-order, operations pool by pool. An entry is made when it is first read;
    later updates do not change the values from which it is made."""

    __slots__ = ("_find", "_describe", "_places", "operation_shares", "pool_shares")

    def __init__(
        self, find: Callable[[], dict[str, tuple[Any, int]]], describe: Callable[[Any, int], ElementShares],
        operation_shares: Callable[[], Iterator[tuple[str, Vector, Vector]]],
        pool_shares: Callable[[], Iterator[PoolShares]],
    ) -> None:  # fmt: skip
        self._find = find
        self._describe = describe
        self.operation_shares = operation_shares
        """Name, fair share and demand share of all operations, for callers that need many of them at once."""
        self.pool_shares = pool_shares
        """Shares of all pools, the root first."""
        self._places: dict[str, tuple[Any, int]] | None = None

    @property
    def places(self) -> dict[str, tuple[Any, int]]:
        """Name -> arguments for ``describe``, made when first needed."""
        if self._places is None:
            self._places = self._find()
        return self._places

    def __getitem__(self, name: str) -> ElementShares:
        return self._describe(*self.places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of ``fair_share_update``: errors in the order of section 15, and the shares by element name."""

    errors: tuple[UpdateError, ...]
    elements: Mapping[str, ElementShares]
