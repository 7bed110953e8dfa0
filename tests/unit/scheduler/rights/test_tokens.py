"""The file of tokens: who is known by which token, what is refused, and that no message gives a secret away."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpumond.core.errors import ConfigError
from cpumond.scheduler.rights.tokens import Tokens, User, hash_token, load_tokens, make_token, parse_tokens

HASH_A, HASH_B, HASH_C = hash_token("a"), hash_token("b"), hash_token("c")


def write(path: Path, text: str | bytes, mode: int = 0o600) -> str:
    path.unlink(missing_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return str(path)


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_tokens(text, "tokens")
    message = str(caught.value)
    assert "\n" not in message
    message.encode()
    return message


def find(tokens: Tokens, token: str) -> User:
    user = tokens.user_of(token)
    assert user is not None
    assert user.token_id == hash_token(token)[:12]
    return replace(user, token_id="")


def test_users_of_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "tokens",
        f"\ufeffalice:{HASH_A}\n# an administrator\n\n  bob : {HASH_B.upper()} : admin \r\n\t# the others of alice\n"
        f"alice:{HASH_C}:admin\nalice:{hash_token('d')}:user",
    )
    known = load_tokens(path)
    assert len(known) == 4
    assert dict(known)[HASH_A[:12]] == User("alice", token_id=HASH_A[:12])
    assert HASH_A not in known
    assert HASH_A not in repr(known)
    assert find(known, "a") == User("alice")
    assert find(known, "b") == User("bob", admin=True)
    assert find(known, "c") == User("alice", admin=True)
    assert find(known, "d") == User("alice")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", f"alice:{HASH_A}"])
@pytest.mark.parametrize("token", ["", " a", "a ", "A", "aa", HASH_A, "alice", "\ud800", "x" * 100_000, "é"])
def test_other_tokens_are_nobodys(text: str, token: str) -> None:
    assert parse_tokens(text, "tokens").user_of(token) is None


def test_the_hash_is_what_sha256sum_says() -> None:
    assert hash_token("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_new_tokens_differ_and_are_safe_anywhere() -> None:
    made = {make_token() for _ in range(100)}
    assert len(made) == 100
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{43}", token) for token in made)


@given(st.lists(st.text(), unique=True, min_size=1, max_size=5), st.text())
def test_a_token_is_its_users_only(known: list[str], other: str) -> None:
    users = Tokens({hash_token(token): User(f"user{number}") for number, token in enumerate(known)})
    for number, token in enumerate(known):
        assert find(users, token) == User(f"user{number}")
    assert (users.user_of(other) is None) == (other not in known)


@pytest.mark.parametrize(
    ("pattern", "fits", "others", "is_bound"),
    [
        ("", ["n1", "", "a/b:c"], [], False),
        ("n1", ["n1"], ["N1", "n12", "xn1", "n1\n", ""], True),
        ("rack1-*", ["rack1-", "rack1-a.b/c"], ["Rack1-a", "arack1-a", "rack12"], False),
        ("n?[0-9]:x", ["na7:x"], ["n7:x", "na7", "nax:x"], False),
    ],
)
def test_a_nodes_token_is_good_for_the_ids_that_its_pattern_matches(
    pattern: str, fits: list[str], others: list[str], is_bound: bool
) -> None:
    line = f"rack1:{HASH_A}:node" + (f":{pattern}" if pattern else "")
    user = find(parse_tokens(line, "tokens"), "a")
    assert user == User("rack1", node=True, pattern=pattern)
    assert [node_id for node_id in [*fits, *others] if user.may_be(node_id)] == fits
    assert user.is_bound == is_bound


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("alice", 'expected "user:sha256-hex" or "user:sha256-hex:admin|user|proxy|node", got no colon'),
        (f"alice:{HASH_A}:admin:x", "only 'node' may be followed by a colon and a pattern of node_ids"),
        (f"alice:{HASH_A}:user:", "only 'node' may be followed"),
        (f"alice:{HASH_A}:node:", "expected a pattern of node_ids, 1 to 4096 printable characters, after 'node:'"),
        (f"alice:{HASH_A}:node:a\0b", "expected a pattern of node_ids"),
        (f"alice:{HASH_A}:nod", "after the hash, got 'nod'"),
        (f":{HASH_A}", "expected a user of 1 to 256 printable characters"),
        (f"{'u' * 257}:{HASH_A}", "expected a user of 1 to 256 printable characters"),
        (f"a\0b:{HASH_A}", "expected a user of 1 to 256 printable characters"),
        (f"a\rb:{HASH_A}", "expected a user of 1 to 256 printable characters"),
        ("alice:", "expected 64 hexadecimal digits, the SHA-256 of the token, after the user, got 0 characters"),
        (f"alice:{HASH_A[:-1]}", "got 63 characters"),
        (f"alice:{HASH_A}0", "got 65 characters"),
        (f"alice:{'g' * 64}", "expected 64 hexadecimal digits"),
        (f"alice:{chr(0x661) * 64}", "expected 64 hexadecimal digits"),
        (f"alice:{HASH_A}:", "'admin' or 'user' or 'node' or 'proxy' after the hash, got something else"),
        (f"alice:{HASH_A}:Admin", "after the hash, got 'Admin'"),
        (f"alice:{HASH_A}:admn", "after the hash, got 'admn'"),
        (f"alice:{HASH_A}:root", "after the hash, got something else"),
    ],
)
def test_a_line_that_is_wrong(line: str, words: str) -> None:
    message = refused(f"# comment\n\n{line}\nbob:{HASH_B}\n")
    assert message.startswith("tokens: line 3: ")
    assert words in message


def test_a_hash_belongs_to_one_line() -> None:
    assert refused(f"alice:{HASH_A}\nbob:{HASH_B}\nbob:{HASH_A.upper()}").startswith(
        "tokens: line 3: the hash is the same as in line 1; "
    )


@pytest.mark.parametrize("line", ["alice:{}", "{}", "alice:{}:admin", "{}:alice", "alice:" + HASH_A + ":{}"])
def test_no_message_gives_a_token_or_a_hash_away(line: str) -> None:
    secret = make_token()
    message = refused(line.format(secret))
    assert secret not in message
    assert HASH_A not in message


@given(st.text(max_size=100))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_tokens(text, "tokens")
    except ConfigError:
        refused(text)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700, 0o644, 0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777], ids=oct)
def test_a_file_that_others_have_rights_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "tokens", f"alice:{HASH_A}", mode)
    if not mode & 0o077:
        assert len(load_tokens(path)) == 1
        return
    with pytest.raises(ConfigError, match=rf"have rights to it \(mode 0{mode:o}\); run `chmod 600 {re.escape(path)}`"):
        load_tokens(path)


def test_systemds_copy_for_this_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``LoadCredential=``: where the directory knows access lists, the group's bit stands for one."""
    given = tmp_path / "credentials"
    given.mkdir()
    path = write(given / "tokens", f"alice:{HASH_A}", 0o440)
    with pytest.raises(ConfigError, match="have rights to it"):
        load_tokens(path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(given))
    assert len(load_tokens(path)) == 1
    for elsewhere, mode in ((given / "tokens", 0o444), (given / "tokens", 0o460), (tmp_path / "tokens", 0o440)):
        with pytest.raises(ConfigError, match="have rights to it"):
            load_tokens(write(elsewhere, f"alice:{HASH_A}", mode))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none: cannot be read: No such file or directory; set `api\.tokens_file`"):
        load_tokens(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="Is a directory"):
        load_tokens(str(tmp_path))
    with pytest.raises(ConfigError, match="is not a regular file"):
        load_tokens(os.devnull)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is not a regular file"):
        load_tokens(str(tmp_path / "pipe"))


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", b"# one\nalice:" + HASH_A.encode() + b"\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="tokens: line 3: is not UTF-8 text"):
        load_tokens(path)


def test_a_file_of_any_size_is_not_read_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", "")
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match="is larger than 16777216 bytes"):
        load_tokens(path)
