"""The address of an HTTP server, from a configuration or a command."""

from __future__ import annotations

import httpx2

from cpumond.core.errors import ConfigError


def parse_base_url(url: str, name: str, token_name: str, port: int) -> httpx2.URL:
    """Parse a server's address, which may have a path (behind a proxy). Raises ConfigError about the setting ``name``.

    ``token_name`` is the setting for a token, which must not be in the address. ``port`` is used in the example."""
    expected = f"expected an address such as http://127.0.0.1:{port}"
    if "@" in url:
        raise ConfigError(f"{name}: must hold no user name or password; use {token_name} instead; {expected}")
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(f"{name}: is not an address: {error}; {expected}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.port == 0:
        raise ConfigError(f"{name}: {expected}, got {url!r}")
    if "?" in url or "#" in url:
        raise ConfigError(f"{name}: nothing may follow the path; {expected}, got {url!r}")
    return parsed.copy_with(raw_path=parsed.raw_path.rstrip(b"/") or b"/")
