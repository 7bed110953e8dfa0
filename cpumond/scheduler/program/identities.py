"""Users known from the configuration: tokens of a file, and groups of users. A reload replaces all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cpumond.scheduler.program.config import SchedulerConfig
from cpumond.scheduler.rights.tokens import Tokens, load_tokens


class Identities:
    """``tokens``: None if no file of tokens is configured. ``groups``: name of a group -> its users."""

    def __init__(self, tokens: Tokens | None = None, groups: Mapping[str, Collection[str]] | None = None) -> None:
        self.tokens = tokens
        self._groups_of: dict[str, frozenset[str]] = {}
        for group, users in (groups or {}).items():
            for user in users:
                self._groups_of[user] = self._groups_of.get(user, frozenset()) | {group}

    def groups_of(self, user: str) -> frozenset[str]:
        return self._groups_of.get(user, frozenset())

    def take_over(self, other: Identities) -> None:
        """Copy ``other`` into this object: all that refer to this object get the new content."""
        self.tokens, self._groups_of = other.tokens, other._groups_of


def load_identities(config: SchedulerConfig) -> Identities:
    """Load the identities of a configuration and of the file that it names. Raises ConfigError or AccessError."""
    tokens_file = config.api.tokens_file
    return Identities(load_tokens(tokens_file) if tokens_file else None, config.groups)
