"""Names, values and edits of attributes (semantics.md 0.2, 2.3-2.5)."""

import math
import re
from typing import Any

import msgspec
import pytest

from cpumond.scheduler import model
from cpumond.scheduler.rights.entries import AccessEntry
from cpumond.scheduler.settings.attributes import (
    ALIASES,
    MAX_CUSTOM_ATTRIBUTES,
    MAX_HINTS,
    MAX_NAME_LENGTH,
    MIN_WEIGHT,
    RESERVED,
    Edit,
    Kind,
    canonical_name,
    canonical_path,
    edit,
    is_option,
    normalise,
    read_attribute,
    read_pool,
    read_tree,
)
from cpumond.scheduler.settings.values import MAX_DEPTH, MAX_VALUE_BYTES, REMOVE, format_value


def refused(kind: Kind, attributes: dict[str, Any], *edits: Edit) -> str:
    before = msgspec.json.encode(attributes)
    with pytest.raises(model.CommandError) as caught:
        edit(kind, attributes, {}, edits)
    assert msgspec.json.encode(attributes) == before
    return str(caught.value)


def put(path: str, value: Any = REMOVE) -> Edit:
    return Edit(tuple(path.split("/")), value)


# --- names


@pytest.mark.parametrize(
    ("kind", "name", "canonical"),
    [
        ("pool", "weight", "weight"),
        ("pool", "max-share-ratio", "max_share_ratio"),
        ("pool", "min_share_resources", "strong_guarantee_resources"),
        ("pool", "min-share-resources", "strong_guarantee_resources"),
        ("pool", "fair-share_preemption_timeout", "fair_share_starvation_timeout"),
        ("pool", "fair-share_starvation_tolerance", "fair_share_starvation_tolerance"),
        ("pool", "allow_aggressive_starvation_preemption", "allow_aggressive_preemption"),
        ("pool", "integral-guarantees", "integral_guarantees"),
        ("pool", "parent-name", "parent_name"),
        ("pool", "my-label", "my-label"),
        ("pool", "nodes_filter", "nodes_filter"),
        ("tree", "max_operations_per_pool", "max_operation_count_per_pool"),
        ("tree", "max_running_operations_per_pool", "max_running_operation_count_per_pool"),
        ("tree", "max_ephemeral_pool_per_user", "max_ephemeral_pools_per_user"),
        ("tree", "aggressive_starvation_enabled", "enable_aggressive_starvation"),
        ("tree", "max_unpreemptable_running_job_count", "max_unpreemptible_running_job_count"),
        ("tree", "max_unpreemptible_running_allocation_count", "max_unpreemptible_running_job_count"),
        ("tree", "job_interrupt_timeout", "job_preemption_timeout"),
        ("tree", "allocation_preemption_timeout", "job_preemption_timeout"),
        ("tree", "job_graceful_interrupt_timeout", "job_graceful_preemption_timeout"),
        ("tree", "allocation_count_preemption_timeout_coefficient", "job_count_preemption_timeout_coefficient"),
        ("tree", "total_resource_limits_consider_delay", "node_reconnection_timeout"),
    ],
)
def test_canonical_names(kind: Kind, name: str, canonical: str) -> None:
    assert canonical_name(kind, name) == canonical


@pytest.mark.parametrize("kind", ["pool", "tree"])
def test_every_other_name_is_one_of_an_option_and_none_itself(kind: Kind) -> None:
    fields = (model.PoolSettings if kind == "pool" else model.TreeSettings).__struct_fields__
    for other, name in ALIASES[kind].items():
        assert name in fields
        assert other not in fields
        assert "-" not in other
    assert not RESERVED & set(fields)


@pytest.mark.parametrize(
    ("kind", "path", "canonical"),
    [
        ("pool", "integral-guarantees/resource-flow/cpu", "integral_guarantees/resource_flow/cpu"),
        ("pool", "min_share_resources/user-slots", "strong_guarantee_resources/user_slots"),
        ("pool", "my-label/some-key", "my-label/some-key"),
        ("pool", "config/max-share-ratio", "config/max-share-ratio"),
        ("pool", "weight/a-b", "weight/a-b"),
        ("tree", "", ""),
        ("tree", "config", "config"),
        ("tree", "config/integral-guarantees/smooth-period", "config/integral_guarantees/smooth_period"),
        ("tree", "config/max_operations_per_pool", "config/max_operation_count_per_pool"),
    ],
)
def test_canonical_paths(kind: Kind, path: str, canonical: str) -> None:
    assert canonical_path(kind, path.split("/") if path else ()) == tuple(canonical.split("/") if canonical else ())


def test_what_is_an_option() -> None:
    assert is_option("pool", "min-share-resources")
    assert is_option("tree", "nodes-filter")
    assert not is_option("pool", "nodes_filter")
    assert not is_option("pool", "name")


# --- reading


def test_the_documents_spelling_of_a_pool() -> None:
    settings = read_pool(
        {
            "weight": 2,
            "min-share-resources": {"cpu": 10, "memory": 2**30},
            "mode": "fair-share",
            "fifo-sort-parameters": ["start-time", "pending_allocation_count"],
            "fair-share_preemption_timeout": 15000,
            "integral-guarantees": {"guarantee-type": "burst", "resource-flow": {"cpu": 3}},
            "ephemeral-subpool-config": {"mode": "fifo", "max-operation-count": 3.0},
            "max_operation_count": 7.0,
            "abc": {"id": 4},
        }
    )
    assert settings == model.PoolSettings(
        weight=2.0,
        strong_guarantee_resources={"cpu": 10.0, "memory": 2.0**30},
        mode="fair_share",
        fifo_sort_parameters=("start_time", "pending_job_count"),
        fair_share_starvation_timeout=15_000.0,
        integral_guarantees=model.PoolIntegralGuarantees(guarantee_type="burst", resource_flow={"cpu": 3.0}),
        ephemeral_subpool_config=model.EphemeralSubpoolConfig(mode="fifo", max_operation_count=3),
        max_operation_count=7,
    )
    assert isinstance(settings.max_operation_count, int)


def test_none_is_not_set() -> None:
    found = read_pool({"weight": None, "resource_limits": {"cpu": None, "memory": 1}})
    assert found == read_pool({"resource_limits": {"memory": 1}})
    assert read_tree({"config": None}) == model.TreeSettings()


@pytest.mark.parametrize("weight", [0, 0.0, -0.0, 2.0**-27])
def test_a_weight_below_the_least_is_the_least(weight: float) -> None:
    attributes, _, (warning,) = normalise("pool", {"weight": weight})
    assert (attributes["weight"], read_pool(attributes).weight) == (weight, MIN_WEIGHT)
    assert warning.startswith("weight: ")
    assert "1.49012e-08" in warning


@pytest.mark.parametrize("weight", [MIN_WEIGHT, 2.0**26])
def test_the_ends_of_the_range_of_weights(weight: float) -> None:
    attributes, _, warnings = normalise("pool", {"weight": weight})
    assert (read_pool(attributes).weight, warnings) == (weight, ())


@pytest.mark.parametrize(
    ("kind", "name", "value", "sentence"),
    [
        ("pool", "weight", -1, "weight: must be a number in [0, 67108864], got -1"),
        ("pool", "weight", 2**26 + 1, "got 67108865"),
        ("pool", "weight", True, "weight: must be a number in [0, 67108864], got true"),
        ("pool", "weight", "3", 'weight: must be a number in [0, 67108864], got "3"'),
        ("pool", "weight", math.nan, "weight: must be a number in [0, 67108864], got nan"),
        ("pool", "weight", math.inf, "weight: must be a number in [0, 67108864], got inf"),
        ("pool", "weight", 10**400, "got an integer of more than 64 bits"),
        ("pool", "max_share_ratio", 1.5, "max_share_ratio: must be a number in [0, 1], got 1.5"),
        ("pool", "max_operation_count", 1.5, "max_operation_count: must be a whole number in [0, 2147483648], got 1.5"),
        ("pool", "max_operation_count", False, "must be a whole number in [0, 2147483648], got false"),
        ("pool", "max_operation_count", math.inf, "must be a whole number in [0, 2147483648], got inf"),
        ("pool", "max_operation_count", -1, "got -1"),
        ("pool", "mode", "lifo", 'mode: must be one of "fair_share", "fifo", got "lifo"'),
        ("pool", "mode", 1, 'mode: must be one of "fair_share", "fifo", got 1'),
        ("pool", "forbid_immediate_operations", "yes", 'must be true or false, got "yes"'),
        ("pool", "forbid_immediate_operations", 1, "must be true or false, got 1"),
        ("pool", "fifo_sort_parameters", [], "must be a list, not empty, each of it one of"),
        ("pool", "fifo_sort_parameters", "weight", 'got "weight"'),
        ("pool", "fifo_sort_parameters", ["weight", 3], 'got ["weight", 3]'),
        ("pool", "fifo_sort_parameters", [["weight"]], "got a list"),
        ("pool", "fifo_sort_parameters", ["weight", "weight"], "contains one of its values twice"),
        ("pool", "strong_guarantee_resources", 5, "strong_guarantee_resources: must be a dictionary, got 5"),
        ("pool", "strong_guarantee_resources", {"cpu": -1}, "_resources/cpu: must be a number in [0, 9.22337e+18]"),
        ("pool", "strong_guarantee_resources", {"cpu": 1e20}, "in [0, 9.22337e+18], got 1e+20"),
        ("pool", "strong_guarantee_resources", {"cpus": 1}, '_resources/cpus: unknown key; did you mean "cpu"?'),
        ("pool", "resource_limits", {"disk": 1}, "known keys: cpu, gpu, memory, network, user_slots"),
        ("pool", "resource_limits", {1: 1}, "resource_limits: the keys of a dictionary must be text, got 1"),
        ("pool", "resource_limits", {"user-slots": 1, "user_slots": 2}, 'given twice, also as "user-slots"'),
        ("pool", "integral-guarantees", {"resoure_flow": {}}, '/resoure_flow: unknown key; did you mean "re'),
        ("pool", "integral_guarantees", {"resource-flow": {"cpu": "a"}}, '/resource-flow/cpu: must be a number in'),
        ("pool", "integral_guarantees", {"relaxed_share_multiplier_limit": 11}, "must be a number in [1, 10], got 11"),
        ("tree", "max_operation_count", 0, "max_operation_count: must be a whole number in (0, 2147483648], got 0"),
        ("tree", "nodes_filter", 1, "nodes_filter: must be a printable text, got 1"),
        ("tree", "nodes_filter", "a\x00b", 'nodes_filter: must be a printable text, got "a\\x00b"'),
        ("tree", "config", 3, "config: must be a dictionary, got 3"),
        ("tree", "config", {"max_operation_count": -1}, "config/max_operation_count: must be"),
        ("tree", "config", {"max_operation_count": 1, "max-operation-count": 1}, "given twice"),
        ("tree", "scheduling_preemption_priority_scope", "x", 'one of "operation_and_ancestors", "operation_only"'),
    ],
)  # fmt: skip
def test_wrong_values(kind: Kind, name: str, value: Any, sentence: str) -> None:
    read = read_pool if kind == "pool" else read_tree
    with pytest.raises(model.CommandError, match=re.escape(sentence)) as caught:
        read({name: value})
    path = str(caught.value).partition(": ")[0].split("/")
    assert caught.value.attributes == {"field": "/".join(canonical_path(kind, path))}, "by the documents' name"


def test_attributes_must_be_a_dictionary_with_text_as_keys() -> None:
    with pytest.raises(model.CommandError, match="attributes: must be a dictionary, got 3"):
        normalise("pool", 3)  # type: ignore[arg-type]
    with pytest.raises(model.CommandError, match="must be a printable text"):
        normalise("pool", {3: 1})  # type: ignore[dict-item]
    with pytest.raises(model.CommandError, match="attributes: the keys of a dictionary must be text, got 3"):
        read_pool({3: 1})  # type: ignore[dict-item]


# --- what is no option


def test_unknown_attributes_are_kept_as_they_are() -> None:
    value = {"a-b": [1, 2.5, True, "x", {"c": []}], "d": {}}
    attributes, spelled, warnings = normalise("pool", {"my-label": value})
    assert attributes == {"my-label": value}
    assert attributes["my-label"] is not value
    assert spelled == {}
    assert warnings == ('"my-label" is no option of a pool: it is kept and has no effect',)


def test_an_unknown_attribute_that_is_like_an_option() -> None:
    assert normalise("pool", {"wieght": 2})[2] == (
        '"wieght" is no option of a pool: it is kept and has no effect; did you mean "weight"?',
    )
    assert 'did you mean "max_operation_count"?' in normalise("tree", {"config": {"max_operation_cnt": 2}})[2][0]


@pytest.mark.parametrize("name", ["id", "type", "name", "parent_name", "parent-name", "full_path", "count"])
def test_reserved_names_cannot_be_set_or_removed(name: str) -> None:
    for value in (1, REMOVE):
        assert refused("pool", {}, put(name, value)) == f"{name}: this attribute of a pool cannot be set or removed"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "x: must be a text, a finite number"),
        ([1, math.inf], "x/1: must be"),
        ({"a": {"b": 2**64}}, "x/a/b: must be a text, a finite number of at most 64 bits"),
        (b"raw", "got b'raw'"),
        ("\ud800", "x: holds text that is not valid Unicode"),
        ({"\ud800": 1}, "x: holds text that is not valid Unicode"),
        ({1: 1}, "x: the keys of a dictionary must be text, got 1"),
        ("x" * MAX_VALUE_BYTES, f"x: takes {MAX_VALUE_BYTES + 2} bytes as JSON, at most {MAX_VALUE_BYTES} are allowed"),
    ],
)
def test_what_is_not_kept(value: Any, words: str) -> None:
    assert words in refused("pool", {}, put("x", value))


def test_bounds_of_what_is_kept() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert edit("pool", {}, {}, [put("x", deep)])[0] == {"x": deep}
    assert f"has more than {MAX_DEPTH} levels" in refused("pool", {}, put("x", [deep]))
    for _ in range(100_000):
        deep = [deep]
    assert f"has more than {MAX_DEPTH} levels" in refused("pool", {}, put("x", deep))
    assert f"at most {MAX_NAME_LENGTH} characters" in refused("pool", {}, put("n" * (MAX_NAME_LENGTH + 1), 1))
    assert f"at most {MAX_DEPTH} names" in refused("pool", {}, Edit(("a",) * (MAX_DEPTH + 1), 1))
    full = {f"x{number}": 1 for number in range(MAX_CUSTOM_ATTRIBUTES)}
    assert len(edit("pool", full, {}, [put("weight", 1)])[0]) == MAX_CUSTOM_ATTRIBUTES + 1
    assert "this would make 201" in refused("pool", full, put("y", 1))
    assert "this would make 201" in refused("tree", full, put("config/y", 1))


@pytest.mark.parametrize("path", [(), ("",), ("a", ""), ("a\n",), ("a", "\ud800")])
def test_wrong_paths(path: tuple[str, ...]) -> None:
    assert "empty" in refused("pool", {}, Edit(path, 1)) or "printable" in refused("pool", {}, Edit(path, 1))


# --- edits


def test_edits_make_missing_parents_and_share_the_rest() -> None:
    old = {"integral_guarantees": {"burst_guarantee_resources": {"cpu": 5.0}}, "resource_limits": {"cpu": 1.0}}
    new, _, _ = edit("pool", old, {}, [put("integral-guarantees/resource_flow", {"cpu": 100})])
    assert new["integral_guarantees"] == {"burst_guarantee_resources": {"cpu": 5.0}, "resource_flow": {"cpu": 100.0}}
    assert old["integral_guarantees"] == {"burst_guarantee_resources": {"cpu": 5.0}}
    assert new["resource_limits"] is old["resource_limits"]
    new, _, _ = edit("pool", {}, {}, [put("integral_guarantees/resource_flow/cpu", 1), put("resource_limits/cpu", 2)])
    assert new == {"integral_guarantees": {"resource_flow": {"cpu": 1.0}}, "resource_limits": {"cpu": 2.0}}


def test_removals() -> None:
    old = {"integral_guarantees": {"resource_flow": {"cpu": 1.0}}, "weight": 2.0, "abc": {"id": 1}}
    paths = (
        "integral_guarantees/resource_flow/cpu", "integral_guarantees/burst_guarantee_resources/cpu", "weight", "mode",
        "resource_limits/cpu", "abc/id", "abc/x/y", "def/x", "ghi",
    )  # fmt: skip
    new, _, warnings = edit("pool", old, {}, [put(path) for path in paths])
    assert new == {"integral_guarantees": {"resource_flow": {}}, "abc": {}}
    assert warnings == ()


@pytest.mark.parametrize("value", [1, REMOVE])
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("resource_limits/cpus", 'resource_limits/cpus: unknown key; did you mean "cpu"?'),
        ("integral_guarantees/flow/cpu", "integral_guarantees/flow: unknown key; known keys: "),
        ("integral_guarantees/resource_flow/cp", 'resource_flow/cp: unknown key; did you mean "cpu"?'),
        ("weight/x", "weight: is a number in [0, 67108864] and has no keys; set it as a whole"),
        ("resource_limits/cpu/x", "resource_limits/cpu: is a number in [0, 9.22337e+18] and has no keys"),
        ("fifo_sort_parameters/0", "fifo_sort_parameters: is a list, not empty"),
    ],
)  # fmt: skip
def test_paths_into_what_options_have_not(path: str, sentence: str, value: Any) -> None:
    assert sentence in refused("pool", {"resource_limits": {"cpu": 1.0}}, put(path, value))


def test_edits_inside_of_what_is_only_kept() -> None:
    new, _, _ = edit("pool", {"abc": {"x": {"y": 1}, "z": [2]}}, {}, [put("abc/x/w", {"v": None, "u": 3})])
    assert new == {"abc": {"x": {"y": 1, "w": {"u": 3}}, "z": [2]}}
    assert refused("pool", {"abc": 5}, put("abc/x", 1)) == "abc: is 5 and has no keys; set it as a whole"
    assert refused("pool", {"abc": {"x": [1]}}, put("abc/x/y", 1)).startswith("abc/x: is [1] and has no keys")


@pytest.mark.parametrize(("path", "missing"), [("abc/x", "abc"), ("abc/x/y", "abc"), ("known/x/y", "known/x")])
def test_below_missing_attributes_nothing_is_set_unless_recursive(path: str, missing: str) -> None:
    before = {"known": {"a": 1}}
    with pytest.raises(model.CommandError) as caught:
        edit("pool", before, {}, [put(path, 1)])
    assert caught.value.code == model.RESOLVE
    assert str(caught.value).startswith(f'Attribute "{missing}" is not found and is no option')
    new = edit("pool", before, {}, [Edit(tuple(path.split("/")), 1, recursive=True)])[0]
    assert read_attribute("pool", model.PoolConfig("i", "p", "<Root>", new), path.split("/")) == 1
    assert edit("pool", before, {}, [put("known/x", 1)])[0] == {"known": {"a": 1, "x": 1}}  # the last key may be new
    assert edit("pool", before, {}, [put(path)])[0] == before  # and removing what is not there is no error
    option = edit("pool", {}, {}, [put("integral-guarantees/resource_flow/cpu", 1)])[0]  # options are always made
    assert option == {"integral_guarantees": {"resource_flow": {"cpu": 1.0}}}
    with pytest.raises(model.CommandError, match="is not found and is no option"):
        edit("tree", {}, {}, [put(f"config/{path}", 1)])


# --- 12.1, access lists

ENTRY = {"action": "allow", "subjects": ["ann", "ml"], "permissions": ["use", "write"]}
OTHER = {"action": "deny", "subjects": ["everyone"], "permissions": ["use"], "inheritance_mode": "object_only"}


@pytest.mark.parametrize("kind", ["pool", "tree"])
def test_12_1_an_access_list_is_kept_and_read(kind: Kind) -> None:
    given = {**ENTRY, "permissions": ["modify-children"], "inheritance-mode": "object-and-descendants"}
    attributes, _, warnings = edit(kind, {}, {}, [put("acl", [given, OTHER]), put("owner", "bob")])
    assert attributes == {"acl": [{**ENTRY, "permissions": ["modify_children"]}, OTHER], "owner": "bob"}
    assert not warnings
    read = read_pool if kind == "pool" else read_tree
    settings = read(attributes)
    assert settings.acl == (
        AccessEntry("allow", ("ann", "ml"), ("modify_children",)),
        AccessEntry("deny", ("everyone",), ("use",), "object_only"),
    )
    assert (settings.inherit_acl, settings.owner) == (True, "bob")
    assert edit(kind, attributes, {}, [put("acl")])[0] == {"owner": "bob"}


def test_12_1_a_list_without_entries_differs_from_none() -> None:
    assert read_pool({"acl": []}).acl == ()
    assert read_pool({}).acl is None
    assert edit("pool", {"acl": [ENTRY]}, {}, [put("acl/0")])[0] == {"acl": []}


def test_12_1_entries_are_added_replaced_and_removed_one_by_one() -> None:
    def change(*edits: Edit) -> Any:
        return edit("pool", {"acl": [ENTRY]}, {}, edits)[0]["acl"]

    assert edit("pool", {}, {}, [put("acl/end", ENTRY)])[0] == {"acl": [ENTRY]}
    assert change(put("acl/end", OTHER)) == [ENTRY, OTHER]
    assert change(put("acl/begin", OTHER)) == [OTHER, ENTRY]
    assert change(put("acl/end", OTHER), put("acl/-1")) == [ENTRY]
    assert change(put("acl/0", OTHER)) == [OTHER]
    assert edit("pool", {}, {}, [put("acl/0")])[0] == {}  # nothing there to remove
    for path in ("acl/1", "acl/x", "acl/-2"):
        assert "the list has 1 entries" in refused("pool", {"acl": [ENTRY]}, put(path, ENTRY))
    assert "set as a whole" in refused("pool", {"acl": [ENTRY]}, put("acl/0/action", "deny"))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({}, "acl: must be a list of entries such as {action=allow; subjects=[alice; ml]; permissions=[use]}, got a"),
        (["x"], "acl/0: must be an entry such as"),
        ([{**ENTRY, "action": "alow"}], 'acl/0/action: "alow" is unknown; did you mean "allow"?'),
        ([{"subjects": ["a"], "permissions": ["use"]}], "acl/0/action: is missing; known: allow, deny"),
        ([ENTRY, {**ENTRY, "subjects": []}], "acl/1/subjects: must be a list, not empty, got []; for example subjects"),
        ([{**ENTRY, "subjects": "ann"}], 'acl/0/subjects: must be a list, not empty, got "ann"'),
        ([{**ENTRY, "subjects": [""]}], "acl/0/subjects: a subject is the name of a user or group"),
        ([{**ENTRY, "subjects": [1]}], "acl/0/subjects: a subject is the name of a user or group"),
        ([{**ENTRY, "permissions": ["wirte"]}], 'acl/0/permissions: "wirte" is unknown; did you mean "write"?'),
        ([{**ENTRY, "permissions": ["mount"]}], 'acl/0/permissions: "mount" is unknown; known: read, use,'),
        ([{"action": "allow", "subjects": ["a"]}], "acl/0/permissions: is missing; for example permissions=[read]"),
        ([{**ENTRY, "subject": ["a"]}], 'acl/0/subject: unknown key; did you mean "subjects"?'),
        ([{**ENTRY, "inheritance_mode": "all"}], 'acl/0/inheritance_mode: "all" is unknown; known: object_and'),
        ([ENTRY] * 1001, "acl: may have at most 1000 entries, got 1001"),
    ],
)
def test_12_1_what_is_wrong_with_an_access_list_is_told(value: Any, sentence: str) -> None:
    assert refused("pool", {}, put("acl", value)).startswith(sentence)


def test_a_warning_is_given_once() -> None:
    assert len(edit("pool", {}, {}, [put("x", {}), put("x/a", 1), put("x/b", 2)])[2]) == 1


def test_what_is_shown_of_a_value() -> None:
    assert format_value({"a": 1}) == "a dictionary"
    assert format_value([1, [2]]) == "a list"
    assert format_value([1, None, True, "a"]) == '[1, null, true, "a"]'
    assert format_value("x" * 100) == f'"{"x" * 77}..."'
    assert format_value("a\nb") == '"a\\nb"'
    assert format_value(2**70) == "an integer of more than 64 bits"
    assert len(format_value(["abc"] * 1000)) <= 82


# --- two spellings


def test_0_2_another_name_is_refused_while_one_is_set() -> None:
    for first, second in (
        ("fair_share_preemption_timeout", "fair_share_starvation_timeout"),
        ("fair_share_starvation_timeout", "fair-share_preemption_timeout"),
    ):
        attributes, spelled, _ = normalise("pool", {first: 1000})
        with pytest.raises(model.CommandError) as caught:
            edit("pool", attributes, spelled, [put(second, 2000)])
        assert str(caught.value) == (
            f'{second}: this option is already set as "{first}"; use that name, or remove it first'
        )
        again, same, _ = edit("pool", attributes, spelled, [put(first, 3000)])
        assert again == {"fair_share_starvation_timeout": 3000.0}
        assert same == spelled
        for remover in (first, second):
            new, spelled_now, _ = edit("pool", attributes, spelled, [put(remover), put(second, 2000)])
            assert new == {"fair_share_starvation_timeout": 2000.0}
            folded = second.replace("-", "_")
            assert spelled_now.get("fair_share_starvation_timeout", "fair_share_starvation_timeout") == folded


def test_0_2_the_two_names_of_the_strong_guarantee_overwrite_each_other() -> None:
    attributes, spelled, _ = normalise("pool", {"min_share_resources": {"cpu": 1}})
    assert spelled == {"strong_guarantee_resources": "min_share_resources"}
    attributes, spelled, _ = edit("pool", attributes, spelled, [put("strong_guarantee_resources", {"cpu": 2})])
    assert (attributes, spelled) == ({"strong_guarantee_resources": {"cpu": 2.0}}, {})
    attributes, spelled, _ = edit("pool", attributes, spelled, [put("min_share_resources", {"cpu": 3})])
    assert attributes == {"strong_guarantee_resources": {"cpu": 3.0}}


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("pool", "max_share_ratio", "max-share-ratio"),
        ("pool", "fair_share_starvation_timeout", "fair_share_preemption_timeout"),
        ("tree", "job_interrupt_timeout", "allocation_preemption_timeout"),
    ],
)
def test_0_2_two_spellings_at_once(kind: Kind, one: str, other: str) -> None:
    assert refused(kind, {}, put(one, 1), put(other, 1)) == f'{other}: given twice, also as "{one}"; keep one of them'
    assert edit(kind, {}, {}, [put(one, 1), put(one), put(other, 1)])[0]


# --- options of trees in two places


def test_2_3_both_places_are_kept() -> None:
    edits = [put("config/max_operations_per_pool", 20), put("max_operation_count_per_pool", 10)]
    attributes, spelled, warnings = edit("tree", {}, {}, edits)
    assert attributes == {"max_operation_count_per_pool": 10, "config": {"max_operation_count_per_pool": 20}}
    assert spelled == {"config/max_operation_count_per_pool": "max_operations_per_pool"}
    (warning,) = warnings
    assert warning.startswith("max_operation_count_per_pool: has no effect while config/max_operation_count_per_pool")
    attributes, spelled, _ = edit("tree", attributes, spelled, [put("config/max_operation_count_per_pool")])
    assert attributes == {"max_operation_count_per_pool": 10, "config": {}}
    assert spelled == {}


def test_2_3_removing_from_a_config_that_is_missing_makes_none() -> None:
    for path in ("config/max_operation_count", "config/integral_guarantees/smooth_period", "config/a/b", "config"):
        assert edit("tree", {}, {}, [put(path)])[0] == {}
    assert "unknown key" in refused("tree", {}, put("config/integral_guarantees/period"))


def test_2_3_config_as_a_whole() -> None:
    attributes, spelled, _ = edit("tree", {}, {}, [put("config", {"job_interrupt_timeout": 5, "a": 1, "b": None})])
    assert attributes == {"config": {"job_preemption_timeout": 5.0, "a": 1}}
    assert spelled == {"config/job_preemption_timeout": "job_interrupt_timeout"}
    replaced, spelled_now, _ = edit("tree", attributes, spelled, [put("config", {"job_preemption_timeout": 6})])
    assert (replaced, spelled_now) == ({"config": {"job_preemption_timeout": 6.0}}, {})
    assert edit("tree", attributes, spelled, [put("config")])[:2] == ({}, {})
    assert edit("tree", attributes, spelled, [put("config/integral_guarantees/smooth-period", 7)])[0]["config"] == {
        "job_preemption_timeout": 5.0,
        "a": 1,
        "integral_guarantees": {"smooth_period": 7.0},
    }


# --- get


def pool_with(attributes: dict[str, Any]) -> model.PoolConfig:
    plain, spelled, _ = normalise("pool", attributes)
    return model.PoolConfig("1-2-3-4", "p", "<Root>", plain, read_pool(plain), spelled)


def test_reading_lists_and_what_is_only_kept() -> None:
    pool = pool_with({"fifo_sort_parameters": ["weight", "start-time"], "a-b": {"c-d": [1, {"e": 2}]}})
    assert read_attribute("pool", pool, ("fifo_sort_parameters", "1")) == "start_time"
    assert read_attribute("pool", pool, ("fifo_sort_parameters", "-1")) == "start_time"
    assert read_attribute("pool", pool, ("a-b", "c-d", "1", "e")) == 2


def test_reading_options_of_trees() -> None:
    plain, spelled, _ = normalise("tree", {"nodes_filter": "a", "config": {"max_operations_per_pool": 3}})
    tree = model.TreeConfig("1-2-3-4", "t", plain, read_tree(plain), spelled)
    assert read_attribute("tree", tree, ("config",)) == {"max_operation_count_per_pool": 3}
    assert read_attribute("tree", tree, ("config", "max-operation-count-per-pool")) == 3
    assert read_attribute("tree", tree, ("max_operations_per_pool",)) == 3
    assert read_attribute("tree", tree, ("nodes-filter",)) == "a"
    with pytest.raises(model.CommandError):
        read_attribute("tree", tree, ("config", "nodes_filter"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("weight", 'Attribute "weight" is not found'),
        ("resource_limits/cpus", 'Attribute "resource_limits/cpus" is not found; did you mean "cpu"?'),
        ("resource_limits/cpu/x", 'Attribute "resource_limits/cpu/x" is not found'),
        ("fifo_sort_parameters/7", 'Attribute "fifo_sort_parameters/7" is not found'),
        ("fifo_sort_parameters/x", 'Attribute "fifo_sort_parameters/x" is not found'),
        ("fifo_sort_parameters/--1", 'Attribute "fifo_sort_parameters/--1" is not found'),
    ],
)
def test_reading_what_is_not_there(path: str, message: str) -> None:
    pool = pool_with({"resource_limits": {"cpu": 1}, "fifo_sort_parameters": ["weight"]})
    with pytest.raises(model.CommandError) as caught:
        read_attribute("pool", pool, path.split("/"))
    assert str(caught.value) == message
    assert caught.value.code == model.RESOLVE


@pytest.mark.parametrize("kind", ["pool", "tree"])
def test_many_unknown_attributes_are_refused_before_they_cost_much(kind: Kind):
    """Each one more would cost as much as there are."""
    edits = [Edit((f"weigh{number}",), 1) for number in range(9000)]
    config = {f"weigh{number}": 1 for number in range(9000)}
    for given in (edits, [Edit(("config",), config)]) if kind == "tree" else (edits,):
        with pytest.raises(model.CommandError, match=r"at most 200 attributes .* more than twice as many; remove some"):
            edit(kind, {}, {}, given)


def test_the_first_unknown_attributes_name_the_option_that_may_be_meant():
    edits = [Edit((f"weigh{number}",), 1) for number in range(MAX_HINTS + 5)]
    _, _, warnings = edit("pool", {}, {}, [*edits, *edits])
    assert len(warnings) == MAX_HINTS + 5
    assert ['did you mean "weight"?' in warning for warning in warnings] == [True] * MAX_HINTS + [False] * 5


def test_durations_may_be_text_with_a_unit():
    assert read_pool({"fair_share_starvation_timeout": "1m"}) == read_pool({"fair_share_starvation_timeout": 60_000})
    assert normalise("tree", {"job_preemption_timeout": "250ms"})[0] == {"job_preemption_timeout": 250}
    with pytest.raises(model.CommandError, match="must be milliseconds, or text with a unit such as"):
        read_pool({"fair_share_starvation_timeout": "60"})
