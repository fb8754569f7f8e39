"""The README is short, and says first what matters. tests/test_docs.py runs its code and follows its links."""

from __future__ import annotations

import re

import pages

TEXT = (pages.ROOT / "README.md").read_text("utf-8")


def test_two_sentences_and_the_figure_come_first() -> None:
    first, second = re.sub(r"<!--.*?-->", "", TEXT, flags=re.DOTALL).strip().split("\n\n")[1:3]
    assert len(re.findall(r"\.(?:\s|$)", first)) == 2
    assert second.startswith("![")


def test_it_is_read_in_two_minutes() -> None:
    """Prose at 240 words a minute; code, tables and what `make results` writes are looked at rather than read."""
    prose = re.sub(
        r"```.*?```|<!-- made by.*?<!-- end -->|<!--.*?-->|^\|.*?$", "", TEXT, flags=re.DOTALL | re.MULTILINE
    )
    assert len(re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", prose))) < 2 * 240


def test_the_first_example_is_ten_lines() -> None:
    python = next(block for block in pages.blocks(TEXT) if block.kind == "python")
    assert len(python.lines) <= 11
