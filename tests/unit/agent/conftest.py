"""A node of fake cgroups whose agent is closed at the end of the test."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from fake_node import FakeNode
from fake_units import UnitNode

from cpumond.core.errors import CgroupWriteError
from cpumond.host.cgroup import Cgroup
from cpumond.host.cgroup.settings import CpuSettings

Records = list[dict[str, Any]]


@pytest.fixture
def logs() -> Iterator[Records]:
    with structlog.testing.capture_logs() as records:
        yield records  # type: ignore[misc]


@pytest.fixture
def make_node(tmp_path: Path, logs: Records) -> Iterator[Callable[..., FakeNode]]:
    """Makes nodes under the test's directory; their agents give everything back afterwards."""
    nodes: list[FakeNode] = []

    def make(jobs: dict[str, dict[str, object]], **more: Any) -> FakeNode:
        nodes.append(FakeNode(tmp_path / f"node{len(nodes)}", jobs, **more))
        return nodes[-1]

    yield make
    for node in nodes:
        if not node.reports.closed:
            node.agent.close()


@pytest.fixture
def refuse_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on no cgroup takes a write; undone by ``monkeypatch``."""

    def refuse(cgroup: Cgroup, before: CpuSettings, after: CpuSettings) -> bool:
        raise CgroupWriteError(cgroup.directory, str(after), OSError(errno.EIO, "broken"))

    return lambda: monkeypatch.setattr("cpumond.host.cgroup.v2.V2Cgroup.write_settings", refuse)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[UnitNode]:
    """A host with one unit; its agent has started, and ends with the test."""
    made = UnitNode(tmp_path)
    made.start()
    yield made
    if not made.bus.closed:
        made.agent.close()
