"""What the scheduler's process makes of its configuration and of a section ``job-cpu-monitor``."""

import socket

import pytest

from cpumond.agent.config import parse_layer
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.program.config import Api, SchedulerConfig
from cpumond.scheduler.program.main import find_own_address, make_rules, read_monitor


@pytest.mark.parametrize("name", ["check_period", "start_delay", "restore_hold", "startup_boost"])
def test_the_agent_reads_the_times_that_the_user_wrote(name):
    given = {name: "1500ms", "min_cpu_limit": 0.5}
    assert parse_layer(read_monitor(given), "heartbeat answer") == parse_layer(given, "specification")
    assert read_monitor(given)[name] == 1500.0


def test_a_wrong_section_is_a_refusal_that_names_the_option():
    with pytest.raises(CommandError, match="smoothing_factor"):
        read_monitor({"smoothing_factor": 7})


def test_decisions_read_what_was_configured():
    wait = {"additional_reclaimed_overcommit_duration_s": 9.0, "allowed_node_cpu_overcommit_ratio": 0.25}
    rules = make_rules(SchedulerConfig(max_operation_count=7, waiting_job_timeout_s=3.0, **wait))
    assert (rules.additional_reclaimed_overcommit_duration_s, rules.allowed_node_cpu_overcommit_ratio) == (9.0, 0.25)
    assert (rules.max_operation_count, rules.waiting_job_timeout_s) == (7, 3.0)
    assert rules.spare == (1.0, 0.05, 0.0, 268_435_456.0, 0.0)


@pytest.mark.parametrize(
    ("listen", "advertise", "address"),
    [
        ("127.0.0.1:0", "", "127.0.0.1:{port}"),
        ("localhost:0", "", "localhost:{port}"),
        ("", "", "127.0.0.1:{port}"),
        ("0.0.0.0:0", "", ""),
        ("0.0.0.0:0", "head:9757", "head:9757"),
    ],
)
def test_the_address_that_clients_are_told(listen: str, advertise: str, address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert find_own_address(Api(listen=listen, advertise=advertise), [sock]) == address.format(port=port)
