"""A page that a command wrote, as a test reads it."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta"}


class HtmlPage(HTMLParser):
    """Elements and graphs; fails by bad nesting, by what is from elsewhere, and by any script but the page's own."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self._open
        assert text.startswith("<!DOCTYPE html>")
        assert not {name for name, _, _ in self.elements} & {"img", "link", "iframe", "object", "base", "form", "svg"}
        for _, attributes, _ in self.elements:
            assert not [key for key in attributes if key.startswith("on") or key in ("src", "href", "xlink:href")]
        charts, script = self.texts("script")
        self.charts: list[dict[str, Any]] = json.loads(charts)
        (policy,) = (each["content"] for _, each, _ in self.elements if each.get("http-equiv"))
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert policy is not None
        assert policy.startswith(f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';")
        assert "import " not in script
        assert "export " not in script

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open:
            texts.append(data)

    def texts(self, tag: str, kind: str = "") -> list[str]:
        """Of the elements of this name, and class."""
        return [
            "".join(texts)
            for name, attributes, texts in self.elements
            if name == tag and (not kind or attributes.get("class") == kind)
        ]

    def line(self, label: str, chart: int = 0) -> dict[str, Any]:
        (series,) = (each for each in self.charts[chart]["series"] if each["label"] == label)
        return series
