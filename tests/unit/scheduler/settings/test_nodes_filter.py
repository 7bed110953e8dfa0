"""The formula of a tree's nodes: its values against Python's own logic, and the sentence for each mistake."""

import pytest
from calls import count_calls
from hypothesis import given
from hypothesis import strategies as st

from cpumond.core.errors import ConfigError
from cpumond.scheduler.settings.nodes_filter import MAX_LENGTH, parse_nodes_filter

TAGS = ["a", "b", "c", "_x", "in1", "rack-1.example.com:9012", "data/center", "inside", "true", "not"]


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_nodes_filter(text)
    message = str(caught.value)
    assert message.startswith("nodes_filter: ")
    assert "\n" not in message
    message.encode()  # without lone surrogates: it can be printed anywhere
    return message


@pytest.mark.parametrize(
    ("text", "tags", "expected"),
    [
        ("", "", True),
        (" \t\r\n\f\v", "a", True),
        ("inside & in-", "inside in-", True),
        ("data/center-2", "data", False),
        ("\na\n&\n(\tb )\n", "a b", True),
    ],
)
def test_values(text: str, tags: str, expected: bool) -> None:
    assert parse_nodes_filter(text).matches(tags.split()) is expected


def test_each_step_of_a_formula_is_taken_once_for_all_nodes() -> None:
    """Not once for each of them: two bounded numbers that are multiplied are minutes."""
    formula = parse_nodes_filter("|".join(f"n{number}" for number in range(1000)))
    nodes = [frozenset({f"n{number}", "rack"}) for number in range(5000)]
    with count_calls() as calls:
        found = formula.select(nodes)
    assert found == [True] * 1000 + [False] * 4000
    assert calls.total() < 3 * (1000 + 5000)


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("a &", 4, "the formula is unfinished, expected a tag, '!', '('"),
        ("!", 2, "unfinished"),
        ("(", 2, "unfinished"),
        ("(a |", 5, "unfinished"),
        ("(a & (b | c)", 1, "unmatched '('"),
        ("(a & (b | c", 6, "unmatched '('"),
        ("(" * 9999 + "a", 9999, "unmatched '('"),
        ("(a))", 4, "unmatched ')'"),
        ("a & )", 5, "unmatched ')'"),
        ("a" + ")" * 9999, 2, "unmatched ')'"),
        ("()", 2, "unexpected token ')', expected a tag"),
        ("(a & )", 6, "unexpected token ')', expected a tag"),
        ("& a", 1, "unexpected token '&', expected a tag"),
        ("a !b", 3, "unexpected token '!', expected '&', '|' or the end of the formula"),
        ("a (b)", 3, "unexpected token '('"),
        ("a %true", 3, "unexpected token '%true'"),
        ("a b", 3, "unexpected variable 'b', expected '&', '|' or the end of the formula"),
        ("(a b)", 4, "unexpected variable 'b', expected '&', '|' or ')'"),
        ("%true a", 7, "unexpected variable 'a'"),
        ("a & in", 5, "'in' is a reserved word"),
        *(
            (text, column, f"invalid token {token!r} in boolean formula, permitted are tags, '!', '&',")
            for text, column, token in (
                ("a && b", 3, "&&"), ("a &&& b", 3, "&&&"), ("12", 1, "12"), ("a & 5b", 5, "5"), ("a == b", 3, "=="),
                ("a<b", 2, "<"), ("-a", 1, "-"), ("%maybe", 1, "%maybe"), ("%truest", 1, "%truest"), ("%", 1, "%"),
                ("%true-1", 1, "%true"), ('"a"', 1, '"'), ("büro", 2, "ü"), ("\0", 1, "\0"), ("a\u00a0", 2, "\u00a0"),
                ("\ud800", 1, "\ud800"), (" | ".join(["tag"] * 1000) + " = " + "b" * 1000, 5999, "="),
            )
        ),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_a_formula_that_is_none(text: str, column: int, words: str) -> None:
    message = refused(text)
    assert message.startswith(f"nodes_filter: column {column}: ")
    assert words in message
    before, after = text[: column - 1][-24:], text[column - 1 :][:24]
    assert message.endswith(f"near {before!r} <here> {after!r}"), "quoted around the place only"


def test_the_longest_formula_is_read_and_a_longer_one_refused() -> None:
    longest = "a|" * (MAX_LENGTH // 2 - 1) + "b "
    assert len(longest) == MAX_LENGTH
    assert parse_nodes_filter(longest).matches({"b"})
    assert "10001 characters, at most 10000" in refused(longest + " ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(" * 4999 + "a" + ")" * 4999, True),
        ("!" * 9999 + "a", False),
        ("a&(" * 2499 + "a" + ")" * 2499, True),
        ("a|(" * 2499 + "a" + ")" * 2499, True),
        ("!(" * 3333 + "a" + ")" * 3333, False),
        ("a&" * 4999 + "a", True),
    ],
    ids=["brackets", "not", "and", "or", "not brackets", "row"],
)
def test_depth_is_no_matter(text: str, expected: bool) -> None:
    assert parse_nodes_filter(text).matches({"a"}) is expected


def test_the_tags_of_a_formula() -> None:
    assert parse_nodes_filter("a & !(b | a) | %true & c.d:1").tags == {"a", "b", "c.d:1"}
    assert parse_nodes_filter("").tags == frozenset()


Formula = tuple[str, str]
"""One formula in our language and in Python's."""


def combine(parts: st.SearchStrategy[Formula]) -> st.SearchStrategy[Formula]:
    blank = st.sampled_from(["", " ", "\t\n"])

    def chain(sign: str, word: str, each: st.SearchStrategy[Formula]) -> st.SearchStrategy[Formula]:
        return st.builds(
            lambda gap, many: (f"{gap}{sign}{gap}".join(m[0] for m in many), f" {word} ".join(m[1] for m in many)),
            blank,
            st.lists(each, min_size=2, max_size=4),
        )

    return st.one_of(
        st.builds(lambda gap, one: (f"!{gap}{one[0]}", f"(not {one[1]})"), blank, parts.map(bracket)),
        st.builds(lambda gap, one: (f"({gap}{one[0]}{gap})", f"({one[1]})"), blank, parts),
        chain("&", "and", parts.map(bracket)),
        chain("|", "or", parts),  # the same precedence on both sides, and no brackets: "a & b | !c"
    )


def bracket(one: Formula) -> Formula:
    simple = not any(sign in one[0] for sign in "&|")
    return (one[0] if simple else f"({one[0]})", f"({one[1]})")


TAG = st.sampled_from(TAGS).map(lambda tag: (tag, f"({tag!r} in tags)"))
FORMULAS = st.recursive(TAG | st.sampled_from([("%true", "True"), ("%false", "False")]), combine, max_leaves=12)


@given(FORMULAS, st.lists(st.frozensets(st.sampled_from(TAGS))))
def test_it_is_what_python_makes_of_it(formula: Formula, nodes: list[frozenset[str]]) -> None:
    """For one node after another, and for all of them at once."""
    ours, theirs = formula
    expected = [bool(eval(theirs, {"tags": tags})) for tags in nodes]  # noqa: S307
    assert [parse_nodes_filter(ours).matches(tags) for tags in nodes] == expected
    assert parse_nodes_filter(ours).select(nodes) == expected


TOKENS = st.sampled_from([*TAGS, "in", "!", "&", "|", "(", ")", "%true", "&&", "1", " ", "%"])


@given(st.lists(TOKENS).map("".join) | st.text(st.characters(), max_size=50))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_nodes_filter(text).matches({"a"})
    except ConfigError:
        refused(text)
