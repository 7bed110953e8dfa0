"""The decisions of a roll-out: which hosts go first, what a plan says, when a canary is taken back."""

import itertools

import msgspec
import pytest

from cpumond.api.json.requests import SetStageBody
from cpumond.core.wire import AgentAbout
from cpumond.scheduler.settings.rollout import (
    Budget,
    CanaryCounts,
    Host,
    SetStage,
    Stage,
    Watch,
    check,
    choose_canaries,
    find_level,
    follows_stage,
    make_stage,
    plan_stage,
)


def host(number, level="shadow", bound="quota", may=True, online=True, others=None):
    return Host(f"n{number}", AgentAbout("1", level, bound, may_set_mode=may), online, level, others)


def test_an_agent_that_does_not_know_the_level_guarantee_stays_in_shadow():
    stage = Stage(nodes_filter="a", level="guarantee", previous="shadow", state="everywhere", user="u", at=0.0)
    old, new = (
        Host(name, AgentAbout("1", "shadow", bound, may_set_mode=True, knows_guarantee=known), True, "shadow")
        for name, bound, known in (("old", "quota", False), ("new", "quota", True))
    )
    assert (old.find_effect("guarantee"), new.find_effect("guarantee")) == ("shadow", "guarantee")
    assert plan_stage(stage, [old, new]).sentences == (
        "1 host would go from shadow to reclaim by guarantee",
        "1 host would stay in shadow: the agent is older than the level guarantee, upgrade it",
    )
    obeys = msgspec.structs.replace(new.about, level="guarantee")
    assert follows_stage(stage, obeys)
    assert not follows_stage(stage, msgspec.structs.replace(obeys, level="shadow"))
    assert choose_canaries("a", [old, new], "guarantee", "shadow", 0.5) == ("new",)


def canary(**more):
    given = {"nodes_filter": "a", "level": "quota", "previous": "shadow", "state": "canary", "user": "u", "at": 0.0}
    return Stage(**{**given, "canaries": ["n1", "n2"], **more})


def counts(late=0.0, writes=0, errors=0, run="r", at=None, proves=True):
    return CanaryCounts(run, late, writes, errors, next(heard) if at is None else at, proves)


heard = itertools.count(0.0, 2.5)
"""Two hosts in turn: a heartbeat of each in 5 s."""


def quiet(**of_first):
    return {"n1": counts(**of_first), "n2": counts()}


def test_a_tenth_of_the_hosts_goes_first_and_always_the_same_ones():
    hosts = [host(number) for number in range(20)]
    chosen = choose_canaries("a", hosts, "quota", None, 0.1)
    assert len(chosen) == 2
    assert choose_canaries("a", reversed(hosts), "quota", None, 0.1) == chosen
    more = choose_canaries("a", hosts, "quota", None, 0.5)
    assert (more[:2], len(more)) == (chosen, 10)


def test_only_hosts_that_the_level_changes_are_canaries_and_at_least_one():
    hosts = [host(1, may=False), host(2, bound="shadow"), host(3, online=False), Host("n4", None, True, "shadow")]
    assert choose_canaries("a", hosts, "quota", None, 1.0) == ()
    assert choose_canaries("a", [*hosts, host(5)], "quota", None, 0.01) == ("n5",)


def test_one_host_of_each_level_that_configurations_set_goes_first():
    hosts = [*(host(number) for number in range(9)), host(10, bound="up-only"), host(11, bound="weight")]
    chosen = choose_canaries("a", hosts, "quota", None, 0.1)
    assert len(chosen) == 3
    assert {"n10", "n11"} < set(chosen)


def test_a_stage_that_does_more_has_a_canary_one_that_does_less_has_none():
    hosts = [host(number) for number in range(4)]
    up = make_stage(SetStage(nodes_filter="a", level="weight"), None, hosts, "u", 1.0)
    assert (up.state, up.previous, len(up.canaries)) == ("canary", None, 1)
    down = make_stage(SetStage(nodes_filter="a", level="shadow"), up, hosts, "u", 2.0)
    assert (down.state, down.canaries) == ("everywhere", [])
    assert {down.find_level(each.node_id) for each in hosts} == {"shadow"}
    at_once = make_stage(SetStage(nodes_filter="a", level="weight", canary_ratio=1.0), None, hosts, "u", 1.0)
    assert at_once.state == "everywhere"


def test_the_rest_keeps_its_level_while_a_canary_runs_and_after_its_stop():
    stage = canary(previous="weight")
    assert [stage.find_level(name) for name in ("n1", "n3")] == ["quota", "weight"]
    assert canary(previous="weight", state="stopped").find_level("n1") == "weight"


def test_a_node_of_several_stages_does_the_least_and_one_of_none_is_safe():
    stages = ["quota", "weight"], ["quota"], [], [None, "weight", None]
    assert [find_level(levels) for levels in stages] == ["weight", "quota", "shadow", "weight"]


def test_hosts_that_another_stage_holds_down_are_no_canaries():
    hosts = [host(1, others="shadow"), host(2)]
    stage = make_stage(SetStage(nodes_filter="a", level="quota", canary_ratio=0.9), None, hosts, "u", 0.0)
    assert stage.canaries == ["n2"]
    assert plan_stage(stage, hosts).sentences == (
        "1 host would go as canary from shadow to reclaim by quota",
        "1 host no more than now: another stage has a lower level",
    )


def test_a_canary_that_is_set_anew_has_the_hosts_that_it_had():
    hosts = [host(number) for number in range(9)]
    first = make_stage(SetStage(nodes_filter="a", level="weight"), None, hosts, "u", 0.0)
    now = [host(number, level="weight" if f"n{number}" in first.canaries else "shadow") for number in range(9)]
    again = make_stage(SetStage(nodes_filter="a", level="quota"), first, now, "u", 1.0)
    assert (again.canaries, again.previous) == (first.canaries, None)


def test_a_former_canary_that_is_taken_back_is_not_said_to_be_one():
    hosts = [host(number, level="weight" if number < 5 else "shadow") for number in range(10)]
    before = canary(level="weight", previous=None, canaries=[f"n{number}" for number in range(5)])
    stage = make_stage(SetStage(nodes_filter="a", level="quota"), before, hosts, "u", 1.0)
    stage = msgspec.structs.replace(stage, canaries=["n0"])
    assert plan_stage(stage, hosts).sentences == (
        "1 host would go as canary from reclaim by weight to reclaim by quota",
        "4 hosts would go from reclaim by weight to shadow",
        "5 hosts would stay until the canary is advanced",
    )


def test_a_plan_counts_what_would_change():
    others = [host(10, may=False), Host("old", None, True, "shadow"), host(11, bound="shadow")]
    hosts = [*(host(number) for number in range(4)), *others]
    stage = make_stage(SetStage(nodes_filter="a", level="weight", canary_ratio=0.25), None, hosts, "u", 0.0)
    plan = plan_stage(stage, hosts)
    assert plan.changed == tuple(stage.canaries)
    assert len(plan.changed) == 1
    assert plan.sentences == (
        "1 host would go as canary from shadow to reclaim by weight",
        "3 hosts would stay until the canary is advanced",
        "1 host no more than now: the host's own configuration is the upper bound",
        "1 host may not: may_set_mode off",
        "1 host unknown: the agent has not described itself; older versions never do",
    )


def silent():
    return {"n1": None, "n2": counts()}


def held():
    return {"n1": counts(proves=False), "n2": counts()}


GOES_ON = {"canary_period_s": 10.0}


@pytest.mark.parametrize(
    ("stage", "rounds", "actions", "why"),
    [
        pytest.param(
            {"budget": Budget(max_late_cores=0.05)}, [quiet(), quiet(late=5.0), quiet(late=10.0)], ["", "", "stop"],
            "0.50 cores", id="late twice in a row",
        ),
        pytest.param(
            {}, [quiet(late=1000.0, writes=5, errors=7), *[quiet(late=1005.0, writes=5, errors=7) for _ in range(2)],
                 quiet(late=1010.0, writes=5, errors=7)],
            [""] * 4, "", id="one burst, and what was before the first check",
        ),
        pytest.param({}, [quiet(), quiet(writes=1)], ["", "stop"],
                     "the canary had 1 write by another program, its budget is 0", id="a foreign write"),
        pytest.param({}, [quiet(), quiet(errors=1)], ["", "stop"], "the canary had 1 error, its budget is 0",
                     id="an error"),
        pytest.param({"budget": Budget(max_foreign_writes=1, max_errors=1)}, [quiet(), quiet(writes=1, errors=1)],
                     ["", ""], "", id="within its budget"),
        pytest.param({}, [quiet(), silent()], ["", "stop"], "", id="a host falls silent"),
        pytest.param({}, [quiet(errors=9), quiet(run="later")], ["", ""], "", id="a restarted agent"),
        pytest.param({}, [quiet(errors=9), quiet(errors=1, run="later")], ["", "stop"], "",
                     id="an error of a restarted agent"),
        pytest.param({}, [quiet() for _ in range(5)], [""] * 5, "", id="it advances only where that was asked for"),
        pytest.param(GOES_ON, [quiet() for _ in range(3)], ["", "", "advance"], "", id="after its period"),
        pytest.param(GOES_ON, [*[silent() for _ in range(5)], *[quiet() for _ in range(3)]], [*[""] * 7, "advance"],
                     "", id="its period begins when all are heard"),
        pytest.param(
            GOES_ON, [*[held() for _ in range(4)], *[quiet() for _ in range(2)], held(), quiet(), quiet()], [""] * 9,
            "", id="once held down, its period begins anew",
        ),
        pytest.param(GOES_ON, [held() for _ in range(9)], [""] * 9, "", id="what is held down proves nothing"),
        pytest.param(GOES_ON, [quiet(), quiet(), *[quiet(run="later") for _ in range(3)]], [*[""] * 4, "advance"], "",
                     id="an agent that began anew between two looks"),
        pytest.param({**GOES_ON, "canaries": []}, [{}] * 9, [""] * 9, "", id="without hosts"),
        pytest.param({}, [quiet(), *[{"n1": counts(late=9.0 * n)} for n in range(1, 3)]], ["", "", "stop"], "",
                     id="a host that tells nothing, as an older agent, does not hide that others are late"),
        pytest.param({}, [{"n2": counts()}, silent()], ["", "stop"], "", id="not heard any more after a take-over"),
        pytest.param({"canary_period_s": 5.0}, [quiet(), {"n2": counts()}, quiet(run="later")], [""] * 3, "",
                     id="an agent that told nothing yet is no error and proves nothing"),
        pytest.param({}, [quiet(), {"n2": counts()}, quiet(run="later", errors=1)], ["", "", "stop"], "",
                     id="what an agent counts from its start is the stage's"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_canary(stage, rounds, actions, why):
    watch, verdicts = Watch(), []
    for number, seen in enumerate(rounds):
        watch, verdict = check(canary(**stage), seen, watch, 5.0 * number)
        verdicts.append(verdict)
    assert [each.action for each in verdicts] == actions
    assert why in verdicts[-1].why


def test_only_what_writes_limits_as_the_stage_says_proves_something():
    about = AgentAbout("1", "quota", "quota", may_set_mode=True)
    assert follows_stage(canary(), about)
    others = {"level": "weight"}, {"is_paused": True}, {"may_set_mode": False}, {"level": "shadow", "bound": "shadow"}
    for other in others:
        assert not follows_stage(canary(), msgspec.structs.replace(about, **other))
    held = msgspec.structs.replace(about, level="weight", bound="weight")
    assert follows_stage(canary(), held)
    assert not follows_stage(canary(previous="weight"), held), "its own configuration was changed: it does what it did"


@pytest.mark.parametrize("period_s", [-5.0, 0.0, 1e12])
def test_a_canary_period_is_a_time_to_come(period_s):
    body = {"nodes_filter": "a", "level": "quota", "canary_period_s": period_s}
    for kind in (SetStage, SetStageBody):
        with pytest.raises(msgspec.ValidationError, match="canary_period_s"):
            msgspec.convert(body | ({"type": "SetStage"} if kind is SetStage else {}), kind)
