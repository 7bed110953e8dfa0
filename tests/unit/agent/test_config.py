"""The configuration: what is accepted, what is refused, and that each refusal names file, key and allowed range."""

import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpumond.agent.config import (
    AgentConfig,
    Source,
    find_idle_options,
    finish_config,
    load_config,
    parse_assignments,
    parse_config_text,
    parse_layer,
)
from cpumond.cli import run
from cpumond.core.errors import ConfigError
from cpumond.core.schema import describe_type
from cpumond.monitor.model import MonitorSettings, compute_mode

FILE = "/etc/x.toml"
KINDS = '"docker", "glob", "kubernetes", "podman", "slurm", "static", "systemd"'
SOURCE = '[[source]]\nkind = "static"\npattern = "jobs/a"\n'


def load(text: str) -> AgentConfig:
    return finish_config(parse_config_text(text, FILE), FILE)


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return str(caught.value)


def monitor(text: str) -> MonitorSettings:
    return load(f"[monitor]\n{text}\n").node_settings()


# defaults and values


def test_without_a_file_everything_has_its_default():
    config = load_config(None)
    assert config.path == ""
    assert config.node_id == socket.gethostname()
    assert config.node_settings() == MonitorSettings()
    assert config.control_socket == "/run/cpumond/control.sock"
    assert (config.metrics.listen, config.report.kind, config.source) == ("127.0.0.1:9756", "log", [])
    assert (config.web.listen, config.web.samples, config.web.period_s) == ("", 180, 5.0)
    assert load("") == msgspec.structs.replace(config, path=FILE)


# refusals, key by key

REFUSALS: dict[str, dict[str, str]] = {
    "[monitor]\n": {
        "smoothing_facto = 1": "monitor.smoothing_facto: unknown key; did you mean 'smoothing_factor'?",
        "votes_decision_threshold = 4\nvote-decision-threshold = 4": (
            "monitor.vote-decision-threshold: given twice, also as 'votes_decision_threshold'; keep one of them"
        ),
        "throttle_vote = 1": "monitor.throttle_vote: must be true or false, got 1",
        "smoothing_factor = true": "monitor.smoothing_factor: must be a number in [0, 1], got True",
        "smoothing_factor = 2024-01-01": (
            "monitor.smoothing_factor: must be a number in [0, 1], got date (datetime.date(2024, 1, 1))"
        ),
        "smoothing_factor = nan": "monitor.smoothing_factor: must be a number in [0, 1], got nan",
        "vote_window_size = 5.5": "monitor.vote_window_size: must be a whole number in [1, 10000], got 5.5",
        "min_cpu_limit = -1": "monitor.min_cpu_limit: must be a number >= 0, got -1",
        "min_cpu_limit = inf": "monitor.min_cpu_limit: must be finite, a number >= 0, got inf",
        "check_period = '2d'": "monitor.check_period: must be a duration in [10ms, 1d], got 2d",
        "check_period = 'x'": (
            'monitor.check_period: expected a duration such as "1s", "250ms" or "1h30m", got \'x\'; '
            "allowed: a duration in [10ms, 1d]"
        ),
        "start_delay = -1": (
            "monitor.start_delay: expected a duration that is finite and not negative, got -1; "
            "allowed: a duration >= 0s"
        ),
        "vote_mode = 'yt'": 'monitor.vote_mode: must be one of "document", "ytsaurus", got \'yt\'',
        "relative_lower_bound = 0.95": (
            "resulting job-cpu-monitor: relative_lower_bound = 0.95 is above relative_upper_bound = 0.9; "
            "allowed: 0 <= relative_lower_bound <= relative_upper_bound <= 1"
        ),
        "vote_window_size = 3": (
            "resulting job-cpu-monitor: vote_decision_threshold = 3 can never be exceeded by 3 votes; "
            "allowed: 1 <= vote_decision_threshold < vote_window_size"
        ),
    },
    SOURCE: {
        "patern = 'x'": "source 1.patern: unknown key; did you mean 'pattern'?",
        "cpu_limit = 0": 'source 1.cpu_limit: must be a number > 0 or one of "from-cgroup", got 0',
        "cpu_limit = inf": 'source 1.cpu_limit: must be finite, a number > 0 or one of "from-cgroup", got inf',
        "cpu_limit = 'all'": "source 1.cpu_limit: must be a number > 0 or one of \"from-cgroup\", got 'all'",
        "[[source]]\nkind = 'static'": "source 2: 'pattern' is missing; it has no default",
    },
    "[[source]]\n": {
        "kind = 1": f"source 1.kind: must be one of {KINDS}, got 1",
        "pattern = 'a'": "source 1: 'kind' is missing; it has no default",
        "kind = 'glob'\npattern = ''": "source 1.pattern: must be a text that is not empty, got ''",
        "kind = 'static'\npattern = 'a/../b'": "source 1 ('a/../b'): pattern must not contain '..'",
        "kind = 'static'\npattern = 'a/*'": (
            "source 1 ('a/*'): a static pattern is one path; use kind = \"glob\" for 'a/*'"
        ),
        "kind = 'static'\npattern = 'a'\nid_regex = '('": (
            "source 1 ('a'): id_regex is not a regular expression: missing ), unterminated subpattern at position 0"
        ),
    },
    "": {
        "[monitr]": "monitr: unknown key; did you mean 'monitor'?",
        "[report]\nuri = 'x'": "report.uri: unknown key; did you mean 'url'?",
        "[log]\nxyzzy = 1": "log.xyzzy: unknown key; known keys: format, level",
        "[operation.o.job-cpu-monitor]\ndecrease = 1": (
            "operation.o.job-cpu-monitor.decrease: unknown key; did you mean 'decrease_coefficient'?"
        ),
        "monitor = 3": "monitor: must be a table, got a number (3)",
        "source = true": "source: must be a list of tables ([[source]]), got true or false (True)",
        "source = [3]": "source 1: must be a table, got a number (3)",
        "operation = []": "operation: must be a table, got a list ([])",
        "[operation.a]\njob-cpu-monitor = 3": "operation.a.job-cpu-monitor: must be a table, got a number (3)",
        "managed_roots = [1]": "managed_roots: must be a list of texts, got a list ([1])",
        "node_id = 3": "node_id: must be a text of at most 4096 characters, got 3",
        "node_id = {}": "node_id: must be a text of at most 4096 characters, got a table",
        "[discovery]\nrescan_period = 0": "discovery.rescan_period: must be a duration > 0s, got 0s",
        "[metrics]\njob_series = 'few'": 'metrics.job_series: must be one of "all", "off", "top", got \'few\'',
        f"[report]\nreport_period = '{'9' * 400}s'": (
            f"report.report_period: expected a duration that is finite, got '{'9' * 400}s'; allowed: a duration > 0s"
        ),
        "[cost]\ncpu_budget_ratio = inf": "cost.cpu_budget_ratio: must be a number in [0, 64], got inf",
        "[web]\nsamples = 5001": "web.samples: must be a whole number in [0, 5000], got 5001",
        **{
            f'[{table}]\nlisten = "{listen}"': (
                f'{table}.listen: must be "host:port" with a port in [0, 65535], got {listen!r}'
            )
            for table in ("metrics", "web")
            for listen in ("9756", ":9756", "host", "host:", "host:x", "host:65536", "host:-1", "host:\u0663")
        },
        **{
            f'[report]\nkind = "http"\nurl = "{url}"': (
                f'report.url: must be an http:// or https:// address when report.kind is "http", got {url!r}'
            )
            for url in ("", "host:80", "ftp://host/", "http://", "http:///path")
        },
    },
}


@pytest.mark.parametrize(
    ("text", "message"), [(head + text, message) for head, rows in REFUSALS.items() for text, message in rows.items()]
)
def test_a_refusal_names_the_file_the_key_and_the_allowed_range(text, message):
    assert refused(text) == f"{FILE}: {message}"


RANGES = {
    "true or false": {"enable_cpu_reclaim", "throttle_vote"},
    "a duration in [10ms, 1d]": {"check_period"},
    "a duration in [100ms, 1d]": {"peak_memory"},
    "a duration >= 0s": {"throttle_poll", "start_delay", "restore_hold", "startup_boost"},
    "a number in [0, 1]": {
        "throttle_budget", "smoothing_factor", "relative_upper_bound", "relative_lower_bound", "decrease_coefficient",
        "min_limit_ratio", "burst_ratio", "throttle_restore_ratio", "pressure_restore_ratio",
    },
    "a number in [0, 1000]": {"use_restore_ratio"},
    "a number in [0, 10]": {"reserve_ratio", "headroom_ratio"},
    "a number in [1, 2]": {"increase_coefficient"},
    "a number >= 0": {"min_cpu_limit", "min_cores_per_thread"},
    "a whole number in [1, 10000]": {"vote_window_size"},
    "a whole number in [1, 9999]": {"vote_decision_threshold"},
    'one of "off", "reclaim", "shadow", "up-only"': {"mode"},
    'one of "document", "peak"': {"limit_rule"},
    'one of "off", "ordered", "use"': {"early_restore"},
    'one of "first_value", "limit"': {"smoothing_seed"},
    'one of "document", "ytsaurus"': {"vote_mode"},
    'one of "both", "down-only", "up-only"': {"direction"},
    'one of "guarantee", "quota", "weight"': {"actuator"},
}  # fmt: skip


def test_each_option_of_the_monitor_has_its_range_in_words():
    info = msgspec.inspect.type_info(MonitorSettings)
    assert isinstance(info, msgspec.inspect.StructType)
    words: dict[str, set[str]] = {}
    for field in info.fields:
        words.setdefault(describe_type(field.type), set()).add(field.encode_name)
    assert words == RANGES


# refusals that are known by a part of their words

IDLE_ROOT = "executor.cgroup_root: cpumond-reclaimed is only for jobs on reclaimed CPU"
BEYOND_LOOPBACK = [
    "0.0.0.0:9759", "[::]:9759", "10.0.0.1:9759", "node-7:9759", "localhost.example:1", "127.0.0.1.x:1",
    "[::ffff:10.0.0.1]:1", "[fe80::1%eth0]:1", "*:1",
]  # fmt: skip
WRONG_SOURCES = [
    ("kind = 'docker'\nslices = ['a.slice']", 'source 1: slices: must not be set with kind = "docker": the engine'),
    ("kind = 'docker'\nwhole = true", 'source 1: whole: must not be set with kind = "docker", whose jobs'),
    ("kind = 'podman'\nid_regex = 'a'", 'source 1: id_regex: must not be set with kind = "podman"'),
    ("kind = 'slurm'\nsocket = '/a'", 'source 1: socket: must not be set with kind = "slurm", which'),
    ("kind = 'docker'\nsocket = 'docker.sock'", "source 1: socket: must be an absolute path, got 'docker.sock'"),
    ("kind = 'kubernetes'\nsocket = 'a'", "must be an absolute path, or kubelet's https:// address, got 'a'"),
    ("kind = 'docker'\ntoken_file = '/a'", "source 1: token_file: is only for a kubelet at an https:// address"),
    ("kind = 'kubernetes'\nsocket = '/run/cri.sock'\nca_file = '/a'", "source 1: ca_file: is only for a kubelet at"),
    ("kind = 'kubernetes'\nsocket = 'http://127.0.0.1:10255'\ntoken_file = '/a'", "token_file: is only for a kubelet"),
    ("kind = 'kubernetes'\nsocket = 'https://10.0.0.1:10250'\nca_file = 'none'",
     'source 1: ca_file: "none" is only for a kubelet on the loopback'),
    ("kind = 'glob'\npattern = 'a'\nca_file = '/a'", "source 1: ca_file: is only for the kinds docker,"),
    ("kind = 'glob'\npattern = 'a'\nsocket = '/a'", "source 1: socket: is only for the kinds docker, podman, slurm,"),
    ("kind = 'static'\npattern = 'a'\nunlimited = 'shadow'", "source 1: unlimited: is only for the kinds docker,"),
    ("kind = 'systemd'", 'source 1: slices: name at least one, for example slices = ["batch.slice"]'),
    ("kind = 'systemd'\nslices = ['batch']", "source 1: slices: 'batch' is not the name of a slice such as"),
    ("kind = 'systemd'\nslices = ['a/b.slice']", "source 1: slices: 'a/b.slice' is not the name of a slice such as"),
    ("kind = 'systemd'\nslices = ['a--b.slice']", "source 1: slices: 'a--b.slice' is not the name of a slice such as"),
    ("kind = 'systemd'\nslices = ['a.slice']\npattern = 'x/*'", 'pattern: with kind = "systemd" it must match'),
    ("kind = 'systemd'\nslices = ['a.slice']\nid = 'x'", 'source 1: id: is only for kind = "static"; use id_regex'),
    ("kind = 'systemd'\nslices = ['a.slice']\nlabels = ['user']", "labels: 'user' is not a property of a unit"),
    ("kind = 'systemd'\nslices = ['a.slice']\nlabels = ['A','B','C','D','E','F','G','H','I']",
     "labels: at most 8 are allowed, got 9"),
    ("kind = 'glob'\npattern = 'a'\nslices = ['a.slice']", 'slices: is only for kind = "systemd"'),
    ("kind = 'static'\npattern = 'a'\nlabels = ['User']", 'labels: is only for kind = "systemd"'),
]  # fmt: skip
WRONG_NODES = [
    ('[executor]\nkind = "cgroup"\ncgroup_root = "a/../b"', "executor.cgroup_root: 'a/../b' must not contain"),
    ('[executor]\nkind = "systemd"\ncgroup_root = "jobs"', "delete this line"),
    ('[executor]\nnode_name = "n"\nkind = "slurm"',
     'executor.kind: "slurm" was removed; use "systemd" or "cgroup", whose'),
    ('[scheduler]\nurl = "localhost:9757"', "scheduler.url: must be an http:// or https:// address"),
    ('[scheduler]\nurl = ["http://a", ""]', "must be an http:// or https:// address, or unix:/PATH, got ''"),
    ('[scheduler]\nurl = "http://a,http://b"', "scheduler.url: write several addresses as a list"),
    ("[scheduler]\nurl = 3", "scheduler.url: must be a text or a list of texts, got 3"),
    ('[scheduler]\ntoken = "a"\ntoken_file = "b"', "either token or token_file"),
    ('[scheduler]\ntoken = "sub secret"', "scheduler.token: must be visible ASCII"),
    ('[executor]\nuser = "a b"', "executor.user"),
    ('[scheduler]\nheartbeat_period = "0s"', "scheduler.heartbeat_period"),
    ("[resources]\ncpu = 0", "resources.cpu"),
    ("[resources]\nmemory = -1", "resources.memory"),
    ("[resources]\nuser_slots = 1.5", "resources.user_slots"),
    ("[executor]\nmax_log_bytes = 10", "executor.max_log_bytes"),
    ("[writes]\ndrift_max = 1001", "writes.drift_max: must be a whole number in [0, 1000], got 1001"),
    ('path = "x"', f"{FILE}: path: unknown key; "),  # the internal field is no key
    ("a = ", f"{FILE}: not valid TOML: line 1: `a =`: a has no value"),
    # At the wrong level: the tables that have it, not what merely sounds like it.
    ("[monitor]\nmanaged_roots = []",
     "monitor.managed_roots: unknown here; managed_roots belongs above the first [table]"),
    ('mode = "shadow"', "mode belongs into [monitor] or [[source]] or [operation.NAME]"),
    ("[web]\ncheck-period = '1s'", "web.check-period: unknown here; check-period belongs into [monitor]"),
    ("[[source]]\nkind = 'glob'\nslots = 1\nuser_slots = 1", "source 1.slots: unknown key"),
    ("[operation.o]\nlisten = ''", "operation.o.listen: unknown here; listen belongs into [metrics] or [web]"),
    *(
        (text,
         (f"{key}: '/sys/fs/cgroup{place}/a/b': name a cgroup by its path below the root of the hierarchy; "
          'write "a/b"'))
        for place in ("", "/cpu,cpuacct", "/cpu", "/unified")
        for key, text in {
            "managed_roots": f'managed_roots = ["/sys/fs/cgroup{place}/a/b"]',
            "source 1: pattern": f'[[source]]\nkind = "glob"\npattern = "/sys/fs/cgroup{place}/a/b"',
            "executor.cgroup_root": f'[executor]\nkind = "cgroup"\ncgroup_root = "/sys/fs/cgroup{place}/a/b"',
        }.items()
    ),
    ('managed_roots = ["/sys/fs/cgroup/"]', 'write "/" for all of it'),
    *((f'managed_roots = ["{root}"]', f"{FILE}: managed_roots: ") for root in ("..", "a/../b")),
    *((f'{key} = "a\\u0000"', f"{key}: must be printable text") for key in ("state_dir", "mountinfo", "node_id")),
    ('managed_roots = ["a\\u0000b"]', "managed_roots: must be printable text"),
    *(
        (f'[executor]\nkind = "cgroup"\ncgroup_root = "{root}"', IDLE_ROOT)
        for root in ("cpumond-reclaimed", "/cpumond-reclaimed/x/", "cpumond-reclaimed-a-b/x")
    ),
    (f"{SOURCE}[source.job-cpu-monitor]\nvote_window_size = 3", "can never be exceeded by"),
    ("[operation.o.job-cpu-monitor]\nvote_window_size = 3", "can never be exceeded by"),
    (f"{SOURCE}job-cpu-monitor.vote_window_size = 4\n[operation.o]\njob-cpu-monitor.vote_decision_threshold = 4",
     "can never be exceeded by"),
    ('[web]\nlisten = "*:1"', "web.listen: must be a loopback address such as 127.0.0.1:9759, "),
    *(
        (f'[web]\nlisten = "{listen}"', f"got {listen!r}; to see it from elsewhere: `ssh -L")
        for listen in BEYOND_LOOPBACK
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "where", "words"), [
    *((f"[[source]]\n{keys}", "source 1", words) for keys, words in WRONG_SOURCES),
    *((text, "", words) for text, words in WRONG_NODES),
])  # fmt: skip
def test_what_cannot_work_is_refused(text, where, words):
    message = refused(text + "\n")
    assert message.startswith(f"{FILE}: {where}")
    assert words in message
    assert "b s" not in message, "a token is not shown"


# files and drop-ins


def write(folder: Path, **files: str) -> str:
    """``main`` and, in ``conf.d``, the others."""
    drop_ins = folder / "conf.d"
    drop_ins.mkdir()
    for name, text in files.items():
        (folder / "cpumond.toml" if name == "main" else drop_ins / f"{name}.toml").write_text(text)
    return str(folder / "cpumond.toml")


def test_drop_ins_are_merged_by_name_and_a_later_file_wins_key_by_key(tmp_path):
    path = write(
        tmp_path,
        main="node_id = 'a'\n[monitor]\nsmoothing_factor = 0.2\nmin_cpu_limit = 2\n",
        b20="[monitor]\nsmoothing_factor = 0.4\n" + SOURCE,
        b10="node_id = 'b'\n[monitor]\nsmoothing_factor = 0.3\nvote-window-size = 7\n" + SOURCE.replace("/a", "/b"),
    )
    config = load_config(path)
    settings = config.node_settings()
    assert (config.node_id, settings.smoothing_factor, settings.min_cpu_limit) == ("b", 0.4, 2.0)
    assert settings.vote_window_size == 7
    assert [source.pattern for source in config.source] == ["jobs/b", "jobs/a"], "sources add up"


def test_other_files_of_conf_d_are_left_alone(tmp_path):
    path = write(tmp_path, main="")
    folder = tmp_path / "conf.d"
    for name in ("notes.txt", ".#a.toml", "._a.toml"):  # of an editor, of macOS
        (folder / name).write_text("not toml")
    (folder / "kept.toml").mkdir()
    os.mkfifo(folder / "b.toml")
    (folder / "..data").mkdir()
    (folder / "..data" / "c.toml").write_text("node_id = 'linked'")
    (folder / "c.toml").symlink_to("..data/c.toml")
    assert (load_config(path).path, load_config(path).node_id) == (path, "linked")
    (folder / "d.toml").symlink_to("nothing")
    with pytest.raises(ConfigError, match=r"d\.toml: cannot be read: No such file"):
        load_config(path)


def test_operations_of_several_files_are_merged_by_name(tmp_path):
    path = write(
        tmp_path,
        main="[operation.a]\nmode = 'shadow'\n[operation.a.job-cpu-monitor]\nmin_cpu_limit = 2\n",
        x="[operation.a.job_cpu_monitor]\nsmoothing-factor = 0.5\n[operation.source]\nmode = 'off'\n",
    )
    config = load_config(path)
    settings = config.resolve_settings(None, "a", {})
    assert (settings.mode, settings.min_cpu_limit, settings.smoothing_factor) == ("shadow", 2.0, 0.5)
    assert config.resolve_settings(None, "source", {}).mode == "off"


WRONG_KEYS = (
    ("b = 1\n[monitor]\nmode = 'x'\ncheck_period = '1y'\n"
     "[[source]]\npatern = 'x'\n[[source]]\nkind = 5\n[operation.b]\nmode = 1\n"),
    "[log]\nlevel = yes\n",
    ("toml:1: b:|toml:3: monitor.mode|toml:4: monitor.check_period|toml:6: source 1.patern|toml:5: source 1: 'kind'|"
     "toml:8: source 2.kind|toml:10: operation.b.mode|more.toml: not valid"),
)  # fmt: skip
WRONG_TOGETHER = (
    "[web]\nlisten = '0.0.0.0:1'\n[report]\nkind = 'http'\n[metrics]\nlisten = 'x'\n[[source]]\nkind = 'glob'\n",
    "[scheduler]\nurl = 'x'\n[executor]\nuser = '??'\n[[source]]\nkind = 'systemd'\n",
    ("more.toml:4: executor.user|more.toml:2: scheduler.url|toml:7: source 1|more.toml:5: source 2|"
     "toml:3: report.url|toml:6: metrics.listen|toml:2: web.listen"),
)  # fmt: skip


@pytest.mark.parametrize(("main", "more", "told"), [WRONG_KEYS, WRONG_TOGETHER])
def test_mistakes_that_do_not_depend_on_each_other_are_told_at_once(tmp_path, capsys, main, more, told):
    assert run(["check-config", write(tmp_path, main=main, more=more)]) == 78
    for line, place in zip(capsys.readouterr().err.splitlines(), told.split("|"), strict=True):
        assert line.startswith(f"cpumond: {tmp_path}/"), line
        assert place in line


def test_a_file_of_rubbish_is_told_of_in_twenty_sentences(tmp_path, capsys):
    main = "".join(f'"k{number}\\u001b[2J" = 1\n' for number in range(99))
    assert run(["check-config", write(tmp_path, main=main)]) == 78
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 20
    assert "\x1b" not in err


@pytest.mark.parametrize(("files", "told"), [
    # What only the whole shows is wrong names the file that said it last, and its table where the key is missing.
    ({"main": "[report]\nkind = 'log'\n", "b": "\n[report]\nkind = 'http'\n"}, "b.toml:2: report.url: must be"),
    ({"main": "[web]\nlisten = '127.0.0.1:1'\n", "b": "[web]\nlisten = '*:1'\n"}, "b.toml:2: web.listen: must be"),
    ({"main": "managed-roots = ['..']\n", "b": ""}, "cpumond.toml:1: managed_roots: '..' must not"),
    # Sources are counted over all files.
    ({"main": SOURCE, "b": f"{SOURCE}{SOURCE}slices = ['a']\n"}, "b.toml:7: source 3: slices: is only for"),
    ({"main": SOURCE, "b": "[[source]]\nkind = 'glob'\npattern = 'a/..'\n"}, "b.toml:1: source 2 ('a/..'): "),
    ({"main": SOURCE, "b": "[[source]]\nkind = 'globe'\n"}, "b.toml:2: source 1.kind: must be one of"),
    ({"main": "", "b": "[log]\nlevel = 'loud'\n"},
     'conf.d/b.toml:2: log.level: must be one of "debug", "error", "info", "warning", got \'loud\''),
])  # fmt: skip
def test_a_mistake_has_the_file_and_line_of_its_setting(tmp_path, files, told):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, **files))
    assert told in str(caught.value)


@pytest.mark.parametrize(("content", "said"), [
    (None, "cannot be read: No such file or directory; give --config"),
    ('node_id = "\xe4"\n'.encode("latin-1"), "it is not UTF-8 but perhaps Latin-1; save it as UTF-8"),
    ("node_id = 'a'\n".encode("utf-16"), "it is not UTF-8 but UTF-16; save it as UTF-8"),
    ("node_id = 'a'\n".encode("utf-16-le"), "it has zero bytes, as UTF-16 has; save it as UTF-8"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path, content, said):
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"x.toml: {said}"):
        load_config(str(path))


def test_a_byte_order_mark_and_ends_of_lines_of_windows_are_taken(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xef\xbb\xbfnode_id = 'a'\r\nstate_dir = '/s'\r\n")
    config = load_config(str(path))
    assert (config.node_id, config.state_dir) == ("a", "/s")


# layers


LAYERS = (
    "[monitor]\nmin_cpu_limit = 1\nsmoothing_factor = 0.1\nvote_window_size = 6\nincrease_coefficient = 1.1\n"
    f"{SOURCE}[source.job-cpu-monitor]\nsmoothing_factor = 0.2\nvote_window_size = 7\nincrease_coefficient = 1.2\n"
    "[operation.o.job-cpu-monitor]\nvote_window_size = 8\nincrease_coefficient = 1.3\n"
)


def test_node_below_source_below_operation_below_job():
    config = load(LAYERS)
    source = config.source[0]

    def resolve(*arguments: Any) -> tuple[float, float, int, float]:
        s = config.resolve_settings(*arguments)
        return s.min_cpu_limit, s.smoothing_factor, s.vote_window_size, s.increase_coefficient

    assert resolve(None, "", {}) == (1.0, 0.1, 6, 1.1)
    assert resolve(source, "", {}) == (1.0, 0.2, 7, 1.2)
    assert resolve(source, "other", {}) == (1.0, 0.2, 7, 1.2)
    assert resolve(None, "o", {}) == (1.0, 0.1, 8, 1.3)
    assert resolve(source, "o", {}) == (1.0, 0.2, 8, 1.3)
    assert resolve(source, "o", {"increase_coefficient": 1.4}) == (1.0, 0.2, 8, 1.4)


@pytest.mark.parametrize(("node", "source", "operation", "job", "mode"), [
    ("shadow", "reclaim", None, {}, "reclaim"),
    ("shadow", "reclaim", "up-only", {}, "up-only"),
    ("shadow", "reclaim", "up-only", {"mode": "off"}, "off"),
    ("reclaim", None, None, {"enable_cpu_reclaim": False}, "shadow"),
    (None, None, None, {"enable_cpu_reclaim": True}, "reclaim"),
])  # fmt: skip
def test_mode_and_enable_cpu_reclaim_are_resolved_over_the_layers(node, source, operation, job, mode):
    def line(value: str | None) -> str:
        return "" if value is None else f"mode = '{value}'\n"

    config = load(f"[monitor]\n{line(node)}{SOURCE}{line(source)}[operation.o]\n{line(operation)}")
    assert compute_mode(config.resolve_settings(config.source[0], "o", job)) == mode


def test_a_layer_given_at_run_time_is_checked_against_the_layers_below():
    config = load("")
    layer = parse_layer({"vote-window-size": 2}, "job j")
    with pytest.raises(ConfigError, match=r"^/etc/x\.toml: resulting job-cpu-monitor: vote_decision_threshold = 3 "):
        config.resolve_settings(None, "", layer)
    with pytest.raises(ConfigError, match=r"^built-in defaults: resulting job-cpu-monitor: "):
        load_config(None).resolve_settings(None, "", layer)


@pytest.mark.parametrize(("raw", "message"), [
    ({"x": 1}, "job j: job-cpu-monitor.x: unknown key; "),
    ({"check_period": "x"}, "job j: job-cpu-monitor.check_period: expected a duration "),
    ([], "job j: job-cpu-monitor: must be a table, got a list ([])"),
])  # fmt: skip
def test_a_wrong_layer_names_where_it_came_from(raw, message):
    with pytest.raises(ConfigError) as caught:
        parse_layer(raw, "job j")
    assert str(caught.value).startswith(message)


# --set


def test_assignments_are_read_as_toml_and_else_as_text():
    given = ("vote_window_size=9", "vote_window_size=7", "mode = up-only", "check_period=2s", "start_delay=1500",
             "throttle-vote=true")  # fmt: skip
    told = {"vote_window_size": 7, "mode": "up-only", "check_period": 2.0, "start_delay": 1.5, "throttle_vote": True}
    assert parse_assignments(given) == told


@pytest.mark.parametrize(("assignment", "message"), [
    ("x", "--set x: expected key=value, for example --set vote_window_size=7"),
    ("smothing_factor=1", "--set: smothing_factor: unknown key; did you mean 'smoothing_factor'?"),
    ("smoothing_factor=", "--set: smoothing_factor: must be a number in [0, 1], got ''"),
    ("mode=on", '--set: mode: must be one of "off", "reclaim", "shadow", "up-only", got \'on\''),
])  # fmt: skip
def test_a_wrong_assignment_is_refused(assignment, message):
    with pytest.raises(ConfigError) as caught:
        parse_assignments((assignment,))
    assert str(caught.value) == message


# --- scheduler, resources, executor

CGROUP, SYSTEMD = (f'[executor]\nkind = "{kind}"' for kind in ("cgroup", "systemd"))
JOBS_SLICE = "cpumond.slice/cpumond-jobs.slice"


@pytest.mark.parametrize(("text", "root", "roots"), [
    (CGROUP, "cpumond-jobs", ["cpumond-jobs", "cpumond-reclaimed"]),
    (f'{CGROUP}\ncgroup_root = "/a/b/"', "a/b", ["a/b", "cpumond-reclaimed-a-b"]),
    (f'managed_roots = ["a"]\n{CGROUP}\ncgroup_root = "a/b"', "a/b", ["a", "a/b", "cpumond-reclaimed-a-b"]),
    (f'managed_roots = ["b.slice"]\n{SYSTEMD}', JOBS_SLICE, ["b.slice", JOBS_SLICE, "cpumond_reclaimed.slice"]),
    (SYSTEMD, JOBS_SLICE, [JOBS_SLICE, "cpumond_reclaimed.slice"]),
    ('managed_roots = ["a"]', "", ["a"]),
    ("", "", []),
])  # fmt: skip
def test_the_executors_place_is_managed(text: str, root: str, roots: list[str]) -> None:
    config = load(text)
    assert (config.executor.cgroup_root, config.find_roots(is_engines=False)) == (root, roots)
    assert config.find_roots(is_engines=True) == config.managed_roots or [""]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
@pytest.mark.parametrize("name", ["main", "node"])
def test_a_token_in_a_file_that_others_can_read_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    path = write(tmp_path, **{"main": "", "zz": "", name: '[scheduler]\ntoken = "s3cret"\n'})
    holder = tmp_path / ("cpumond.toml" if name == "main" else "conf.d/node.toml")
    holder.chmod(mode)
    with pytest.raises(ConfigError, match=f"{holder}: scheduler.token: others.*chmod 600 {holder}") as caught:
        load_config(path)
    assert "s3cret" not in str(caught.value)
    holder.chmod(0o600)
    assert load_config(path).scheduler.token == "s3cret"  # noqa: S105


SLICES = ["batch.slice", "batch-night.slice", "-.slice", "a_b.c.slice", "machine-x\\x2dy.slice"]
LOOPBACK = [
    "127.0.0.1:9759", "127.8.9.1:0", "[::1]:9759", "localhost:9759", "LOCALHOST:1", "[::ffff:127.0.0.1]:1",
]  # fmt: skip
UNITS = "[[source]]\nkind = 'systemd'\nslices = ['batch.slice']\nlabels = ['User']"
NO_CA = "[[source]]\nkind = 'kubernetes'\nca_file = 'none'\n"
OTHER_ROOT = '[executor]\nkind = "cgroup"\ncgroup_root = "cpumond-reclaimedx"'
DOCKER = "[[source]]\nkind = 'docker'\n"


def find_floor(config: AgentConfig) -> float:
    return config.resolve_settings(config.source[0], "", {}).min_cpu_limit


TAKEN = [
    ("[monitor]\nsmoothing_seed = 'first-value'", lambda c: c.node_settings().smoothing_seed, "first_value"),
    ("[monitor]\nvotes-decision-threshold = 4", lambda c: c.node_settings().vote_decision_threshold, 4),
    (f'{SOURCE}mode = "up_only"', lambda c: (c.source[0].mode, c.node_settings().min_cpu_limit), ("up-only", 1.0)),
    # Jobs of engines have a floor of their own below all that is given.
    (DOCKER, find_floor, 0.1),
    (f"[monitor]\nmin_cpu_limit = 0.3\n{DOCKER}", find_floor, 0.3),
    (f"{DOCKER}[source.job-cpu-monitor]\nmin-cpu-limit = 0.4", find_floor, 0.4),
    ("node_id = 'n1'\nruntime-dir = '/r/'", lambda c: (c.node_id, c.control_socket), ("n1", "/r/control.sock")),
    ("state_dir = 's'", lambda c: c.state_dir, os.path.abspath("s")),
    ('managed_roots = ["/jobs//", "a/./b", "..a"]', lambda c: c.managed_roots, ["jobs", "a/b", "..a"]),
    ("[monitor]\ncheck_period = '250ms'", lambda c: c.node_settings().check_period_s, 0.25),
    ("[monitor]\nstartup_boost = 1500", lambda c: c.node_settings().startup_boost_s, 1.5),
    ("[writes]\noverride-ttl = '5m'\ndrift_max = 7", lambda c: c.writes.override_ttl_s, 300.0),
    ("[discovery]\nrescan_period = 2500", lambda c: c.discovery.rescan_period_s, 2.5),
    ("[metrics]\nlisten = '[::1]:1'\njob_series = 'top'", lambda c: c.metrics.listen, "[::1]:1"),
    ("[report]\nkind = 'http'\nurl = 'https://h/x'\ntimeout = '1m30s'", lambda c: c.report.timeout_s, 90.0),
    ("[control]\ngroup = 'ops'\n[log]\nlevel = 'debug'", lambda c: (c.control.group, c.log.level), ("ops", "debug")),
    ("[cost]\ncpu_budget_ratio = 1", lambda c: c.cost.cpu_budget_ratio, 1.0),
    ('state_dir = "/x/y"', lambda c: c.executor.jobs_dir, "/x/y-jobs"),
    ('state_dir = "/x/y"\n[executor]\njobs_dir = "/z"', lambda c: c.executor.jobs_dir, "/z"),
    *(
        (text and f"[scheduler]\nurl = {text}", lambda c: c.scheduler.addresses, addresses)
        for text, addresses in (
            ("", ()), ('"http://a"', ("http://a",)), ('["http://a", "https://b/c"]', ("http://a", "https://b/c")),
            ("[]", ()),
        )
    ),
    ("[scheduler]\nheartbeat-period = 200", lambda c: c.scheduler.heartbeat_period_s, 0.2),
    ("[resources]\ncpu_overdraft_timeout = 1500", lambda c: c.resources.cpu_overdraft_timeout_s, 1.5),
    ("[resources]\nmemory_overdraft_timeout = '2s'", lambda c: c.resources.memory_overdraft_timeout_s, 2.0),
    *((f'[web]\nlisten = "{listen}"', lambda c: c.web.listen, listen) for listen in LOOPBACK),
    (UNITS, lambda c: c.source, [Source(kind="systemd", slices=["batch.slice"], labels=["User"])]),
    *(
        (f"[[source]]\nkind = 'systemd'\nslices = ['{name}']", lambda c: c.source[0].slices, [name])
        for name in SLICES
    ),
    *(
        (f"{NO_CA}socket = '{socket}'", lambda c: c.source[0].ca_file, "none")
        for socket in ("", "https://127.0.0.1:10250", "https://[::1]:1", "https://localhost:10250/")
    ),
    (OTHER_ROOT, lambda c: len(c.executor.cgroup_roots) == 2, True),
]  # fmt: skip


@pytest.mark.parametrize(("text", "read", "value"), TAKEN, ids=[repr(text) for text, _, _ in TAKEN])
def test_what_is_taken(text, read, value):
    assert read(load(text)) == value


# ---- options without effect

PEAK = 'limit_rule = "peak"\n'
OF_SOURCE = SOURCE + "[source.job-cpu-monitor]\n"
IDLE: dict[str, tuple[str, list[str]]] = {
    "nothing": ("", []),
    "an option of the default rule": ("[monitor]\nvote_window_size = 7\n", []),
    "another rule's": (
        f"[monitor]\n{PEAK}vote-window-size = 7\nreserve_ratio = 0.1\n",
        ['monitor.vote_window_size has no effect under limit_rule = "peak"'],
    ),
    "of the default rule's rival": (
        "[monitor]\npeak_memory = '9s'\n", ['monitor.peak_memory has no effect under limit_rule = "document"'],
    ),
    "below the level that sets the rule": (
        f"[monitor]\n{PEAK}[operation.op.job-cpu-monitor]\nheadroom_ratio = 0.2\n{OF_SOURCE}vote_mode = 'ytsaurus'\n",
        [
            'source 1.job-cpu-monitor.vote_mode has no effect under limit_rule = "peak"',
            'operation.op.job-cpu-monitor.headroom_ratio has no effect under limit_rule = "peak"',
        ],
    ),
    "a default that a source's rule has a use for": (f"[monitor]\nthrottle_budget = 0.01\n{OF_SOURCE}{PEAK}", []),
    "for the jobs of one source": (
        f"[operation.op.job-cpu-monitor]\nvote_mode = 'ytsaurus'\n{OF_SOURCE}{PEAK}",
        [f"operation.op.job-cpu-monitor.vote_mode has no effect under {PEAK.strip()}, for jobs of source 1"],
    ),
    "the rule of an operation": (
        f"[operation.op.job-cpu-monitor]\n{PEAK}throttle_vote = true\n{OF_SOURCE}throttle_vote = true\n",
        ['operation.op.job-cpu-monitor.throttle_vote has no effect under limit_rule = "peak"'],
    ),
    "by the actuator": (
        "[monitor]\nactuator = 'weight'\nburst_ratio = 0.5\nthrottle_poll = '1s'\n",
        [
            'monitor.throttle_poll has no effect under limit_rule = "document" with actuator = "weight"',
            'monitor.burst_ratio has no effect with actuator = "weight"',
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "told"), IDLE.values(), ids=IDLE)
def test_an_option_without_effect_is_told_with_its_place(text: str, told: list[str]) -> None:
    assert find_idle_options(load(text)) == [f"{FILE}: {sentence}" for sentence in told]
