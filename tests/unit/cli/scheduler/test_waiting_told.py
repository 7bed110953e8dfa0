"""What `cpumond run` says while its operation has no job."""

from __future__ import annotations

from scheduler_world import World

from cpumond.api.views import OperationDetails, show_operation_details
from cpumond.cli.scheduler.running import WaitTold


def test_what_is_waited_for_is_told_after_a_while_and_when_it_changes():
    world, told = World(), WaitTold()
    world.create_pool("p")
    operation = world.start("p")

    def look(now_s: float) -> str:
        details: OperationDetails = show_operation_details(world.rights, world.record(operation), world.now)
        return told.note(details, now_s)

    no_node = "no node of the tree is online and takes jobs"
    assert [look(now) for now in (0.0, 4.9, 5.0, 9.0)] == ["", "", no_node, ""]
    world.suspend(operation)
    suspended = "suspended: no job is started until that is taken back"
    assert [look(now) for now in (10.0, 14.0, 16.0, 99.0)] == ["", "", suspended, ""]
    world.resume(operation)
    world.node("n1", cpu=1.0)
    world.settle_down()
    assert [look(now) for now in (100.0, 200.0)] == ["", ""], "it runs"
