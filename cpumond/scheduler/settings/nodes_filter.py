"""Formulas of tags: ``nodes_filter`` selects the nodes of a pool tree; ``scheduling_tag_filter`` selects the nodes on
which jobs start (semantics.md 2.1, 2.13).

``!`` binds tighter than ``&``, and ``&`` tighter than ``|``. Parser and evaluation keep their own stacks; therefore
deep formulas do not come near Python's recursion limit."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedToken, v_args

from cpumond.core.errors import ConfigError

MAX_LENGTH: Final = 10_000
"""Maximum number of characters in a formula."""
MAX_TOKENS: Final = 100
"""Maximum number of tags and operators in a ``scheduling_tag_filter``."""
TAG_FILTER: Final = "scheduling_tag_filter"

OPERAND: Final = "a tag, '!', '(', '%true' or '%false'"
PERMITTED: Final = "tags, '!', '&', '|', '(', ')', '%true' and '%false'"
NEAR: Final = 24
"""Number of characters of a formula that a message shows on each side of the error."""

GRAMMAR: Final = r"""
?start: either
?either: both | either _OR both
?both: unit | both _AND unit
?unit: "!" unit -> negation
     | "(" either ")"
     | (TAG | LITERAL) -> operand

TAG: /(?!in(?![A-Za-z0-9_\/\-.:]))[A-Za-z_][A-Za-z0-9_\/\-.:]*/
LITERAL: /%(true|false)(?![A-Za-z0-9_\/\-.:])/
_AND: /&(?!&)/
_OR: /\|(?!\|)/
%ignore /[ \t\r\n\f\v]+/
"""
"""``&&`` and ``||`` are errors, not two operators each; ``in`` is a reserved word, not a tag."""

_TAG: Final = re.compile(r"(?!in\Z)[A-Za-z_][A-Za-z0-9_/\-.:]*\Z")
TAG_RULE: Final = (
    "a tag begins with a letter or _ and goes on with letters, digits and _ / - . : (in is no tag); formulas of tags "
    "could not name others"
)

_INVALID = re.compile(r"in|&+|\|+|[0-9]+|[=<>+*^~-]+|%[A-Za-z]*|.", re.DOTALL)
"""Matches the text that a message quotes if no token begins at that place."""


def is_tag(text: str) -> bool:
    """Return whether a formula can contain this text as a tag."""
    return _TAG.match(text) is not None


@dataclass(frozen=True, slots=True)
class NodesFilter:
    """A parsed formula, made by ``parse_nodes_filter``. Two formulas are equal if their ``text`` is."""

    text: str
    _postfix: tuple[str, ...] = field(compare=False, repr=False)
    """Tags, literals and operators; operands precede their operator. Empty if the formula is true for every node."""

    @property
    def tags(self) -> frozenset[str]:
        return frozenset(step for step in self._postfix if step not in ("!", "&", "|", "%true", "%false"))

    @property
    def token_count(self) -> int:
        """Return the number of tags, literals and operators, without parentheses."""
        return len(self._postfix)

    def matches(self, tags: Collection[str]) -> bool:
        """Return whether a node matches. ``tags``: the node's tags and address; a tag that is missing is false."""
        return bool(self._evaluate(1, lambda tag: tag in tags))

    def select(self, tags: Sequence[frozenset[str]]) -> list[bool]:
        """Return ``matches`` of many nodes. The formula is evaluated once, for all nodes as the bits of a number."""
        named = {tag: bytearray(len(tags) // 8 + 1) for tag in self.tags}
        known = frozenset(named)
        for number, each in enumerate(tags):
            for tag in known & each:
                named[tag][number // 8] |= 1 << number % 8
        bits = {tag: int.from_bytes(array, "little") for tag, array in named.items()}
        found = self._evaluate((1 << len(tags)) - 1, bits.__getitem__)
        return [digit == "1" for digit in f"{found:0{len(tags)}b}"[::-1]] if tags else []

    def _evaluate(self, everyone: int, having: Callable[[str], int]) -> int:
        """Return the nodes for which the formula is true, as bits. ``having``: returns the nodes that have a tag."""
        stack = [0 if self._postfix else everyone]
        for step in self._postfix:
            if step == "!":
                stack[-1] ^= everyone
            elif step in ("&", "|"):
                right = stack.pop()
                stack[-1] = (stack[-1] & right) if step == "&" else (stack[-1] | right)
            elif step in ("%true", "%false"):
                stack.append(everyone if step == "%true" else 0)
            else:
                stack.append(having(step))
        return stack[-1]


def parse_nodes_filter(text: str, option: str = "nodes_filter") -> NodesFilter:
    """Parse a formula; an empty or blank formula is true for every node. ``option``: name of the formula in errors.

    Raises ConfigError with the unexpected text, its column (in characters, from 1), and what is expected."""
    if len(text) > MAX_LENGTH:
        raise ConfigError(
            f"{option}: the formula has {len(text)} characters, at most {MAX_LENGTH} are allowed; "
            "give the nodes a common tag and name that one"
        )
    if not text.strip(" \t\r\n\f\v"):
        return NodesFilter(text, ())
    try:
        # The transformer runs inside the parser: the result is the list of the transformer, no tree.
        postfix = _parser().parse(text)
    except UnexpectedCharacters as error:
        raise _explain_characters(option, text, error.pos_in_stream or 0) from None
    except UnexpectedToken as error:
        raise _explain_token(option, text, error) from None
    return NodesFilter(text, tuple(postfix))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def parse_tag_filter(text: str, option: str = TAG_FILTER) -> NodesFilter:
    """Parse a ``scheduling_tag_filter``, with a cache: each change of a tree checks all. Raises ConfigError."""
    parsed = parse_nodes_filter(text, option)
    if parsed.token_count > MAX_TOKENS:
        raise ConfigError(
            f"{option}: the formula has {parsed.token_count} tokens (tags and operators), at most {MAX_TOKENS} are "
            "allowed; give the nodes a common tag and name that one"
        )
    return parsed


@functools.lru_cache(maxsize=1024)
def read_filter(text: str) -> NodesFilter:
    """Call ``parse_nodes_filter`` with a cache: most changes of a tree do not change its filters."""
    return parse_nodes_filter(text)


@v_args(inline=True)
class _ToPostfix(Transformer[Token, list[str]]):
    """Makes the postfix list. Each rule appends to its left operand's list: operators do not copy a long formula."""

    def operand(self, token: Token) -> list[str]:
        return [str(token)]

    def negation(self, operand: list[str]) -> list[str]:
        operand.append("!")
        return operand

    def both(self, left: list[str], right: list[str]) -> list[str]:
        left += right
        left.append("&")
        return left

    def either(self, left: list[str], right: list[str]) -> list[str]:
        left += right
        left.append("|")
        return left


@functools.cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr", lexer="basic", transformer=_ToPostfix())


def _explain_characters(option: str, text: str, position: int) -> ConfigError:
    found = _INVALID.match(text, position)
    assert found is not None
    if found[0] == "in":
        return _refusal(option, text, position, "'in' is a reserved word, expected a tag of another name")
    return _refusal(option, text, position, f"invalid token {found[0]!r} in boolean formula, permitted are {PERMITTED}")


def _explain_token(option: str, text: str, error: UnexpectedToken) -> ConfigError:
    token = error.token
    wants_operand = "TAG" in error.expected
    if token.type == "$END":
        if wants_operand:
            return _refusal(option, text, len(text), f"the formula is unfinished, expected {OPERAND}")
        return _refusal(option, text, _last_open(text), "unmatched '(', expected a ')' for it")
    position = token.start_pos
    assert position is not None
    is_open = text.count("(", 0, position) > text.count(")", 0, position)
    if token.type == "RPAR" and not is_open:
        return _refusal(option, text, position, "unmatched ')', no '(' is open here")
    expected = OPERAND if wants_operand else "'&', '|' or ')'" if is_open else "'&', '|' or the end of the formula"
    kind = "variable" if token.type == "TAG" else "token"
    return _refusal(option, text, position, f"unexpected {kind} {str(token)!r}, expected {expected}")


def _last_open(text: str) -> int:
    """Return the position of the innermost '(' that is not closed."""
    depth = 0
    for position in range(len(text) - 1, -1, -1):
        depth += (text[position] == ")") - (text[position] == "(")
        if depth < 0:
            return position
    raise AssertionError("the parser found an open '('")


def _refusal(option: str, text: str, position: int, what: str) -> ConfigError:
    before, after = text[max(position - NEAR, 0) : position], text[position : position + NEAR]
    return ConfigError(f"{option}: column {position + 1}: {what}; near {before!r} <here> {after!r}")
