"""Tags that an operator gives to nodes (semantics.md 2.1, 2.2)."""

import pytest
from scheduler_world import TREE, World, assert_consistent

from cpumond.scheduler.access.required import decide
from cpumond.scheduler.event_log.commands import Asked, make_command_event
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.state.node_commands import ChangeNodeTags, CordonNode, SetNodeTags
from cpumond.scheduler.state.nodes import LOST_S


@pytest.fixture
def world() -> World:
    world = World()
    world.node("n1", cpu=4.0, tags=("agent",))
    return world


def test_they_stand_beside_the_agents_and_outlive_registrations(world):
    change = world.do(SetNodeTags("n1", tags=("ssd", "fast", "ssd")))
    assert [record.user_tags for record in change.kept_nodes] == [("fast", "ssd")]
    world.restart()
    world.nodes["n1"].restart_agent()
    node = world.state.nodes["n1"]
    assert (node.user_tags, node.agent_tags, node.tags) == (("fast", "ssd"), ("agent",), {"agent", "fast", "n1", "ssd"})
    world.do(CordonNode("n1"))
    world.do(SetNodeTags("n1"))
    assert (node.user_tags, node.tags, node.cordoned) == ((), {"agent", "n1"}, True)


def test_some_are_given_and_taken_back_beside_the_others(world):
    world.do(SetNodeTags("n1", tags=("hdd", "fast")))
    command = ChangeNodeTags("n1", why="new disks", add=("ssd", "fast"), remove=("hdd",))
    told = make_command_event(world.state, command, Asked(User("ann")), world.do(command), world.now)
    assert told.event.text == 'ann changed the tags of node "n1": +ssd +fast -hdd: new disks'
    assert world.state.nodes["n1"].user_tags == ("fast", "ssd")
    for tag, what in (("agent", "is one of its agent's own tags; change"), ("hdd", r"is not one of \['fast', 'ssd'\]")):
        with pytest.raises(CommandError, match=f'user_tags: "{tag}" {what}'):
            world.do(ChangeNodeTags("n1", add=("new",), remove=("ssd", tag)))
    assert world.state.nodes["n1"].user_tags == ("fast", "ssd")
    world.set_tree(acl_required=True)
    assert not any(each.allowed for each in decide(world.state, command, User("bob")))


def test_they_outlive_the_loss_of_the_node_and_can_be_given_meanwhile(world):
    world.do(SetNodeTags("n1", tags=("ssd",)))
    for _ in range(2):  # silent, then lost
        world.after(400.0).expire()
    assert not world.state.nodes
    world.after(LOST_S + 1.0).expire()
    assert world.state.lost_nodes["n1"].user_tags == ("ssd",)
    world.do(SetNodeTags("n1", tags=("hdd",)))
    world.nodes["n1"].restart_agent()
    assert world.state.nodes["n1"].user_tags == ("hdd",)


def test_a_node_follows_them_to_another_tree_with_a_word_about_its_jobs(world):
    world.set_tree(nodes_filter="!gpu")
    world.create_tree("gpus", nodes_filter="gpu")
    world.run(jobs=2)
    change = world.do(SetNodeTags("n1", tags=("gpu",)))
    assert change.warnings == ('node "n1" goes from tree "default" to tree "gpus"; 2 jobs on it are aborted',)
    assert (world.state.nodes["n1"].tree, len(world.tree().nodes)) == ("gpus", 0)
    world.settle_down()
    assert not world.nodes["n1"].jobs
    assert_consistent(world.state)


def test_what_would_fit_several_trees_or_no_formula_could_name_is_refused(world):
    world.set_tree(nodes_filter="agent")
    world.create_tree("gpus", nodes_filter="gpu")
    with pytest.raises(CommandError, match='would match the nodes_filter of "default" and "gpus"; give it other tags'):
        world.do(SetNodeTags("n1", tags=("gpu",)))
    for tag in ("", "1a", "a b", "in", "a&b", "%true"):
        with pytest.raises(CommandError, match="is no tag: a tag begins with a letter"):
            world.do(SetNodeTags("n1", tags=("ok", tag)))
    with pytest.raises(CommandError, match="at most 100 tags are allowed"):
        world.do(SetNodeTags("n1", tags=tuple(f"t{number}" for number in range(101))))
    assert world.state.nodes["n1"].user_tags == ()


def test_who_may_give_them_is_who_may_cordon_the_node_and_it_is_told(world):
    world.set_tree(acl_required=True)
    command = SetNodeTags("n1", tags=("ssd",))
    (verdict,) = decide(world.state, command, User("bob"))
    assert not verdict.allowed
    assert all(each.allowed for each in decide(world.state, command, User("root", admin=True)))
    told = make_command_event(world.state, command, Asked(User("ann")), world.do(command), world.now)
    assert told.event.text == 'ann gave node "n1" the tags ssd'
    assert (told.event.node, told.event.tree) == ("n1", TREE)
    assert world.do(command).warnings == ('node "n1" is already tagged so; nothing changed',)
