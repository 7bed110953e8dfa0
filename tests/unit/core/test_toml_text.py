"""The usual mistakes in TOML: the line's number and text, and what to write."""

import pytest

from cpumond.core.decode import ContentError, decode_toml
from cpumond.core.toml_text import list_lines


@pytest.mark.parametrize(("line", "remedy"), [
    ("a = 1,5  # cores", "a decimal number has a point, not a comma; write a = 1.5"),
    ("a = yes", "the values are true and false, in lower case; write a = true"),
    ("a = 1s", 'a value with a unit needs quotes; write a = "1s"'),
    ("a = 50%", 'a value with a unit needs quotes; write a = "50%"'),
    ("a = “b”", 'quotes must be straight; write a = "b"'),
    ("a = 1\na = 2", "a appears twice, first in line 2; keep one of them"),
    ("[t]\nb = 1\n[t]", "the table [t] appears twice, first in line 2; put all of its keys below one of them"),
    (r'a = "C:\Users\x"', r"""a backslash in "..." needs a second one, or single quotes; write a = 'C:\Users\x'"""),
    (r'a = "job_\d+"', r"""a backslash in "..." needs a second one, or single quotes; write a = 'job_\d+'"""),
    ("a = shadow", 'a text needs quotes; write a = "shadow"'),
    ("a = 10.0.0.1:9757", 'a text needs quotes; write a = "10.0.0.1:9757"'),
    ("a: b", '= separates key and value, not :; write a = "b"'),
    ('a = "b', 'the quote is not closed; write a = "b"'),
    ("a =", "a has no value: write one, or leave the line out"),
    ('a = ["b"\nc = 1', "the list that begins in line 2 is not closed, or a comma is missing; end it with ]"),
])  # fmt: skip
def test_a_usual_mistake_has_its_line_and_a_remedy(line: str, remedy: str) -> None:
    """What is to be written is TOML; a line with nothing wrong is above it."""
    with pytest.raises(ContentError) as told:
        decode_toml(f"first = 1\n{line}\n")
    last = line.rpartition("\n")[2]
    number = 2 + line.count("\n")
    assert str(told.value) == f"line {number}: `{last}`: {remedy}"
    assert "; write " not in remedy or decode_toml(remedy.partition("; write ")[2])


def test_an_error_without_a_remedy_keeps_the_parsers_words() -> None:
    with pytest.raises(ContentError, match=r"^line 1: `a = 1 \]`: Expected newline .* \(column 7\)$"):
        decode_toml("a = 1 ]\n")
    with pytest.raises(ContentError, match=r"^line 1: `a = 1x{115}\.\.\.`: Expected newline"):
        decode_toml(f"a = 1{'x' * 100_000}")


@pytest.mark.parametrize("line", ["token = s3cr3t", "DB_PASSWORD: s3cr3t", "conninfo = “s3cr3t”", 'token = "s3cr3t'])
def test_secrets_are_not_quoted(line: str) -> None:
    """A sentence may end in a log."""
    with pytest.raises(ContentError) as told:
        decode_toml(line)
    assert "s3cr3t" not in str(told.value)
    assert str(told.value).startswith("line 1: `")


def test_lines_of_keys() -> None:
    lines = list_lines("a = 1\n[t.'x.y']\nb.c = 1\n\n[[source]]\n[[source]]\nkind = 'glob'\n[source.more]\nd = 1\n")
    assert lines[("t", "x.y", "b", "c")] == 3
    assert (lines[("source",)], lines[("source 1",)], lines[("source 2", "kind")]) == (5, 5, 7)
    assert lines[("source 2", "more", "d")] == 9


@pytest.mark.parametrize(("text", "told"), [
    (f"a{'.a' * 200} = 1", "a key in it has 201 names with dots between them, and at most 200 are read"),
    ("".join(f"a{'.a' * 198}.b{number} = 1\n" for number in range(600)), "its keys with dots have too many names"),
    ("a = 1\n" * 500_001, "it has more than 500000 keys"),
    ("#" * (8 * 2**20 + 1), "it is longer than 8 MiB"),
], ids=["names", "steps", "keys", "size"])  # fmt: skip
def test_what_would_take_long_is_not_parsed(text: str, told: str) -> None:
    with pytest.raises(ContentError, match=told):
        decode_toml(text)


@pytest.mark.parametrize("quote", ['"', "'", '"""', "'''"])
def test_texts_and_comments_are_no_keys(quote: str) -> None:
    """Neither are long words, each of whose letters might begin a key."""
    words = "a" + ".a" * 300
    text = f"b = {quote}{words} = # {quote}  # {words} = {quote}\n'c.d'.e = 0b{'1' * 50_000}\n"
    assert decode_toml(text)["b"] == f"{words} = # "
