"""Canaries of a played cluster, as the scheduler looks at them."""

import asyncio
import zlib
from collections.abc import Callable

import msgspec
import pytest
from scheduler_world import PlayedNode, World

from cpumond.api.rollout_views import view_rollout
from cpumond.core.errors import CpumondError
from cpumond.core.levels import SAFE, lowest, read_level
from cpumond.core.wire import AgentAbout
from cpumond.scheduler.service.rollout_watch import RolloutWatch
from cpumond.scheduler.settings.rollout import Budget, RemoveStage, SetStage, Stage, StopStage

FEW = Budget(check_period_s=5.0)
ABOUT = AgentAbout("0.2.0", "shadow", "quota", may_set_mode=True)


class Fleet:
    """A world with hosts of the tag ``a``, and who watches their canaries. ``late``: core-seconds in a second of hosts
    that do the most; ``refuses``: whether the store takes nothing; ``meanwhile``: another command before a verdict."""

    def __init__(self, hosts: int = 10) -> None:
        self.world = World()
        self.about: dict[str, AgentAbout] = {}
        self.late: dict[str, float] = {}
        self.refuses = False
        self.said: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.hosts = [self.world.node(f"n{number}", tags=("a",)) for number in range(hosts)]
        for host in self.hosts:
            self.beat(host)
        self.begin()

    def begin(self) -> None:
        """Another scheduler takes over."""
        self.watch = RolloutWatch(self.world.state, lambda: self.world.now, self._execute)

    async def _execute(self, command, user):
        if self.refuses:
            raise CpumondError("the disk is full")
        self.meanwhile()
        self.said.append(command.why)
        self.world.do(command, user.name)

    def beat(self, host: PlayedNode) -> None:
        """A heartbeat of a host that does as it was told before."""
        node = self.world.state.nodes[host.id]
        about = self.about.get(host.id, ABOUT)
        if about.may_set_mode:
            told = host.heard.level if node.sequence >= 0 else SAFE  # a run of it begins with nothing
            known = told if told != "guarantee" or about.knows_guarantee else ""
            about = msgspec.structs.replace(about, level=lowest(read_level(known), about.bound))
        late = about.late_core_seconds + self.late.get(host.id, 0.0) * (self.world.now - node.last_seen)
        node.about = self.about[host.id] = msgspec.structs.replace(about, late_core_seconds=late)
        host.beat()

    def live(self, seconds: int, heartbeat_s: int = 1, without: tuple[str, ...] = ()) -> None:
        for _ in range(seconds):
            self.world.now += 1.0
            for host in self.hosts:
                turn = zlib.crc32(host.id.encode()) % heartbeat_s
                if host.id not in without and int(self.world.now) % heartbeat_s == turn:
                    self.beat(host)
            self.world.expire()
            asyncio.run(self.watch.look())

    def set(self, nodes: str, level: str, **more):
        return self.world.do(SetStage(nodes_filter=nodes, level=level, **{"budget": FEW, **more}))

    def stage(self, nodes: str = "a"):
        return self.world.state.stages.get(nodes)

    @property
    def told(self) -> list[str]:
        return sorted({self.world.state.nodes[host.id].level for host in self.hosts})


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_the_first_stage_of_a_part_leaves_the_rest_to_the_stage_of_all(fleet):
    fleet.set("%true", "quota", canary_ratio=1.0)
    fleet.set("a", "quota")
    assert (fleet.told, fleet.stage().state) == (["quota"], "everywhere")
    fleet.set("a", "weight")
    assert fleet.told == ["weight"]
    fleet.live(2)
    fleet.set("a", "quota")
    assert len(fleet.stage().canaries) == 1
    assert fleet.told == ["quota", "weight"]
    stopped = fleet.world.do(StopStage(nodes_filter="a"))
    assert (stopped.warnings, fleet.told) == ((), ["weight"])
    fleet.live(2)
    removed = fleet.world.do(RemoveStage(nodes_filter="a"))
    assert removed.warnings == ("10 hosts may now do more, without a canary",)
    assert fleet.told == ["quota"]


def test_all_at_once_and_nobody_to_go_first_is_said(fleet):
    assert fleet.set("a", "weight", canary_ratio=1.0).warnings == ("10 hosts may now do more, without a canary",)
    for host in fleet.hosts:
        fleet.world.state.nodes[host.id].is_online = False
    done = fleet.set("a", "quota")
    assert (fleet.stage().state, fleet.stage().canaries) == ("canary", [])
    assert done.warnings == ("no host can go first now, so nothing is proven before the stage is advanced",)


def test_who_goes_on_by_itself_says_which_hosts_no_canary_was_like(fleet):
    fleet.set("a", "quota", canary_period_s=20.0)
    fleet.live(6)
    fleet.hosts.append(fleet.world.node("late", tags=("a",)))
    fleet.about["late"] = msgspec.structs.replace(ABOUT, bound="weight")
    fleet.live(30)
    assert fleet.stage().state == "everywhere"
    assert fleet.said == ["the canary was within its budget for 20 s; 1 host may now do more, without a canary"]


def test_hosts_that_were_told_more_and_do_not_do_it_yet_are_not_as_told(fleet):
    fleet.set("a", "quota", canary_ratio=1.0)
    [view] = view_rollout(fleet.world.state, {}).stages
    assert (view.host_count, view.reached) == (10, 0)
    fleet.about["n1"] = msgspec.structs.replace(ABOUT, bound="weight")
    fleet.live(2)
    [view] = view_rollout(fleet.world.state, {}).stages
    assert view.reached == 10, "each as far as its own configuration goes"


def test_a_canary_that_is_removed_or_leaves_the_group_stops_the_stage(fleet):
    fleet.set("a", "quota", canary_period_s=20.0, canary_ratio=0.2)
    first, _ = fleet.stage().canaries
    fleet.live(6)
    [host] = [each for each in fleet.hosts if each.id == first]
    host.tags = ()
    host.register()
    fleet.live(40)
    assert fleet.world.state.nodes[first].level == "shadow"
    assert fleet.stage().state == "canary", "a canary that is none of the group proves nothing"
    fleet.world.do(RemoveStage(nodes_filter="a"))
    fleet.set("a", "quota", canary_period_s=20.0, canary_ratio=0.2)
    fleet.live(6)
    gone = fleet.stage().canaries[0]
    fleet.hosts = [each for each in fleet.hosts if each.id != gone]
    del fleet.world.state.nodes[gone]
    fleet.live(6)
    assert fleet.stage().state == "stopped"


def test_a_stage_of_an_earlier_version_is_read_as_it_was_meant():
    text = b'{"nodes_filter":"a","level":"quota","previous":"shadow","state":"stopped","user":"u","at":1.0}'
    stage = msgspec.json.decode(text, type=Stage)
    assert stage.find_level("n1") == "shadow"
    new = msgspec.json.encode(msgspec.structs.replace(stage, previous=None))
    assert msgspec.json.decode(new, type=Stage).find_level("n1") is None


def test_a_canary_is_watched_for_its_period_anew_after_a_take_over(fleet):
    fleet.set("a", "quota", canary_period_s=30.0)
    fleet.live(28)
    fleet.begin()
    fleet.live(28)
    assert fleet.stage().state == "canary"
    fleet.live(10)
    assert fleet.stage().state == "everywhere"


def test_a_stop_that_the_store_refuses_is_carried_out_later(fleet):
    fleet.set("a", "quota")
    fleet.live(6)
    fleet.late, fleet.refuses = dict.fromkeys(fleet.stage().canaries, 1.0), True
    fleet.live(20)
    assert fleet.stage().state == "canary"
    fleet.late.clear()
    fleet.live(20)
    fleet.refuses = False
    fleet.live(6)
    assert fleet.stage().state == "stopped"
    fleet.set("a", "quota")
    fleet.live(20)
    assert fleet.stage().state == "canary", "a stage that is set anew begins without blame"


def test_no_filter_is_all_nodes(fleet):
    assert fleet.set(" ", "weight").id == "%true"
    assert fleet.stage("%true").nodes_filter == "%true"
    assert fleet.stage("") is None


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stage_set_anew_while_its_canary_is_judged_has_a_new_canary(fleet, is_late):
    """Another command may be stored while the verdict waits for its turn."""
    fleet.set("a", "weight", canary_period_s=10.0)
    fleet.live(6)
    fleet.late = dict.fromkeys(fleet.stage().canaries, 1.0 if is_late else 0.0)
    fleet.meanwhile = lambda: fleet.set("a", "quota")
    fleet.live(14)
    assert fleet.said, "there was a verdict"
    assert (fleet.stage().state, fleet.stage().level) == ("canary", "quota")
    assert fleet.told == ["quota", "shadow"]


def test_a_canary_whose_agent_begins_anew_again_and_again_is_taken_back(fleet):
    fleet.set("a", "quota")
    [canary] = [host for host in fleet.hosts if host.id in fleet.stage().canaries]
    for number in range(2):
        fleet.live(12)
        assert fleet.stage().state == "canary"
        fleet.about[canary.id] = ABOUT
        canary.incarnation += f"-{number}"
        canary.register()
    fleet.live(12)
    assert "1 error" in fleet.stage().stopped
