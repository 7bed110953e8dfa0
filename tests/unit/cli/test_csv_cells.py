"""CSV that a spreadsheet opens: no text of a user is a formula."""

import csv
import io
import re

import pytest

from cpumond.cli.output import print_csv


def test_neither_a_value_nor_a_name_is_a_formula(capsys: pytest.CaptureFixture[str]) -> None:
    print_csv([{"=cmd|x": "+1", "name": "-2", "inner": {"@a": "\tb"}, "number": -3}])
    assert capsys.readouterr().out == "'=cmd|x,name,inner.@a,number\r\n'+1,'-2,'\tb,-3\r\n"


@pytest.mark.parametrize(
    "text", ["nightly\r=1+1", "nightly\n=1+1", "nightly\r\n=1+1", 'a "b", c\r', "a\u2028@b", "a\x0b-b", "a\x85+b"]
)
def test_no_text_begins_a_row(capsys: pytest.CaptureFixture[str], text: str) -> None:
    print_csv([{"name": text, "state": "running"}, {"name": "", text: "a name, too"}])
    printed = capsys.readouterr().out
    guarded = re.sub(r"(?<=[\r\n\x0b\x85\u2028])([-=@+])", r"'\1", text)
    rows = [["name", "state", guarded], [guarded, "running", ""], ["", "", "a name, too"]]
    assert list(csv.reader(io.StringIO(printed, newline=""))) == rows
    cell = guarded.replace('"', '""')
    assert printed.count(f'"{cell}"') == 2, "in quotes, for readers that end a row at any line break"
