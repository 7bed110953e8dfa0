"""Secrets of an operation: what jobs get of them, what is refused, and where they never are (semantics.md 12.6)."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import EASY, PlayedNode, World, describe

from cpumond.api.overview import find_alerts
from cpumond.api.yt.yson import read_yson
from cpumond.core.wire import AgentAbout, JobOrder
from cpumond.scheduler.answers.causes import Cause
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.decide.placement import NO_SECRETS
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.program.vault_keys import FileKeys
from cpumond.scheduler.rights.vaults import VaultError
from cpumond.scheduler.settings.operations import StartOperation, find_unrecognized, read_spec
from cpumond.scheduler.settings.vault import MAX_VAULT_BYTES, read_vault, without_vault, write_yson

KEY, SECRET = "PASSKEY", "hunter2"
ONE = {"command": "true", "job_count": 1}
OLD, NEW = b"o" * 32, b"n" * 32


def make_world(*keys: bytes) -> World:
    return World(replace(EASY, vault_keys=FileKeys(keys) if keys else None))


def restart_with(world: World, *keys: bytes) -> None:
    world.rules = replace(EASY, vault_keys=FileKeys(keys) if keys else None)
    world.restart()


def make_node(world: World, knows_secrets: bool = True) -> PlayedNode:
    node = world.node("n")
    node.beat()
    world.state.nodes["n"].about = AgentAbout("0", "shadow", "shadow", knows_secrets=knows_secrets)
    return node


def start(world: World, jobs: int = 1) -> str:
    return world.start("p", jobs=jobs, secure_vault={KEY: SECRET})


def find_orders(world: World, node: PlayedNode) -> list[JobOrder]:
    world.update()
    return node.beat().start


def is_told(value: object) -> bool:
    text = repr(value)
    return KEY in text or SECRET in text


def test_vault_1_each_key_is_a_variable_and_all_of_them_one():
    vault = {"a": "x", "n": 5, "f": True, "d": 3.14, "m": {"k": "v"}, "e": None}
    found = read_vault({"secure_vault": vault})
    assert read_yson(found.pop("YT_SECURE_VAULT").encode()) == vault
    texts = {"a": "x", "n": "5", "f": "true", "d": "3.14", "m": '{"k"="v";}'}
    assert found == {f"YT_SECURE_VAULT_{name}": text for name, text in texts.items()}
    assert read_vault({"secure-vault": {}}) == read_vault({"secure_vault": None}) == read_vault({}) == {}


def test_it_may_stand_where_the_command_line_takes_it():
    tasks = {"t": ONE, "secure_vault": {"a": "x"}}
    assert read_vault({"tasks": tasks})["YT_SECURE_VAULT_a"] == "x"
    assert read_spec({"tasks": tasks}, dict).tasks == read_spec({"tasks": {"t": ONE}}, dict).tasks


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
FLAT = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(), SCALARS, max_size=3)


@given(FLAT | st.lists(FLAT, max_size=3) | st.dictionaries(st.text(), FLAT, max_size=3))
def test_the_text_of_a_vault_is_read_back_as_it_was(value):
    assert read_yson(write_yson(value).encode("ascii")) == value


@pytest.mark.parametrize(
    ("vault", "sentence"),
    [
        ({"good": 1, f"{KEY}-b": SECRET}, "key 2 of 2 is no name of a variable: use letters, digits and _ (ASCII)"),
        ({"": SECRET}, "key 1 of 1 is no name of a variable"),
        ({"é": SECRET}, "key 1 of 1 is no name of a variable"),
        ({KEY: f"{SECRET}\0"}, "the value of key 1 of 1 contains a character with the code 0"),
        ({KEY: {"a": [f"{SECRET}\udcff"]}}, "the value of key 1 of 1 is no valid UTF-8; give it in base64"),
        ({KEY: (SECRET, 1)}, "the value of key 1 of 1 is neither text, a number,"),
        ({KEY: SECRET * MAX_VAULT_BYTES}, "bytes as text, at most 65536 are passed to a job"),
        ([KEY, SECRET], "expected a map of names to secrets"),
    ],
)
def test_vault_3_what_is_refused_is_told_without_its_keys_and_values(vault, sentence):
    with pytest.raises(CommandError, match="spec/secure_vault: ") as caught:
        read_spec({"tasks": {"t": ONE}, "secure_vault": vault}, dict)
    assert sentence in str(caught.value)
    assert not is_told((str(caught.value), caught.value.attributes))


def test_a_vault_of_one_task_and_two_vaults_are_refused():
    in_task: dict[str, Any] = {"tasks": {"t": {**ONE, "secure-vault": {KEY: SECRET}}}}
    with pytest.raises(CommandError) as caught:
        read_spec(in_task, dict)
    assert str(caught.value) == "spec/tasks/t/secure_vault: belongs to the root of the specification: every job gets it"
    with pytest.raises(CommandError, match="spec/secure_vault: is given twice; keep one of them"):
        read_spec({"tasks": {"t": ONE}, "secure_vault": {KEY: SECRET}, "secure-vault": {}}, dict)


def test_its_variables_count_as_what_an_order_carries():
    task = {**ONE, "environment": dict.fromkeys("abc", "x" * 60000)}
    vault = {"k": "x" * 60_000}
    with pytest.raises(CommandError, match="together, with the variables of secure_vault, may take at most 262144"):
        read_spec({"tasks": {"t": task}, "secure_vault": vault}, dict)


def test_without_a_key_a_vault_is_refused():
    world = make_world()
    before = describe(world.state)
    with pytest.raises(CommandError) as caught:
        start(world)
    text = "spec/secure_vault: this scheduler stores no secrets; an administrator can set secrets_key_file in its"
    assert str(caught.value).startswith(text)
    assert describe(world.state) == before


def test_an_empty_vault_is_not_unrecognized_and_not_kept(world):
    change = world.do(StartOperation({"tasks": {"t": {**ONE, "secure-vault": {}}}, "secure_vault": {}}))
    assert change.warnings == ()
    record = world.record(change.id)
    assert find_unrecognized(record.spec) == {}
    assert record.spec == {"tasks": {"t": ONE}}
    assert record.tasks[0].spec == {}


@pytest.mark.parametrize("place", [("secure_vault",), ("tasks", "secure_vault")])
def test_the_command_line_of_the_client_is_not_kept_with_it(place):
    """`yt` adds its arguments to a specification, which is among them."""
    client = {"pid": 1, "command": ["yt", "vanilla", "--spec", f"{{secure_vault={{{KEY}={SECRET}}}}}"]}
    spec: dict[str, Any] = {"tasks": {"t": ONE}, "started_by": client}
    assert without_vault(spec) == spec
    (spec["tasks"] if len(place) > 1 else spec)["secure_vault"] = {KEY: SECRET}
    assert without_vault(spec) == {"tasks": {"t": ONE}, "started_by": {"pid": 1}}


def test_a_job_gets_it_and_nothing_else_has_it_but_sealed():
    world = make_world(NEW)
    node, operation = make_node(world), start(world)
    (order,) = find_orders(world, node)
    assert order.secrets == {"YT_SECURE_VAULT": f'{{"{KEY}"="{SECRET}";}}', f"YT_SECURE_VAULT_{KEY}": SECRET}
    assert order.environment == {}
    assert not is_told([world.record(operation), world.stored, describe(world.state), world.state.vaults])
    assert (world.record(operation).vault_bytes > 0, list(world.state.vaults)) == (True, [operation])


@pytest.mark.parametrize("end", ["abort", "complete", "last job"])
def test_it_is_erased_by_the_write_that_ends_its_operation(end):
    world = make_world(NEW)
    node, operation = make_node(world), start(world)
    assert ("vault", operation) in world.stored
    if end == "last job":
        find_orders(world, node)
        node.beat()
        (job_id,) = node.jobs
        node.finish(job_id)
        node.beat()
    else:
        getattr(world, end)(operation)
    assert world.record(operation).is_finished
    assert (world.state.vaults, [key for kind, key in world.stored if kind == "vault"]) == ({}, [])
    assert world.state.spec_room.live_bytes == 0


def test_one_whose_operation_has_ended_is_erased_at_the_start():
    world = make_world(NEW)
    operation = start(world)
    sealed = world.stored["vault", operation]
    world.abort(operation)
    world.stored["vault", operation] = sealed
    restart_with(world, NEW)
    world.expire()
    assert (world.state.vaults, [key for kind, key in world.stored if kind == "vault"]) == ({}, [])


def test_a_vault_kept_by_an_earlier_version_is_removed_from_the_store(world):
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
    assert not is_told((record, world.stored, describe(world.state)))


def test_the_first_key_seals_and_all_of_them_open():
    world = make_world(OLD)
    first = start(world)
    restart_with(world, NEW, OLD)
    second = start(world)
    named = [world.state.vaults[each].key for each in (first, second)]
    assert named[0] != named[1]
    assert not any(each.lacks_secrets for each in world.state.operations.values())
    restart_with(world, NEW)
    assert [world.state.operations[each].lacks_secrets for each in (first, second)] == [True, False]


@pytest.mark.parametrize("keys", [(), (OLD,)])
def test_without_its_key_no_job_is_started_and_that_is_told(keys):
    world = make_world(NEW)
    node, held, other = make_node(world), start(world), world.start("p")
    restart_with(world, *keys)
    world.state.nodes["n"].about = AgentAbout("0", "shadow", "shadow", knows_secrets=True)
    (order,) = find_orders(world, node)
    assert (order.operation_id, order.secrets) == (other, {})
    alerts = [(each.code, each.subject) for each in find_alerts(world.state, world.now).alerts]
    assert ("secrets_not_readable", held) in alerts
    answer = explain_operation(world.state, world.record(held), world.now, {})
    assert Cause("secrets").text in answer.lines[0]
    restart_with(world, NEW)
    world.state.nodes["n"].about = AgentAbout("0", "shadow", "shadow", knows_secrets=True)
    secrets = {order.operation_id: order.secrets for order in find_orders(world, node)}
    assert secrets[held][f"YT_SECURE_VAULT_{KEY}"] == SECRET


def test_an_order_of_before_a_restart_without_the_key_is_not_repeated():
    world = make_world(NEW)
    node = make_node(world)
    node.deaf = True
    operation = start(world)
    assert len(find_orders(world, node)) == 1
    restart_with(world)
    world.state.nodes["n"].about = AgentAbout("0", "shadow", "shadow", knows_secrets=True)
    assert find_orders(world, node) == []
    world.now += 1000.0
    node.beat()
    assert world.record(operation).counts["t"].aborted == 1


def test_an_agent_that_would_leave_it_out_gets_no_order():
    """Also where the agent became an older one between the start and the order."""
    world = make_world(NEW)
    node, operation, other = make_node(world, knows_secrets=False), start(world), world.start("p")
    assert [order.operation_id for order in find_orders(world, node)] == [other]
    assert world.element(operation).deactivations == {NO_SECRETS: 1}
    (tree,) = explain_operation(world.state, world.record(operation), world.now, {}).trees
    assert "it has secrets, which leaves out 1 of 1 node online" in str(tree.lines)
    make_node(world)
    node.deaf = True
    assert [order.operation_id for order in find_orders(world, node)] == [operation]
    world.state.nodes["n"].about = None
    node.deaf = False
    assert node.beat().start == []
    world.now += 1000.0
    node.beat()
    (ended,) = world.state.finished_jobs[operation].values()
    told = "the agent of node n is of a version that passes no secrets to jobs: upgrade it"
    assert (ended.state, ended.reason) == ("aborted", told)


def test_a_sealed_vault_is_of_its_operation_alone_and_as_it_was():
    keys = FileKeys([NEW, OLD])
    sealed = keys.seal("1-2-3-4", {"a": SECRET})
    assert keys.open(sealed) == {"a": SECRET}
    assert not is_told((sealed, FileKeys([OLD]).seal("1-2-3-4", {"a": SECRET})))
    assert keys.seal("1-2-3-4", {"a": SECRET}).content != sealed.content
    for changed in (
        {"operation_id": "1-2-3-5"},
        {"content": sealed.content[:-1] + bytes([sealed.content[-1] ^ 1])},
        {"nonce": b"0" * 12},
        {"nonce": b""},
        {"key": FileKeys([OLD]).first},
        {"key": "00000000"},
    ):
        with pytest.raises(VaultError):
            keys.open(msgspec.structs.replace(sealed, **changed))
