"""What README tells to type, found by what is in it: tests run these lines as they stand there."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def read_blocks(language: str) -> list[str]:
    """README's fenced blocks of a language, in their order."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def find_line(word: str) -> str:
    """The first fenced line of shell with this word."""
    lines = [line for block in read_blocks("sh") for line in block.splitlines() if word in line]
    assert lines, f"README has no fenced line with {word}"
    return lines[0]


def read_installation() -> dict[str, str]:
    """The block that makes a service of it, in parts: ``build`` the package, ``install`` it, ``editor``, ``enable``."""
    (block,) = (block for block in read_blocks("sh") if "build-deb.sh" in block)
    words = {"build": "build-deb.sh", "editor": "editor ", "enable": "systemctl enable --now cpumond"}
    parts: dict[str, str] = {"install": ""}
    for line in block.splitlines():
        name = next((name for name, word in words.items() if word in line), "install")
        parts[name] = f"{parts.get(name, '')}{line}\n"
    return parts
