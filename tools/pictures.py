"""`make pictures`: everything in docs/images, made by the software that it shows.

python tools/pictures.py [how-it-works] [demo] [report] [server] [headline]
"""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"

# ---------------------------------------------------------------------------------------------------------
# How it works: a drawing

BASE, TASKS, INK, SOFT = "#8d99ae", ("#0072b2", "#d55e00", "#009e73"), "#22303c", "#5c6b7a"
FONT = "font-family='Helvetica, Arial, sans-serif'"


def box(x: float, y: float, w: float, h: float, fill: str, opacity: float = 1.0, radius: float = 4) -> str:
    """A rectangle."""
    return (
        f"<rect x='{x:g}' y='{y:g}' width='{w:g}' height='{h:g}' rx='{radius:g}' fill='{fill}' "
        f"fill-opacity='{opacity:g}'/>"
    )


def words(
    x: float, y: float, text: str, size: float = 15, fill: str = INK, anchor: str = "middle", bold: bool = False
) -> str:
    """A line of text."""
    weight = " font-weight='bold'" if bold else ""
    return (
        f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size:g}' fill='{fill}' "
        f"text-anchor='{anchor}'{weight}>{html.escape(text)}</text>"
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a head at its end."""
    line = f"M{x1:g} {y1:g} L{x2:g} {y2:g}"
    return f"<path d='{line}' stroke='{SOFT}' stroke-width='2' marker-end='url(#head)' fill='none'/>"


def how_it_works() -> str:
    """One layer with its base weight and a task's factors, and the files of a zoo."""
    blue = TASKS[0]
    parts = [
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 960 430' role='img' "
        "aria-label='A frozen network and small files for tasks'>",
        "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0 0 L8 4 L0 8 z' fill='{SOFT}'/></marker></defs>",
        box(0, 0, 960, 430, "#ffffff", radius=8),
        words(300, 36, "One layer, as a task computes with it", 18, bold=True),
        # the equation
        words(52, 168, "input", 15),
        arrow(78, 163, 108, 163),
        box(118, 98, 130, 130, BASE),
        words(183, 160, "W", 26, "#ffffff", bold=True),
        words(183, 184, "frozen", 14, "#ffffff"),
        words(272, 171, "+", 26),
        box(298, 98, 18, 130, blue),
        words(307, 248, "LM", 15, blue, bold=True),
        words(330, 171, "·", 26),
        box(344, 154, 130, 18, blue),
        words(409, 194, "RM", 15, blue, bold=True),
        arrow(486, 163, 516, 163),
        words(534, 171, "×", 24),
        box(552, 98, 14, 130, blue),
        words(559, 248, "F", 15, blue, bold=True),
        arrow(574, 163, 600, 163),
        words(183, 80, "shared by all tasks", 14, SOFT),
        words(386, 80, "rank 2: two thin matrices", 14, SOFT),
        words(559, 80, "scale", 14, SOFT),
        words(300, 300, "Only the blue parts are trained for a task, with a head of its own.", 15, SOFT),
        words(300, 324, "For a ResNet-18 they are half a percent of the network.", 15, SOFT),
        words(300, 372, "Nothing that an old task computes with ever changes:", 16, INK, bold=True),
        words(300, 396, "its answers stay the same to the last bit.", 16, INK, bold=True),
        f"<path d='M640 24 V406' stroke='{BASE}' stroke-opacity='0.4'/>",
        # the folder
        words(800, 36, "What is stored", 18, bold=True),
        box(676, 62, 248, 112, BASE),
        words(800, 112, "base", 20, "#ffffff", bold=True),
        words(800, 138, "the network, once: 45 MB", 14, "#ffffff"),
    ]
    for n, (name, colour) in enumerate(zip(("birds", "flowers", "cars"), TASKS, strict=True)):
        y = 196 + 58 * n
        parts += [
            box(676, y, 248, 44, colour, 0.12),
            box(676, y, 8, 44, colour, radius=2),
            words(698, y + 28, name, 16, INK, "start", bold=True),
            words(908, y + 28, "0.3 MB", 14, SOFT, "end"),
        ]
    parts += [words(800, 396, "one file for each task, added at any time", 14, SOFT), "</svg>"]
    return "\n".join(parts) + "\n"


# ---------------------------------------------------------------------------------------------------------
# A terminal


def record(command: Sequence[str], folder: Path, width: int = 126) -> str:
    """Run a command, and return what a terminal shows, with its colours."""
    environment = {**os.environ, "COLUMNS": str(width), "FORCE_COLOR": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, cwd=folder, env=environment
    )
    return done.stdout


def terminal(shown: str, title: str, typed: str, width: int = 126, seconds: float = 9.0) -> str:
    """A terminal as an SVG whose lines appear one after the other. It loads nothing: letters are the reader's own."""
    import io

    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(f"[bold green]$[/] [bold]{typed}[/]")
    console.print(Text.from_ansi(shown.rstrip()), soft_wrap=True)
    svg = console.export_svg(title=title, unique_id="rkr")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: Fira Code, monospace", "font-family: Menlo, Consolas, DejaVu Sans Mono, monospace", svg)
    last = max(map(int, re.findall(r"url\(#rkr-line-(\d+)\)", svg)))
    delay = seconds / max(last, 1)

    def line(match: re.Match[str]) -> str:
        later, number = f"animation-delay:{int(match[2]) * delay:.2f}s", match[2]
        return f'<text style="{later}" {match[1]}clip-path="url(#rkr-line-{number})"'

    svg = re.sub(r'<text ([^>]*?)clip-path="url\(#rkr-line-(\d+)\)"', line, svg)
    appear = (
        "@keyframes appear{from{opacity:0}to{opacity:1}}"
        ".rkr-matrix text{animation:appear 0.01s both}"
        "@media (prefers-reduced-motion: reduce){.rkr-matrix text{animation:none}}"
    )
    return svg.replace("</style>", f"{appear}</style>", 1)


def demo(folder: Path) -> str:
    """`rkr demo` in a terminal."""
    return terminal(record([sys.executable, "-m", "rkr", "demo"], folder), "rkr demo", "rkr demo")


# ---------------------------------------------------------------------------------------------------------
# Pages in a browser


def screenshot(
    address: str, into: Path, width: int = 1200, height: int = 1000, wait: str = "body", files: Sequence[Path] = ()
) -> None:
    """A page as a PNG file, in Chromium.

    Args:
        address: The page.
        into: The file.
        width: Of the browser, in pixels.
        height: Of the browser, in pixels.
        wait: A selector of what must be there first.
        files: What is put into its field for files before that.
    """
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        sys.exit("screenshots need Chromium: apt-get install chromium")
    arguments = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=arguments, timeout=120_000)
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        page.goto(address)
        if files:
            page.locator("#files").set_input_files(files)
        page.locator(wait).first.wait_for(state="attached")
        page.screenshot(path=into)
        browser.close()


def report(folder: Path) -> None:
    """The report page of `rkr demo`."""
    page = folder / "runs" / "digits" / "report" / "index.html"
    if not page.exists():
        record([sys.executable, "-m", "rkr", "demo"], folder)
    screenshot(page.absolute().as_uri(), IMAGES / "report.png", height=1560, wait="html[data-ready]")


def server(folder: Path) -> None:
    """The page of `rkr serve`, with two tasks of drawn pictures."""
    record([sys.executable, str(ROOT / "examples" / "draw_pictures.py"), "photos"], folder)
    for source, task in (("colours", "colours"), ("shapes.csv", "shapes")):
        learn = ["learn", f"photos/{source}", "--model", "zoo", "--task", task, "--epochs", "2"]
        record([sys.executable, "-m", "rkr", *learn], folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rkr", "serve", "zoo", "--port", str(port)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(240):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                    break
                time.sleep(0.5)
            new = sorted((folder / "photos" / "new").glob("*.png"))
            address = f"http://127.0.0.1:{port}/"
            screenshot(
                address, IMAGES / "server.png", height=1000, wait="#answers article:nth-of-type(2) .share", files=new
            )
        finally:
            process.terminate()


def headline(_: Path) -> None:
    """The README's figure, and the pages that are made from the same files."""
    subprocess.run(
        [sys.executable, ROOT / "tools/results_page.py", "results", "docs/results/results.md"], cwd=ROOT, check=True
    )


def write(name: str, text: str) -> None:
    """Write an SVG file."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / name).write_text(text, encoding="utf-8")


PICTURES: dict[str, Callable[[Path], None]] = {
    "how-it-works": lambda _: write("how-it-works.svg", how_it_works()),
    "demo": lambda folder: write("demo.svg", demo(folder)),
    "report": report,
    "server": server,
    "headline": headline,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", choices=[*PICTURES, []], help="default: all")
    names = parser.parse_args().pictures or list(PICTURES)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            PICTURES[name](Path(folder))
            print(f"{name}: made", flush=True)


if __name__ == "__main__":
    main()
