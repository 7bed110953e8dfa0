"""The source ``systemd``: services and scopes of slices, by a look at cgroupfs."""

import os
from pathlib import Path

import pytest

from cpumond.agent.config import Source
from cpumond.agent.discovery import concerns, find_cgroups, list_jobs


@pytest.fixture
def root(tmp_path: Path) -> str:
    for path in (
        "batch.slice/work.service", "batch.slice/run-1.scope", "batch.slice/some.mount",
        "batch.slice/batch-night.slice/late.service", "batch.slice/pod.scope/container/inner.service",
        "system.slice/ssh.service", "init.scope",
    ):  # fmt: skip
        os.makedirs(tmp_path / path)
    return str(tmp_path)


def units(*slices: str, **more: object) -> Source:
    return Source(kind="systemd", slices=list(slices), **more)  # type: ignore[arg-type]


LATE, WORK = "batch.slice/batch-night.slice/late.service", "batch.slice/work.service"


@pytest.mark.parametrize(("source", "paths"), [
    (units("batch.slice"), [LATE, "batch.slice/pod.scope", "batch.slice/run-1.scope", WORK]),
    (units("batch.slice", pattern="*.service"), [LATE, WORK]),
    (units("batch-night.slice", pattern="l*"), [LATE]),
    (units("-.slice", pattern="[is]*"), ["init.scope", "system.slice/ssh.service"]),
], ids=["and of those below it", "whose names fit", "in a slice below", "the root slice is everything"])  # fmt: skip
def test_services_and_scopes_of_a_slice(root: str, source: Source, paths: list[str]) -> None:
    assert find_cgroups(root, source)[0] == paths


def test_a_slice_is_watched_with_those_below_it_and_waited_for(root: str) -> None:
    """Each dash in its name is a level."""
    assert find_cgroups(root, units("batch.slice"))[1] == ["", "batch.slice", "batch.slice/batch-night.slice"]
    assert find_cgroups(root, units("a-b-c.slice")) == ([], ["", "a.slice", "a.slice/a-b.slice"])


@pytest.mark.parametrize(("options", "job_id", "path"), [
    ({"pattern": "work*"}, "work.service", "batch.slice/work.service"),
    ({"pattern": "run-*", "id_regex": r"^run-(?P<id>\d+)\.scope$"}, "1", "batch.slice/run-1.scope"),
])  # fmt: skip
def test_a_job_is_called_as_its_unit_or_a_part_of_it(
    root: str, options: dict[str, str], job_id: str, path: str
) -> None:
    [job] = list_jobs([units("batch.slice", cpu_limit=2.0, **options)], [], root).jobs
    assert (job.job_id, job.path, job.cpu_limit_cores) == (job_id, path, 2.0)


@pytest.mark.parametrize(("path", "concerned"), [
    (".", True),
    ("batch.slice", True),
    ("batch.slice/new.service", True),
    ("batch.slice/batch-night.slice/new.service", True),
    ("batches.slice", False),
    ("system.slice/new.service", False),
])  # fmt: skip
def test_only_changes_in_a_slice_concern_it(path: str, concerned: bool) -> None:
    assert concerns(units("batch.slice"), path) == concerned
    assert concerns(units("-.slice"), path)
