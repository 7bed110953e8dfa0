"""What 0.2 left of jobs that it had started through Slurm, which no executor does any more."""

import contextlib
from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from cpumond.core.decode import decode_json
from cpumond.host.executor.cgroup import CgroupExecutor
from cpumond.host.executor.keeper_link import KeptJob
from cpumond.host.executor.records import drop_slurm_records


def test_its_records_are_removed_and_named_once(tmp_path):
    for name in ("job-2.json", "job-1.json"):
        (tmp_path / "slurm-jobs").mkdir(exist_ok=True)
        (tmp_path / "slurm-jobs" / name).write_text("{}")
    (tmp_path / "slurm-guests").write_text("cpumond-0123")
    (tmp_path / "keeper.lock").touch()
    with capture_logs() as told:
        drop_slurm_records(str(tmp_path))
        drop_slurm_records(str(tmp_path))
    assert [each["job_ids"] for each in told] == [["job-1", "job-2"]]
    assert [path.name for path in tmp_path.iterdir()] == ["keeper.lock"]


def test_an_earlier_keepers_jobs_are_not_taken_over(tmp_path):
    kept: list[Any] = [
        decode_json(text, KeptJob)
        for text in (
            b'{"id": "a", "state": "running", "slurm_job": 7, "places": {"": "/c/job_7"}, "cpu_seconds": null}',
            b'{"id": "b", "state": "running", "slurm_job": null, "places": {}, "oom_kills": 0, "start_time": 5.0}',
        )
    ]
    cgroups: Any = SimpleNamespace(join_files=lambda _: [], path=lambda job_id: job_id)
    with contextlib.closing(CgroupExecutor(cgroups, str(tmp_path))) as executor:
        executor._reconcile(kept)
        assert list(executor._jobs) == ["b"]
