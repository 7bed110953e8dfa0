"""Questions about rights, and what an asker is shown (semantics.md 12)."""

import msgspec
import pytest
from scheduler_world import TREE, World, entry

from cpumond.api import node_views, overview, pool_views, views
from cpumond.api.permissions import (
    HIDDEN,
    RightsTarget,
    check_question,
    find_path_target,
    find_target,
    hide_secrets,
    judge_action,
    list_permissions,
)
from cpumond.api.updated_tree import look_once
from cpumond.api.yt import orchid
from cpumond.api.yt.ypath import parse_ypath
from cpumond.scheduler.access import Rights
from cpumond.scheduler.model import ROOT_POOL, CommandError, Config, PoolConfig, TreeConfig
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.state import lifecycle
from cpumond.scheduler.state.transaction import Transaction

ADMIN, ANN, BOB = User("root", admin=True), User("ann"), User("bob")
NOBODY = User("spy")


class Asked(World):
    """Pool ``b`` in ``a``, which ann may use and bob administers, and an operation of ann's with secrets."""

    def __init__(self) -> None:
        super().__init__(acl_required=True)
        acl = [entry("ann", "use"), entry("bob", "administer"), entry("spy", "read", action="deny")]
        self.create_pool("a", acl=acl)
        self.create_pool("b", "a")
        tasks = {"t": {"job_count": 1, "environment": {"KEY": "x"}, "command": "true"}}
        self.id = self.start("b", user="ann", tasks=tasks, environment={"TOKEN": "x"}, alias="*one")

    def can(self, user: User, action: str, name: str) -> bool:
        return judge_action(self.state, Rights(self.state, user), action, find_target(self.state, name)).allowed

    def rights(self, user: User) -> Rights:
        return Rights(self.state, user)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_an_object_is_a_pool_a_tree_an_operation_or_a_path(asked):
    operation = RightsTarget(operation=asked.record(asked.id))
    for name, target in {
        "b": RightsTarget(TREE, "b"),
        ROOT_POOL: RightsTarget(TREE),
        "tree:default": RightsTarget(TREE),
        asked.id: operation,
        "*one": operation,
        "//sys/pool_trees/default": RightsTarget(TREE),
        "//sys/pool_trees/default/a/b": RightsTarget(TREE, "b"),
        "//sys/pool_trees/default/a/@acl": RightsTarget(TREE, "a"),
        "//sys/pools/a/b": RightsTarget(TREE, "b"),
        f"//sys/operations/{asked.id}": operation,
        "//sys/scheduler/orchid": RightsTarget(),
        "//sys": RightsTarget(),
    }.items():
        assert find_target(asked.state, name) == target, name
    assert find_path_target(asked.state, parse_ypath("/")) == RightsTarget()


def test_an_object_is_found_by_its_id(asked):
    tree = TreeConfig("1-2-3-4", "t", pools={"p": PoolConfig("1-2-3-5", "p", ROOT_POOL)})
    asked.carry_out(Transaction(config=Config({**asked.state.config.trees, "t": tree}, TREE)))
    assert find_target(asked.state, "#1-2-3-4") == RightsTarget("t")
    assert find_target(asked.state, "#1-2-3-5/@acl") == RightsTarget("t", "p")


def test_an_ephemeral_pool_is_asked_about_by_the_one_it_is_in(asked):
    asked.set_tree(default_parent_pool="a")
    asked.start(user="ann")
    assert find_target(asked.state, "ann") == RightsTarget(TREE, "a")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("aa", 'there is no pool "aa" in tree "default", and no such operation; did you mean "a"?'),
        ("tree:defaul", 'Pool tree "defaul" does not exist; did you mean "default"?'),
        ("*two", "No such operation *two"),
        ("#1-2-3-9", "No such object 1-2-3-9"),
        ("//sys/pool_trees/x", 'Pool tree "x" does not exist'),
    ],
)
def test_what_is_not_there_is_told(asked, name, sentence):
    with pytest.raises(CommandError) as caught:
        find_target(asked.state, name)
    assert str(caught.value).startswith(sentence)


def test_unrecognised_options_are_shown_without_secrets(asked):
    task = {"command": "true", "job_count": 1, "environment": {"TOKEN": "x"}, "more": {"environment": {"A": "x"}}}
    record = asked.record(asked.start("b", user="ann", tasks={"t": task}))
    asked.set_pool("a", acl=[])
    for user, shown in ((ANN, {"environment": {"A": "x"}}), (BOB, {HIDDEN: True})):
        info = orchid.operation_info(asked.rights(user), record, look_once({})).to_dict()
        assert info["unrecognized_spec"] == {"tasks": {"t": {"more": shown}}}
        assert info["alerts"]["unrecognized_spec"]["message"] == 'spec option "tasks/t/more" is not recognized'


def test_actions_are_permissions_and_words_of_the_command_line(asked):
    for action in ("use", "start", "read", "show"):
        assert asked.can(ANN, action, "b"), action
    for action in ("write", "set", "modify-children", "create", "remove", "move", "administer"):
        assert not asked.can(ANN, action, "b"), action
        assert asked.can(BOB, action, "b"), action
    for action in ("abort", "pin", "manage", "log", "read_secrets", "why", "read", "administer"):
        assert asked.can(ANN, action, asked.id), action
        assert asked.can(BOB, action, "*one"), action
        assert not asked.can(NOBODY, action, asked.id), action
    assert not asked.can(BOB, "remove", "tree:default")
    assert not asked.can(BOB, "move", "tree:default")
    assert asked.can(NOBODY, "read", "//sys")
    assert not asked.can(NOBODY, "write", "//sys")


def test_the_first_that_is_missing_is_the_reason(asked):
    asked.set_pool("b", acl=[entry("ann", "write")])
    verdict = judge_action(asked.state, asked.rights(ANN), "remove", RightsTarget(TREE, "b"))
    assert verdict.because == 'no access list allows modify_children to ann, and pool "a" has one'
    verdict = judge_action(asked.state, asked.rights(ANN), "read", RightsTarget())
    assert verdict.because == "every user may read an object without an access list"


@pytest.mark.parametrize(
    ("name", "action", "sentence"),
    [
        ("b", "wirte", 'action "wirte" is unknown for pool "b"; did you mean "write"?'),
        ("*one", "abor", 'did you mean "abort"?'),
        ("*one", "use", " is unknown for operation "),
        ("//sys", "xxxxx", 'action "xxxxx" is unknown for an object without an access list; known: read, use,'),
    ],
)
def test_an_unknown_action_is_told(asked, name, action, sentence):
    with pytest.raises(CommandError) as caught:
        asked.can(ANN, action, name)
    assert sentence in str(caught.value)


def test_who_administers_an_object_may_ask_about_others(asked):
    for target in (find_target(asked.state, "b"), find_target(asked.state, asked.id)):
        check_question(asked.rights(BOB), target, "ann")
        with pytest.raises(CommandError, match="spy may not ask what ann may do to"):
            check_question(asked.rights(NOBODY), target, "ann")
    check_question(asked.rights(ANN), find_target(asked.state, asked.id), "bob")  # its owner
    with pytest.raises(CommandError, match="that is for administrators"):
        check_question(asked.rights(BOB), RightsTarget(), "ann")


def test_secrets_are_left_out_in_any_spelling(asked):
    record = hide_secrets(asked.record(asked.id))
    assert b'"x"' not in msgspec.json.encode(record)
    assert record.spec[HIDDEN] is record.spec["tasks"]["t"][HIDDEN] is record.tasks[0].spec[HIDDEN] is True
    assert record.tasks[0].command == "true"
    assert hide_secrets(record) == record


def test_an_operation_is_shown_with_what_one_may_do_to_it(asked):
    asked.set_pool("a", acl=[entry("bob", "manage")])
    own, others = (views.view_operation_details(asked.rights(user), asked.record(asked.id), 0.0) for user in (ANN, BOB))
    assert own.may == dict.fromkeys(("read", "administer", "manage", "read_secrets"), "")
    assert own.tasks[0].environment == {"KEY": "x"}
    assert others.may["manage"] == ""
    assert others.may["read_secrets"] == 'no access list allows read_secrets to bob, and pool "a" has one'
    assert b'"x"' not in msgspec.json.encode(others)


def test_pools_and_trees_are_shown_with_what_one_may_do_there(asked):
    pool = asked.pool("b")
    shown = pool_views.view_pool(pool, 0.0, asked.rights(ANN))
    assert [name for name, reason in shown.may.items() if not reason] == ["use"]
    assert pool_views.view_pool(pool, 0.0).may == {}
    assert list_permissions(asked.rights(BOB), pool) == ["use", "modify_children", "write", "administer"]
    assert list_permissions(asked.rights(ANN), asked.tree().root) == []
    (tree,) = pool_views.view_trees(asked.rights(ANN), 0.0).trees
    assert tree.may["use"] == 'no access list allows use to ann, and pool tree "default" says acl_required'


def test_what_may_not_be_read_is_nowhere(asked):
    node = asked.node("n1")
    asked.settle_down()
    asked.create_pool("rival")
    asked.start("rival", user="bob", jobs=1, cpu=100.0)
    (job,) = asked.jobs_of(asked.id)
    rights, everything = asked.rights(NOBODY), asked.rights(ADMIN)
    living = asked.state.nodes[node.id]
    for each, shown in ((everything, [job.id]), (rights, [])):
        details = node_views.view_node_details(living, 0.0, each)
        assert ([each.id for each in details.jobs], list(details.titles)) == (shown, [asked.id] if shown else [])
    assert len(views.find_operations(rights)) == 1
    for known, count in ((rights, 1), (everything, 2)):
        shown = orchid.scheduler_orchid(known, {})
        assert len(shown["operations"]) == len(shown["pool_trees"][TREE]["operations"]) == count
        is_shown = asked.id in shown["operations"]
        assert is_shown == (asked.id in shown["pool_trees"][TREE]["operations"]) == (count == 2)
        assert len(shown["pool_trees"][TREE]["operations_by_pool"]["b"]) == count - 1
    asked.abort(asked.id)
    assert (asked.id in orchid.scheduler_orchid(rights, {})["operations"]) is False


def test_preemptions_and_alerts_of_what_may_not_be_read_are_not_told(asked):
    asked.node("n1", cpu=1.0)
    stuck = asked.start("b", user="ann", cpu=50.0)
    live = asked.state.operations.values()
    assert [each.subject for each in overview.find_operation_alerts(live, asked.rights(ADMIN))] == [stuck]
    assert not list(overview.find_operation_alerts(live, asked.rights(NOBODY)))
    asked.settle_down()
    (job,) = asked.jobs_of(asked.id)
    lifecycle.stop(asked.state, job, "preempted", "for a test", 0.0)
    shown = [node_views.view_preemptions(asked.rights(user), limit=9) for user in (ADMIN, NOBODY)]
    assert [len(each.preemptions) for each in shown] == [1, 0]
    by_path = [orchid.scheduler_orchid(asked.rights(user), {})["preemptions"] for user in (ADMIN, NOBODY)]
    assert [len(each) for each in by_path] == [1, 0]


def test_the_orchid_shows_a_specification_without_secrets(asked):
    asked.set_pool("a", acl=[])
    record, look_at = asked.record(asked.id), look_once({})
    for user, is_shown in ((ANN, True), (BOB, False)):
        info = orchid.operation_info(asked.rights(user), record, look_at).to_dict()
        for name in ("spec", "provided_spec", "full_spec"):
            assert (b'"x"' in msgspec.json.encode(info[name])) is is_shown, name
        assert info["runtime_parameters"]["acl"] == []
