"""Who may import whom: the borders between the folders of the package, read from its source."""

import re

import picture
from picture import MODULES, ROOT, find_spread_classes, list_imports, read_module

FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))

PURE = (
    "core.answers", "core.errors", "core.job_cgroups", "core.levels", "core.measures", "core.wire", "core.words",
    "monitor", "fairshare",
    "host.cgroup.parse", "host.cgroup.settings", "host.systemd.properties",
    "agent.explanation", "agent.limits.hold", "agent.limits.judge",
    "api.cursors", "api.event_views", "api.figures", "api.node_views", "api.overview", "api.permissions",
    "api.pool_views",
    "api.rollout_views", "api.tables", "api.token_views", "api.updated_tree", "api.views", "api.yt.lazy",
    "api.yt.errors", "api.yt.jobs", "api.yt.orchid", "api.yt.orchid_attributes",
    "api.yt.values", "api.yt.ypath",
    *(
        f"scheduler.{name}"
        for name in (
            "model", "rights.users", "rights.entries", "rights.token_records", "rights.vaults", "access", "events",
            "elements", "settings", "decide", "state", "store.lead", "event_log.commands", "event_log.happenings",
            "history.model", "history.collector", "history.series", "history.report",
            "history.chunks", "history.extras", "history.savings", "history.waste",
            "trial.forward", "trial.load", "trial.remedy", "trial.rounds", "answers.calibration",
            "answers.causes", "answers.obstacles", "answers.idle", "answers.operation", "answers.pool",
            "answers.remedies", "answers.resulting", "answers.standing", "answers.unmet",
        )
    ),
)  # fmt: skip
VALUE_MODULES = {
    "__future__", "array", "bisect", "collections", "collections.abc", "contextlib", "dataclasses", "decimal", "enum",
    "errno", "fractions", "functools", "hashlib", "heapq", "itertools", "math", "operator", "re", "statistics",
    "struct", "types", "typing",
}  # fmt: skip
"""Of the standard library: modules that know values only, neither the machine nor the time."""

MORE_FOR = {
    "cpumond.core.errors": {"os"},  # os.strerror, the system's words for an errno
    "cpumond.scheduler.elements.fitting": {"weakref"},  # what goes with the last element that has it
    "cpumond.scheduler.history.chunks": {"zlib"},
    "cpumond.scheduler.trial.load": {"random"},  # the caller's generator, with a seed
    "cpumond.scheduler.settings.operations": {"signal"},  # names of signals
    "cpumond.scheduler.settings.retries": {"signal"},  # names of signals
    "cpumond.scheduler.settings.rollout": {"zlib"},  # a checksum of names
    "cpumond.scheduler.store.lead": {"cpumond.scheduler.store"},  # the value Lease
    "cpumond.scheduler.state.spec_room": {"sys"},  # sys.getsizeof
    "cpumond.scheduler.rights.users": {"fnmatch"},  # patterns of names
    "cpumond.scheduler.trial.remedy": {"shlex"},  # command lines
    "cpumond.core.measures": {"sys"},  # sys.float_info
    "cpumond.scheduler.model.budget": {"datetime", "zoneinfo"},  # days of a calendar in a zone
    "cpumond.core.words": {"datetime", "difflib"},  # times as people read them, suggestions for misspelt names
    "cpumond.host.systemd.properties": {"os"},  # os.path, names only
    "cpumond.scheduler.settings.tree_file": {"hashlib"},  # a name of a tree's content
    "cpumond.scheduler.settings.nodes_filter": {"lark"},  # a parser from a grammar
    "cpumond.api.yt.lazy": {"datetime"},  # times as people read them
    "cpumond.monitor.replay": {"csv", "sys"},  # csv reads lines it is given; sys.float_info
    "cpumond.monitor.shapes": {"random"},  # a generator with a seed: the same numbers each time
}
BELOW: dict[str, set[str]] = {
    "core": {"core"},
    "web": {"web"},
    "monitor": {"core.errors", "core.levels", "core.measures", "monitor"},
    "fairshare": {"core.errors", "core.measures", "core.words", "fairshare"},
    "host": set(),
    "host.cgroup": {
        "core.errors", "core.job_cgroups", "core.measures", "monitor.model", "host.cgroup", "host.cgroup_processes",
    },
    "host.cgroup_processes": set(),
    "host.connections": set(),
    "host.executor": {
        "core.decode", "core.errors", "core.job_cgroups", "core.wire", "host.cgroup.idle", "host.cgroup.job_tree",
        "host.cgroup.mounts", "host.cgroup.settings", "host.cgroup_processes", "host.executor",
        "host.systemd.connection",
    },
    "host.engine": {
        "core.decode", "core.errors", "core.measures", "host.cgroup.files", "host.cgroup.mounts", "host.engine",
    },
    "host.service": {"core.errors", "core.settings"},
    "host.systemd": {"core.errors", "core.measures", "monitor.model", "host.cgroup", "host.systemd"},
    "agent": {"", "core", "host", "monitor", "web", "agent"},
    "agent.config": {"core", "monitor.model"},
    "agent.discovery": {
        "core.errors", "core.job_cgroups", "core.measures", "agent.config", "agent.discovery", "host.engine.model",
        "host.engine.processes",
    },
    "agent.report": {"", "core", "agent.config", "agent.report"},
    "scheduler": {"", "core", "host.connections", "host.service", "fairshare", "monitor.model", "scheduler"},
    "api": {"", "core", "fairshare", "scheduler", "web", "api"},
    "testing": {"testing"},
    "cluster": {"core", "host", "cluster"},
}  # fmt: skip
"""Part of the package -> the parts it may import ("" is the version in ``cpumond`` itself). The longest name counts."""

HOME = {
    "prometheus_client": {"cpumond.agent.exporter", "cpumond.scheduler.program.exporter"},
    "dbus_fast": {"cpumond.host.systemd.connection"},
    "asyncinotify": {"cpumond.agent.watch"},
    "cgroupspy": {"cpumond.cli.demo", "cpumond.cluster"},
    "cysystemd": {"cpumond.host.service", "cpumond.core.log"},
    "click": {"cpumond.cli"},
    "rich": {"cpumond.cli"},
    "grpc": {"cpumond.host.engine.cri"},
    "cryptography": {"cpumond.scheduler.program.vault_keys"},
    "opentelemetry": {"cpumond.scheduler.program.traces"},
    "lark": {"cpumond.scheduler.settings.nodes_filter"},
    "psycopg": {"cpumond.scheduler.store.postgresql", "cpumond.scheduler.store.postgresql_session"},
    "sqlite3": {"cpumond.scheduler.store", "cpumond.scheduler.history"},
    "yt": set(),  # its client is what tests run against us
    "starlette": {
        "cpumond.agent.api", "cpumond.cli.agent.receiver", "cpumond.api", "cpumond.scheduler.program.main",
        "cpumond.web",
    },
    "uvicorn": {
        "cpumond.agent.api", "cpumond.cli.agent.receiver", "cpumond.scheduler.program.server",
        "cpumond.host.connections", "cpumond.scheduler.program.connection",
    },
}  # fmt: skip
"""Library -> the only places that may import it."""


def is_in(module: str, part: str) -> bool:
    """Whether a module (without the leading ``cpumond.``) is ``part`` or below it."""
    return module == part or (part != "" and module.startswith(f"{part}."))


def part_of(name: str) -> str:
    return name.partition(".")[2]


def is_pure(module: str) -> bool:
    return module.startswith("cpumond.") and any(is_in(part_of(module), part) for part in PURE)


def may_import(name: str, imported: str) -> bool:
    """By what lies below the module; a pure one knows values only, the fair-share library the standard library only."""
    if not imported.startswith("cpumond"):
        allowed = VALUE_MODULES | MORE_FOR.get(name, set()) | {"msgspec"}
        if is_in(part_of(name), "fairshare"):
            allowed = VALUE_MODULES
        return imported in allowed or not is_pure(name)
    parts = [part for part in BELOW if is_in(part_of(name), part)]
    is_below = not parts or any(is_in(part_of(imported), part) for part in BELOW[max(parts, key=len)])
    return is_below and (not is_pure(name) or is_pure(imported) or imported in MORE_FOR.get(name, set()))


def test_a_module_imports_only_what_it_may():
    assert [
        f"{name} imports {imported}"
        for name in MODULES
        for imported in sorted(list_imports(name))
        if not may_import(name, imported)
    ] == []


def test_a_pure_module_neither_opens_nor_prints():
    pure = [name for name in MODULES if is_pure(name)]
    assert len(pure) > 100
    effects = {"open", "print", "input", "exec", "eval", "__import__"}
    assert [name for name in pure if read_module(name).called & effects] == []


def test_no_modules_import_each_other_in_a_circle_and_no_part_one_above_it(capsys):
    assert picture.main() == 0, capsys.readouterr().out


def test_the_scheduler_is_a_few_folders_with_few_arrows_between_them(capsys):
    picture.draw("cpumond.scheduler")
    drawn = capsys.readouterr().out.splitlines()[-1]
    parts, arrows = (int(re.search(rf"(\d+) {word}", drawn)[1]) for word in ("parts", "arrows"))
    # The package itself is one of the parts.
    assert parts <= 17
    assert arrows <= 90


def test_a_library_is_imported_in_its_place_only():
    assert [
        f"{name} imports {imported}"
        for name in MODULES
        for imported in sorted(list_imports(name))
        if (homes := HOME.get(imported.split(".")[0])) is not None and not any(is_in(name, home) for home in homes)
    ] == []


def test_no_class_inherits_for_methods_alone():
    assert find_spread_classes() == []


def test_what_runs_in_the_agent_does_not_need_what_is_for_tests():
    imported = {name: {part_of(each).partition(".")[0] for each in list_imports(name)} for name in MODULES}
    users = {name for name, parts in imported.items() if parts & {"testing", "cluster"}}
    assert {name for name in users if not name.startswith(("cpumond.testing", "cpumond.cluster"))} <= {
        "cpumond.cli.scheduler.cluster",
        *(name for name in MODULES if name.startswith("cpumond.cli.demo.")),
    }


def test_every_folder_has_its_rules():
    assert set(FOLDERS) - set(BELOW) <= {"cli"}


def test_what_users_send_is_not_compared_as_a_whole():
    """A name of a megabyte would hold up the event loop for half a second: ``core.words.nearest`` cuts it."""
    users = [name for name, path in MODULES.items() if "get_close_matches" in path.read_text("utf-8")]
    assert [name for name in users if name.startswith(("cpumond.api", "cpumond.scheduler"))] == []
