"""The OpenAPI document is true: requests made of it, good and bad ones, get the answers that it promises."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from test_json_api import LiveScheduler, make_node

from cpumond import __version__
from cpumond.api.endpoints import ENDPOINTS
from cpumond.api.json.document import make_document

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    unsupported_method, negative_data_rejection,
]  # fmt: skip
DOCUMENT = make_document(ENDPOINTS, __version__)
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveScheduler]:
    with LiveScheduler(tmp_path_factory.mktemp("openapi"), max_body=16 * 2**20) as server:
        server.post("/trees/default/pools", {"name": "a", "attributes": {"weight": 2}}, 201)
        node = make_node(server, "n1")
        node.register()
        server.wait_for_update()
        server.start("a", job_count=3)
        node.beat()
        yield server


OPERATIONS = {each.ok().label: each.ok() for each in schema.get_all_operations()}
"""By method and path: tests of one name, as ``schema.parametrize()`` makes them, are one test for pytest-xdist."""


@pytest.mark.parametrize("label", OPERATIONS)
def test_answers_are_as_promised(label: str, server: LiveScheduler):
    @settings(
        max_examples=8, derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        case=OPERATIONS[label].as_strategy() | OPERATIONS[label].as_strategy(generation_mode=GenerationMode.NEGATIVE)
    )
    def call(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=250)  # a simulation may take a while

    call()


def test_the_document_is_served_as_it_is_made(server):
    assert server.get("/openapi.json") == DOCUMENT


def test_every_route_and_nothing_else_is_in_the_document():
    described = {
        (method.upper(), path, operation["operationId"])
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    }
    assert described == {(endpoint.method, endpoint.path, endpoint.name) for endpoint in ENDPOINTS}


def test_every_reference_leads_somewhere_and_every_schema_is_one():
    schemas = DOCUMENT["components"]["schemas"]
    for component in schemas.values():
        jsonschema.Draft202012Validator.check_schema(component)
    assert {reference.rpartition("/")[2] for reference in find_references(DOCUMENT)} == set(schemas)


def find_references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from find_references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from find_references(inner)
