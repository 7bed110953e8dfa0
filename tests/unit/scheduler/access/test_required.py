"""Which rights each command needs (semantics.md 12.3)."""

from typing import Any, get_args

import pytest
from scheduler_world import TREE, World, entry, refused_with

from cpumond.scheduler.access import Rights, required
from cpumond.scheduler.access.required import GUARANTEES, OF_OWNERS, check, decide, list_needs
from cpumond.scheduler.model import ACCESS_DENIED, ROOT_POOL, CommandError, PoolSettings, PreemptionSettings
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings import commands, operations
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.changes import compare_configs
from cpumond.scheduler.settings.rollout import AdvanceStage, RemoveStage, RolloutCommand, SetStage, StopStage
from cpumond.scheduler.settings.tree_file import ApplyTree
from cpumond.scheduler.settings.undo import Undo
from cpumond.scheduler.state.commands import Command
from cpumond.scheduler.state.node_commands import CordonNode, DrainNode, NodeCommand, UncordonNode

ANN = User("ann")
TASKS = {"t": {"command": "true", "job_count": 1}}


def put(**values: Any) -> tuple[Edit, ...]:
    return tuple(Edit((name,), value) for name, value in values.items())


class Teams(World):
    """Pools ``a`` with ``b`` and in that ``c``, and ``z``, all with guarantees."""

    def __init__(self, **tree: Any) -> None:
        super().__init__(**{"acl_required": True, **tree})
        for name, parent, cpu in (("a", ROOT_POOL, 10), ("b", "a", 5), ("c", "b", 2), ("z", ROOT_POOL, 10)):
            self.create_pool(name, parent, strong_guarantee_resources={"cpu": cpu})

    def needs(self, command: Command, user: User = ANN) -> set[tuple[str, str]]:
        found = list_needs(self.state, command, Rights(self.state, user))
        return {
            (need.permission, need.operation.id if need.operation else need.pool if need.tree else "") for need in found
        }

    def change(self, pool: str, **values: Any) -> set[tuple[str, str]]:
        return self.needs(commands.ChangePool(TREE, pool, put(**values)))


@pytest.fixture
def teams() -> Teams:
    return Teams()


def test_each_command_has_its_needs():
    kinds = commands.ConfigCommand, operations.OperationCommand, NodeCommand, RolloutCommand
    assert set(required._NEEDS) == {*(command for kind in kinds for command in get_args(kind)), ApplyTree, Undo}


def test_each_option_of_a_pool_has_its_place():
    rest = set(PoolSettings.__struct_fields__) - GUARANTEES - OF_OWNERS
    assert rest == {
        *PreemptionSettings.__struct_fields__, "scheduling_tag_filter", "acl", "inherit_acl", "owner",
    }  # fmt: skip


def test_12_3_trees_are_everybodys_while_nothing_decides_who_may_do_what():
    teams = Teams(acl_required=False)

    def may(user: User) -> bool:
        return all(verdict.allowed for verdict in decide(teams.state, commands.CreateTree("t"), user))

    assert may(ANN)
    assert not may(User("local", needs_entry=True))
    for attributes in ({"acl": []}, {"inherit_acl": False}):
        teams.set_pool("c", **attributes)
        assert not may(ANN)
        teams.set_pool("c", **dict.fromkeys(attributes))
    teams.set_tree(acl=[])
    assert not may(ANN)


STAGE: dict[str, Any] = {"nodes_filter": "%true"}
YOUNG: list[Any] = [
    SetStage(**STAGE, level="weight"), AdvanceStage(**STAGE), StopStage(**STAGE), RemoveStage(**STAGE),
    CordonNode("n1"), UncordonNode("n1"), DrainNode("n1"), CordonNode("n2"),
    commands.ChangeTree(TREE, put(acl_required=True)), commands.ChangeTree(TREE, put(acl=[])),
    commands.ChangePool(TREE, "c", put(owner="ann")), commands.ChangePool(TREE, "c", put(inherit_acl=False)),
    commands.CreatePool(TREE, "n", "b", {"acl": []}),
]  # fmt: skip
"""What version 0.1 had not."""


@pytest.mark.parametrize("command", YOUNG, ids=str)
def test_the_absence_of_lists_gives_no_power_that_is_younger(command: Any) -> None:
    teams = Teams(acl_required=False)
    teams.node("n1")
    with refused_with(ACCESS_DENIED, r"only administrators may|for administrators of the scheduler"):
        check(teams.state, command, ANN)
    assert check(teams.state, command, User("root", admin=True)) == "root is an administrator"


def test_the_absence_of_lists_gives_what_version_0_1_gave() -> None:
    teams = Teams(acl_required=False)
    for command in (
        commands.ChangePool(TREE, "c", put(color="blue", fair_share_starvation_timeout=5)),
        commands.RemovePool(TREE, "c"),
        commands.CreatePool(TREE, "n", "b", {"color": "blue"}),
        commands.ChangeTree(TREE, put(max_share_ratio=0.5)),
    ):
        check(teams.state, command, ANN)


def tree(*edits: Edit, **values: Any) -> commands.ChangeTree:
    return commands.ChangeTree(TREE, edits or put(**values))


def change(**values: Any) -> commands.ChangePool:
    return commands.ChangePool(TREE, "c", put(**values))


def create(parent: str = "b", **attributes: Any) -> commands.CreatePool:
    return commands.CreatePool(TREE, "n", parent, attributes)


def start(**spec: Any) -> operations.StartOperation:
    return operations.StartOperation({"tasks": TASKS, **spec})


NEEDS: list[tuple[Command, str]] = [
    *((kind(TREE), "administer:") for kind in (commands.CreateTree, commands.RemoveTree, commands.SetDefaultTree)),
    *((command, "administer:") for command in (commands.SetDefaultTree(None), CordonNode("not there"))),
    *((kind("n1"), "administer:<Root>") for kind in (CordonNode, UncordonNode, DrainNode)),
    (tree(nodes_filter="x"), "write:<Root>"),
    (tree(**{"nodes-filter": "x"}), "write:<Root>"),
    (tree(custom=1), "write:<Root>"),
    (tree(acl=[]), "administer:<Root>"),
    (tree(**{"acl-required": False}), "administer:<Root>"),
    (tree(owner="ann"), "administer:<Root>"),
    (tree(inherit_acl=False), "administer:<Root>"),
    (tree(Edit(("acl", "end"), {})), "administer:<Root>"),
    (tree(Edit(("config", "acl_required"), False)), "administer:<Root>"),
    (tree(config={"acl": []}), "write:<Root> administer:<Root>"),
    (tree(nodes_filter="x", acl=None), "write:<Root> administer:<Root>"),
    # a new pool
    (create(mode="fifo"), "modify_children:b"),
    (create(ROOT_POOL), "modify_children:<Root>"),
    (create(**{"max-share-ratio": 0.1}), "modify_children:b write:b"),
    (create(weight=1), "modify_children:b write:b"),
    (create(acl=[]), "modify_children:b administer:b"),
    (create(owner="x"), "modify_children:b administer:b"),
    (create(mine=1), "modify_children:b administer:b"),
    (create(fair_share_starvation_timeout=1), "modify_children:b administer:b"),
    # options of a pool
    (change(mode="fifo"), "write:c"),
    (change(**{"forbid-immediate-operations": True}), "write:c"),
    # that the parent gives
    (change(strong_guarantee_resources={"cpu": 3}), "write:c write:b"),
    (change(min_share_resources={"cpu": 3}), "write:c write:b"),
    (change(strong_guarantee_resources={"cpu": 1.5}), "write:c"),
    (change(strong_guarantee_resources={"cpu": 2}), "write:c"),
    (change(strong_guarantee_resources=None), "write:c"),
    (change(strong_guarantee_resources={"cpu": 1, "memory": 1}), "write:c write:b"),
    (change(weight=2), "write:c write:b"),
    (change(max_share_ratio=0.5), "write:c"),
    (change(resource_limits={"cpu": 1}), "write:c"),
    (change(max_operation_count=9), "write:c write:b"),
    (change(resource_limits_overcommit_tolerance={"cpu": 1}), "write:c write:b"),
    (change(budget={"core_hours": 1}), "write:c write:b"),
    (change(integral_guarantees={"resource_flow": {"cpu": 1}}), "write:c write:b"),
    (change(integral_guarantees={"guarantee_type": "relaxed"}), "write:c write:b"),
    (change(strong_guarantee_resources="x"), "write:c write:b"),
    # that only administer may set
    (change(acl=[]), "write:c administer:c"),
    (change(inherit_acl=False), "write:c administer:c"),
    (change(owner="ann"), "write:c administer:c"),
    (change(custom=1), "write:c administer:c"),
    (change(**{"fair-share_preemption_timeout": 1}), "write:c administer:c"),
    # what goes and moves
    (commands.RemovePool(TREE, "c"), "modify_children:b write:c"),
    (commands.RemovePool(TREE, "a", recursive=True), "modify_children:<Root> write:a write:b write:c"),
    *((command, "write:c modify_children:b") for command in (commands.MovePool(TREE, "c", "b", "d"), change(name="d"))),
    *((command, "write:c modify_children:b modify_children:z write:z")
      for command in (commands.MovePool(TREE, "c", "z", "c"), change(parent_name="z"))),
    # the common distributors
    (commands.TransferPoolResources(TREE, "c", "z", {}), "write:b write:a write:<Root>"),
    (commands.TransferPoolResources(TREE, "c", "b", {}), "write:b"),
    # where an operation goes
    (start(pool="c"), "use:c"),
    (start(pool="c$x"), "use:c"),
    (start(), "use:<Root>"),
    (start(pool="new"), "use:<Root>"),
    (start(pool="new$x"), "use:<Root>"),
    (start(pool=ROOT_POOL), "use:<Root>"),
    (start(**{"scheduling-options-per-pool-tree": {TREE: {"pool": "z"}}}), "use:z"),
    (start(pool="a", scheduling_options_per_pool_tree={TREE: {"pool": "z"}}), "use:z"),
    # what does not exist needs nothing
    (commands.ChangeTree("no", ()), ""),
    (commands.CreatePool("no", "n"), ""),
    (commands.CreatePool(TREE, "n", "no"), ""),
    (commands.ChangePool(TREE, "no", ()), ""),
    (commands.RemovePool(TREE, "no"), ""),
    (commands.MovePool(TREE, "no", "a", "b"), ""),
    (commands.MovePool(TREE, "c", "no", "c"), "modify_children:b write:c"),
    (commands.TransferPoolResources(TREE, "no", "a", {}), ""),
    (start(pool_trees=["no"]), ""),
]  # fmt: skip


@pytest.mark.parametrize(("command", "needs"), NEEDS, ids=lambda value: str(value)[:60])
def test_12_3_rights_that_a_command_needs(teams, command, needs):
    teams.node("n1")
    assert teams.needs(command) == {tuple(need.split(":")) for need in needs.split()}


def test_12_3_a_config_that_goes_is_changed_in_all_that_it_says():
    teams = Teams()
    teams.do(commands.ChangeTree(TREE, (Edit(("config",), {"acl_required": True}),)))
    assert teams.needs(commands.ChangeTree(TREE, put(config=None))) == {("write", ROOT_POOL), ("administer", ROOT_POOL)}


def test_12_3_less_of_a_limit_is_a_smaller_number(teams):
    set_before: dict[str, Any] = {"max_share_ratio": 0.5, "max_operation_count": 9, "weight": 3}
    teams.set_pool("b", resource_limits={"cpu": 4, "memory": 100}, max_running_operation_count=9, **set_before)
    write, more = {("write", "b")}, {("write", "b"), ("write", "a")}
    for name, value in set_before.items():
        assert teams.change("b", **{name: value}) == write
        assert teams.change("b", **{name: value / 3}) == write if name != "max_operation_count" else True
        assert teams.change("b", **{name: None}) == more
    assert teams.change("b", max_operation_count=8) == write
    assert teams.change("b", max_operation_count=10) == more
    assert teams.change("b", resource_limits={"cpu": 3, "memory": 100}) == write
    assert teams.change("b", resource_limits={"cpu": 3}) == more
    assert teams.needs(commands.ChangePool(TREE, "b", (Edit(("resource_limits", "memory")),))) == more
    assert teams.needs(commands.ChangePool(TREE, "b", (Edit(("resource_limits", "memory"), 99),))) == write


def test_12_3_a_flow_that_shrinks_is_less(teams):
    flow = {"resource_flow": {"cpu": 2}, "burst_guarantee_resources": {"cpu": 3}}
    for name in ("a", "b"):
        teams.set_pool(name, integral_guarantees=flow)
    assert teams.change("b", integral_guarantees={**flow, "resource_flow": {"cpu": 1}}) == {("write", "b")}
    more = teams.change("b", integral_guarantees={**flow, "burst_guarantee_resources": {"cpu": 4}})
    assert more == {("write", "b"), ("write", "a")}


def test_12_3_who_removes_a_list_administers_its_pool(teams):
    teams.set_pool("c", acl=[entry("x", "use")])
    assert ("administer", "c") in teams.needs(commands.RemovePool(TREE, "a", recursive=True))


def test_12_3_who_moves_a_pool_below_other_rights_administers_it(teams):
    move = commands.MovePool(TREE, "c", "z", "c")
    teams.set_pool("c", strong_guarantee_resources=None)
    teams.set_tree(acl=[entry("lead", "manage")])
    assert teams.needs(move) == {("write", "c"), ("modify_children", "b"), ("modify_children", "z")}
    for attributes in ({"acl": [entry("x", "use")]}, {"owner": "bob"}, {"inherit_acl": False}):
        teams.set_pool("z", **attributes)
        assert ("administer", "c") in teams.needs(move)
        teams.set_pool("c", inherit_acl=False, owner="cat")
        assert ("administer", "c") not in teams.needs(move)
        teams.set_pool("z", **dict.fromkeys(attributes))
        teams.set_pool("c", inherit_acl=None, owner=None)


def test_12_3_operations_of_an_ephemeral_pool_are_not_taken_by_its_name(teams):
    teams.start(user="bob")
    assert teams.pool("bob").is_ephemeral
    taken = {("modify_children", "z"), ("modify_children", ROOT_POOL)}
    assert teams.needs(commands.CreatePool(TREE, "bob", "z")) == taken
    assert teams.needs(commands.CreatePool(TREE, "bob", ROOT_POOL)) == {("modify_children", ROOT_POOL)}
    teams.set_pool("z", acl=[entry("ann", "administer")])
    assert teams.needs(commands.CreatePool(TREE, "bob", "z")) == {*taken, ("administer", ROOT_POOL)}
    assert ("administer", ROOT_POOL) in teams.needs(commands.MovePool(TREE, "c", "z", "bob"))


def test_12_3_taking_a_change_back_needs_what_its_reverse_needs(teams):
    def undo(command: Command) -> set[tuple[str, str]]:
        before = teams.state.config
        teams.do(command)
        return teams.needs(Undo(1, tuple(compare_configs(before, teams.state.config))))

    assert undo(commands.ChangePool(TREE, "c", put(mode="fifo"))) == {("write", "c")}
    less = commands.ChangePool(TREE, "c", put(strong_guarantee_resources={"cpu": 1}))
    assert undo(less) == {("write", "c"), ("write", "b")}
    teams.set_pool("c", acl=[entry("ann", "administer")])
    # The list of what was below comes back with it.
    back = {("modify_children", "a"), ("write", "a"), ("administer", "a")}
    assert undo(commands.RemovePool(TREE, "b", recursive=True)) == back
    assert undo(commands.CreatePool(TREE, "n", "z", {"acl": []})) == {
        ("modify_children", "z"), ("write", "n"), ("administer", "n")
    }  # fmt: skip


def test_12_3_a_start_needs_use_below_the_default_parent_and_in_each_tree():
    teams = Teams(default_parent_pool="b", nodes_filter="!x")
    assert teams.needs(operations.StartOperation({"tasks": TASKS})) == {("use", "b")}
    teams.create_tree("other", nodes_filter="x")
    both = operations.StartOperation({"tasks": TASKS, "pool_trees": [TREE, "other"]})
    assert [need.tree for need in list_needs(teams.state, both, Rights(teams.state, ANN))] == [TREE, "other"]
    assert teams.needs(operations.StartOperation({"tasks": TASKS, "pool": 7})) == set()  # and is refused


def test_12_3_operations_need_manage(teams):
    with pytest.raises(CommandError, match="No such operation x"):
        teams.needs(operations.AbortOperation("x"))
    started = teams.start("c", user="bob")
    manage = {("manage", started)}
    ends = operations.AbortOperation(started), operations.CompleteOperation(started)
    for command in (*ends, operations.SuspendOperation(started), operations.ResumeOperation(started)):
        assert teams.needs(command) == manage

    def update(**parameters: Any) -> set[tuple[str, str]]:
        return teams.needs(operations.UpdateOperation(started, parameters))

    assert update(weight=2) == update(pool="c") == update(nonsense=1) == manage
    assert update(acl=[]) == {*manage, ("administer", started)}
    assert update(pool="z") == {*manage, ("use", "z")}
    teams.set_pool("z", acl=[entry("ann", "read_secrets", "use")])
    assert update(pool="z") == {*manage, ("use", "z"), ("read_secrets", started)}


def test_a_refusal_says_who_what_why_and_whom_to_ask(teams):
    teams.set_pool("a", acl=[entry("lead", "administer")])
    with pytest.raises(CommandError) as caught:
        check(teams.state, operations.StartOperation({"tasks": TASKS, "pool": "c"}), ANN)
    assert caught.value.code == ACCESS_DENIED
    assert str(caught.value) == (
        'ann may not start operations in pool "c" (permission use): no access list allows use to ann, and pool "a" has '
        "one; ask lead, an administrator"
    )
    teams.node("n1")
    for command, words in (
        (commands.CreateTree("x"), r"ann may not administer pool trees .* that is for administrators"),
        (DrainNode("n1"), r'ann may not administer pool tree "default" \(node "n1"\)'),
    ):
        with pytest.raises(CommandError, match=words):
            check(teams.state, command, ANN)
    teams.set_pool("b", acl=[entry("ann", "write")])
    with pytest.raises(CommandError, match=r'change the options of pool "a" to give "b" more \(weight\) \(permission'):
        check(teams.state, commands.ChangePool(TREE, "b", put(weight=7)), ANN)


def test_what_allowed_a_command_is_told_once(teams):
    teams.set_tree(acl=[entry("ann", "write", "modify_children")])
    assert check(teams.state, commands.RemovePool(TREE, "a", recursive=True), ANN).split("; ") == [
        'the access list of pool tree "default" allows modify_children to ann',
        *(f'the access list of pool tree "default" allows write to ann, inherited by pool "{name}"' for name in "abc"),
    ]
