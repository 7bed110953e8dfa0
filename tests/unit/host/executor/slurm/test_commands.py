"""What Slurm's commands are given, and what their answers mean; the answers are those of Slurm 22.05."""

from __future__ import annotations

import ast
import json

import pytest

from cpumond.host.executor.model import Launch
from cpumond.host.executor.slurm.commands import (
    Refusal,
    SlurmJob,
    make_look,
    make_script,
    make_submission,
    parse_look,
    parse_submission,
)


def make_launch(**changes) -> Launch:
    fields = {
        "job_id": "a.b-1", "argv": ["true"], "environment": {}, "user": "u", "working_directory": "/", "cpu_limit": 1.0,
        "memory_limit": 0, "directory": "/d", "max_log_bytes": 4096,
    }  # fmt: skip
    return Launch(**{**fields, **changes})


@pytest.mark.parametrize(("cores", "cpus"), [(0.01, 1), (1.0, 1), (1.0000000001, 1), (1.01, 2), (2.5, 3), (64.0, 64)])
def test_slurm_allocates_the_cpus_that_the_limit_begins(cores, cpus):
    assert f"--cpus-per-task={cpus}" in make_submission(make_launch(cpu_limit=cores), "p", "n")


def test_what_a_job_is_submitted_with():
    argv = make_submission(make_launch(memory_limit=(64 << 20) + 1), "part", "n1r")
    assert argv[0] == "sbatch"
    assert {"--partition=part", "--nodelist=n1r", "--job-name=cpumond-a.b-1", "--mem=65M", "--no-requeue",
            "--propagate=NONE", "--output=/dev/null"} < set(argv)  # fmt: skip
    assert not [word for word in make_submission(make_launch(), "p", "n") if word.startswith("--mem")]


def test_the_script_holds_the_order_on_one_line_of_ascii():
    order = {"argv": ["a'b\"\\", "\n#SBATCH --uid=0\r\n", "é\u2028\U0001f600", "\x01"], "environment": {"": "$x"}}
    script = make_script("/usr/bin/python3", "/p q/'", order)
    assert script.isascii()
    first, *lines = script.decode().splitlines()
    assert first == "#!/usr/bin/python3 -IS"
    assert [line for line in lines if line.startswith("#")] == []
    (call,) = ast.parse(lines[-1]).body
    assert json.loads(ast.literal_eval(call.value.args[0].args[0])) == order
    assert 'sys.path.append("/p q/\'")' in lines


def test_a_look_is_read_by_the_widths_it_asked_for():
    widths = [int(each.partition(":")[2]) for each in make_look("p")[-1].partition("=")[2].split(",")]
    rows = [
        ("12", "RUNNING", "0", "65534", "None", "cpumond-a.b-1"),
        ("13", "CANCELLED", "36608", "0", "None", "cpumond-" + "x" * 100),
        ("14", "PENDING", "0", "0", "(Nodes required for job are DOWN, or reserved)", "cpumond-c"),
        ("15", "RUNNING", "0", "0", "None", "somebody's cpumond-d"),
        ("slurm_load_jobs error", "", "", "", "", ""),
    ]
    text = "\n".join("".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows)
    assert parse_look(text + "\n\n") == [
        SlurmJob(12, "RUNNING", 0, 65534, "None", "a.b-1"),
        SlurmJob(13, "CANCELLED", 36608, 0, "None", "x" * 100),
        SlurmJob(14, "PENDING", 0, 0, "(Nodes required for job are DOWN, or reserved)", "c"),
    ]


@pytest.mark.parametrize(
    ("state", "reason", "is_over", "is_waiting", "is_hopeless"),
    [
        ("PENDING", "Resources", False, True, False),
        ("PENDING", "PartitionConfig", False, True, True),
        ("PENDING", "JobHeldUser", False, True, True),
        ("CONFIGURING", "None", False, False, False),
        ("RUNNING", "None", False, False, False),
        ("COMPLETING", "None", False, False, False),
        ("COMPLETED", "None", True, False, False),
        ("NODE_FAIL", "None", True, False, False),
        ("OUT_OF_MEMORY", "None", True, False, False),
        ("FAILED", "BadConstraints", True, False, False),
    ],
)
def test_what_a_state_means(state, reason, is_over, is_waiting, is_hopeless):
    job = SlurmJob(1, state, 0, 0, reason, "j")
    assert (job.is_over, job.is_waiting, job.is_hopeless) == (is_over, is_waiting, is_hopeless)


AWAY = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n"
LATE = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
MUNGE = "sbatch: error: If munged is up, restart with --num-threads=10\nsbatch: error: Munge encode failed\n"
FULL = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.\n"
NONE = "sbatch: error: invalid partition specified: x\n"
LONG = "sbatch: error: Batch job submission failed: Pathname of a file, directory or other parameter too long\n"


@pytest.mark.parametrize(
    ("code", "out", "err", "expected"),
    [
        (0, "17\n", "", 17),
        (0, "17;cluster\n", "sbatch: some warning\n", 17),
        (1, "", AWAY, (False, True)),
        (1, "", LATE, (False, True)),
        (1, "", MUNGE, (False, True)),
        (1, "", FULL, (False, True)),
        (None, "", "", (False, True)),
        (-9, "", "", (False, True)),
        (1, "", NONE + "sbatch: error: Batch job submission failed: Invalid partition name specified\n", (True, True)),
        (1, "", LONG, (True, False)),
        (127, "", "cannot run sbatch: No such file or directory", (True, True)),
        (0, "", "", (True, True)),
    ],
)
def test_what_becomes_of_a_submission(code, out, err, expected):
    result = parse_submission(code, out, err)
    found = (result.is_final, result.node_fault) if isinstance(result, Refusal) else result
    assert found == expected
    if isinstance(result, Refusal):
        assert result.problem
        assert "sbatch: error" not in result.problem
