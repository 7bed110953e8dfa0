"""Values of options on the command line."""

from typing import Any

import pytest

from cpumond.cli.scheduler.arguments import read_attributes, read_edits, read_value
from cpumond.core.errors import UsageError
from cpumond.scheduler.settings.attributes import Edit, Kind, edit

FLOW = {"guarantee_type": "relaxed", "resource_flow": {"cpu": 2}}


@pytest.mark.parametrize(("text", "value"), [
    ("{guarantee_type=relaxed;resource_flow={cpu=2}}", FLOW),
    ("{guarantee_type=relaxed,resource_flow={cpu=2}}", FLOW),
    ('{"guarantee_type": "relaxed", "resource_flow": {"cpu": 2}}', FLOW),
    ('{guarantee_type="relaxed", resource_flow={cpu=2}}', FLOW),
    ("{a=%true;b=[1.5;-2;3u];}", {"a": True, "b": [1.5, -2, 3]}),
    (' {\n "a,b" = "x,\\"y;z";\n} ', {"a,b": 'x,"y;z'}),
    ("[weight,start_time]", ["weight", "start_time"]),
    ("2", 2),
    ("gpu & !old", "gpu & !old"),
    ("weight;start_time", "weight;start_time"),
    ("[draft] of mine", "[draft] of mine"),
    ("nan", "nan"),
    ("{cpu=nan}", {"cpu": "nan"}),
    ("  ", None),
])  # fmt: skip
def test_values_are_json_toml_or_yson(text: str, value: Any) -> None:
    assert read_value(text) == value


@pytest.mark.parametrize(("kind", "key", "text"), [
    ("pool", "integral_guarantees", "{guarantee_type=relaxed,resource_flow={cpu=2}}"),
    ("pool", "integral_guarantees/resource_flow", "{cpu=2;user_slots=3}"),
    ("pool", "fifo_sort_parameters", "[start_time;weight]"),
    ("pool", "acl", "[{action=allow;subjects=[ml];permissions=[use]}]"),
    ("tree", "integral_guarantees", "{smooth_period=30000;}"),
    ("tree", "config/non_preemptible_resource_usage_threshold", "{user_slots=2;}"),
])  # fmt: skip
def test_options_of_pools_and_trees_take_yson(kind: Kind, key: str, text: str) -> None:
    assert read_attributes([f"{key}={text}"], kind)
    [change] = read_edits([f"{key}={text}"], kind=kind)
    attributes, _, warnings = edit(kind, {}, {}, [Edit(tuple(change["path"]), change["value"])])
    assert attributes
    assert not warnings


@pytest.mark.parametrize(("kind", "assignment", "said"), [
    ("pool", "resource-limits={cpu=2", "resource-limits: expected a dictionary in YSON or JSON, for example"),
    ("pool", "integral_guarantees.resource_flow=2 cores", "integral_guarantees/resource_flow: expected a "),
    ("pool", "fifo_sort_parameters=weight", "fifo_sort_parameters: expected a list in YSON or JSON"),
    ("tree", "acl=[{action=allow", "acl: expected a list in YSON"),
    ("tree", "config/integral_guarantees=x", "config/integral_guarantees: expected a dictionary"),
])  # fmt: skip
def test_text_for_a_dictionary_or_list_is_refused(kind: Kind, assignment: str, said: str) -> None:
    for read in (read_edits, read_attributes):
        with pytest.raises(UsageError) as refusal:
            read([assignment], kind=kind)
        assert str(refusal.value).startswith(said)
        assert f'got "{assignment.partition("=")[2]}"' in str(refusal.value)


def test_other_options_take_any_text() -> None:
    assert read_attributes(["nodes_filter={gpu"], "tree") == {"nodes_filter": "{gpu"}
    assert read_attributes(["note=[1"], "pool") == {"note": "[1"}
