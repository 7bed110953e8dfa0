"""``.ci/run``: each part has a limit and says how long it took; what is quick comes first."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mutations import MUTATIONS, UNIT
from readme_lines import find_line

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")


def run_part(line: str) -> tuple[int, str]:
    (function,) = re.findall(r"^part\(\) .*?^}$", RUN, re.MULTILINE | re.DOTALL)
    script = f"set -euo pipefail\n{function}\n{line}\necho next"
    done = subprocess.run(
        ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250, check=False
    )
    return done.returncode, done.stdout


def test_a_part_says_how_long_it_took() -> None:
    code, output = run_part("part quick 50 echo done")
    assert code == 0
    told = r"== quick\ndone\n== quick: exit code 0 after \d+ s, \d+ s since the beginning\nnext\n"
    assert re.fullmatch(told, output), output
    code, output = run_part("part bad 50 sh -c 'exit 3'")
    assert code == 3
    assert "== bad: exit code 3 after" in output
    assert "next" not in output, "one that fails ends the run"


def test_a_part_that_hangs_is_interrupted_after_its_limit() -> None:
    code, output = run_part("""part hung 1 sh -c 'trap "echo was at it; exit" INT; while :; do sleep 0.1; done'""")
    assert code == 124
    assert "was at it\n== hung: not done after its limit of 1 s\n" in output


def test_quick_checks_come_before_the_tests_and_all_parts_end_in_time() -> None:
    parts = re.findall(r"part (?:\"[^\"]+\"|\w+) (\d+|\$\(\(.*?\)\)) (.*)", RUN)
    commands = [command for _, command in parts]
    first = next(number for number, command in enumerate(commands) if "bin/pytest" in command)
    quick = "".join(commands[:first])
    assert [word for word in ("ruff check", "ruff format --check", "bin/mypy") if word not in quick] == []
    assert sum(int(limit) for limit, _ in parts[:first]) < 4500 / 2
    assert parts[-1][0] == "$((4500 - SECONDS))"


def test_it_runs_what_the_readme_tells_to_type_for_the_tests() -> None:
    assert f" sh -c '{find_line('pytest')}'\n" in RUN
    assert " .venv/bin/pytest --rest " in RUN.splitlines()[-1], "and then all that it leaves out"


def test_the_slow_lane_which_this_script_leaves_out_can_be_collected() -> None:
    for library in ("kubernetes_validate", "playwright", "psycopg"):
        pytest.importorskip(library, reason=f"needs the Python package {library}: sh tests/venv.sh all")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "tests/slow"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout


def test_no_two_modules_of_tests_have_one_name() -> None:
    """They would be one module to pytest where both are in a run."""
    names = Counter(path.name for path in UNIT.parent.rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_mistakes_on_purpose_can_still_be_made() -> None:
    """The lane that makes them is run by hand: it must not be found broken there."""
    package = "\0".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "cpumond").rglob("*.py"))
    texts = [old for made in MUTATIONS.values() for old, _ in made]
    assert [old for old in texts if package.count(old) != 1] == []
    assert [name for name in MUTATIONS if len(list(UNIT.rglob(name))) != 1] == []


def test_names_of_tests_have_at_most_70_characters() -> None:
    named = re.compile(r"^\s*(?:async )?def (test_\w{66,})", re.MULTILINE)
    assert {
        path.name: found for path in UNIT.parent.rglob("*.py") if (found := named.findall(path.read_text("utf-8")))
    } == {}
