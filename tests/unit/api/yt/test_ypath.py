import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpumond.api.yt.values import Attributed
from cpumond.api.yt.ypath import MAX_CHARS, YPath, YPathError, escape_literal, parse_ypath


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/", YPath("/")),
        ("//sys/pools", YPath("/", ("sys", "pools"))),
        ("//a/b/@attr/sub/key", YPath("/", ("a", "b"), ("attr", "sub", "key"))),
        ("//a/@", YPath("/", ("a",), ())),
        ("/@", YPath("/", (), ())),
        ("//@id", YPath("/", (), ("id",))),
        ("#a-B-0-12345678/@id", YPath("#a-B-0-12345678", (), ("id",))),
        ("#1-2-3-4/a", YPath("#1-2-3-4", ("a",))),
        ("//sys/pools&/@type", YPath("/", ("sys", "pools"), ("type",), frozenset({1}))),
        ("#1-2-3-4&/@type", YPath("#1-2-3-4", (), ("type",), frozenset({-1}))),
        ("//пул/ a b ", YPath("/", ("пул", " a b "))),
        (r"//a\/b\@\&\*\[\{\\c/@\xd0\xbf", YPath("/", (r"a/b@&*[{\c",), ("п",))),
        (r"//\xff", YPath("/", ("\udcff",))),
        ("//a]b}c<d>", YPath("/", ("a]b}c<d>",))),
    ],
)
def test_a_path_is_read_into_its_steps(text, path):
    assert parse_ypath(text) == path
    assert parse_ypath(str(path)) == path
    assert path.node == YPath(path.root, path.steps, None, path.suppress_link)


def test_the_attributes_of_a_rich_path_are_left_aside():
    assert parse_ypath(Attributed("//x", {"append": True})) == YPath("/", ("x",))


@pytest.mark.parametrize(
    ("text", "reason", "offset"),
    [
        ("", "a path must begin with", 0), ("sys/pools", "a path must begin with", 0),
        ("<append=%true>//sys", "a path must begin with", 0), ("/sys", 'a name follows "/"', 1),
        ("//", "a name is missing at the end", 2), ("//a/", "a name is missing at the end", 4),
        ("//a//b", "an empty name", 4), ("///a", "an empty name", 2), ("//a&&", "misplaced &", 4),
        ("//a/&", "misplaced &", 4), ("//a&b", 'a name follows "/"', 4), ("//a@b", "a literal @", 3),
        ("//*", "wildcards", 2), ("//a[1]", "ranges of rows", 3), ("//a{b}", "column selectors", 3),
        ("//a\\q", "broken escape", 3), ("//a\\xg0", "broken escape", 3), ("//a\\", "broken escape", 3),
        ("//a/@x/@y", "a literal @", 7), ("//a/@x/", "a name is missing at the end", 7),
        ("//a/@/x", "an empty name", 5), ("//a/@x&", "misplaced &", 6), ("#12/@id", "four hexadecimal numbers", 1),
        ("#1-2-3-4x", 'a name follows "/"', 8), (5, "not a string", 0), (None, "not a string", 0),
    ],
)  # fmt: skip
def test_a_path_that_is_not_understood_is_refused_with_its_place(text, reason, offset):
    with pytest.raises(YPathError) as refused:
        parse_ypath(text)
    assert reason in str(refused.value)
    assert (refused.value.offset, refused.value.attributes) == (offset, {"offset": offset})
    assert refused.value.code == 1


names = st.text(st.characters(codec="utf-8"), min_size=1)
paths = st.builds(
    YPath,
    st.sampled_from(["/", "#0-1-ab-ffffffff"]),
    st.lists(names, max_size=5).map(tuple),
    st.none() | st.lists(names, max_size=3).map(tuple),
)


@given(paths)
def test_a_path_survives_being_written_and_read(path):
    assert parse_ypath(str(path)) == path


@given(st.text(st.sampled_from("/@&*[{\\#x0aп-")))
def test_a_random_text_is_a_path_or_refused(text):
    try:
        path = parse_ypath(text)
    except YPathError:
        return
    assert parse_ypath(str(path)) == path


def test_an_escaped_name_has_no_line_breaks():
    assert escape_literal("a\nb/c") == r"a\x0ab\/c"


def test_a_path_of_a_megabyte_is_refused():
    assert parse_ypath("//" + "a" * (MAX_CHARS - 2)).steps == ("a" * (MAX_CHARS - 2),)
    with pytest.raises(YPathError, match="longer than 32768 characters") as refused:
        parse_ypath("//" + "a" * 10**6)
    assert len(str(refused.value)) < 1000
