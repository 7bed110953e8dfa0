"""Who may import whom: the borders between the folders of the package, read from its source."""

from __future__ import annotations

import picture
import pytest
from picture import MODULES, ROOT, list_called, list_imports

FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))

PURE = (
    "monitor", "units", "words", "answers", "errors", "wire", "agent.explanation", "agent.hold", "cgroup.parse",
    "cgroup.settings", "fairshare", "api.figures", "api.lazy", "api.node_views", "api.orchid", "api.orchid_attributes",
    "api.overview", "api.pool_views", "api.tables", "api.updated_tree", "api.views", "api.values", "api.ypath",
    *(
        f"scheduler.{name}"
        for name in (
            "model", "attributes", "validation", "config_commands", "operations", "elements", "state", "tables",
            "registration", "dispatch", "reports", "admission",
            "commands", "transaction", "snapshot", "placement", "starvation", "preemption", "nodes_filter", "why",
            "history", "resulting", "idle_options", "protection", "spec_room",
        )
    ),
)  # fmt: skip
VALUE_MODULES = {
    "__future__", "array", "bisect", "collections", "collections.abc", "dataclasses", "decimal", "enum", "errno",
    "fractions", "functools", "heapq", "itertools", "math", "operator", "re", "struct", "types", "typing",
}  # fmt: skip
"""Of the standard library: modules that know values only, neither the machine nor the time."""

MORE_FOR = {
    "cpumond.errors": {"os"},  # os.strerror, the system's words for an errno
    "cpumond.scheduler.spec_room": {"sys"},  # sys.getsizeof
    "cpumond.units": {"sys"},  # sys.float_info
    "cpumond.words": {"datetime"},  # times as people read them
    # suggestions for misspelt names
    "cpumond.fairshare.validate": {"difflib"},
    "cpumond.scheduler.attributes": {"difflib"},
    "cpumond.scheduler.config_commands": {"difflib"},
    "cpumond.scheduler.operations": {"difflib"},
    "cpumond.scheduler.nodes_filter": {"lark"},  # a parser from a grammar
    "cpumond.api.lazy": {"datetime"},  # times as people read them
    "cpumond.monitor.replay": {"csv", "sys"},  # csv reads lines it is given; sys.float_info
    "cpumond.monitor.shapes": {"random"},  # a generator with a seed: the same numbers each time
}
BELOW: dict[str, set[str]] = {
    "answers": set(),
    "base_url": {"errors"},
    "decode": set(),
    "errors": set(),
    "units": set(),
    "words": {"units"},
    "wire": set(),
    "monitor": {"errors", "units", "monitor"},
    "fairshare": {"errors", "units", "fairshare"},
    "cgroup": {"cgroup_processes", "errors", "units", "monitor.model", "cgroup"},
    "cgroup_processes": set(),
    "config": {"decode", "errors", "schema", "monitor.model"},
    "schema": {"errors", "units", "monitor.model"},
    "discovery": {"errors", "units", "config", "discovery"},
    "reporters": {"", "answers", "base_url", "decode", "errors", "units", "config", "wire", "reporters"},
    "executor": {"cgroup.jobs", "cgroup_processes", "decode", "errors", "wire", "executor"},
    "log": set(),
    "process": {"errors", "config"},
    "connections": set(),
    "agent": {
        "", "decode", "errors", "units", "config", "log", "process", "wire", "monitor", "cgroup", "discovery",
        "reporters", "executor", "web", "connections", "answers", "words", "agent",
    },
    "web": {"web"},
    "testing": {"errors", "cgroup", "testing"},
    "scheduler": {
        "", "decode", "errors", "units", "config", "schema", "log", "process", "wire", "monitor.model", "fairshare",
        "scheduler", "connections", "words",
    },
    "api": {"", "config", "errors", "units", "words", "wire", "fairshare", "scheduler", "web", "api"},
}  # fmt: skip
"""Part of the package -> the parts it may import ("" is the version in ``cpumond`` itself)."""

HOME = {
    "prometheus_client": {"cpumond.agent.exporter", "cpumond.scheduler.exporter"},
    "dbus_fast": {"cpumond.cgroup.unit_bus", "cpumond.executor.systemd"},
    "asyncinotify": {"cpumond.agent.watch"},
    "cgroupspy": {"cpumond.cgroup", "cpumond.testing"},
    "cysystemd": {"cpumond.process", "cpumond.log"},
    "click": {"cpumond.cli"},
    "rich": {"cpumond.cli"},
    "lark": {"cpumond.scheduler.nodes_filter"},
    "sqlite3": {"cpumond.scheduler.store"},
    "yt": set(),  # its client is what tests run against us
    "starlette": {"cpumond.agent.api", "cpumond.cli.receiver", "cpumond.api", "cpumond.scheduler.main", "cpumond.web"},
    "uvicorn": {
        "cpumond.agent.api",
        "cpumond.cli.receiver",
        "cpumond.scheduler.main",
        "cpumond.connections",
        "cpumond.scheduler.connection",
    },
}
"""Library -> the only places that may import it."""


def is_in(module: str, part: str) -> bool:
    """Whether a module (without the leading ``cpumond.``) is ``part`` or below it."""
    return module == part or (part != "" and module.startswith(f"{part}."))


def part_of(name: str) -> str:
    return name.partition(".")[2]


PURE_MODULES = [name for name in MODULES if any(is_in(part_of(name), part) for part in PURE)]


@pytest.mark.parametrize("name", PURE_MODULES)
def test_a_pure_module_knows_values_only(name):
    allowed = VALUE_MODULES | MORE_FOR.get(name, set()) | {"msgspec"}
    for imported in list_imports(name):
        pure = any(is_in(part_of(imported), part) for part in PURE) and imported.startswith("cpumond.")
        assert pure or imported in allowed, f"{name} imports {imported}"


@pytest.mark.parametrize("name", [name for name in MODULES if is_in(part_of(name), "fairshare")])
def test_the_fair_share_library_needs_the_standard_library_only(name):
    for imported in list_imports(name):
        assert imported.split(".")[0] in VALUE_MODULES | {"cpumond", "difflib"}, f"{name} imports {imported}"


@pytest.mark.parametrize("name", PURE_MODULES)
def test_a_pure_module_neither_opens_nor_prints(name):
    assert not list_called(name) & {"open", "print", "input", "exec", "eval", "__import__"}


@pytest.mark.parametrize("name", [name for name in MODULES if part_of(name).split(".")[0] in BELOW])
def test_a_module_imports_only_what_lies_below_it(name):
    allowed = BELOW[part_of(name).split(".")[0]]
    for imported in list_imports(name):
        if imported.split(".")[0] == "cpumond":
            assert any(is_in(part_of(imported), part) for part in allowed), f"{name} imports {imported}"


def test_no_modules_import_each_other_in_a_circle_and_no_part_one_above_it(capsys):
    assert picture.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("library", HOME)
def test_a_library_is_imported_in_its_place_only(library):
    for name in MODULES:
        if any(imported.split(".")[0] == library for imported in list_imports(name)):
            assert any(name == home or name.startswith(f"{home}.") for home in HOME[library]), name


def test_the_parts_that_talk_to_the_outside_do_not_know_each_other_nor_the_shells():
    outside = {"cgroup", "discovery", "executor", "reporters"}
    shells = {"agent", "scheduler", "api", "cli"}
    for name in MODULES:
        part = part_of(name).split(".")[0]
        for imported in list_imports(name) - {"cpumond.cgroup.jobs"}:
            other = part_of(imported).split(".")[0] if imported.startswith("cpumond.") else ""
            if part in outside:
                assert other not in (outside | shells) - {part}, f"{name} imports {imported}"
            if part in ("agent", "scheduler"):
                assert other not in {"cli", "testing"} | ({"agent", "scheduler"} - {part}), f"{name} imports {imported}"


def test_what_runs_in_the_agent_does_not_need_what_is_for_tests():
    users = {name for name in MODULES if "cpumond.testing" in list_imports(name)}
    assert all(name == "cpumond.cli.cluster" or name.startswith("cpumond.cli.demo") for name in users), users


def test_every_folder_has_its_rules():
    assert set(FOLDERS) - set(BELOW) <= {"cli"}


def test_what_users_send_is_not_compared_as_a_whole():
    """A name of a megabyte would hold up the event loop for half a second: ``fairshare.validate.nearest`` cuts it."""
    users = [
        name
        for name, path in MODULES.items()
        if name.startswith(("cpumond.api", "cpumond.scheduler")) and "get_close_matches" in path.read_text("utf-8")
    ]
    assert users == ["cpumond.scheduler.tokens"], "that file is the operator's"
