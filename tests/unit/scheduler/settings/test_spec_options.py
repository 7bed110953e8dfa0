"""What becomes of each option of a specification: the table in ``settings/spec_options.py``, asked of the scheduler."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from packaging_script import load_script
from scheduler_world import TREE, World, make_task
from yt.wrapper.spec_builders import TaskSpecBuilder, VanillaSpecBuilder

from cpumond.scheduler.model import CommandError, PoolSettings, Task
from cpumond.scheduler.settings import spec_options
from cpumond.scheduler.settings.commands import ChangePool, Edit
from cpumond.scheduler.settings.operations import TREE_OPTIONS, StartOperation, find_unrecognized, list_erased_trees
from cpumond.scheduler.settings.validation import find_warnings

WITHOUT_WISH: tuple[Any, ...] = (None, False, 0, "", {}, [])


def start(
    place: spec_options.Place, name: str, value: Any, *, trees: int = 1
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The warnings of a start with an option, and what of it is not recognised. Raises CommandError."""
    world = World()
    world.create_tree("other", nodes_filter="x")
    task: dict[str, Any] = {"command": "true", "job_count": 1}
    spec: dict[str, Any] = {"tasks": {"t": task}, "pool_trees": ["default", "other"][:trees]}
    if place == "pool":
        world.create_pool("p")
        told = world.do(ChangePool("default", "p", (Edit((name,), value),))).warnings
        assert set(told) <= set(find_warnings(world.state.config.trees["default"]))  # an alert, as long as it is so
        return told, dict(enumerate(told))
    inside: dict[str, Any] = {"root": spec, "task": task, "tree": {}}[place]
    if place == "tree":
        spec["scheduling_options_per_pool_tree"] = {"default": inside}
    inside[name] = value
    change = world.do(StartOperation(spec))
    return change.warnings, find_unrecognized(world.record(change.id).spec)


ROWS = [(option, place) for option in spec_options.OPTIONS for place in option.places if option.verdict != "honoured"]


def place_of(option: spec_options.Option, place: spec_options.Place) -> str:
    prefix = {"root": "", "pool": "", "task": "tasks/t/", "tree": "scheduling_options_per_pool_tree/default/"}[place]
    return prefix + option.name


@pytest.mark.parametrize(("option", "place"), ROWS, ids=[f"{place}-{option.name}" for option, place in ROWS])
def test_what_is_not_honoured_is_refused_told_of_or_could_mean_nothing(option, place):
    name = option.name.replace("*", "x")
    for spelling in (name, *[name.replace("_", "-")] * (place != "pool"), *option.aliases):
        if option.verdict == "refused":
            with pytest.raises(CommandError) as caught:
                start(place, spelling, True, trees=2)
            assert (caught.value.code, caught.value.attributes["field"]) == (1, place_of(option, place))
            assert str(caught.value) == f"spec/{place_of(option, place)}: {option.sentence}"
        else:
            warnings, shown = start(place, spelling, True)
            told = place_of(option, place).replace(option.name, spelling)
            subject = f'spec option "{told}"' if place != "pool" else f'pool "p": {told}'
            expected = (f"{subject} has no effect: {option.sentence}",) * (option.verdict == "warned")
            assert (warnings, bool(shown)) == (expected, bool(expected))
    without = (None,) if option.with_zero or place == "pool" else WITHOUT_WISH
    assert {start(place, name, value)[0] for value in without} == {()}
    if option.several_trees:
        assert start(place, name, True, trees=1) == ((), {})


@pytest.mark.parametrize(
    ("place", "builder", "others"),
    [
        ("root", VanillaSpecBuilder, {"task", "tasks", "secure_vault_variable"}),
        ("task", TaskSpecBuilder, {"environment_variable", "job_binary_cypress_path", "job_binary_local_path"}),
    ],
)
def test_every_option_that_the_client_builds_has_a_row(place, builder, others):
    """``others``: methods that set another option."""
    words = ("begin", "end", "get", "build", "prepare", "supports", "add", "spec")
    methods = {name for name, _ in inspect.getmembers(builder, inspect.isfunction)}
    options = {name for name in methods if not name.startswith("_") and name.partition("_")[0] not in words} - others
    assert len(options) > 25
    assert {name for name in options if spec_options.find_option(place, spec_options.canonical(name)) is None} == set()


def test_what_is_honoured_is_read():
    assert spec_options.honoured("task") == frozenset(Task.__struct_fields__) - {"name", "spec", "memory_reserve"}
    assert spec_options.honoured("tree") == TREE_OPTIONS | {"pool"}
    assert spec_options.honoured("root") >= spec_options.honoured("tree")


def test_a_refusal_says_what_would_go_wrong_and_what_to_write():
    for option in spec_options.OPTIONS:
        if option.verdict == "refused":
            wrong, _, instead = option.sentence.partition("; ")
            assert min(len(wrong), len(instead)) > 10, option.name
        assert bool(option.sentence) or option.verdict in ("honoured", "ignored")
        assert not option.sentence.endswith("."), option.name


def test_no_option_has_two_rows_or_two_meanings():
    names = [(place, name) for row in spec_options.OPTIONS for place in row.places for name in (row.name, *row.aliases)]
    assert len(set(names)) == len(names)


def test_the_document_has_the_options_as_they_are():
    script = load_script("ytsaurus_options")
    text = script.DOCUMENT.read_text(encoding="utf-8")
    assert script.write_document(text) == text, "run: python packaging/ytsaurus_options.py"
    for option in spec_options.OPTIONS:
        assert f"`{option.name}`" in text


def test_trees_that_are_only_tried_are_left_out(world):
    """10.3, TREE-2."""
    world.create_tree("other", nodes_filter="x")
    spec = {"tasks": {"t": make_task()}, "tentative_pool_trees": ["other"]}
    spec["scheduling_options_per_pool_tree"] = {"other": {"weight": 2}}
    for more in ({"pool_trees": ["default"]}, {}):
        change = world.do(StartOperation({**spec, **more}))
        assert tuple(world.record(change.id).trees) == ("default",)
        (told,) = change.warnings
        assert told == 'spec option "tentative_pool_trees" has no effect: the operation runs in its other trees'
    with pytest.raises(CommandError, match=r"^spec/schedule_in_single_tree: "):
        world.do(StartOperation({**spec, "schedule_in_single_tree": True}))


def test_an_operation_goes_to_the_tree_with_most_left_of_its_guarantee():
    """10.2, TREE-1: guarantees of 0.5 and 0.6, demands of 0.4 and 0.2."""
    world = World(nodes_filter="a")
    world.create_tree("b", nodes_filter="b")
    for tree, guaranteed, wanted in ((TREE, 5, 4), ("b", 6, 2)):
        world.node(f"of-{tree}", cpu=10.0, tags=("b" if tree == "b" else "a",))
        world.create_pool("p", tree=tree, strong_guarantee_resources={"cpu": guaranteed})
        world.create_pool("other", tree=tree, strong_guarantee_resources={"cpu": 10 - guaranteed})
        world.start("p", jobs=wanted, pool_trees=[tree])
    world.settle_down()
    spec: dict[str, Any] = {"pool_trees": [TREE, "b"], "schedule_in_single_tree": True}
    operation = world.run("p", jobs=4, **spec)
    assert [job.node.id for job in world.jobs_of(operation)] == ["of-b"] * 4
    assert list_erased_trees(world.record(operation)) == [TREE]
    world.restart()
    assert tuple(world.record(operation).trees) == ("b",)
    world.set_pool("p", tree="b", max_running_operation_count=1)
    assert tuple(world.record(world.start("p", **spec)).trees) == (TREE,), "only where it would run"
    world.set_pool("p", tree="b", max_running_operation_count=9)
    world.node("with-memory", cpu=0.1, memory=2**30, tags=("a",))
    world.settle_down()
    task = {"command": "true", "job_count": 1, "memory_limit": 2**20}
    assert tuple(world.record(world.start("p", tasks={"t": task}, **spec)).trees) == (TREE,), "the other has no memory"


def test_the_document_asks_an_old_cluster_for_all_options_of_pools():
    text = (Path(__file__).resolve().parents[4] / "docs" / "from-ytsaurus.md").read_text(encoding="utf-8")
    asked = set(text.partition("for name in ")[2].partition("\ndo ")[0].replace("\\", " ").split())
    assert asked >= {*PoolSettings.__struct_fields__, *spec_options.IDLE_OF_POOLS}
