"""Command lines of the agent's and the trials' commands that are wrong: nothing on standard output, one sentence, and
64 for what is wrong in shape, 78 for what is wrong in meaning."""

import pytest

from cpumond.cli import run
from cpumond.monitor.shapes import SHAPES

EITHER = "simulate: give either TRACE, a CSV file of seconds,cores, or --shape NAME; see its --help"
NO_PORT = '--listen: must be "host:port" with a port in [0, 65535], got '
BEYOND = "--listen: {0} can be reached from other machines; give --token-file, or listen on 127.0.0.1"
NO_CORES = "Invalid value for '--cpu-limit': "

ROWS = {
    "stub-scheduler": [
        (64, ["--listen", "x"], f"{NO_PORT}'x'"),
        (64, ["--listen", "127.0.0.1:70000"], NO_PORT),
        *((78, ["--listen", each], BEYOND.format(each)) for each in ("0.0.0.0:0", "[::]:0", "192.0.2.1:9758")),
        (78, ["--listen", "a..b:1"], "--listen: 'a..b' cannot be resolved"),
        (78, ["--token-file", "/none"], "token file /none: No such file or directory"),
    ],
    "dry-run --cgroup /": [
        (64, ["--set", "novalue"], "Invalid value for '--set': expected key=value, for"),
        (78, ["--set", "novalue=1"], "--set: novalue: unknown key"),
        (78, ["--set", "smoothing_factor=2"], "--set: smoothing_factor: must be a number in [0, 1], got 2"),
    ],
    "replay": [
        (64, ["--cpu-limit", "10"], "Missing argument 'FILE'"),
        (64, ["x.csv"], "Missing option '--cpu-limit'"),
        (64, ["x.csv", "--cpu-limit", "10", "--format", "xml"], "Invalid value for '--format': "),
        (64, ["x.csv", "--cpu-limit", "10", "more"], "Got unexpected extra argument (more)"),
        *((64, ["x.csv", "--cpu-limit", each], f"{NO_CORES}expected a finite number of cores > 0, got ")
          for each in ("0", "-1", "nan", "inf", "1e999")),
        (64, ["x.csv", "--cpu-limit", "ten"], NO_CORES),
    ],
    "replay x.csv --cpu-limit 10": [
        (78, ["--set", "vote_window=7"], "--set: vote_window: unknown key; did you mean 'vote_window_size'?"),
        (78, ["--set", "=1"], "--set: : unknown key"),
        (78, ["--set", "smoothing_factor=0.5\nx=1"], "--set: smoothing_factor: expected a value on one line, got "),
        (78, ["--set", "vote_window_size=3"], "--set: vote_decision_threshold = 3 can never be exceeded by 3 votes; "),
        (78, ["--set", "relative_lower_bound=0.95"], "--set: relative_lower_bound = 0.95 is above relative_upper_"),
    ],
    "simulate --cpu-limit 8": [
        (64, [], EITHER),
        (64, ["x.csv", "--shape", "web"], EITHER),
        (64, ["--shape", "wep"], "--shape: there is no 'wep'; did you mean 'web'?"),
        (64, ["--shape", "?"], f"--shape: there is no '?'; known are {', '.join(SHAPES)}"),
        (64, ["--shape", "web", "--compare", "peek"], "--compare: there is no 'peek'; did you mean 'peak'?"),
        (64, ["--shape", "web", "--compare", "peak,"], "--compare: there is no ''; known are document, peak"),
        (64, ["x.csv", "--seed", "2"], "--seed is for --shape; leave it out with TRACE"),
        (64, ["--shape", "web", "--cpu-limit", "1e7"], "--cpu-limit: at most 1e+06 cores are simulated, got 1e+07"),
        *((64, ["--shape", "web", "--duration", each], "Invalid value for '--duration': ") for each in ("0", "8d")),
        (78, ["x.csv", "--set", "limit_rule=peek"], "--set: limit_rule: "),
        (78, ["x.csv", "--set", "vote_window_size=2"], "--set: vote_decision_threshold = 3 can never be exceeded"),
    ],
    "fair-share": [
        (64, [], "Missing argument 'FILE'"),
        (64, ["x", "more"], "Got unexpected extra argument (more)"),
        (64, ["x", "--format", "csv"], "Invalid value for '--format': "),
        (64, ["x", "--explain"], "Option '--explain' requires an argument"),
        (64, ["x", "--nonsense"], "No such option"),
    ],
    "fair-share simulate": [
        (64, [], "Missing argument 'FILE'"),
        (64, ["x", "more"], "Got unexpected extra argument (more)"),
        *((64, ["x", option, value], f"Invalid value for '{option}': ") for option, value in
          (("--step", "0"), ("--step", "1us"), ("--until", "-1"), ("--until", "1y"), ("--every", "x"))),
    ],
    "estimate": [
        (64, ["--since", "1h"], "--since is for --prometheus only; leave it out"),
        (64, ["--token-file", "x"], "--token-file is for --prometheus only"),
        (64, ["--prometheus", "http://x", "--root", "a"], "--root is not for --prometheus, which reads past data"),
        (64, ["--force"], "--force only applies to --write; add --write FILE"),
        (64, ["--set", "limit_rule=peak"], "--set limit_rule: the estimate covers every rule; leave it out"),
        (78, ["--set", "smoothing_factor=2"], "--set: smoothing_factor: must be"),
        (78, ["--prometheus", "x"], "--prometheus: expected an address such as http://127.0.0.1:9090, got 'x'"),
        (78, ["--prometheus", "http://a:b@x"], "--prometheus: must hold no user name or password; use --token-file"),
        (78, ["--prometheus", "http://x", "--token-file", "/none"], "token file /none: No such file"),
        (64, ["--duration", "0"], "Invalid value for '--duration': must be at least 1s"),
        (64, ["--prometheus", "http://x", "--match", "a\udcff"], "--match: contains characters that cannot be printed"),
        (64, ["--write", "/tmp/x", "--html", "/tmp/../tmp/x"], "--write and --html name the same file"),
        (73, ["--write", "/none/jobs.toml"], "cannot write /none/jobs.toml"),
    ],
    "job add --socket /x": [
        (64, [], "Missing option '--cgroup'"),
        (64, ["--cgroup", "a\udcff"], "a name on the command line is not readable text"),
        (64, ["--cgroup", "a", "--cpu-limit", "-1"], NO_CORES),
        (64, ["--cgroup", "a", "--mode", "on"], "Invalid value for '--mode': "),
        (64, ["--cgroup", "a", "--set", "vote_window_size"], "Invalid value for '--set': "),
        (78, ["--cgroup", "a", "--set", "nonsense=1"], "--set: nonsense: unknown key"),
        (78, ["--cgroup", "a", "--set", "vote_window_size=7\nx=1"], "--set: vote_window_size: "),
    ],
    "pin a --socket /x": [
        (64, ["--for", "soon"], "Invalid value for '--for': "), (64, ["--cpu-limit", "nan"], NO_CORES),
    ],
    "explain --socket /x": [
        (64, [], "Missing argument 'JOB'"), (64, ["a", "--last", "-1"], "Invalid value for '--last': "),
    ],
    "top --socket /x": [
        *((64, ["--interval", each], "Invalid value for '--interval': ") for each in ("1ms", "99ms", "3601", "1d")),
        (64, ["--sort", "colour"], "Invalid value for '--sort': "),
    ],
    "status": [(64, ["more"], "Got unexpected extra argument (more)")],
    "job": [(64, ["nonsense"], "No such command 'nonsense'")],
}  # fmt: skip
"""Command -> exit code, its further arguments, and the begin of the sentence."""


@pytest.mark.parametrize(
    ("command", "code", "arguments", "sentence"), [(command, *row) for command, rows in ROWS.items() for row in rows]
)
def test_a_wrong_command_line_is_one_sentence(
    command: str, code: int, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), *arguments]) == code
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith(f"cpumond: {sentence}")
    assert errors.count("\n") == 1
