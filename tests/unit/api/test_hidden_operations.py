"""Operations that the asker may not know of, in what is told of others (semantics.md 12)."""

import msgspec
import pytest
from scheduler_world import TREE, World

from cpumond.api.glance_views import PreemptionGroups, group_preemptions
from cpumond.api.json.events import may_see
from cpumond.api.json.forecasts import hide_unreadable
from cpumond.api.json.rights import filter_plan, filter_report
from cpumond.api.node_views import list_fitting, view_preemptions
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.answers.plan import ChangePlan, Effect
from cpumond.scheduler.events import Event
from cpumond.scheduler.history.model import ReportRow, ReportTree, ReportView
from cpumond.scheduler.model import PreemptionRecord
from cpumond.scheduler.model.forecast import PredictedStart, PredictedStop, Simulation
from cpumond.scheduler.rights.users import User

DENY = [{"action": "deny", "subjects": ["spy"], "permissions": ["read"]}]


@pytest.fixture
def world() -> World:
    """Operation 1 of the spy's, 2 that the spy may not read; each took a job of the other."""
    world = World(pools=["open"])
    world.create_pool("closed", acl=DENY)
    own, hidden = world.start("open", user="spy"), world.start("closed", user="ann", title="takeover")
    for number, (victim, other) in enumerate(((own, hidden), (hidden, own))):
        why = f'preempted to start job j-{other} of operation "{other}" in pool "x": it starves'
        place = (TREE, "x", "n", 900.0 + number, "preempted", why, {"cpu": 1.0})
        world.state.preemptions.append(PreemptionRecord(f"j-{victim}", victim, *place, f"j-{other}", other))
    world.own, world.hidden = own, hidden  # type: ignore[attr-defined]
    return world


def test_preemptions_name_no_hidden_operation_on_either_side(world):
    rights = Rights(world.state, User("spy"))
    [seen] = view_preemptions(rights, limit=9).preemptions
    assert (seen.operation_id, seen.preemptor_operation_id, seen.preemptor_job_id) == (world.own, "", "")
    assert world.hidden not in seen.why
    assert "it starves" in seen.why
    assert not view_preemptions(rights, limit=9, operation=world.hidden).preemptions
    assert world.hidden not in msgspec.json.encode(group_preemptions([seen], rights)).decode()
    of_ann = view_preemptions(Rights(world.state, User("ann")), limit=9, operation=world.hidden)
    assert [each.preemptor_operation_id for each in of_ann.preemptions] == [world.own, world.hidden]


def test_groups_of_preemptions_hide_it_too_and_read_one_sentence_of_each(world, monkeypatch):
    world.state.preemptions.extend(list(world.state.preemptions) * 50)
    read: list[str] = []
    hide = Rights.hide_operations

    def count(rights: Rights, text: str) -> str:
        read.append(text)
        return hide(rights, text)

    monkeypatch.setattr(Rights, "hide_operations", count)

    def ask(user: str, operation: str = "") -> PreemptionGroups:
        rights = Rights(world.state, User(user))
        return group_preemptions(list_fitting(rights, operation), rights)

    found = ask("spy")
    assert (found.kept, len(found.groups), len(read)) == (51, 1, 1)
    assert world.hidden not in msgspec.json.encode(found).decode()
    assert not ask("spy", world.hidden).groups
    assert ask("ann", world.hidden).kept == 102


def test_why_an_operation_has_what_it_has_names_no_hidden_one(world):
    shares = {TREE: ("rule", [f"#{world.hidden} takes the rest"])}
    record = world.record(world.own)
    told = explain_operation(world.state, record, world.now, shares, Rights(world.state, User("spy")))
    assert world.hidden not in msgspec.json.encode(told).decode()
    assert [len(told.preempted), len(told.preempted_for_it)] == [1, 0]
    told = explain_operation(world.state, record, world.now, shares, world.rights)
    assert world.hidden in msgspec.json.encode(told).decode()


@pytest.mark.parametrize(
    ("user", "pool", "sees"),
    [
        ("spy", "closed", False), ("spy", "closed$ann", False), ("spy", "open", True), ("spy", "gone", True),
        ("bob", "closed", True), ("root", "closed", True),
    ],
)  # fmt: skip
def test_events_of_a_forgotten_operation_are_shown_as_its_pool_allows(world, user, pool, sees):
    event = Event(at=1.0, kind="operation_failed", text="", operation="long-gone", tree=TREE, pool=pool)
    assert may_see(Rights(world.state, User(user, admin=user == "root")), event) == sees


def test_an_event_of_ones_own_is_seen_and_one_of_a_hidden_operation_is_not(world):
    rights = Rights(world.state, User("spy"))
    for operation, user, sees in (("long-gone", "spy", True), (world.hidden, "ann", False), (world.own, "spy", True)):
        event = Event(at=1.0, kind="command", text="", user=user, operation=operation, tree=TREE, pool="closed")
        assert may_see(rights, event) == sees
    assert rights.hide_operations(f"for operation {world.hidden} in pool") == "for operation hidden in pool"


def test_plans_and_reports_leave_out_what_is_hidden(world):
    named = (("operation", world.hidden), ("pool", "closed"))
    effects = [Effect(kind, TREE, name, "", None, None, []) for kind, name in named]
    rows = [ReportRow(name=world.hidden), ReportRow(name="of a run before")]
    users = [ReportRow(name="bob"), ReportRow(name="ann")]
    tree = ReportTree(TREE, ReportRow(name="<Root>"), [], rows, 1, users)
    for user, left_out in ((User("spy"), 1), (User("bob"), 0)):
        rights = Rights(world.state, user)
        assert len(filter_plan(ChangePlan(accepted=True, effects=effects), rights).effects) == 2 - left_out
        (shown,) = filter_report(ReportView(0.0, 1.0, 1.0, 1.0, [tree]), rights).trees
        assert (len(shown.operations), shown.left_out_operations) == (2 - left_out, 1 + left_out)
        assert [row.name for row in shown.users] == ["bob"] * (1 - left_out), "others are for administrators"
    (shown,) = filter_report(ReportView(0.0, 1.0, 1.0, 1.0, [tree]), world.rights).trees
    assert shown.users == users


def test_a_simulation_leaves_out_and_counts_what_is_hidden_or_gone(world):
    seen, hidden = world.own, world.hidden
    ids = [seen, hidden, "1-2-3-4", "foretold-1"]  # the third was forgotten since the run began
    starts = [PredictedStart(each, "title", "default", "p", 1.0, 2.0, None, None) for each in ids]
    stops = [
        PredictedStop("job", each, "default", "p", "n0", 1.0, "preempted", 0.5, victim, f"for {each}")
        for each in ids for victim in ("", hidden)
    ]  # fmt: skip
    whole = Simulation(0.0, 9.0, "foretold-1", starts, stops, [], [], 3)

    of_spy = hide_unreadable(whole, Rights(world.state, User("spy")))
    assert [each.operation_id for each in of_spy.starts] == [seen, "foretold-1"]
    assert of_spy.left_out == 5
    assert [each.operation_id for each in of_spy.stops if each.operation_id] == [seen, "foretold-1"]
    told = msgspec.json.encode(of_spy).decode()
    assert hidden not in told
    assert "1-2-3-4" not in told
    assert len(of_spy.stops) == len(stops)

    assert [each.operation_id for each in hide_unreadable(whole, world.rights).starts] == ids
