"""Tests that are coroutines: each runs in an event loop of its own, where a ``conftest`` has this hook."""

import asyncio
import inspect

import pytest

LONGEST_S = 200.0
"""How long one may take; that of a request that never ends fails with the place where it waits."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), LONGEST_S))
    return True
