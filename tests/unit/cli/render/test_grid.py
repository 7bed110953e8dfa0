"""Tables that fit a terminal: nothing that is a name or a number is cut, however narrow it is."""

import pytest

from cpumond.cli.render.grid import (
    Column,
    column,
    draw_fields,
    draw_grid,
    fold,
    make_rows,
    pick,
    shorten,
    shorten_name,
    width_of,
    without_names,
)

ID = "c67fb814-fa548091-3697671f-4fac3001"
HEADINGS = (column("operation"), column("state"), column("user", 3), column(">used", 1), column("title", 2))
TITLE = "Обучение 訓練 der größten Modelle aller Zeiten"
ROWS = [[ID, "running", "alice", "1.25", TITLE], ["1-2-3-4", "pending", "bob", "-", ""]]


def test_a_title_is_shortened_before_a_column_is_left_out():
    text, left_out = draw_grid(HEADINGS, ROWS, 80)
    assert left_out == []
    assert "…" in text
    assert max(map(width_of, text.split("\n"))) <= 80


def test_columns_are_left_out_by_rank_and_told():
    text, left_out = draw_grid(HEADINGS, ROWS, 55)
    assert left_out == ["user", "title"]
    assert text.split("\n")[1] == f"{ID}  running  1.25"


def test_where_the_first_columns_have_no_room_rows_become_lines():
    text, left_out = draw_grid(HEADINGS, ROWS, 40)
    assert left_out == []
    lines = text.split("\n")
    assert lines[:5] == ["operation:", f"  {ID}", "state:     running", "user:      alice", "used:      1.25"]
    assert max(map(width_of, lines)) <= 40
    assert "" in lines


def test_sentences_go_on_below():
    headings = (column(">number"), column("what"))
    text, _ = draw_grid(headings, [["17", "alice changed pool research in many ways"]], 30)
    assert text.split("\n") == ["number  what", "    17  alice changed pool", "        research in many ways"]


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [("plain", 5, "plain"), ("plainer", 5, "plai…"), ("訓練訓練", 5, "訓練…"), ("訓練訓練", 4, "訓…")],
)
def test_wide_characters_take_two_columns(text, width, shown):
    assert shorten(text, width) == shown


@pytest.mark.parametrize(("name", "width", "shown"), [
    ("a/b", 3, "a/b"),
    ("shop/web-1/app", 9, "shop…/app"),
    ("shop/web-1/app", 8, "sho…/app"),
    ("訓練/訓練", 6, "訓…練"),
])  # fmt: skip
def test_a_name_is_shortened_in_its_middle(name, width, shown):
    assert shorten_name(name, width) == shown
    assert width_of(shown) <= width


def test_no_word_is_broken():
    assert fold("one two three", 7, "  ") == "one two\n  three"
    assert fold(f"operation {ID} is done", 20) == f"operation\n{ID}\nis done"


def test_a_field_without_a_value_is_left_out():
    assert list(draw_fields([("a", "1"), ("longer", ""), ("bc", "2")], 80)) == ["a:  1", "bc: 2"]


def test_styles_are_there_with_colour_alone():
    rows = [[("x", "red"), "y"]]
    assert "\x1b" not in draw_grid(("a", "b"), rows, 80)[0]
    assert "\x1b[31mx" in draw_grid(("a", "b"), rows, 80, colour=True)[0]


WORDS: tuple[Column[str], ...] = (
    column("word", 0, lambda word: word),
    column(">length\nin letters", 2, lambda word: str(len(word))),
    column("first", 1, lambda word: (word[0], "red")),
)


def test_rows_are_made_of_items_and_tables_of_the_columns_they_want():
    columns = pick(WORDS, {"first": 0, "length in letters": 3})
    assert [(each.name, each.rank) for each in columns] == [("first", 0), ("length in letters", 3)]
    assert make_rows(columns, ["pool"]) == [[("p", "red"), "4"]]
    below = draw_grid(without_names(WORDS), make_rows(WORDS, ["pool", "tree"]), None)[0]
    assert below.split("\n") == ["pool  4  p", "tree  4  t"]
