"""Errors within answers, of operations and jobs (yt_protocol.md 7)."""

from __future__ import annotations

from typing import Any

from cpumond.scheduler.model.failures import EndError


def make_error(message: str, code: int = 1, attributes: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "attributes": attributes or {}, "inner_errors": []}


def make_failure(failure: EndError) -> dict[str, Any]:
    inner = [make_failure(each) for each in failure.inner]
    return {**make_error(failure.message, failure.code, dict(failure.attributes)), "inner_errors": inner}
