"""Secrets of an operation: what is refused, and where they never are (semantics.md 12.6)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scheduler_world import World, describe

from cpumond.scheduler.model import CommandError
from cpumond.scheduler.settings.operations import StartOperation, find_unrecognized, read_spec

KEY, SECRET = "PASSKEY", "hunter2"
ONE = {"command": "true", "job_count": 1}


@pytest.mark.parametrize("name", ["secure_vault", "secure-vault"])
@pytest.mark.parametrize("in_task", [False, True])
def test_a_vault_is_refused_without_its_keys_and_values(name, in_task):
    vault = {name: {KEY: SECRET}}
    spec: dict[str, Any] = {"tasks": {"t": {**ONE, **vault}}} if in_task else {"tasks": {"t": ONE}, **vault}
    with pytest.raises(CommandError, match=r"spec/(tasks/t/)?secure_vault: secrets are not given to jobs; ") as caught:
        read_spec(spec, dict)
    told = f"{caught.value} {caught.value.attributes}"
    assert KEY not in told
    assert SECRET not in told


def test_an_empty_vault_is_not_unrecognized_and_not_kept():
    world = World()
    change = world.do(StartOperation({"tasks": {"t": {**ONE, "secure-vault": {}}}, "secure_vault": {}}))
    assert change.warnings == ()
    record = world.record(change.id)
    assert find_unrecognized(record.spec) == {}
    assert record.spec == {"tasks": {"t": ONE}}
    assert record.tasks[0].spec == {}


def test_a_vault_that_an_earlier_version_has_kept_is_taken_out_of_the_store():
    world = World()
    operation = world.start("p")
    stored = msgspec.json.decode(world.stored["operation", operation])
    stored["spec"]["secure_vault"] = {KEY: SECRET}
    for task in stored["spec"]["tasks"].values():
        task["secure-vault"] = {KEY: SECRET}
    for task in stored["tasks"]:
        task["spec"] = {"secure-vault": {KEY: SECRET}, "mine": 1}
    world.stored["operation", operation] = msgspec.json.encode(stored)
    world.restart()
    record = world.record(operation)
    assert [task.spec for task in record.tasks] == [{"mine": 1}]
    for told in (repr(record), repr(world.stored), repr(describe(world.state))):
        assert SECRET not in told
        assert KEY not in told
