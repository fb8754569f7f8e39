"""The documentation: its code runs and prints what it says, its links lead somewhere, its words are spelt."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pages
import pictures
import pytest

ROOT = pages.ROOT
ELSEWHERE = {
    "docs/project/contributing.md": "tests/test_contributing.py",
    "docs/project/changelog.md": "has no code",
}
PAGES = [page for page in pages.pages() if str(page.relative_to(ROOT)) not in ELSEWHERE]
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
IMAGE = re.compile(r"^```\{image\} (\S+)$", re.MULTILINE)
MARKDOWN = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - set((ROOT / "docs/_build").rglob("*.md")))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=[pytest.mark.slow] if "slow" in pages.marks(page.read_text("utf-8")) else [], id=name(page)
        )
        for page in PAGES
    ],
)
def test_the_code_of_a_page_runs(page: Path) -> None:
    text = page.read_text("utf-8")
    if "$ curl" in text and shutil.which("curl") is None:
        pytest.skip("needs curl")
    problems, _ = pages.run(text, name(page))
    assert not problems, "\n\n".join(map(str, problems)) + "\n\nmake pages puts current outputs into the pages"


@pytest.mark.parametrize("page", ELSEWHERE)
def test_pages_that_are_run_elsewhere(page: str) -> None:
    assert (ROOT / page).is_file()
    if ELSEWHERE[page].endswith(".py"):
        assert (ROOT / ELSEWHERE[page]).is_file()


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", lambda match: match[1] or "", title.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {slug(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", MARKDOWN, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    text = page.read_text("utf-8")
    for link in [*LINK.findall(CODE.sub("", text)), *IMAGE.findall(text)]:
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = page if not path else (page.parent / path)
        made = target.name in ("commands.md", "method-options.md", "api.md")  # headings that directives make
        if not target.exists() or (anchor and target.suffix == ".md" and not made and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs/index.md").read_text("utf-8")
    for page in pages.pages()[1:]:
        path = page.relative_to(ROOT / "docs").with_suffix("")
        assert str(path) == "index" or re.search(rf"^{path}$", index, re.MULTILINE), path


def test_every_extra_is_on_the_page_of_installation() -> None:
    page = (ROOT / "docs/start/install.md").read_text("utf-8")
    extras = pages.tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert [name for name in extras if name not in ("bench", "test") and f"| `{name}` |" not in page] == []


def test_spelling() -> None:
    pytest.importorskip("codespell_lib", reason="needs codespell")
    folders = ["docs", "examples", "src", "tools", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", "--skip", "*.svg,*.png,_build,*.js,*.css,__pycache__", *folders],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.stdout + done.stderr == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(package, reason="needs the extra docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, "docs", str(tmp_path / "site")], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "api.html").read_text("utf-8")
    import rkr

    assert [n for n in rkr.__all__ if f'id="rkr.{n}"' not in page and n != "networks"] == []
    assert "in percent of the network: the paper" in page  # the first line of a property, whole
    for file in (tmp_path / "site").rglob("*.html"):  # nothing is loaded from elsewhere
        loaded = re.findall(r'<(?:script|img|link)[^>]*?(?:src|href)="(https?:[^"]*)"', file.read_text("utf-8"))
        assert loaded == [], file


def test_the_drawing_is_that_of_the_script() -> None:
    assert (pictures.IMAGES / "how-it-works.svg").read_text("utf-8") == pictures.how_it_works()


def test_a_recorded_terminal_shows_every_line_and_loads_nothing() -> None:
    svg = pictures.terminal("\x1b[1mfirst\x1b[0m line\nsecond", "title", "rkr demo")
    root = ElementTree.fromstring(svg)
    text = "".join(root.itertext()).replace("\xa0", " ")
    assert all(part in text for part in ("$", "rkr demo", "first", " line", "second"))
    delays = [float(found) for found in re.findall(r"animation-delay:([\d.]+)s", svg)]
    assert delays == sorted(delays)
    for made in (svg, (pictures.IMAGES / "demo.svg").read_text("utf-8")):
        assert "@font-face" not in made
        assert "url(http" not in made


# -- the tool itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "printed", "varies", "same"),
    [
        ("a 1.5", "a 1.5\n", False, True),
        ("a 1.5", "a 1.6\n", False, False),
        ("a 1.5", "a 1,016.25\n", True, True),
        ("a 1.5", "b 1.5\n", True, False),
        ("first\n...\nlast", "first\n2\n3\nlast", False, True),
        ("0.9...", "0.987", False, True),
        ("", "something", False, False),
    ],
)
def test_outputs_are_compared(expected: str, printed: str, varies: bool, same: bool) -> None:
    assert pages.matches(expected, printed, varies) is same


PAGE = """\
Text. `parts.py`:

```python
NUMBER = 4
```

```python
from parts import NUMBER
print(NUMBER)
```

```text
3
```

```console
$ cat parts.py
$ rkr cost nothing
```

<!-- not run: no such option -->
```console
$ rkr run digits --epoks 3
```
"""


def test_a_page_is_one_session_and_stale_outputs_are_replaced() -> None:
    problems, written = pages.run(PAGE, "page.md")
    assert [problem.line for problem in problems] == [13, 17, 18, 23]
    assert "No such option: --epoks" in problems[-1].text
    assert "```text\n4\n```" in written
    assert "$ cat parts.py\nNUMBER = 4\n$ rkr cost nothing\nrkr: " in written
    again, same = pages.run(written, "page.md")
    assert [problem.line for problem in again] == [25]
    assert same == written


SERVER = """\
```console
$ rkr serve --nowhere &
```
"""


def test_a_server_that_does_not_start_is_told() -> None:
    problems, _ = pages.run(SERVER, "page.md")
    assert ["rkr serve --nowhere ended with exit code 2" in problem.text for problem in problems] == [True]


def test_figures_that_vary_are_replaced_if_asked_for() -> None:
    text = "<!-- figures vary -->\n```python\nprint(2)\n```\n\n<!-- figures vary -->\n```text\n1\n```\n"
    assert pages.run(text, "page.md") == ([], text)
    assert pages.run(text, "page.md", figures=True) == ([], text.replace("\n1\n", "\n2\n"))


def test_a_block_of_an_unknown_kind_is_refused() -> None:
    problems, _ = pages.run("```sh\nls\n```\n", "page.md")
    assert "must be one of" in problems[0].text
