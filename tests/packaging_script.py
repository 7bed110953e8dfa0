"""Programs of ``packaging/`` as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PACKAGING = Path(__file__).resolve().parents[1] / "packaging"


def load_script(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, PACKAGING / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, script)  # where its dataclasses look for their names
        patch.syspath_prepend(str(PACKAGING))  # where its own imports look for each other
        specification.loader.exec_module(script)
    return script
