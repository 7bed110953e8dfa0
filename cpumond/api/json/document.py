"""The OpenAPI 3.1 document of the JSON API's table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from cpumond.api import views
from cpumond.api.json.endpoint import Endpoint

MEANING: Final = {
    200: "Done, or the requested data",
    201: "Made",
    304: "Unchanged since the version that If-None-Match names",
    400: "The body is not JSON",
    401: "The token is missing or wrong",
    403: "The user may not do this",
    404: "There is no such object",
    409: "It exists already, or a limit is reached; a heartbeat: register again",
    413: "The body is too large",
    422: "A value is wrong or the change is refused; the sentence says what and where",
    429: "Too many such requests are waiting",
    500: "An internal error of the scheduler; see its log",
    503: "Nothing can be stored at the moment, the scheduler is not ready or is stopping, or a node is away",
    504: "The node, or the disk of the history, did not answer in time",
}

_KEY_HEADER: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Chosen by the sender: a repeat within 15 minutes gets the first response and changes nothing",
    "schema": {"type": "string", "pattern": "^[-_.:A-Za-z0-9]{1,200}$"},
}


def make_document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    types: list[Any] = [views.Failure]
    for endpoint in endpoints:
        types += [*endpoint.statuses.values(), endpoint.body, endpoint.query]
    kinds = list({repr(kind): kind for kind in types if kind is not None}.values())
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    used = {endpoint.query.__name__ for endpoint in endpoints if endpoint.query is not None}
    for endpoint in endpoints:
        queries = [] if endpoint.query is None else _query_parameters(components[endpoint.query.__name__])
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _make_operation(endpoint, schema_of, queries)
    document = {
        "openapi": "3.1.0",
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "info": {
            "title": "cpumond scheduler",
            "version": version,
            "description": "Pool trees, operations and nodes of one scheduler. CPU is in cores, memory in bytes, "
            "options have the names and units of YTsaurus' documentation.",
        },
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in components.items() if name not in used},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    # Defaults in the document may still be Python values such as tuples.
    return msgspec.json.decode(msgspec.json.encode(document), type=dict[str, Any])


def _query_parameters(schema: dict[str, Any]) -> list[dict[str, Any]]:
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": inner}
        for name, inner in schema["properties"].items()
    ]


def _make_operation(endpoint: Endpoint, schema_of: dict[str, Any], queries: list[dict[str, Any]]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    responses: dict[str, Any] = {}
    for status, kind in endpoint.statuses.items():
        media_type = endpoint.content_type if status == endpoint.status else "application/json"
        content: dict[str, Any] = {media_type: {"schema": schema_of[repr(kind)]}}
        responses[str(status)] = {"description": MEANING[status], "content": content}
    described: dict[str, Any] = {"operationId": endpoint.name, "summary": endpoint.summary, "responses": responses}
    keys = [_KEY_HEADER] if endpoint.takes_key else []
    if steps or queries or keys:
        described["parameters"] = [*steps, *queries, *keys]
    if endpoint.body is not None:
        content = {"application/json": {"schema": schema_of[repr(endpoint.body)]}}
        described["requestBody"] = {"required": endpoint.needs_body, "content": content}
    if not endpoint.is_public:
        # If no tokens are configured, no token is needed.
        described["security"] = [{"token": []}, {}]
    if endpoint.has_etag:
        described["responses"]["304"] = {"description": MEANING[304]}
    return described
