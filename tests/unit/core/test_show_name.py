"""Names as they are shown: what moves no cursor stays as it is."""

from __future__ import annotations

import pytest

from cpumond.core.words import show_name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Обучение 訓練", "Обучение 訓練"),
        ("é\n'x' \\ \x1b[2J", "é\\n'x' \\ \\x1b[2J"),
        ("שלום \u202eevil", "שלום \\u202eevil"),
        ("👩\u200d🚀", "👩\\u200d🚀"),
        ("\udcff", "\\udcff"),
    ],
)
def test_only_what_cannot_be_printed_is_escaped(name, shown):
    assert show_name(name) == shown
    assert show_name(name).isprintable()
