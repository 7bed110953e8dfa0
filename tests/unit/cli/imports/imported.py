"""Configurations of other schedulers that are read in tests."""

from collections.abc import Mapping
from pathlib import Path

from cpumond.cli.imports.command import find_reader
from cpumond.cli.imports.making import Making

DATA = Path(__file__).resolve().parents[3] / "data" / "imports"


def read(*names: str, total: Mapping[str, float] | None = None) -> Making:
    kinds = {".xml": "yarn", ".dump": "slurm", "queues.yaml": "yunikorn", "kueue.yaml": "kueue"}
    kind = next(kind for end, kind in kinds.items() if names[0].endswith(end))
    return find_reader(kind)({name: (DATA / name).read_text(encoding="utf-8") for name in names}, total or {})
