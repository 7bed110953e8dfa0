"""The scheduler's configuration: what is accepted, what is refused and how, and that the shipped file is true."""

import os
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from cpumond.agent.config import AgentConfig
from cpumond.core.errors import ConfigError
from cpumond.scheduler.program.config import (
    Api,
    MinSpareJobResources,
    SchedulerConfig,
    finish_scheduler_config,
    load_scheduler_config,
    parse_scheduler_config_text,
)

FILE = "/etc/x.toml"


def load(text: str) -> SchedulerConfig:
    return finish_scheduler_config(parse_scheduler_config_text(text, FILE), FILE)


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text)
    message = str(caught.value)
    assert message.startswith(f"{FILE}: ")
    return message


def test_bare_numbers_are_milliseconds_and_keys_may_have_hyphens() -> None:
    config = load(
        'fair-share-update-period = 250\nnode_heartbeat_timeout = "1m30s"\nwaiting-job-timeout = 0\n'
        "[min-spare-job-resources-on-node]\nuser-slots = 2\ncpu = 1\n[api]\nmax-depth = 8\n"
        '[store]\nlease = "500ms"\n'
    )
    assert config.store.lease_s == 0.5
    assert config.fair_share_update_period_s == 0.25
    assert config.node_heartbeat_timeout_s == 90.0
    assert config.waiting_job_timeout_s == 0.0
    assert config.min_spare_job_resources_on_node == MinSpareJobResources(user_slots=2, cpu=1.0)
    assert config.api.max_depth == 8


def test_paths_become_absolute() -> None:
    config = load('state_dir = "state"\n[api]\ntokens_file = "tokens"')
    assert config.state_dir == os.path.join(os.getcwd(), "state")
    assert config.api.tokens_file == os.path.join(os.getcwd(), "tokens")


TOKENS = 'tokens_file = "/etc/tokens"'
CERTIFICATE = 'certificate = "/etc/c"\nkey = "/etc/k"'
OPEN = ("0.0.0.0:9757", "[::]:9757", "10.0.0.1:1", "[::ffff:10.0.0.1]:1", "scheduler.example.com:9757", "128.0.0.1:1")
KEYS = 'secrets_key_file = "/k"\n[api]\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_operations = 1", "max_operations: unknown key; did you mean 'max_operation_count'?"),
        ("[api]\nlisen = 1", "api.lisen: unknown key; did you mean 'listen'?"),
        ("fair_share_update_period = 9", "fair_share_update_period: must be a duration in [10ms, 1m], got"),
        ('node_heartbeat_timeout = "0s"', "node_heartbeat_timeout: must be a duration in [10ms, 1d]"),
        ('waiting_job_timeout = "2d"', "waiting_job_timeout: must be a duration in ["),
        ("max_operation_count = 0", "max_operation_count: must be a whole number in [1, 1e+06], got 0"),
        ('cluster_name = ""', "cluster_name: must be a text that is not empty"),
        ('cluster_name = "a\\nb"', "cluster_name: must be printable text"),
        ("[api]\nmax_body = 10", "api.max_body: must be a whole number in ["),
        ("[api]\nrate_limit = -1", "api.rate_limit: must be a number in ["),
        ("[api]\nrate_limit = nan", "api.rate_limit: "),
        ("[min_spare_job_resources_on_node]\nxyz = 1", "xyz: unknown key; known keys: cpu, memory, user_slots"),
        (f"x = {'[' * 20_000}", "not valid TOML"),
        *(
            (f"{key} = '{regex}'", f"{key}: is not a regular expression: ")
            for key in ("pool_name_regex", "ephemeral_pool_name_regex")
            for regex in ("[a-", "(", "a{99999999999}", "*", "(" * 4000)
        ),
        *(
            (f'[api]\nlisten = "{listen}"', f"api.listen: {listen!r} can be reached from other machines, and without")
            for listen in OPEN
        ),
        ('[api]\nlisten = "0.0.0.0:1"', "or api.socket, where root makes tokens with `cpumond token create`, or"),
        *(
            (f'[api]\nlisten = "{listen}"', 'api.listen: must be "host:port" with a port in [0, 65535]')
            for listen in (" ", "9757", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", ":9757", "127.0.0.1:x")
        ),
        *(
            (f'[api]\nadvertise = "{address}"', "api.advertise: ")
            for address in ("a", "a:", "a:0", "0.0.0.0:9757", "[::]:9757")
        ),
        ('[store]\nkind = "postgresql"', "store.conninfo: is needed"),
        ('[store]\nconninfo = "host=db"', 'store.conninfo: is for store.kind = "postgresql"'),
        ('state_dir = "/s"\nsecrets_key_file = "/s/deep/../keys"\n[api]\n',
         "secrets_key_file: /s/keys is in state_dir, so every copy"),
        (f'{KEYS}listen = "0.0.0.0:1"\n{TOKENS}', "secrets_key_file: secrets would be sent to nodes unencrypted"),
        (f'{KEYS}listen = "127.0.0.1:1"', "secrets_key_file: every user of this host could get the secrets"),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_what_is_refused(text: str, words: str) -> None:
    assert words in refused(text)


@pytest.mark.parametrize(
    "text",
    [
        *(f'[api]\nlisten = "{listen}"\n{TOKENS}' for listen in OPEN),
        *(
            f'[api]\nlisten = "{listen}"'
            for listen in ("127.0.0.1:0", "127.8.9.1:65535", "[::1]:9757", "localhost:1", "[::ffff:127.0.0.1]:1")
        ),
        'state_dir = "/s"\nsecrets_key_file = "/statement"',
        f'{KEYS}listen = "127.0.0.1:1"\n{TOKENS}',
        f'{KEYS}listen = "0.0.0.0:1"\n{TOKENS}\n{CERTIFICATE}',
        '[api]\nadvertise = "a:9757"\n[store]\nkind = "postgresql"\nconninfo = "host=db"',
    ],
)
def test_what_is_accepted(text: str) -> None:
    given = {"api": {}, "store": {}, **tomllib.loads(text)}
    config = load(text)
    assert {key: getattr(config.api, key) for key in given["api"]} == given["api"]
    assert {key: getattr(config.store, key) for key in given["store"]} == given["store"]


def test_mistakes_that_do_not_depend_on_each_other_are_told_at_once() -> None:
    api = 'listen = "0.0.0.0:1"\nkey = "k"\ntrusted_proxy = ["x"]\n'
    with pytest.raises(ConfigError) as caught:
        load(f'pool_name_regex = "("\n[api]\n{api}[store]\nconninfo = "x"')
    told = [str(caught.value), *caught.value.others]
    keys = ["pool_name_regex", "api.listen", "api.certificate", "api.trusted_proxy", "store.conninfo"]
    assert [sentence.split(": ")[1] for sentence in told] == keys


def test_drop_ins_are_merged_in_order_of_their_names(tmp_path: Path) -> None:
    main = tmp_path / "scheduler.toml"
    main.write_text('cluster_name = "main"\n[api]\nmax_depth = 10\nmax_body = 2048\n')
    folder = tmp_path / "scheduler.conf.d"
    folder.mkdir()
    (folder / "20.toml").write_text("[api]\nmax-depth = 20\n")
    (folder / "10.toml").write_text("max_operation_count = 7\n[api]\nmax_depth = 11\n")
    (folder / "30.toml.bak").write_text("not TOML")
    # The agent's drop-ins may lie in the same directory.
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "agent.toml").write_text('node_id = "x"\n')
    config = load_scheduler_config(str(main))
    assert (config.cluster_name, config.max_operation_count) == ("main", 7)
    assert (config.api, config.path) == (Api(max_depth=20, max_body=2048), str(main))


SHIPPED = Path(__file__).parents[4] / "config" / "scheduler.toml"


def uncommented() -> str:
    """The shipped file with each commented-out key in force."""
    return re.sub(r"(?m)^#(?=[\[a-z])", "", SHIPPED.read_text())


SECTIONS = {
    field.encode_name: field.type
    for field in msgspec.structs.fields(SchedulerConfig)
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
}


def test_the_shipped_file_as_it_is_gives_the_defaults() -> None:
    assert msgspec.structs.replace(load_scheduler_config(str(SHIPPED)), path="") == load_scheduler_config(None)


def test_every_key_of_the_shipped_file_is_accepted_and_is_its_default() -> None:
    assert msgspec.structs.replace(load(uncommented()), path="") == load_scheduler_config(None)


@pytest.mark.parametrize(("section", "struct"), [("", SchedulerConfig), *SECTIONS.items()])
def test_every_key_of_the_code_is_in_the_file(section: str, struct: type[msgspec.Struct]) -> None:
    table = parse_scheduler_config_text(uncommented(), "scheduler.toml")
    if section:
        table = table[section]
    for field in msgspec.structs.fields(struct):
        if field.name == "path":
            continue
        assert field.encode_name in table, f"{field.encode_name} is missing in [{section}] of config/scheduler.toml"


def test_every_key_of_the_file_has_a_line_that_explains_it() -> None:
    before = ""
    for line in SHIPPED.read_text().splitlines():
        if re.match(r"#[a-z]", line):
            assert before.startswith("# "), line
        before = line


def test_what_both_configurations_have_is_called_the_same() -> None:
    agent = {field.encode_name for field in msgspec.structs.fields(AgentConfig)}
    ours = {field.encode_name for field in msgspec.structs.fields(SchedulerConfig)}
    assert agent & ours == {"state_dir", "metrics", "log", "path"}
