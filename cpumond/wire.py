"""The message an agent sends to a scheduler: a heartbeat with the node's full state, version 1.

Sent as JSON by HTTP POST. A heartbeat is level-triggered: it holds everything the node knows, so losing any number of
them loses nothing. ``incarnation`` names one run of the agent, ``sequence`` grows by at least one with each heartbeat
of a run; a receiver drops what is older than what it has (same incarnation, sequence not larger).

CPU values are cores (1.0 = one CPU all the time). ``cpumond schema heartbeat`` prints the JSON Schema.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

HEARTBEAT_VERSION = 1

MAX_NAME = 4096

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Cores = Annotated[float, msgspec.Meta(ge=0.0)]


class JobReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One job of the node.

    ``cpu_limit`` is what the job ordered; ``current_cpu_limit`` what its cgroup may use now, at most ``cpu_limit``
    unless somebody raised it by hand; ``smoothed_cpu_usage`` null until the second good sample; ``mode`` how the
    agent treats the job.
    """

    job_id: _Name
    operation_id: str
    cpu_limit: _Cores
    current_cpu_limit: _Cores
    smoothed_cpu_usage: _Cores | None = None
    mode: str = "reclaim"


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The full state of one node.

    ``cpu_capacity`` the node's CPUs in cores; ``sent_at`` seconds since 1970, for people only, never compared.
    """

    node_id: _Name
    incarnation: _Name
    sequence: Annotated[int, msgspec.Meta(ge=0)]
    sent_at: float
    cpu_capacity: _Cores
    jobs: list[JobReport]
    version: Annotated[int, msgspec.Meta(ge=1, le=HEARTBEAT_VERSION)] = HEARTBEAT_VERSION


def heartbeat_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a heartbeat."""
    schema = msgspec.json.schema(Heartbeat)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "cpumond heartbeat", **schema}


SCHEMAS = {"heartbeat": heartbeat_schema}
"""Name of a message -> function that gives its JSON Schema (``cpumond schema NAME``)."""
