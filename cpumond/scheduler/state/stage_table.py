"""The stages of a roll-out, found by their node filters, and the levels that they set for nodes; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress

from cpumond.core.levels import Level
from cpumond.scheduler.settings.nodes_filter import NodesFilter, parse_nodes_filter
from cpumond.scheduler.settings.rollout import Stage, find_least, find_level


class StageTable:
    """All stages; each filter is parsed once."""

    def __init__(self) -> None:
        self._stages: dict[str, tuple[Stage, NodesFilter]] = {}

    def __len__(self) -> int:
        return len(self._stages)

    def get(self, name: str) -> Stage | None:
        found = self._stages.get(name)
        return None if found is None else found[0]

    def list(self) -> list[Stage]:
        return [self._stages[name][0] for name in sorted(self._stages)]

    def change(self, stages: Iterable[Stage], removed: Iterable[str]) -> None:
        """Apply stages, each of which replaces the stage with the same filter; remove stages by their filters."""
        for name in removed:
            self._stages.pop(name, None)
        for stage in stages:
            self._stages[stage.nodes_filter] = (stage, parse_nodes_filter(stage.nodes_filter))

    def find_level(self, node_id: str, tags: Collection[str]) -> Level:
        """Return the level that all stages together set for a node."""
        return find_level(self._list_levels(node_id, tags))

    def find_levels(
        self, nodes: Sequence[tuple[str, frozenset[str]]], but: str | None = None
    ) -> Sequence[Level | None]:
        """Return the level that the stages set for each node (id and tags); None for a node that no stage fits.
        ``but``: filter of a stage to leave out. Each filter is evaluated once for all nodes."""
        told: list[list[Level | None]] = [[] for _ in nodes]
        for each, (stage, nodes_filter) in self._stages.items():
            if each != but:
                fits = nodes_filter.select([tags for _, tags in nodes])
                for (node_id, _), levels in compress(zip(nodes, told, strict=True), fits):
                    levels.append(stage.find_level(node_id))
        return [find_least(levels) for levels in told]

    def _list_levels(self, node_id: str, tags: Collection[str]) -> Iterator[Level | None]:
        for stage, nodes_filter in self._stages.values():
            if nodes_filter.matches(tags):
                yield stage.find_level(node_id)
