"""config/cpumond.toml shows every key with its default, and says so truly."""

import itertools
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from cpumond.agent.config import AgentConfig, OperationOptions, Source, finish_config, load_config, parse_config_text
from cpumond.core.errors import ConfigError
from cpumond.monitor.model import MonitorSettings

SHIPPED = Path(__file__).parents[2] / "config" / "cpumond.toml"
WITHOUT_ONE_DEFAULT = {
    "node_id", "mode", "enable_cpu_reclaim", "burst_ratio", "throttle_poll_s", "pressure_restore_ratio",
    "use_restore_ratio", "early_restore", "id", "id_regex", "cpu", "memory", "user_slots", "pattern",
}  # fmt: skip
"""Their defaults depend on something else; the file says on what."""


def uncommented() -> str:
    """The file with each commented-out key in force."""
    return re.sub(r"(?m)^#(?=[\[a-z])", "", SHIPPED.read_text())


def test_the_shipped_file_as_it_is_gives_the_defaults() -> None:
    shipped = msgspec.structs.replace(load_config(str(SHIPPED)), path="")
    assert shipped == load_config(None)
    finish_config(parse_config_text(uncommented(), "cpumond.toml"), "cpumond.toml")


SECTIONS = {
    field.encode_name: field.type
    for field in msgspec.structs.fields(AgentConfig)
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
}


@pytest.mark.parametrize(("section", "struct"), [
    ("", AgentConfig),
    ("monitor", MonitorSettings),
    ("source", Source),
    ("operation", OperationOptions),
    *SECTIONS.items(),
])  # fmt: skip
def test_every_key_of_the_code_is_in_the_file_with_its_default(section: str, struct: type[msgspec.Struct]) -> None:
    table = parse_config_text(uncommented(), "cpumond.toml")
    if section == "source":
        table = table["source"][0]
    elif section == "operation":
        table = table["operation"]["operation-id"]
    elif section:
        table = table[section]
    for field in msgspec.structs.fields(struct):
        if field.name in ("path", "ceiling") and struct is AgentConfig:
            continue
        assert field.encode_name in table, f"{field.encode_name} is missing in [{section}] of config/cpumond.toml"
        simple = field.default is not msgspec.NODEFAULT and not isinstance(field.default, msgspec.Struct)
        if simple and field.name not in WITHOUT_ONE_DEFAULT:
            assert table[field.encode_name] == field.default, field.encode_name


def list_examples() -> dict[str, str]:
    """The agent's configurations that README and docs show; others there are the scheduler's."""
    root, keys = SHIPPED.parents[1], {field.encode_name for field in msgspec.structs.fields(AgentConfig)}
    found = {}
    for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        for number, block in enumerate(re.findall(r"(?s)```toml\n(.*?)```", page.read_text()), 1):
            if tomllib.loads(block).keys() <= keys:
                found[f"{page.relative_to(root)} {number}"] = block
    return found


def test_any_two_examples_of_the_documents_work_together(tmp_path: Path) -> None:
    examples = list_examples()
    assert len(examples) > 10
    (tmp_path / "cpumond.toml").write_text(SHIPPED.read_text())
    folder = tmp_path / "conf.d"
    folder.mkdir()
    for one, other in itertools.permutations(examples, 2):
        for name, example in (("1.toml", one), ("2.toml", other)):
            (folder / name).write_text(examples[example])
        try:
            load_config(str(tmp_path / "cpumond.toml"))
        except ConfigError as error:
            pytest.fail(f"{one} and {other}: {error}")
