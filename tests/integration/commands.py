"""``cpumond`` in the process of the test, where the start of another one would take longest."""

import contextlib
import gc
import io
import os
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from unittest import mock

from cpumond.cli import run

AS_NOBODY = [
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"),
]
"""Before a command: the account ``nobody``, who may read this checkout wherever it is."""


@contextlib.contextmanager
def end_of_process() -> Iterator[None]:
    """What is left open within is closed at its end, as with a process of its own."""
    gc.freeze()  # what was there before is not looked at
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            yield
            gc.collect()
    finally:
        gc.unfreeze()


def run_command(words: list[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command that prints to no terminal and is sent no signal; its environment is ours unless given."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    environ = mock.patch.dict(os.environ, os.environ if environment is None else environment, clear=True)
    with end_of_process(), environ, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return subprocess.CompletedProcess(words, code, *texts)
