"""CSV that a spreadsheet opens: no text of a user is a formula."""

from __future__ import annotations

import pytest

from cpumond.cli.output import print_csv


def test_neither_a_value_nor_a_name_is_a_formula(capsys: pytest.CaptureFixture[str]) -> None:
    print_csv([{"=cmd|x": "+1", "name": "-2", "inner": {"@a": "\tb"}, "number": -3}])
    assert capsys.readouterr().out == "'=cmd|x,name,inner.@a,number\n'+1,'-2,'\tb,-3\n"
