"""Nodes of a tree on which jobs with a ``scheduling_tag_filter`` above them may start (semantics.md 2.13). Pure.

They are computed once for all operations with the same filters on their path, and again if nodes come, go or change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import compress
from typing import Protocol
from weakref import WeakValueDictionary

from cpumond.core.words import quoted
from cpumond.fairshare.resources import ZERO, Vector, sum_vectors
from cpumond.scheduler.elements.node_sizes import NodeSizes
from cpumond.scheduler.settings.nodes_filter import TAG_FILTER, read_filter


class Tagged(Protocol):
    """The part of a node that this module uses."""

    @property
    def tags(self) -> frozenset[str]: ...
    @property
    def capacity(self) -> Vector: ...
    @property
    def counted_capacity(self) -> Vector: ...
    @property
    def is_online(self) -> bool: ...


Kind = frozenset[tuple[str, ...]]
"""Kind of a node: each tuple of filters that all match it. An element treats all nodes of one kind alike."""


class Fitting:
    """The nodes that match all of ``filters``, their total, and the largest requests that jobs can have there."""

    __slots__ = ("__weakref__", "filters", "nodes", "sizes", "total")

    def __init__(self, filters: tuple[str, ...]) -> None:
        self.filters = filters
        self.nodes: frozenset[Tagged] = frozenset()
        self.total: Vector = ZERO
        """Sum of the parts that these nodes have in the tree's total."""
        self.sizes = NodeSizes({})

    @property
    def words(self) -> str:
        """The filters as text: ``scheduling_tag_filter "ssd"``."""
        return f"{TAG_FILTER} {' and '.join(map(quoted, self.filters))}"

    def find(self, nodes: Mapping[str, Tagged]) -> None:
        """Find the matching nodes among all nodes of the tree."""
        fitting = list(nodes.values())
        for text in self.filters:
            fitting = list(compress(fitting, read_filter(text).select([node.tags for node in fitting])))
        self.nodes = frozenset(fitting)
        self.sizes = NodeSizes(Counter(node.capacity for node in fitting), self.words if nodes else "")

    def sum_total(self) -> bool:
        """Set ``total`` as ``Tree.sum_total`` does. Returns whether the total changed."""
        before, self.total = self.total, sum_vectors([node.counted_capacity for node in self.nodes])
        return self.total != before


class Fittings:
    """All fittings of one tree that elements of the tree have."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[str, ...], Fitting] = WeakValueDictionary()
        self._kinds: dict[Tagged, Kind] = {}
        self.version = 0
        """Grows whenever the resources of any fitting change."""

    def __bool__(self) -> bool:
        return bool(self._known)

    def list(self) -> list[Fitting]:
        return list(self._known.values())

    def narrow(self, above: Fitting | None, text: str, nodes: Mapping[str, Tagged]) -> Fitting | None:
        """Return the nodes of ``above`` that also match the filter ``text``; None if there is no filter at all."""
        text = text.strip()
        filters = () if above is None else above.filters
        if not text or text in filters:
            return above
        filters = (*filters, text)
        found = self._known.get(filters)
        if found is None:
            found = self._known[filters] = Fitting(filters)
            self._kinds.clear()
            found.find(nodes)
            found.sum_total()
        return found

    def of(self, node: Tagged) -> Kind:
        kind = self._kinds.get(node)
        if kind is None:
            kind = self._kinds[node] = frozenset(each.filters for each in self.list() if node in each.nodes)
        return kind

    def renew(self, nodes: Mapping[str, Tagged], are_nodes_same: bool) -> None:
        """Update all fittings from the nodes. ``are_nodes_same``: whether only the nodes' jobs have changed."""
        if not are_nodes_same:
            self._kinds.clear()
        for each in self.list():
            counts = each.sizes.counts
            if not are_nodes_same:
                each.find(nodes)
            self.version += each.sum_total() or each.sizes.counts != counts
