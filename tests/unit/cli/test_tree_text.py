"""Files of trees: how they look, and where a mistake in one is (semantics.md 2.12)."""

import sys
from typing import Any

import pytest

from cpumond.cli.scheduler.tree_text import Form, form_of, is_tree_file, read_tree_text, write_tree
from cpumond.core.errors import ConfigError, UsageError
from cpumond.scheduler.settings.tree_file import PoolTable, Table, TreeTables

ACL = [{"action": "allow", "subjects": ["ml"], "permissions": ["use"]}]
TREE = TreeTables(
    Table(options={"nodes_filter": "a & b", "config": {"max_operation_count": 5, "weird": 1.0}, "acl": ACL}),
    (
        PoolTable(
            name="research",
            options={"weight": 2.0, "strong_guarantee_resources": {"cpu": 4.5, "memory": 2**34}},
            attributes={"label": {"a": [1, {"b": 2.0}]}},
        ),
        PoolTable(name="nightly", parent="research", options={"weight": 0.5}),
        PoolTable(name="e x"),
    ),
)


def below_head(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#")).lstrip()


def test_toml_is_what_a_person_would_write() -> None:
    text = write_tree("default", TREE, "toml")
    assert text.startswith('# Pool tree "default", as `cpumond tree export` writes it')
    assert below_head(text) == (
        'tree = "default"\n'
        "\n"
        "[options]\n"
        "acl = [\n"
        '  { action = "allow", subjects = ["ml"], permissions = ["use"] },\n'
        "]\n"
        "config = { max_operation_count = 5, weird = 1.0 }\n"
        'nodes_filter = "a & b"\n'
        "\n"
        "[pools.research]\n"
        "strong_guarantee_resources = { cpu = 4.5, memory = 17179869184 }\n"
        "weight = 2\n"
        "attributes = { label = { a = [1, { b = 2.0 }] } }\n"
        "\n"
        "[pools.research.pools.nightly]\n"
        "weight = 0.5\n"
        "\n"
        '[pools."e x"]\n'
    )


def test_yaml_is_what_a_person_would_write() -> None:
    assert below_head(write_tree("default", TREE, "yaml")) == (
        "tree: default\n"
        "options:\n"
        "  acl:\n"
        "  - {action: allow, subjects: [ml], permissions: [use]}\n"
        "  config: {max_operation_count: 5, weird: 1.0}\n"
        "  nodes_filter: a & b\n"
        "pools:\n"
        "  research:\n"
        "    strong_guarantee_resources: {cpu: 4.5, memory: 17179869184}\n"
        "    weight: 2\n"
        "    attributes: {label: {a: [1, {b: 2.0}]}}\n"
        "    pools:\n"
        "      nightly:\n"
        "        weight: 0.5\n"
        "  e x: {}\n"
    )


@pytest.mark.parametrize("form", ["toml", "yaml", "json"])
def test_each_form_says_the_same(form: Form) -> None:
    read = read_tree_text(write_tree("default", TREE, form), "f", form)
    assert (read.tree, read.tables) == ("default", TREE)


@pytest.mark.parametrize("form", ["toml", "yaml", "json"])
def test_a_tree_without_pools_says_that_there_shall_be_none(form: Form) -> None:
    empty = TreeTables(Table(), ())
    assert read_tree_text(write_tree("t", empty, form), "f", form).tables == empty


def test_ids_are_there_when_they_are_wanted() -> None:
    tables = TreeTables(None, (PoolTable(name="a", id="1-2-3-4"),))
    text = write_tree("t", tables, "toml")
    assert '[pools.a]\nid = "1-2-3-4"\n' in text
    assert read_tree_text(text, "f", "toml").tables.pools == tables.pools


def test_what_a_file_does_not_name_is_not_spoken_of() -> None:
    assert read_tree_text("[pools.a]\n", "f", "toml").tables.own is None
    assert read_tree_text("[options]\n", "f", "toml").tables == TreeTables(Table(), None)
    assert read_tree_text("", "f", "yaml").tables == TreeTables()
    assert read_tree_text("pools:\n  a:\n", "f", "yaml").tables.pools == (PoolTable(name="a"),)


TOML = 'tree = "t"\n\n[pools.a]\nweight = 1\n\n[pools.a.pools."b"]\n'
YAML = "pools:\n  a:\n    weight: 1\n    pools:\n      b:\n"


@pytest.mark.parametrize(("text", "form", "told"), [
    (f"{TOML}weihgt = 1\n", "toml", 'f:7: pool "b": weihgt: is no option of a pool; did you mean "weight"?'),
    (f"{YAML}        weihgt: 1\n", "yaml", 'f:6: pool "b": weihgt: is no option of a pool; did you mean "weight"?'),
    (f"{TOML}label = 1\n", "toml", "put attributes that are no options below `attributes`"),
    (f"{TOML}weight = -1\n", "toml", 'f:7: pool "b": weight: must be a number in [0, 67108864], got -1'),
    (f"{TOML}resource_limits = {{ cpus = 1 }}\n", "toml", "f:7:"),
    (f"{TOML}attributes.weight = 1\n", "toml", "attributes/weight: is an option; put it beside"),
    (f"{TOML}acl = [{{ action = 'alow' }}]\n", "toml", "f:7:"),
    (f"{TOML}\n[options]\nnodes_fliter = 'x'\n", "toml", "f:9: the tree: nodes_fliter: is no option of a tree"),
    ("[[pools.a.acl]]\naction = 'allow'\n[[pools.b.acl]]\naction = 'alow'\n", "toml", "f:1: pool"),
    (f"{TOML}\n[pool.x]\n", "toml", "f:8: pool is unknown; did you mean pools?"),
    (f"{TOML}\n[pools.b]\n", "toml", "f:8: pools/b occurs twice, also as pools/a/pools/b"),
    ("pools = 3\n", "toml", "f:1: pools must be a table, got 3"),
    ("[pools.a]\nid = 3\n", "toml", "f:2: pools/a/id must be a text, got 3"),
    ("[pools.a]\n[pools.a]\n", "toml", "f: line 2: `[pools.a]`: the table [pools.a] appears twice, first in line 1"),
    ("a = x\n", "toml", "f: line 1: `a = x`: a text needs quotes; write a ="),
    ("- a\n", "yaml", "f: the whole must be a table, got ["),
    (f"{YAML}        weight: 1\n        weight: 2\n", "yaml", 'f: line 7: "weight" occurs twice'),
    ("pools:\n  1: {}\n", "yaml", "f:1: pools its keys must be text, got 1; put it in quotes"),
    ("pools: &a\n  b: *a\n", "yaml", "a value cannot contain itself"),
    ("options: {attributes: {a: &a [*a]}}\n", "yaml", "f: line 1: a value cannot contain itself"),
    ("tree: d\n? [a, b]\n: 1\n", "yaml", "f: line 2: a key must be a text, not a list or a table"),
    ("tree: d\noptions:\n  a: 2001-99-99\n", "yaml", 'f: line 3: "2001-99-99" is no timestamp; put a text in quotes'),
    ("options: {weight: !!int x}\n", "yaml", 'f: line 1: "x" is no int'),
    ("options: {acl: [{action: allow, action: deny}]}\n", "yaml", 'f: line 1: "action" occurs twice'),
    ("[" * 100_000, "yaml", "f: "),
    # Numbers of YAML with the base 60, which nobody means, and which overflow.
    ("pools:\n  a: {weight: 1:59}\n", "yaml", 'f: line 2: "1:59" is a number with the base 60 in YAML; put'),
    (f"[pools.a]\nweight = {'9' * 5000}\n", "toml", "f: a number in it has thousands of digits"),
    # Halves of characters, in values and in keys.
    ('pools:\n  a: {attributes: {x: "\\ud800"}}\n', "yaml", "f: line 2: half a character (one of U+D800"),
    ('pools:\n  "\\udc00": {}\n', "yaml", "f: line 2: half a character (one of U+D800"),
    ('{"pools": {"a": {"attributes": {\n"x": "\\ud800"}}}}', "json", "f: line 2: half a character (one of U+D800"),
    ('{"pools": {"a": {"attributes": {\n"x": "\\udc00"}}}}', "json", "f: line 2: half a character (one of U+D800"),
    ('[pools.a]\nattributes.x = "\\ud800"\n', "toml", "Escaped character is not a Unicode scalar value"),
])  # fmt: skip
def test_a_mistake_is_told_with_its_line(text: str, form: Form, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tree_text(text, "f", form)
    assert told in str(caught.value)


def test_anchors_and_merges_of_yaml() -> None:
    text = "pools:\n  a: &base\n    weight: 2\n  b:\n    <<: *base\n    mode: fifo\n  c: *base\n"
    pools = read_tree_text(text, "f", "yaml").tables.pools or ()
    read = [(pool.name, pool.options) for pool in pools]
    assert read == [("a", {"weight": 2}), ("b", {"weight": 2, "mode": "fifo"}), ("c", {"weight": 2})]


@pytest.mark.parametrize("of", ["{{p: *a{0}, q: *a{0}}}", "[*a{0}, *a{0}]"])
def test_a_few_lines_of_yaml_that_stand_for_a_billion_values_are_refused(of: str) -> None:
    text = "options:\n  a0: &a0 {x: 1}\n" + "".join(f"  a{n + 1}: &a{n + 1} {of.format(n)}\n" for n in range(30))
    with pytest.raises(ConfigError, match="f: it has more than 500000 values"):
        read_tree_text(text, "f", "yaml")


def test_a_text_of_several_lines_in_toml_may_look_like_a_table() -> None:
    found = read_tree_text('[options.attributes]\na = """\n[x = {} #]\n"""\n', "f", "toml")
    assert found.tables.own == Table(attributes={"a": "[x = {} #]\n"})


def test_without_pyyaml_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = sys.modules
    monkeypatch.setitem(modules, "yaml", None)
    for work in (lambda: write_tree("t", TREE, "yaml"), lambda: read_tree_text("a: 1", "f", "yaml")):
        with pytest.raises(UsageError, match=r"YAML needs PyYAML: pip install pyyaml; or use TOML"):
            work()
    assert read_tree_text(write_tree("t", TREE, "toml"), "f", "toml").tables == TREE


def test_the_form_is_that_of_the_name() -> None:
    assert [form_of(name) for name in ("a.toml", "b/c.YAML", "d.yml", "e.json")] == ["toml", "yaml", "yaml", "json"]
    assert not is_tree_file("research")
    with pytest.raises(UsageError, match=r"a.txt: expected the name of a file that ends with .toml"):
        form_of("a.txt")


def test_surrogate_pairs_of_json_are_one_character() -> None:
    found = read_tree_text('{"pools": {"a": {"attributes": {"x": "\\ud83d\\ude00"}}}}', "f", "json").tables
    assert found.pools is not None
    assert found.pools[0].attributes == {"x": "\U0001f600"}


@pytest.mark.parametrize("form", ["toml", "yaml", "json"])
def test_what_would_take_its_reader_minutes_is_not_read(form: Form) -> None:
    with pytest.raises(ConfigError, match=r"^f: it is longer than 8 MiB; split it$"):
        read_tree_text("a" * (8 * 2**20 + 1), "f", form)
    keys = "".join(f"b{number} = 1\n" for number in range(3000))
    with pytest.raises(ConfigError, match="f: a key in it has 3001 names with dots between them, and at most 200"):
        read_tree_text(f"[a{'.a' * 3000}]\n{keys}", "f", "toml")
