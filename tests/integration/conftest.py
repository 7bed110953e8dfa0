"""Fixtures of the integration tests."""

import os
from collections.abc import Iterator

import pytest
from browser import browser, new_page, page, sign  # noqa: F401
from postgresql import database, postgresql  # noqa: F401
from real_parts import agent, cgroups, hierarchies, scheduler  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forecasts, which are waited for, keep their priority; commands find no scheduler or token of who runs this."""
    directory = tmp_path_factory.mktemp("priority")
    (directory / "sitecustomize.py").write_text("import os\n\nos.nice = lambda increment: 0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
        for name in ("CPUMOND_SCHEDULER", "CPUMOND_TOKEN", "CPUMOND_TOKEN_FILE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module", autouse=True)
def own_priority() -> Iterator[None]:
    """What a test forks from its own process keeps its priority, too. Tests elsewhere may run in it afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.nice", lambda _: 0)
        yield
