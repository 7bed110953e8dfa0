"""The table of options: each that is called expressible or approximated is put into a pool or tree that takes it, each
other one is told, with its place and why; ``docs/coming-from.md`` has all of them."""

import re
from typing import Any

import pytest
from packaging_script import load_script

from cpumond.cli.imports.making import At, Making
from cpumond.cli.imports.options import TABLES, Option, find_option
from cpumond.cli.imports.slurm import _read_s
from cpumond.cli.imports.yarn import _split as split_vcores
from cpumond.core.measures import parse_duration_s
from cpumond.scheduler.settings.attributes import read_pool, read_tree

ROWS = [(table, row) for table, rows in TABLES.items() for row in rows]
YARN = {"split": split_vcores}
MADE_BY = {"slurm": {"read_s": _read_s}, "fair": YARN, "capacity": YARN, "yunikorn": {"read_s": parse_duration_s}}
OF_A_TREE = ("allocations", "slurm.conf", "property", "limit of the root for all users")


def make_example(table: str, row: Option) -> tuple[str, str, str]:
    """A name that fits the row, a value as that system writes it, and the resource that it is of."""
    pattern, _, word = row.name.partition("=")
    name = re.sub(r"\[(.).*?\]", r"\1", pattern).replace("*", "memory" if pattern.endswith(".*") else "x")
    if word:
        return name, re.sub(r"\[(\[)\]\*", "[memory=1024,vcores=2]", word).replace("?*[0-9w]", "2w"), ""
    if pattern.startswith(("maxresources", "resources", "childtemplate.res")):
        return name, "8", name.rpartition(".")[2]
    option = row.becomes.partition(",")[0]
    if ("resource" in option or option == "lending_limit") and "." not in option:
        texts = {"slurm": "cpu=8,mem=16G,gres/gpu=2", "kueue": "8"}
        return name, texts.get(table, "[memory=1024,vcores=2]"), "cpu" if table == "kueue" else ""
    texts = {"acl": "alice,bob users", "time": "15", "tolerance": "0.9"}
    text = next((text for part, text in texts.items() if part in option), "3")
    return name, "15s" if table == "yunikorn" and "time" in option else text, ""


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda each: each if isinstance(each, str) else each.name)
def test_each_option_becomes_what_its_row_says(table: str, row: Option) -> None:
    making = Making(table, {}, **MADE_BY.get(table, {}))
    name, value, resource = make_example(table, row)
    found = find_option(table, row.place, name, value)
    assert found is row
    given: dict[str, Any] = making.options if row.place in OF_A_TREE and "of each" not in row.sentence else {}
    making.set_option(row.place, name, value, At("file:7", "queue q"), given, resource)
    wanted = [re.split("[=:/]", option)[0] for option in row.becomes.split(", ") if option and option[0] != "("]
    if row.verdict in ("expressible", "approximated"):
        assert sorted(given) == sorted(set(wanted))
        (read_tree if given is making.options else read_pool)(given)
    else:
        assert given == {}
    if row.verdict != "expressible":
        assert (making.notes[0].verdict, making.notes[0].where, making.notes[0].option) == (row.verdict, "file:7", name)


def test_the_document_has_the_options_as_they_are() -> None:
    script = load_script("import_options")
    text = script.DOCUMENT.read_text(encoding="utf-8")
    assert script.write_document(text) == text, "run: python packaging/import_options.py"
