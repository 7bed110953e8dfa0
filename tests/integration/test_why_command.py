"""``cpumond why`` against a real scheduler: the sentence, the table, and its change applied as it is printed."""

import shlex

from test_json_api import make_node
from test_scheduler_commands import Shell, cpumond, server
from waiting import wait_until

__all__ = ["cpumond", "server"]


def test_the_first_line_says_it_all_and_the_last_one_is_what_to_type(server, cpumond: Shell):
    """Pool research may run one of its three operations; a node of 8 cores is there for them."""
    cpumond("pool", "create", "research", "max_running_operation_count=1")
    node = make_node(server, "n1", cpu=8.0)
    node.register()
    for _ in range(3):
        cpumond("operation", "start", "--pool", "research", "--cpu-limit", "2", "--", "sleep", "60")

    def is_held() -> bool:
        node.beat()
        return cpumond.json("why")["parts"]["starting"] == 0.0 and server.scheduler.state.jobs != {}

    wait_until(is_held, "one operation runs")
    lines = cpumond("why").splitlines()
    assert lines[0] == (
        "4 cores stand idle while 2 operations wait: max_running_operation_count of pool research is 1; raise it to 3 "
        "and 4 cores start work"
    )
    assert lines[2:6] == [
        "capacity: 8 cores",
        "used:     2 cores",
        "no work:  2 cores, idle, nothing waits for it",
        "blocked:  4 cores, idle while work waits for it",
    ]
    assert lines[7].split() == ["cores", "blocked", "by", "pool", "change"]
    assert lines[8].split() == ["4", "max_running_operation_count", "research", "raise", "it", "to", "3"]
    assert lines[9].startswith("$ cpumond pool set research max_running_operation_count=3")
    cpumond(*shlex.split(lines[9])[2:])
    assert "blocked:  0 cores" in cpumond("why")
