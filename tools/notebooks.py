"""`make notebooks`: notebooks in examples/ from the tutorials in docs, so that nothing is written twice.

python tools/notebooks.py          # write them
python tools/notebooks.py --check  # exit code 1 if one is out of date

Blocks of Python become cells, commands become cells that begin with "!". Outputs are left out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pages

SOURCES = {
    "five_minutes": "docs/start/five-minutes.md",
    "own_loop": "docs/tutorials/own-loop.md",
    "export": "docs/tutorials/export.md",
    "compare": "docs/tutorials/compare.md",
}
FENCED = re.compile(r"^```.*?^```\n", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE)


def notebook(text: str, page: Path) -> str:
    """A page as a notebook."""
    lines = text.splitlines(keepends=True)
    cells: list[dict[str, Any]] = []
    at = 0
    for block in pages.blocks(text):
        start, end = block.at - 1, block.at + len(block.lines) + 1
        _prose("".join(lines[at:start]), page, cells)
        at = end
        if block.kind == "python" and block.why_not is None:
            _code(block.code, cells)
        elif block.kind == "console" and block.why_not is None:
            typed = [line[2:] for line in block.lines if line.startswith("$ ")]
            _code("\n".join(f"!{line}" for line in typed), cells)
        elif block.file is not None:
            _code(f"%%writefile {block.file}\n{block.code}", cells)
        elif block.kind == "console":
            _prose("".join(lines[start:end]), page, cells)
    _prose("".join(lines[at:]), page, cells)
    for number, cell in enumerate(cells):
        cell["id"] = f"{page.stem}-{number}"
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return json.dumps({"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _prose(text: str, page: Path, cells: list[dict[str, Any]]) -> None:
    text = COMMENT.sub(
        "", re.sub(r"^```\{image\} (\S+)\n:alt: (.*?)\n.*?^```\n", r"![\2](\1)\n", text, flags=re.DOTALL | re.M)
    )

    def link(match: re.Match[str]) -> str:
        target = match[2]
        if re.match(r"\w+:|#", target):
            return match[0]
        path = (page.parent / target).resolve().relative_to(pages.ROOT)
        return f"{match[1]}(../{path})"

    text = re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", link, text).strip()
    if text:
        cells.append({"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)})


def _code(code: str, cells: list[dict[str, Any]]) -> None:
    source = code.strip("\n").splitlines(keepends=True)
    cells.append({"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source})


def main() -> int:
    stale = []
    for name, source in SOURCES.items():
        path, page = pages.ROOT / "examples" / f"{name}.ipynb", pages.ROOT / source
        made = notebook(page.read_text(encoding="utf-8"), page)
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(made, encoding="utf-8")
    print(*stale, sep="\n", end="\n" * bool(stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
