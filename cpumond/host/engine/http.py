"""HTTP requests to engines, bounded in time and size."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import httpx2

from cpumond.core.decode import ContentError, decode_json
from cpumond.host.engine.model import EngineError

ANSWER_TIMEOUT_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 16 << 20
NOTHING: Final[Mapping[str, Any]] = {}
_Shape = TypeVar("_Shape")


async def get_json(
    client: httpx2.AsyncClient, where: str, path: str, shape: type[_Shape], more: Mapping[str, Any] = NOTHING
) -> _Shape:
    """Return an engine's response to GET ``path``, as ``shape``.

    ``where``: kind and address of the engine, for sentences. ``more``: arguments of ``client.stream``.

    Raises StatusError for any status but 200, EngineError for a response that is too large or invalid, TimeoutError
    after ANSWER_TIMEOUT_S, httpx2.HTTPError or OSError if the engine does not respond."""
    body = bytearray()
    async with asyncio.timeout(ANSWER_TIMEOUT_S), client.stream("GET", path, **more) as answer:
        check_status(answer, where, path)
        async for chunk in answer.aiter_raw():  # raw: compressed data would unpack to more
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise EngineError(f"{where}: {path} is larger than {MAX_ANSWER_BYTES >> 20} MiB")
    try:
        return decode_json(body, shape)
    except ContentError as error:
        raise EngineError(f"{where}: {path} is invalid: {error}") from error


class StatusError(EngineError):
    """A response with a status different from 200."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


def check_status(answer: httpx2.Response, where: str, path: str) -> None:
    """Raise StatusError unless the response has status 200."""
    if answer.status_code != 200:
        raise StatusError(f"{where}: {path} was answered with status {answer.status_code}", answer.status_code)
