"""The file of keys that secrets are sealed with: what it holds, and who may read it (semantics.md 12.6)."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpumond.core.errors import ConfigError
from cpumond.scheduler.program.vault_keys import MAKE, load_keys

KEY, OTHER = (base64.b64encode(sign * 32).decode() for sign in (b"k", b"o"))


def write(directory: Path, text: str, mode: int = 0o600) -> str:
    path = directory / "keys"
    path.touch(mode=mode)
    path.chmod(mode)
    path.write_text(text)
    return str(path)


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_keys(path)
    told = str(caught.value)
    assert KEY not in told
    return told.removeprefix(f"{path}: ")


def test_the_first_key_seals_and_all_open(tmp_path):
    old = load_keys(write(tmp_path, KEY))
    both = load_keys(write(tmp_path, f"# of 2026\n\n{OTHER}\n {KEY} \n"))
    assert both.open(old.seal("a", {"x": "y"})) == {"x": "y"}
    assert both.first == load_keys(write(tmp_path, OTHER)).first != old.first


def test_the_command_that_is_told_makes_one_and_keeps_one_that_is_there(tmp_path):
    path = str(tmp_path / "made")
    done = [subprocess.run(["/bin/sh", "-c", MAKE.format(path=path)], capture_output=True, check=False) for _ in "12"]
    assert [each.returncode == 0 for each in done] == [True, False]
    assert os.stat(path).st_mode & 0o777 == 0o600
    keys = load_keys(path)
    assert keys.open(keys.seal("a", {})) == {}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o660])
def test_one_that_others_have_rights_to_is_refused(tmp_path, mode):
    told = refused(write(tmp_path, KEY, mode))
    assert told.startswith(f"others than its owner have rights to it (mode {mode:04o}); run `chmod 600 ")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_one_of_another_user_is_refused(tmp_path):
    path = write(tmp_path, KEY)
    os.chown(path, 65_534, 65_534)
    assert refused(path).startswith("belongs to another user (number 65534), who could read and change it")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no key; add one on a line of its own"),
        ("# nothing\n", "holds no key"),
        (f"{KEY}\n{KEY[:-8]}\n", "line 2: expected a key, 32 random bytes in base64 on one line"),
        (f"{KEY}\n{KEY}{KEY}\n", "line 2: expected a key"),
        ("no base64 at all!\n", "line 1: expected a key"),
        (f"{KEY}\n{OTHER}\n{KEY}\n", "holds a key twice; remove one of the two lines"),
        ("\0" * 70_000, "is larger than 65536 bytes, so it is no file of keys"),
    ],
)
def test_what_is_no_file_of_keys_is_refused(tmp_path, text, sentence):
    assert refused(write(tmp_path, text)).startswith(sentence)


def test_a_file_that_is_missing_is_told_with_how_to_make_it(tmp_path):
    path = str(tmp_path / "none")
    assert refused(path) == (
        f"cannot be read: No such file or directory; create `secrets_key_file` with "
        f"`(umask 077; set -C; openssl rand -base64 32 >{path})`"
    )
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert refused(str(tmp_path / "pipe")).startswith("is not a regular file")


def test_without_the_library_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    told = refused(write(tmp_path, KEY))
    assert told == "`secrets_key_file` needs the package cryptography, 41 or later: pip install cryptography"
