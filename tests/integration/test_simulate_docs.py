"""docs/simulate.md: what its examples print is what the program prints, and its tables name all there is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpumond.monitor.shapes import SHAPES
from cpumond.monitor.simulate import SimulationResult

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulate.md").read_text()
EXAMPLES = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", PAGE)


@pytest.mark.parametrize(("command", "output"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_an_example_prints_what_the_page_says(command: str, output: str, tmp_path: Path) -> None:
    program = tmp_path / "cpumond"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m cpumond "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == output


def test_the_tables_name_each_shape_and_each_key() -> None:
    for name, shape in SHAPES.items():
        assert f"| `{name}` | {shape.about} |\n" in PAGE
    for key in SimulationResult.__struct_fields__[1:]:
        assert f"| `{key}` |" in PAGE
