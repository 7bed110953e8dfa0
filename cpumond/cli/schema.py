"""``cpumond schema``: the JSON Schemas of messages and of the commands' JSON."""

from __future__ import annotations

import json
from typing import Any

import click
import msgspec

from cpumond.cli.answers import ANSWERS
from cpumond.core.errors import UsageError
from cpumond.core.wire import SCHEMAS
from cpumond.core.words import did_you_mean

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _make_any_schema(kind: type) -> dict[str, Any]:
    """The schema of ``object``: any value."""
    if kind is object:
        return {"description": "Any value."}
    raise NotImplementedError


def _admit_defaults(part: Any) -> None:
    """Allow "" for a text that a file may leave out but not leave empty: an omitted text is printed as empty."""
    if isinstance(part, dict):
        if part.get("default") == "":
            part.pop("minLength", None)
        for each in part.values():
            _admit_defaults(each)
    elif isinstance(part, list):
        for each in part:
            _admit_defaults(each)


def make_schema(command: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a command's ``--json`` output, or of one line if it has several."""
    kinds = ANSWERS[command]
    schemas, parts = msgspec.json.schema_components(
        kinds if isinstance(kinds, tuple) else (kinds,), schema_hook=_make_any_schema, ref_template="#/$defs/{name}"
    )
    _admit_defaults(parts)
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {"$schema": DIALECT, "title": f"cpumond {command} --json", **schema, "$defs": parts}


@click.command("schema", epilog="Example: cpumond schema operation list")
@click.argument("words", metavar="NAME...", nargs=-1, required=True)
def schema_command(words: tuple[str, ...]) -> None:
    """Print the JSON Schema of a message (heartbeat), or of a command's --json output (operation list).

    For a command that prints several lines of JSON it is the schema of each line. Later versions may add fields; none
    changes its meaning or disappears."""
    name = " ".join(words)
    if name in SCHEMAS:
        schema = SCHEMAS[name]()
    elif name in ANSWERS:
        schema = make_schema(name)
    else:
        known = [*SCHEMAS, *ANSWERS]
        hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
        raise UsageError(f"there is no message or command {name!r} with JSON{hint}")
    click.echo(json.dumps(schema, indent=2))
