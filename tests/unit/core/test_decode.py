"""Whatever bytes a file or a peer holds: a value, or ContentError and nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpumond.agent.jobs.files import JobFile
from cpumond.core.decode import ContentError, decode_json, decode_toml

DAMAGED = (
    b"", b"{", b"\xff", b'{"a\xff": 1}', b'{"a": "\xed\xa0\x80"}', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000,
    b"1e999", b"NaN", b"\0" * 4096, b'"\\ud800"', b'{"a": 1} x', b"\xef\xbb\xbf{}",
)  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED, ids=lambda data: repr(data[:12]))
def test_damaged_json_is_one_exception_with_a_sentence(data: bytes) -> None:
    for kind in (JobFile, dict[str, dict[str, float]]):
        with pytest.raises(ContentError, match=r"\w"):
            decode_json(data, kind)


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 3000, "x = " + "{a = " * 3000, "x = " + "9" * 5000, "x =", 'x = "\0"', "x = 2020-13-45"]
)
def test_damaged_toml_is_one_exception_with_a_sentence(text: str) -> None:
    with pytest.raises(ContentError, match=r"\w"):
        decode_toml(text)


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(ContentError):
        decode_json(data, Any)  # type: ignore[arg-type]
    with contextlib.suppress(ContentError):
        decode_toml(data.decode("utf-8", "replace"))
