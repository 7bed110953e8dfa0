"""The control group: which jobs are left in shadow, that they stay so, and what is told of them."""

import pytest
from fake_node import QUICK, FakeNode, source

from cpumond.agent import control
from cpumond.agent.config import AgentConfig, finish_config, parse_config_text
from cpumond.agent.explanation import add_sentences
from cpumond.core.errors import ConfigError
from cpumond.testing import v2_cgroup

FOUR = v2_cgroup(quota="400000 100000")
IDS = [f"job-{number}" for number in range(4000)]
HALF = AgentConfig(control_group_ratio=0.5)


def chosen(ratio: float) -> set[str]:
    config = AgentConfig(control_group_ratio=ratio)
    return {job for job in IDS if config.is_control(job)}


def explain(node: FakeNode, job: str) -> str:
    settings = node.job(job).settings
    return add_sentences(control.explain_job(node.agent, job), settings, "cpumond unpin").why


def test_a_share_of_the_jobs_is_chosen_and_a_larger_one_includes_it() -> None:
    assert chosen(0.0) == set()
    assert len(chosen(0.1)) == pytest.approx(400, abs=80)
    assert chosen(0.1) < chosen(0.3) < chosen(0.5)


def test_with_host_all_jobs_of_a_host_are_or_none() -> None:
    hosts = [AgentConfig(node_id=f"n{number}", control_group_ratio=0.5, control_group="host") for number in range(200)]
    assert all(len({host.is_control(job) for job in IDS[:40]}) == 1 for host in hosts)
    assert sum(host.is_control("a") for host in hosts) == pytest.approx(100, abs=30)


@pytest.mark.parametrize("value", ["0.6", "-0.1", '"half"', "true"])
def test_a_ratio_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="control_group_ratio"):
        finish_config(parse_config_text(f"control_group_ratio = {value}\n", "f"), "f")


def test_its_jobs_keep_what_they_ordered_and_say_why(make_node) -> None:
    control_job = next(job for job in IDS if HALF.is_control(job))
    other = next(job for job in IDS if not HALF.is_control(job))
    ratio = "control_group_ratio = 0.5\n"
    node = make_node({control_job: FOUR, other: FOUR}, config=ratio + QUICK + source()).run(8)
    assert (node.cores(control_job), node.cores(other)) == (4.0, 0.5)
    modes = {report.job_id: report.mode for report in node.agent.loop.publisher.make_heartbeat().jobs}
    assert modes == {control_job: "control", other: "reclaim"}
    assert "it is in the control group (control_group_ratio), so nothing is written" in explain(node, control_job)
    assert control.view_job(node.job(control_job)).status == "control"
    node.reload(QUICK + source())
    node.ticks(8)
    assert (node.cores(control_job), node.cores(other)) == (0.5, 0.5)
    node.reload(ratio + QUICK + source())
    node.ticks(2)
    assert (node.cores(control_job), node.cores(other)) == (4.0, 0.5)
