"""What ``fair-share`` reads: every field of the form, defaults, identical objects, and a sentence for each mistake."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpumond.cli.fairshare.input import MAX_BYTES, InputReader, UpdateInput, read_updates
from cpumond.core.errors import FairShareInputError
from cpumond.fairshare import ROOT, IntegralGuarantees, Operation, Options, Pool, Snapshot
from cpumond.fairshare.resources import UNLIMITED

LEAST: dict[str, Any] = {"total_resources": {"cpu": 100}, "now": 5}


def read(**fields: Any) -> UpdateInput:
    return InputReader().read(json.dumps({**LEAST, **fields}).encode())


def refusal(text: str | bytes | dict[str, Any]) -> str:
    if isinstance(text, dict):
        text = json.dumps({**LEAST, **text})
    with pytest.raises(FairShareInputError) as error:
        InputReader().read(text if isinstance(text, bytes) else text.encode())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_least_that_is_needed():
    update = read()
    assert update == UpdateInput(None, Snapshot((0.0, 100.0, 0.0, 0.0, 0.0)), 5.0, None)


def test_null_is_not_set():
    nothing = {"id": None, "options": None, "root": None, "pools": None, "operations": None}
    assert read(**nothing, previous_update_time=None) == read()
    pool = dict.fromkeys(("weight", "mode", "max_share_ratio", "resource_limits", "integral", "fifo_reordering"))
    operation = dict.fromkeys(("weight", "demand", "usage", "gang", "start_time", "resource_limits", "max_share_ratio"))
    update = read(pools=[{"name": "q", "parent": ROOT, **pool}], operations=[{"name": "o", "parent": "q", **operation}])
    assert update.snapshot.pools == (Pool("q"),)
    assert update.snapshot.operations == (Operation("o", "q"),)


def test_every_field_of_an_operation():
    fields = {
        "weight": 2, "demand": {"cpu": 3, "memory": 2**53 - 1}, "usage": {"cpu": 1.5}, "gang": True, "start_time": 7,
        "resource_limits": {"gpu": 4, "network": None}, "max_share_ratio": 0.5,
    }  # fmt: skip
    operation = read(operations=[{"name": "o", "parent": ROOT, **fields}]).snapshot.operations[0]
    assert operation == Operation(
        "o", ROOT, 2.0, (0.0, 3.0, 0.0, 2.0**53 - 1, 0.0), (0.0, 1.5, 0.0, 0.0, 0.0), True, 7.0,
        (math.inf, math.inf, 4.0, math.inf, math.inf), 0.5,
    )  # fmt: skip
    vectors = (*operation.demand, *operation.usage, *operation.resource_limits)
    assert {type(value) for value in (*vectors, operation.weight, operation.start_time)} == {float}


def test_every_field_of_a_pool():
    integral = {
        "type": "relaxed", "resource_flow": {"cpu": 5}, "burst_guarantee_resources": {"gpu": 1},
        "relaxed_share_multiplier_limit": 4, "can_accept_free_volume": False,
        "should_distribute_free_volume_among_children": True, "accumulated_volume": {"cpu": 1.006, "memory": 0.5},
        "last_share_ratio": 0.25,
    }  # fmt: skip
    flags = {
        "step_function_for_gang_operations": False, "fifo_reordering": True,
        "compute_promised_guarantee_fair_share": True, "priority_strong_guarantee_adjustment": True,
        "priority_strong_guarantee_adjustment_donorship": True,
    }  # fmt: skip
    fields = {"weight": 3, "mode": "fifo", "strong_guarantee_resources": {"cpu": 0, "gpu": 2}, "integral": integral}
    pool = read(pools=[{"name": "q", "parent": ROOT, **fields, **flags}]).snapshot.pools[0]
    assert pool == Pool(
        "q",
        weight=3.0,
        mode="fifo",
        strong_guarantee_resources=(None, 0.0, 2.0, None, None),
        integral_guarantees=IntegralGuarantees(
            guarantee_type="relaxed",
            resource_flow=(0.0, 5.0, 0.0, 0.0, 0.0),
            burst_guarantee_resources=(0.0, 0.0, 1.0, 0.0, 0.0),
            relaxed_share_multiplier_limit=4.0,
            can_accept_free_volume=False,
            should_distribute_free_volume_among_children=True,
            accumulated_volume=(0.0, 1.01, 0.0, 0.5, 0.0),  # cpu in hundredths
            last_share_ratio=0.25,
        ),
        **flags,
    )


def test_a_share_of_the_cluster_becomes_limits_of_a_pool():
    pools = [
        {"name": "a", "parent": ROOT, "max_share_ratio": 0.125, "resource_limits": {"cpu": 500}},
        {"name": "b", "parent": ROOT, "max_share_ratio": 1, "resource_limits": {"cpu": 7}},
    ]
    update = read(pools=pools, total_resources={"cpu": 100, "gpu": 12, "memory": 1000})
    limits = [pool.resource_limits for pool in update.snapshot.pools]
    assert limits == [(0.0, 12.5, 2.0, 125.0, 0.0), (0.0, 7.0, 12.0, 1000.0, 0.0)]


def test_the_root_and_options():
    update = read(
        root={
            "mode": "fifo", "resource_limits": {"cpu": 50}, "priority_strong_guarantee_adjustment_donorship": True,
            "integral": {"should_distribute_free_volume_among_children": True},
        },
        options={"main_resource": "gpu", "integral_smooth_period_s": 30, "fast_fifo": True},
    )  # fmt: skip
    assert update.snapshot.root == Pool(
        ROOT,
        "",
        mode="fifo",
        resource_limits=(math.inf, 50.0, *UNLIMITED[2:]),
        priority_strong_guarantee_adjustment_donorship=True,
        integral_guarantees=IntegralGuarantees(should_distribute_free_volume_among_children=True),
    )
    assert update.snapshot.options == Options("gpu", integral_smooth_period_s=30.0, fast_fifo=True)


def test_pools_may_come_in_any_order():
    pools = [{"name": "b", "parent": "a"}, {"name": "c", "parent": "b"}, {"name": "a", "parent": ROOT}]
    assert [pool.name for pool in read(pools=pools).snapshot.pools] == ["a", "b", "c"]


def test_what_is_as_before_is_the_identical_object():
    reader = InputReader()
    pools = [{"name": "q", "parent": ROOT, "max_share_ratio": 0.5}, {"name": "r", "parent": ROOT}]
    operations = [{"name": "o", "parent": "q", "demand": {"cpu": 1}}, {"name": "p", "parent": "r"}]

    def next_snapshot(**fields: Any) -> Snapshot:
        return reader.read(json.dumps({**LEAST, "pools": pools, "operations": operations, **fields}).encode()).snapshot

    before, after = next_snapshot(), next_snapshot(now=6)
    elements = ((*each.pools, *each.operations, each.root) for each in (before, after))
    for old, new in zip(*elements, strict=True):
        assert old is new
    changed = next_snapshot(operations=[operations[1], {**operations[0], "weight": 2}])
    assert changed.operations[0] is before.operations[1]
    assert changed.operations[1] == Operation("o", "q", 2.0, (0.0, 1.0, 0.0, 0.0, 0.0))
    grown = next_snapshot(total_resources={"cpu": 200})
    assert grown.pools[0].resource_limits[1] == 100.0
    assert grown.pools[1] is before.pools[1]


def test_a_mistake_does_not_spoil_what_was_read_before():
    reader = InputReader()
    good = json.dumps({**LEAST, "operations": [{"name": "o", "parent": ROOT}]}).encode()
    first = reader.read(good)
    with pytest.raises(FairShareInputError):
        reader.read(good.replace(b'"<root>"', b'"nowhere"'))
    assert reader.read(good).snapshot.operations[0] is first.snapshot.operations[0]


POOL = {"name": "p3", "parent": ROOT}
OPERATION = {"name": "o1", "parent": ROOT}
OF_INTEGRAL = (
    "type, resource_flow, burst_guarantee_resources, relaxed_share_multiplier_limit, can_accept_free_volume, "
    "should_distribute_free_volume_among_children, accumulated_volume, last_share_ratio"
)


@pytest.mark.parametrize(("fields", "message"), [
    ({"weight": "x"}, 'weight: expected a number, got "x"'),
    ({"weight": True}, "weight: expected a number, got true"),
    ({"mode": "lifo"}, 'mode: expected fair_share or fifo, got "lifo"'),
    ({"integral": {"type": "strong"}}, 'integral.type: expected none, burst or relaxed, got "strong"'),
    ({"integral": {"resource_flow": {"cpu": []}}}, "integral.resource_flow.cpu: expected a number, got []"),
    ({"integral": {"flow": {"cpu": 1}}}, f'integral: unknown key "flow"; known are {OF_INTEGRAL}'),
    ({"wieght": 1}, 'unknown key "wieght"; did you mean "weight"?'),
    ({"resource_limits": {"CPU": 1}},
     'resource_limits: unknown key "CPU"; known are user_slots, cpu, gpu, memory, network'),
    ({"max_share_ratio": 1.5}, "max_share_ratio: expected a number in [0, 1], got 1.5"),
    ({"integral": {"accumulated_volume": {"cpu": 1e308}}},
     "integral.accumulated_volume: cpu: expected a finite number in [0, 1e+100], got 1e+308"),
])  # fmt: skip
def test_a_mistake_in_a_pool_is_said_with_its_name(fields, message):
    assert refusal({"pools": [{"name": "before", "parent": ROOT}, {**POOL, **fields}]}) == f'pool "p3": {message}'


@pytest.mark.parametrize(("fields", "message"), [
    ({"operations": [{**OPERATION, "gang": 1}]}, 'operation "o1": gang: expected true or false, got 1'),
    ({"operations": [{**OPERATION, "demand": {"memory": "1G"}}]},
     'operation "o1": demand.memory: expected a number, got "1G"'),
    ({"operations": [{**OPERATION, "demand": [9] * 100}]},
     f'operation "o1": demand: expected an object, got [{"9, " * 18}9,...'),
    ({"operations": [{**OPERATION, "demands": 1}]}, 'operation "o1": unknown key "demands"; did you mean "demand"?'),
    ({"pools": [{"name": "p3"}]}, 'pool "p3": the key "parent" is missing'),
    ({"pools": [{"parent": ROOT}]}, 'pools[0]: the key "name" is missing'),
    ({"pools": [POOL, 7]}, "pools[1]: expected an object, got 7"),
    ({"pools": {"p3": {}}}, 'pools: expected a list, got {"p3": {}}'),
    ({"options": {"fast_fifo": "yes"}}, 'options: fast_fifo: expected true or false, got "yes"'),
    ({"root": {"integral": {"can_accept": True}}},
     'root: integral: unknown key "can_accept"; did you mean "can_accept_free_volume"?'),
    ({"id": 5}, "id: expected a text, got 5"),
    ({"poolz": []}, 'unknown key "poolz"; did you mean "pools"?'),
    ({"total_resources": {"cpu": 1e308}, "pools": [{**POOL, "max_share_ratio": 0.5}]},
     "total_resources: cpu: expected a finite number in [0, 9.22e+18], got 1e+308"),
    ({"now": 1e308}, "now: expected a finite number of seconds within +-9.22e+12, got 1e+308"),
    ({"pools": [{"name": "a", "parent": "b"}, {"name": "b", "parent": "a"}]},
     'pool "a": its ancestors lead back to itself ("a" -> "b" -> "a"); give one of them another parent'),
    ('{"total_resources": {"cpu": 100}}', 'the key "now" is missing'),
    ('{"now": 5}', 'the key "total_resources" is missing'),
    *((text, f"expected an object, got {text}") for text in ("5", "[]", '"x"', "null")),
    ("[" * 100_000, "expected object, got array"),
    ('{"id": ' + "[" * 100_000, "id: expected str | null, got array"),
    ("{", "not valid JSON: it ends in the middle of the object"),
    ('{"now": NaN}', "not valid JSON: column 9: NaN is not a JSON number; leave a missing limit out"),
    ('{"total_resources": {},\n "now": -Infinity}',
     "not valid JSON: line 2, column 10: Infinity is not a JSON number; leave a missing limit out"),
    ('{"now" 5}', "not valid JSON: column 8: expected ':'"),
    ("{'now': 5}", "not valid JSON: column 2: object keys must be strings"),
    ('{"now": 5, "total_resources": {}} {}', "not valid JSON: column 36: trailing characters"),
    ("\0", "not valid JSON: column 1: invalid character"),
    (b'{"id": "\xff"}', "not valid JSON: a text is not UTF-8"),
], ids=lambda each: str(each)[:40])  # fmt: skip
def test_a_mistake_of_the_whole_is_said_with_its_place(fields, message):
    assert refusal(fields) == message


@pytest.mark.parametrize("fields", [{"root": {"weight": 1}}, {"a\x1b": 1}])
def test_an_unknown_key_moves_no_cursor(fields):
    assert "unknown key" in refusal(fields)
    assert "\x1b" not in refusal(fields)


def test_a_key_that_imitates_a_path_is_still_one_sentence():
    assert refusal({"x` - at `$.pools[9]": 1}).startswith("pools[9]: ")


@pytest.mark.parametrize("digits", ["1e400", "1" + "0" * 400])
def test_a_number_that_no_double_holds(digits):
    text = json.dumps({**LEAST, "pools": [{**POOL, "weight": 0}]}).replace('"weight": 0', f'"weight": {digits}')
    assert refusal(text) == 'pool "p3": weight: the number is too large'


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Any]:
    def read_content(content: str | bytes) -> list[UpdateInput]:
        path = tmp_path / "tree.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return list(read_updates(str(path)))

    return read_content


def line(id_: str) -> str:
    return json.dumps({**LEAST, "id": id_})


def ids(updates: list[UpdateInput]) -> list[str | None]:
    return [update.id for update in updates]


@pytest.mark.parametrize(("content", "found"), [
    (line("a"), ["a"]),
    (line("a") + "\n", ["a"]),
    (json.dumps(json.loads(line("a")), indent=1) + "\n\n", ["a"]),
    (f"\n{line('a')}\n \n{line('b')}\r\n{line('c')}", ["a", "b", "c"]),
    ("\ufeff" + line("a"), ["a"]),
], ids=["a line", "with its end", "many lines", "a line each, and empty ones", "a byte order mark"])  # fmt: skip
def test_objects_are_on_one_line_each_or_one_is_on_many(lines, content, found):
    assert ids(lines(content)) == found


def test_a_long_line_is_read_whole(lines):
    operations = [{"name": f"operation-{n}", "parent": ROOT} for n in range(5000)]
    updates = lines(json.dumps({**LEAST, "operations": operations}) + "\n" + line("b"))
    assert [len(update.snapshot.operations) for update in updates] == [5000, 0]


@pytest.mark.parametrize("content", ["", "\n\n \n"])
def test_an_empty_file(lines, content, tmp_path):
    with pytest.raises(FairShareInputError) as error:
        lines(content)
    path = tmp_path / "tree.json"
    assert str(error.value) == f"{path}: is empty; expected a JSON object, see 'cpumond fair-share --help'"


@pytest.mark.parametrize(("content", "message"), [
    (f"{line('a')}\n\n{line('b')[:-5]}\n{line('c')}", "line 3: not valid JSON: it ends in the middle of the object"),
    (f'{line("a")}\n{{"now": 1}}\n', 'line 2: the key "total_resources" is missing'),
    ('{"now":\n "x"}', 'now: expected a number, got "x"'),
    ('{"now":\n <>}', "not valid JSON: line 2, column 2: invalid character"),
    ('{"now": 5\n', "not valid JSON: it ends in the middle of the object"),
    ("[1,\n2]", "line 1: expected object, got array"),
    ("x" * 100_000, "line 1: not valid JSON: column 1: invalid character"),
    # Which mistake is met first depends on how deep this Python can go.
    ('{"id": ' + "[" * 100_000, ""),
])  # fmt: skip
def test_a_mistake_in_a_file_is_said_with_its_line(lines, tmp_path, content, message):
    with pytest.raises(FairShareInputError) as error:
        lines(content)
    assert str(error.value).startswith(f"{tmp_path / 'tree.json'}: {message}")


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(FairShareInputError, match=r"^/dev/zero: line 1: not valid JSON: column 1: invalid character"):
        list(read_updates("/dev/zero"))


def test_a_file_that_is_larger_than_any_tree(tmp_path, monkeypatch):
    assert MAX_BYTES >= 100 * 2**20
    monkeypatch.setattr("cpumond.cli.fairshare.input.MAX_BYTES", 2**20)
    path = tmp_path / "big.json"
    path.write_text('{"id":\n' + " " * 2**21)
    with pytest.raises(FairShareInputError, match=r"big\.json: is larger than 1 MiB; expected one pool tree"):
        list(read_updates(str(path)))
