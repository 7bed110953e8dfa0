"""Addresses of HTTP servers."""

import pytest

from cpumond.core.base_url import parse_base_url
from cpumond.core.errors import ConfigError


@pytest.mark.parametrize(("url", "parsed"), [
    ("http://127.0.0.1:9757", "http://127.0.0.1:9757/"),
    ("https://proxy/behind/it/", "https://proxy/behind/it"),
    ("http://[::1]:1", "http://[::1]:1/"),
])  # fmt: skip
def test_an_address_and_the_path_to_it(url: str, parsed: str):
    assert str(parse_base_url(url, "scheduler.url", "scheduler.token_file", 9757)) == parsed


@pytest.mark.parametrize(("url", "problem"), [
    ("x", "expected an address such as http://127.0.0.1:9090, got 'x'"),
    ("http://", "expected an address such as http://127.0.0.1:9090, got 'http://'"),
    ("http://a:0", "expected an address such as http://127.0.0.1:9090, got 'http://a:0'"),
    ("ftp://a", "expected an address such as http://127.0.0.1:9090, got 'ftp://a'"),
    ("http://a:b", "is not an address: "),
    ("http://a?b=c", "nothing may follow the path"),
    ("http://a/#b", "nothing may follow the path"),
    ("http://a:1/?", "nothing may follow the path"),
    ("http://a:1#", "nothing may follow the path"),
])  # fmt: skip
def test_what_is_no_address_is_said(url: str, problem: str):
    with pytest.raises(ConfigError) as caught:
        parse_base_url(url, "--prometheus", "--token-file", 9090)
    assert str(caught.value).startswith(f"--prometheus: {problem}")
    assert "http://127.0.0.1:9090" in str(caught.value)


def test_a_password_in_the_address_is_refused_and_not_shown():
    refused = r"^scheduler\.url: must hold no user name or password; use scheduler"
    with pytest.raises(ConfigError, match=refused) as caught:
        parse_base_url("http://agent:s3cret@127.0.0.1:9757", "scheduler.url", "scheduler.token_file", 9757)
    assert "s3cret" not in str(caught.value)
