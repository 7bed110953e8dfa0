"""Any sequence of roll-out commands over hosts of any kind: nobody does more without a canary or a sentence."""

import msgspec
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from test_rollout_watch import ABOUT, Fleet

from cpumond.core.levels import LEVELS, SAFE, is_above, lowest
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.settings import rollout
from cpumond.scheduler.state.stages import list_hosts

FILTERS = ("%true", "a", "b", "a & !b")
HOST = st.tuples(
    st.sets(st.sampled_from(["a", "b"])), st.sampled_from(LEVELS), st.booleans() | st.just(True),
    st.booleans() | st.just(True),
)  # fmt: skip
SET = st.builds(
    rollout.SetStage, nodes_filter=st.sampled_from(FILTERS), level=st.sampled_from(LEVELS[1:]),
    canary_ratio=st.sampled_from([0.1, 0.5, 1.0]),
)  # fmt: skip
OTHER = st.builds(
    lambda kind, name: kind(nodes_filter=name),
    st.sampled_from([rollout.AdvanceStage, rollout.StopStage, rollout.RemoveStage]),
    st.sampled_from(FILTERS),
)  # fmt: skip
CHANGE = st.tuples(st.sampled_from(["tags", "bound", "may", "silent", "unknown"]), st.integers(0, 5), HOST)
STEPS = st.lists(SET | OTHER | CHANGE, min_size=1, max_size=12)


class Played:
    """``Fleet`` of given hosts, in which each does at once what it is told."""

    def __init__(self, hosts):
        self.fleet = Fleet(0)
        self.world = self.fleet.world
        for number, (tags, bound, may, _) in enumerate(hosts):
            host = self.world.node(f"n{number}", tags=tuple(tags))
            self.fleet.hosts.append(host)
            self.fleet.about[host.id] = msgspec.structs.replace(
                ABOUT, bound=bound, may_set_mode=may, knows_guarantee=number % 3 > 0
            )
        self.beat()

    def beat(self):
        for _ in range(2):
            self.world.now += 1.0
            for host in self.fleet.hosts:
                node = self.world.state.nodes[host.id]
                is_known = node.about is not None or node.sequence < 0
                if node.is_online and is_known:
                    self.fleet.beat(host)

    def change(self, what, number, host):
        tags, bound, may, _ = host
        played = self.fleet.hosts[number % len(self.fleet.hosts)]
        node, about = self.world.state.nodes[played.id], self.fleet.about[played.id]
        if what == "tags":
            played.tags = tuple(tags)
            played.register()
        elif what == "silent":
            node.is_online = False
        elif what == "unknown":
            node.about, node.sequence = None, max(node.sequence, 0)
        else:
            changed = {"bound": bound} if what == "bound" else {"may_set_mode": may}
            self.fleet.about[played.id] = msgspec.structs.replace(about, **changed)
        self.beat()

    def told(self):
        return {node.id: node.level for node in self.world.state.nodes.values()}

    def does(self):
        return {node.id: find_effect(node, node.level) for node in self.world.state.nodes.values()}


def find_effect(node, level):
    about = node.about
    if about is None or not about.may_set_mode:
        return None
    return lowest("shadow" if level == "guarantee" and not about.knows_guarantee else level, about.bound)


@example(
    # A host that does not know "guarantee" did less than it was told.
    [*[(set(), "off", True, True)] * 3, ({"a"}, "up-only", True, True)],
    [
        rollout.SetStage(nodes_filter="%true", level="guarantee", canary_ratio=1.0),
        rollout.SetStage(nodes_filter="a", level="weight", canary_ratio=0.5),
        rollout.StopStage(nodes_filter="%true"),
    ],
)
@given(st.lists(HOST, min_size=1, max_size=6), STEPS)
@examples(300)
def test_no_host_does_more_without_a_canary_or_a_sentence(hosts, steps):
    played = Played(hosts)
    state = played.world.state
    for step in steps:
        if isinstance(step, tuple):
            played.change(*step)
            continue
        name, told, did = step.nodes_filter, played.told(), played.does()
        before, plan = state.stages.get(name), None
        if isinstance(step, rollout.SetStage):
            found = list_hosts(state, name)
            plan = rollout.plan_stage(rollout.make_stage(step, before, found, "u", 0.0), found)
        try:
            done = played.world.do(step)
        except CommandError:
            assert (played.told(), state.stages.get(name)) == (told, before)
            continue
        stage, does = state.stages.get(name), played.does()
        if plan is not None:
            assert set(plan.changed) == {each for each in does if does[each] != did[each]}
        canaries = stage.canaries if stage is not None and stage.state == "canary" else []
        risen = {each for each, level in played.told().items() if is_above(level, told[each]) and each not in canaries}
        known = {each for each in risen if does[each] is not None and is_above(does[each], did[each])}
        unknown = {each for each in risen if state.nodes[each].about is None}
        if isinstance(step, rollout.AdvanceStage):
            there = [state.nodes[each] for each in before.canaries if state.nodes[each].is_online]
            shown = {did[node.id] for node in there if did[node.id] == find_effect(node, before.level)}
            shown = {
                each for each in shown - {None} if is_above(each, before.previous or SAFE) and is_above(each, SAFE)
            }
            known = {each for each in known if does[each] not in shown}
            unknown = set() if shown else unknown
        counted = sum(int(text.split()[0]) for text in done.warnings if "do more" in text)
        assert counted == len(known) + len(unknown)
        played.beat()


@given(
    heartbeat_s=st.integers(1, 30), check_s=st.integers(1, 40), before_s=st.integers(0, 60),
    ratio=st.sampled_from([0.1, 0.3, 0.8]), trouble=st.sampled_from(["late", "errors", "foreign_writes"]),
    takes_over=st.booleans(),
)  # fmt: skip
@examples(60)
def test_a_canary_in_trouble_is_reverted_within_two_checks(heartbeat_s, check_s, before_s, ratio, trouble, takes_over):
    fleet = Fleet()
    fleet.set("a", "quota", canary_ratio=ratio, budget=rollout.Budget(check_period_s=float(check_s)))
    canaries = fleet.stage().canaries
    fleet.live(2 * heartbeat_s + before_s + 1, heartbeat_s)
    if takes_over:
        fleet.begin()
        fleet.live(1, heartbeat_s)
    if trouble == "late":
        fleet.late = dict.fromkeys(canaries, 0.2)
    else:
        fleet.about[canaries[0]] = msgspec.structs.replace(fleet.about[canaries[0]], **{trouble: 1})
    period_s = check_s + heartbeat_s  # of a check: it waits for a heartbeat of each host
    # The check in which the trouble begins may have had too little of it.
    for _ in range(3 * period_s if trouble == "late" else period_s):
        fleet.live(1, heartbeat_s)
        others = {node.level for node in fleet.world.state.nodes.values() if node.id not in canaries}
        assert others == {"shadow"}
    assert fleet.stage().state == "stopped"
    assert fleet.told == ["shadow"]
