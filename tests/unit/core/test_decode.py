"""Whatever bytes a file or a peer holds: a value, or ContentError and nothing else."""

import contextlib
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpumond.agent.jobs.files import JobFile
from cpumond.core.decode import ContentError, decode_json, decode_text, decode_toml, is_no_utf8

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


def test_half_a_character_is_called_that() -> None:
    with pytest.raises(ContentError, match="it is not UTF-8: half a character"):
        decode_text("a = '\ud800'".encode("utf-8", "surrogatepass"))
    with pytest.raises(ContentError, match="a text in it is not UTF-8"):
        decode_json(b'{"a": "\xff"}', dict[str, str])


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(ContentError):
        decode_json(data, Any)  # type: ignore[arg-type]
    with contextlib.suppress(ContentError):
        decode_toml(data.decode("utf-8", "replace"))


RACE = """
import sys, threading
import msgspec
from cpumond.core.decode import decode_json

sys.setswitchinterval(1e-6)
names = [f"f{number}" for number in range(30)]
content = "{%s}" % ",".join('"%s": {"a": [1]}' % name for name in reversed(names))
for _ in range(40):
    inner = [msgspec.defstruct("Inner", [("a", "list[int]")]) for _ in names]
    kind = msgspec.defstruct("Kind", list(zip(names, inner)))
    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=lambda: (barrier.wait(), decode_json(content, kind))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("all decoded")
"""


def test_threads_that_decode_a_type_first_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all decoded\n", "")


@pytest.mark.parametrize(("error", "is_that"), [
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), True),
    (msgspec.DecodeError("Invalid UTF-8 encoded string"), True),
    (msgspec.DecodeError("Input data was truncated"), False),
], ids=["msgspec 0.22", "msgspec 0.23", "another"])  # fmt: skip
def test_bytes_that_are_no_text_are_known_by_either_error(error, is_that):
    assert is_no_utf8(error) is is_that
