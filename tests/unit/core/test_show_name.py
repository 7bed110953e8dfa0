"""Names as they are shown: what moves no cursor stays as it is."""

import json

import msgspec
import pytest

from cpumond.core.words import escape, escape_json


@pytest.mark.parametrize(("name", "shown"), [
    ("Обучение 訓練", "Обучение 訓練"),
    ("é\n'x' \\ \x1b[2J", "é\\n'x' \\ \\x1b[2J"),
    ("שלום \u202eevil", "שלום \\u202eevil"),
    ("👩\u200d🚀", "👩\\u200d🚀"),
    ("\udcff", "\\udcff"),
])  # fmt: skip
def test_only_what_cannot_be_printed_is_escaped(name, shown):
    assert escape(name) == shown
    assert escape(name).isprintable()


def test_json_moves_no_cursor_and_stays_what_it_is():
    unseen = ["\x1b\x07\n", *map(chr, (*range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F)))]
    unseen += map(chr, range(0x2066, 0x206A))
    value = {"é 訓練": unseen, "".join(unseen): "שלום 👩"}
    for text in (msgspec.json.encode(value), msgspec.json.format(msgspec.json.encode(value)).decode()):
        shown = escape_json(text)
        assert json.loads(shown) == value
        assert shown.replace("\n", "").isprintable()
        assert escape_json(shown) == shown
