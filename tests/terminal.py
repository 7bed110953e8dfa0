"""A program in a terminal, as it was: recorded with its times, and drawn as an SVG that moves by CSS alone."""

import fcntl
import os
import pty
import re
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Final, NamedTuple

COLUMNS, ROWS = 100, 32
TORN_S: Final = 0.03
"""Output that follows sooner belongs to the same picture."""
CONTROL: Final = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")
STYLES: Final = {"1": "b", "3": "i", "1;33": "y"}
"""Parameters of an SGR sequence -> class of its text."""
BARS: Final = {"█": "used", "░": "may", "·": "order"}
"""Drawn as rectangles, which are as wide in any font."""
CELL_X, CELL_Y, MARGIN, HEAD = 8.0, 18.0, 14.0, 30.0
STYLE: Final = """
text{font:13.3px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#d6dae0;white-space:pre}
.b{font-weight:700;fill:#fff}.i{font-style:italic;fill:#9aa3ad}.y{font-weight:700;fill:#f2c14e}.p{fill:#7fd38a}
.used{fill:#4ea1f2}.may{fill:#2f4f74}.order{fill:#3a3f47}.head{fill:#9aa3ad;font-size:12px}
"""


class Chunk(NamedTuple):
    """Output, and when it came, in seconds since the start."""

    at_s: float
    text: str


class Frame(NamedTuple):
    """What stands on the screen from then on: of each row the runs of one style, (column, class, text)."""

    at_s: float
    rows: tuple[tuple[tuple[int, str, str], ...], ...]


def record(command: Sequence[str], environment: dict[str, str]) -> list[Chunk]:
    """What ``command`` prints into a terminal. Raises SystemExit with what it said where its exit code is not 0."""
    pid, terminal = pty.fork()
    if pid == 0:
        # Before anything asks for the size.
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.execvpe(command[0], list(command), {**environment, "TERM": "xterm-256color"})  # noqa: S606
    began_s = time.monotonic()
    chunks: list[Chunk] = []
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # its end
            break
        chunks.append(Chunk(time.monotonic() - began_s, data.decode(errors="replace")))
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise SystemExit(f"{' '.join(command)}: exit code {code}\n{''.join(text for _, text in chunks)[-4000:]}")
    return chunks


class Screen:
    """As much of a terminal as rich needs."""

    def __init__(self) -> None:
        self._rows: list[list[tuple[str, str]]] = [[] for _ in range(ROWS)]
        self._row = self._column = 0
        self._style = ""

    def feed(self, text: str) -> None:
        for parameters, letter, move, plain in CONTROL.findall(text):
            if plain:
                self._put(plain)
            elif move == "\r":
                self._column = 0
            elif move == "\n":
                self._feed_line()
            elif letter == "A":
                self._row = max(self._row - int(parameters or 1), 0)
            elif letter == "K":
                self._rows[self._row] = self._rows[self._row][: 0 if parameters == "2" else self._column]
            elif letter == "m":
                self._style = STYLES.get(parameters, "")

    def _put(self, text: str) -> None:
        for char in text:
            if self._column == COLUMNS:
                self._column = 0
                self._feed_line()
            row = self._rows[self._row]
            row.extend([(" ", "")] * (self._column + 1 - len(row)))
            row[self._column] = char, BARS.get(char, self._style)
            self._column += 1

    def _feed_line(self) -> None:
        if self._row == ROWS - 1:
            self._rows.append([])
            del self._rows[0]
        else:
            self._row += 1

    def show(self) -> tuple[tuple[tuple[int, str, str], ...], ...]:
        return tuple(tuple(_split(row)) for row in self._rows)


def _split(row: list[tuple[str, str]]) -> Iterator[tuple[int, str, str]]:
    """Runs of a style; a run of text ends where two spaces follow, so that columns stay where they are in any font."""
    column = 0
    for style, cells in groupby(row, lambda cell: cell[1]):
        text = "".join(char for char, _ in cells)
        for part in re.finditer(r"\S+(?: \S+)*", text):
            yield column + part.start(), style, part[0]
        column += len(text)


def list_frames(chunks: Sequence[Chunk], each_s: float) -> list[Frame]:
    """The screen at most once in ``each_s``, where it changed; the last as it ended."""
    screen = Screen()
    frames: list[Frame] = []
    for number, (at_s, text) in enumerate(chunks):
        screen.feed(text)
        is_last = number == len(chunks) - 1
        if not is_last and (chunks[number + 1].at_s - at_s < TORN_S or (frames and at_s - frames[-1].at_s < each_s)):
            continue
        rows = screen.show()
        if not frames or rows != frames[-1].rows:
            frames.append(Frame(at_s, rows))
    return frames


def draw(frames: Sequence[Frame], title: str, speed: float, hold_s: float) -> str:
    """An SVG that plays the frames ``speed`` times as fast, shows the last for ``hold_s`` and begins again; the last
    alone for whoever asked for less motion, and where there is no CSS. Each row that occurs is in it once."""
    width = 2 * MARGIN + COLUMNS * CELL_X
    height = HEAD + MARGIN + ROWS * CELL_Y
    names: dict[tuple[tuple[int, str, str], ...], str] = {}
    strips = []
    for number, frame in enumerate(frames):
        used = [
            f'<use href="#{names.setdefault(row, f"r{len(names)}")}" y="{y * CELL_Y:g}"/>'
            for y, row in enumerate(frame.rows)
            if row
        ]
        strips.append(f'<g transform="translate({number * width:g})">{"".join(used)}</g>')
    times = [frame.at_s / speed for frame in frames]
    whole_s = times[-1] + hold_s
    steps = "".join(
        f"{100 * at_s / whole_s if number else 0:.3g}%{{transform:translateX({-number * width:g}px)}}"
        for number, at_s in enumerate(times)
    )
    last = f"translateX({-(len(frames) - 1) * width:g}px)"
    style = (
        f"{STYLE}.film{{transform:{last};animation:film {whole_s:.1f}s step-end infinite}}"
        f"@media (prefers-reduced-motion:reduce){{.film{{animation:none}}}}"
        f"@keyframes film{{{steps}100%{{transform:{last}}}}}"
    )
    rows = "".join(f'<g id="{name}">{"".join(map(_draw_run, row))}</g>' for row, name in names.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img"><title>{escape(title)}</title>'
        f"<style>{style}</style><defs>{rows}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="#16191e"/>'
        f'<circle cx="18" cy="15" r="5" fill="#5b616a"/><circle cx="36" cy="15" r="5" fill="#5b616a"/>'
        f'<circle cx="54" cy="15" r="5" fill="#5b616a"/><text class="head" x="74" y="19">{escape(title)}</text>'
        f'<svg x="{MARGIN:g}" y="{HEAD:g}" width="{COLUMNS * CELL_X:g}" height="{ROWS * CELL_Y:g}">'
        f'<g class="film">{"".join(strips)}</g></svg></svg>\n'
    )


def _draw_run(run: tuple[int, str, str]) -> str:
    column, style, text = run
    x = f"{column * CELL_X:g}"
    if style in BARS.values():
        size = f'width="{len(text) * CELL_X:g}" height="{CELL_Y - 5:g}"'
        return f'<rect x="{x}" y="3" {size} class="{style}"/>'
    known = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="14"{known} textLength="{len(text) * CELL_X:g}">{escape(text, quote=False)}</text>'
