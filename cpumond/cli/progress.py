"""The progress of a command, as one line of the terminal."""

from __future__ import annotations

import shutil
import sys

import click


class ProgressLine:
    """A line on standard error that each update overwrites; nothing is shown if that is no terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        self._width = 0

    def draw(self, text: str) -> None:
        if self._is_shown:
            # A line that wraps cannot be overwritten.
            text = text[: shutil.get_terminal_size().columns - 1]
            click.echo(f"\r{text.ljust(self._width)}", err=True, nl=False)
            self._width = len(text)

    def end(self) -> None:
        if self._width:
            click.echo(f"\r{' ' * self._width}\r", err=True, nl=False)
            self._width = 0
