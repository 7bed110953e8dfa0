"""Makes what README shows, from the real thing: the recording of the demo, the chart of what real servers feel, the
overview of the web page, and the figures in its sentences; for docs/simulate.md the chart of what rules free.
docs/pictures/made-of.json keeps of what each was made, ``tests/unit/test_pictures.py`` says which is older than that.

    python tests/pictures.py [demo] [peers] [trust] [overview] [readme]    # without a name: all, in this order
    python tests/pictures.py --servers FILE    # the figures of tests/bench/real_services.py --json, which takes hours

``demo`` takes a minute and wants a machine that does little else, ``peers`` half a minute, ``trust`` some minutes.
``overview`` runs ``tests/screenshots.py``: root, real cgroups, chromium, four minutes. ``readme`` writes the figures.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import terminal

ROOT: Final = Path(__file__).resolve().parents[1]
PICTURES: Final = ROOT / "docs" / "pictures"
README: Final = ROOT / "README.md"
MADE_OF: Final = PICTURES / "made-of.json"
WEB: Final = "cpumond/web/static"
SOURCES: Final = {
    "demo": tuple(f"cpumond/cli/demo/{name}.py" for name in ("jobs", "run", "story", "view")),
    "overview": (f"{WEB}/page_overview.js", f"{WEB}/chart.js", f'{WEB}/scheduler.js:["', f"{WEB}/style.css:--"),
}
"""Picture -> the files that decide what it shows; after a colon: the lines that begin so alone (pages, colours)."""
FILES: Final = {
    "demo": ("docs/pictures/demo.svg", "docs/pictures/demo.json"),
    "overview": ("docs/pictures/overview.png", "docs/screenshots"),
}
SPEED, HOLD_S, EACH_S = 2.5, 8.0, 0.9
"""How much faster the recording plays, how long its end stays, and the least time between two pictures."""
MAX_BYTES: Final = 150_000
LATE_S: Final = 1.5
"""Three checks of the demo: later the processes themselves did not run."""
PROBE: Final[tuple[float, list[int]]] = (600.0, [1])
"""Seconds and seeds of the peers that a test plays again."""
SEEDS: Final = 200


def read_digest(name: str, root: Path = ROOT) -> str:
    """Of the sources of a picture, without comments, indentation and empty lines."""
    digest = hashlib.sha256()
    for source in SOURCES[name]:
        path, _, part = source.partition(":")
        lines = [line.strip() for line in (root / path).read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if line.startswith(part) and not line.startswith(("#", "//"))]
        digest.update("\n".join(filter(None, lines)).encode())
    return digest.hexdigest()[:16]


def find_older(root: Path = ROOT) -> list[str]:
    """A sentence for each picture that is older than what it shows."""
    kept = json.loads(MADE_OF.read_text(encoding="utf-8"))
    older = [name for name in SOURCES if kept.get(name) != read_digest(name, root)]
    paths = {name: ", ".join(source.partition(":")[0] for source in SOURCES[name]) for name in older}
    return [f"{', '.join(FILES[name])}: older than {paths[name]}: `python tests/pictures.py {name}`" for name in older]


def keep_digest(name: str) -> None:
    kept = json.loads(MADE_OF.read_text(encoding="utf-8")) if MADE_OF.exists() else {}
    keep("made-of.json", {**kept, name: read_digest(name)})


def keep(name: str, content: object) -> None:
    (PICTURES / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load(name: str) -> Any:
    return json.loads((PICTURES / name).read_text(encoding="utf-8"))


# the demo


def make_demo() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    keep_demo(terminal.record([sys.executable, "-m", "cpumond", "demo"], environment))


def keep_demo(chunks: list[terminal.Chunk]) -> None:
    """Draw a recording and keep its figures. Raises SystemExit where it does not show what the demo is about."""
    text = "".join(chunk.text for chunk in chunks)
    summary = text[text.rindex("\nAfter ") :].replace("\r", "")
    told = read_summary(summary)
    wrong = re.findall(r"Not seen: .*", summary)
    if max(told["give_back_s"]) > LATE_S:
        wrong.append(f"CPU was given back after {max(told['give_back_s'])} s: the machine is too busy for a recording.")
    if wrong:
        raise SystemExit("\n".join(wrong) + "\nNothing was written. Run it again on a machine that does little else.")
    # The token of a scheduler that is gone; it looks like one that is not.
    token = re.search(r"\b[0-9a-f]{48}\b", text)
    prompt = terminal.Chunk(0.0, "\x1b[1m$ .venv/bin/cpumond demo\x1b[0m\r\n")
    shown = [prompt, *(terminal.Chunk(at_s, _mask(each, token)) for at_s, each in chunks)]
    drawn = terminal.draw(terminal.list_frames(shown, EACH_S), f"cpumond demo, {SPEED:g} times as fast", SPEED, HOLD_S)
    if len(drawn) > MAX_BYTES:
        raise SystemExit(f"docs/pictures/demo.svg would have {len(drawn)} bytes, more than {MAX_BYTES}")
    (PICTURES / "demo.svg").write_text(drawn, encoding="utf-8")
    keep("demo.json", told)
    keep_digest("demo")


def _mask(text: str, token: re.Match[str] | None) -> str:
    return text if token is None else text.replace(token[0], token[0][:4] + "...")


def read_summary(text: str) -> dict[str, Any]:
    seconds, cores = _find(r"After (\d+) s on a node of ([\d.]+) core", text)
    ordered, used, reclaimed, given = _find(
        r"requested ([\d.]+), used ([\d.]+), reclaimed ([\d.]+), used by jobs that were started on freed CPU ([\d.]+)",
        text,
    )
    (back,) = _find(r"its whole guarantee back \d+ times?, ([\d., ]+) s after it woke up", text)
    (ran,) = _find(r"used its whole request ([\d., ]+) s after it woke up", text)
    (start_ms,) = _find(r"from heartbeat to process (\d+) ms", text)
    return {
        "seconds": float(seconds), "cores": float(cores), "ordered_cpu_s": float(ordered), "used_cpu_s": float(used),
        "reclaimed_cpu_s": float(reclaimed), "given_cpu_s": float(given), "start_ms": float(start_ms),
        "give_back_s": [float(each) for each in back.split(", ")],
        "full_use_s": [float(each) for each in ran.split(", ")],
    }  # fmt: skip


def _find(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"the demo does not say {pattern!r}:\n{text}")
    return found.groups()


# what rules free


def make_peers() -> None:
    from bench.peers import compare

    seconds, seeds = PROBE
    keep("peers.json", {**compare(7200.0, [1, 2, 3]), "probe": compare(seconds, seeds)["rows"]})
    (PICTURES / "peers.svg").write_text(draw_peers(load("peers.json")), encoding="utf-8")


def draw_peers(data: dict[str, Any]) -> str:
    """A row for each rule, two bars in it: what it frees, and how often it holds jobs back."""
    rows = sorted(data["rows"], key=lambda row: row["held_back_ratio"])
    most = max(row["held_back_ratio"] for row in rows)
    title = f"Of the CPU that {data['loads']} simulated loads ordered and did not want"
    return _draw_card(
        title, ("is freed (more is better)", "jobs are held back (less is better)"),
        [
            (row["about"], f"{row['reclaimed_ratio']:.0%}", row["reclaimed_ratio"],
             f"{row['held_back_ratio']:.1%}", row["held_back_ratio"] / most)
            for row in rows
        ],
    )  # fmt: skip


def _draw_card(title: str, heads: tuple[str, str], rows: Sequence[tuple[str, str, float, str, float]]) -> str:
    """A row for each thing that is compared, two bars in it: (what, text and length in [0, 1] of each bar)."""
    height = 96 + 44 * len(rows)
    bars = []
    for number, (about, first, first_ratio, second, second_ratio) in enumerate(rows):
        y = 72 + 44 * number
        kind = "ours" if about.startswith("cpumond") else "peer"
        bars.append(
            f'<text x="24" y="{y + 19}">{escape(about)}</text>'
            f'<rect class="{kind}" x="320" y="{y}" width="{200 * first_ratio:.1f}" height="26" rx="3"/>'
            f'<text x="{328 + 200 * first_ratio:.1f}" y="{y + 18}">{first}</text>'
            f'<rect class="held" x="570" y="{y}" width="{max(170 * second_ratio, 1.5):.1f}" height="26" rx="3"/>'
            f'<text x="{578 + 170 * second_ratio:.1f}" y="{y + 18}">{second}</text>'
        )
    style = (
        'text{font:14px system-ui,"Segoe UI",Roboto,"Liberation Sans",sans-serif;fill:#1b2430}.t{font-weight:600}'
        ".n{font-size:12px;fill:#57616d}.ours{fill:#1f6feb}.peer{fill:#8b949e}.held{fill:#d97706}.card{fill:#fff;stroke:#d5dbe2}"
        "@media (prefers-color-scheme:dark){text{fill:#e4e9ef}.n{fill:#9aa7b5}.card{fill:#171d25;stroke:#303a46}"
        ".ours{fill:#58a6ff}.held{fill:#f0a04b}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="828" height="{height}" viewBox="0 0 828 {height}" role="img">'
        f"<title>{title}: {heads[0]}, {heads[1]}</title><style>{style}</style>"
        f'<rect class="card" x=".5" y=".5" width="827" height="{height - 1}" rx="8"/>'
        f'<text class="t" x="24" y="30">{title}</text>'
        f'<text class="n" x="320" y="56">{heads[0]}</text>'
        f'<text class="n" x="570" y="56">{heads[1]}</text>'
        f"{''.join(bars)}</svg>\n"
    )


# what real servers feel


ARMS: Final = {
    "guarantee": "cpumond, guarantees, rule peak", "guarantee-ceiling": "cpumond, the same, jobs with ceilings",
    "early-restore": "cpumond, quotas, rule peak", "document": "cpumond, quotas, rule document",
    "peak": "cpumond, peak, early_restore off", "overcommit-idle": "batch in the idle class, no agent",
    "overcommit-low": "batch at the lowest weight, no agent", "koordinator": "batch on 65 % less use, like Koordinator",
    "vpa": "90th percentile + 15 %, like VPA",
}  # fmt: skip
"""Those of the chart, by their names in the bench."""


def keep_servers(file: str) -> None:
    """The figures of a session of the bench, as medians over its rounds."""
    from bench.real_figures import AGAIN, BASE, Run, drop_runs, find_noise, list_ratios

    runs, dropped = drop_runs(msgspec.json.decode(Path(file).read_bytes(), type=list[Run]), 0.2)
    servers = list(runs[0].servers)
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs):
        found = [run for run in runs if run.arm == arm]
        rows.append({
            "name": arm, "rounds": len(found),
            "p99_ms": {name: median(run.servers[name].whole.p99 for run in found) for name in servers},
            "p99_ratio": {name: round(median(list_ratios(runs, arm, name) or [0.0]), 3) for name in servers},
            "freed_ratio": round(median(run.freed_ratio for run in found), 3),
            "held_back_ratio": round(median(run.held_back_ratio for run in found), 5),
            "batch_cores": round(median(run.batch_cores for run in found), 3),
        })  # fmt: skip
    noise = {name: round(find_noise(runs, name), 3) for name in servers} if AGAIN in {run.arm for run in runs} else {}
    keep("real-servers.json", {"base": BASE, "dropped": len(dropped), "noise": noise, "rows": rows})
    (PICTURES / "real-servers.svg").write_text(draw_servers(load("real-servers.json")), encoding="utf-8")


def find_worst(row: dict[str, Any]) -> float:
    """How many times its p99 the server has that an arm slows down most."""
    return float(max(row["p99_ratio"].values()))


def draw_servers(data: dict[str, Any]) -> str:
    """A row for each arm: how much slower the server becomes that it slows down most, and the CPU of batch work."""
    rows = {row["name"]: row for row in data["rows"]}
    shown = [(about, rows[name]) for name, about in ARMS.items() if name in rows]
    slowest, most = max(find_worst(row) for _, row in shown), max(row["batch_cores"] for _, row in shown)
    return _draw_card(
        "Of PostgreSQL, nginx, Redis and Node.js the one that feels most, and a compiler as batch",
        ("p99, times that alone (less is better)", "cores for batch beside them"),
        [
            (about, _show_times(find_worst(row)), find_worst(row) / slowest,
             f"{row['batch_cores']:.2f}" if row["batch_cores"] else "none", row["batch_cores"] / most)
            for about, row in shown
        ],
    )  # fmt: skip


# the simulated pair of schedulers


def make_trust() -> None:
    from simulation.world import Options, run_seed

    totals: Counter[str] = Counter()
    bad = []
    for seed in range(SEEDS):
        outcome = run_seed(seed, Options())
        totals.update(seeds=1, checks=outcome.checks, faults=sum(outcome.faults.values()))
        totals["simulated_s"] += round(outcome.simulated_s)
        if outcome.violation:
            bad.append(f"seed {seed}: {outcome.violation}")
    if bad:
        raise SystemExit("\n".join(bad))
    keep("trust.json", totals)


# the overview


def make_overview() -> None:
    script, folder, picture = ROOT / "tests/screenshots.py", ROOT / "docs/screenshots", PICTURES / "overview.png"
    subprocess.run([sys.executable, script, folder, "--overview", picture], check=True)
    keep_digest("overview")


# the figures in README


def describe_demo() -> str:
    told = load("demo.json")
    return (
        f"The recorded demo: in {told['seconds']:g} s on {told['cores']:g} core it reclaimed "
        f"{told['reclaimed_cpu_s']:g} core-seconds, and jobs that were started on them used {told['given_cpu_s']:g}. "
        f"The job that became busy used its whole request within {max(told['full_use_s']):g} s; no quota was moved."
    )


def _show_times(times: float) -> str:
    return f"{times:.2f}" if times < 10.0 else f"{times:.0f}"


def describe_servers() -> str:
    data = load("real-servers.json")
    rows = {row["name"]: row for row in data["rows"]}
    worst = {name: _show_times(find_worst(row)) for name, row in rows.items()}
    noise, cores = _show_times(max(data["noise"].values())), rows["guarantee"]["batch_cores"]
    freed = rows["guarantee"]["freed_ratio"]
    return (
        "PostgreSQL, nginx, Redis and Node.js under bursts of load. **With guarantees**, as `cpumond init` sets them "
        f"up, {freed:.0%} of the CPU that they requested and did not use was reclaimed, batch jobs got {cores:.2g} of "
        f"the machine's 2 cores, and the 99th percentile of latency was at most {worst['guarantee']} times that "
        f"without them (two runs without them differ up to {noise} times). **With quotas**, no batch jobs: "
        f"{worst['early-restore']} times by rule `peak`, {worst['document']} by YTsaurus' rule, {worst['vpa']} by a "
        "percentile set each minute, like VPA's. [All figures](docs/real-servers.md), [simulated](docs/simulate.md)."
    )


def describe_trust() -> str:
    told = load("trust.json")
    hours = told["simulated_s"] / 3600
    return (
        f"{told['seeds']} simulated worlds, {hours:.0f} hours with {told['faults']:,} faults and "
        f"{told['checks'] / 1e6:.1f} million checks: nothing acknowledged was lost, no job started twice "
        "([how it was tested, and what it found](docs/trust.md))."
    )


SENTENCES: Final = {"demo": describe_demo, "servers": describe_servers, "trust": describe_trust}
"""Name of a mark in README -> what has to stand between it and the next end."""


def fill(text: str) -> str:
    """``text`` with the sentences between their marks. Raises ValueError for a mark that is not there once."""
    for name, say in SENTENCES.items():
        mark = re.compile(rf"(<!-- {name} -->\n\n).*?( <!-- end -->)", re.DOTALL)
        if len(mark.findall(text)) != 1:
            raise ValueError(f"README has no place for the figures of {name!r}, or two")
        lines = textwrap.fill(say(), 120, break_on_hyphens=False)
        text = mark.sub(lambda found, lines=lines: f"{found[1]}{lines}{found[2]}", text)
    return text


def make_readme() -> None:
    README.write_text(fill(README.read_text(encoding="utf-8")), encoding="utf-8")


MAKERS: Final[dict[str, Callable[[], None]]] = {
    "demo": make_demo, "peers": make_peers, "trust": make_trust, "overview": make_overview, "readme": make_readme,
}  # fmt: skip


def make(names: Iterable[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    for name in dict.fromkeys([*names, "readme"]):
        MAKERS[name]()
        print(f"{name}: made", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MAKERS))
    parser.add_argument("--servers", metavar="FILE", help="figures of a session of tests/bench/real_services.py")
    options = parser.parse_args()
    given = options.names
    if options.servers:
        keep_servers(options.servers)
        given = given or ["readme"]
    if unknown := set(given) - set(MAKERS):
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(MAKERS)}")
    make(given or MAKERS)
