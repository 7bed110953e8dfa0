"""The file of a service account's token."""

import pytest

from cpumond.core.errors import AccessError
from cpumond.host.engine.token import read_token


def test_a_token(tmp_path):
    (tmp_path / "token").write_text(" abc.DEF-_\n")
    assert read_token(f"{tmp_path}/token") == "abc.DEF-_"


@pytest.mark.parametrize("text", [b"", b"secret\nsecond", b"sec ret", b"sec\x00ret", b"secr\xc3\xa9t"])
def test_what_is_no_token_is_not_told(tmp_path, text):
    (tmp_path / "token").write_bytes(text)
    with pytest.raises(AccessError) as error:
        read_token(f"{tmp_path}/token")
    assert "sec" not in str(error.value)
