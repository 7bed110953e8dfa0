"""``tests/bench/check.py``: which figures it finds, how it compares them, and that every bench has a way to be run."""

import re
from pathlib import Path

import pytest
from bench.check import Figure, judge, load_gates, load_runs

BENCH = Path(__file__).parents[1] / "bench"

LESS = Figure(r"took ([\d.]+)", "bare requests", "less")
MORE = Figure(r"made ([\d.]+)/s", "of the bare application", "more")


@pytest.mark.parametrize(("figure", "value", "known", "text", "is_good"), [
    (LESS, 12.0, [10.0] * 10, "b f: 12 bare requests (at most 12)", True),
    (LESS, 12.1, [10.0] * 10, "b f: 12.1 bare requests (at most 12)", False),
    (LESS, 13.0, [9.0, 11.0], "b f: 13 bare requests (at most 12 of 2 runs)", False),
    (MORE, 1.0, [1.2] * 10, "b f: 1 of the bare application (at least 1)", True),
    (MORE, 0.9, [1.2] * 10, "b f: 0.9 of the bare application (at least 1)", False),
    (LESS, 99.0, [], "b f: 99 bare requests (no run to compare with)", True),
    (LESS, None, [10.0], "b f: not printed", False),
])  # fmt: skip
def test_a_figure_is_compared_with_the_mean_of_its_runs(figure, value, known, text, is_good):
    assert judge("b f", figure, value, known) == (text, is_good)


def test_gates_name_programs_that_are_there_and_runs_are_of_gates():
    gates = load_gates()
    for name, bench in gates.items():
        assert (BENCH / bench.command[0]).is_file(), name
        assert all(re.compile(figure.read).groups == 1 for figure in bench.figures.values()), name
    for run in load_runs():
        assert {name: set(values) - set(gates[name].figures) for name, values in run.figures.items() if values} == {
            name: set() for name, values in run.figures.items() if values
        }, run.name
