"""Runs the code on the pages of the documentation, and puts what it prints into them.

python tools/pages.py docs/start/concepts.md             # check: the code runs, and prints what the page says
python tools/pages.py --write docs/start/concepts.md     # replace outputs that are out of date
python tools/pages.py --figures docs/start/concepts.md   # also where only figures that may vary differ

A page is one session in an empty folder. Its blocks run from top to bottom:

* ```python``` is executed. A ```text``` block right after it is what it prints.
* ```console``` has commands after "$ ", each followed by what it prints. `rkr serve ... &` is answered until the page
  ends, at a free port, which the page calls 8000.
* A block below a line that ends in a file's name, such as "`mine.toml`:", is written to that file.
* ```toml``` and ```json``` are parsed, ```text``` is for people. There are no other kinds.

"..." in an output stands for anything. HTML comments say what is different:

    <!-- not run: takes hours -->       above a block: its syntax is checked, and the options of its commands
    <!-- figures vary -->               above a block: numbers in its output may differ
    <!-- page: slow, photos, small -->  at the top of a page: run by `make test-slow`; begin with drawn pictures;
                                        new zoos see them at 64 pixels
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
KINDS = ("python", "console", "toml", "json", "text", "mermaid")
FENCE = re.compile(r"^( *)(```+)\s*([\w-]*)$")
FILE = re.compile(r"`([\w./-]+\.\w+)`:$")
PAGE = re.compile(r"^<!-- page: (.*?) -->$", re.MULTILINE)
NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
PROGRESS = re.compile(r"^.*, epoch \d+/\d+: loss .* left\n", re.MULTILINE)  # shown when an epoch takes long
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
SHELL = ("cat", "cp", "curl", "head", "ls", "mkdir", "mv", "rm")
SERVED = "127.0.0.1:8000"
WIDTH = "110"


@dataclass
class Block:
    """A block of code and what is said above it."""

    kind: str
    lines: list[str]
    at: int  # index of its first line in the page
    above: list[str] = field(default_factory=list)  # comments that belong to it
    file: str | None = None

    @property
    def code(self) -> str:
        """Its text."""
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def why_not(self) -> str | None:
        """The reason why it is not run."""
        found = [match[1] for line in self.above if (match := NOT_RUN.match(line))]
        return found[0] if found else None

    @property
    def varies(self) -> bool:
        """Whether numbers in its output differ between machines."""
        return "<!-- figures vary -->" in self.above


@dataclass(frozen=True)
class Problem:
    """What is wrong with a page, and where."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def blocks(text: str) -> list[Block]:
    """The blocks of code of a page, directives left out."""
    found: list[Block] = []
    lines = text.splitlines()
    comments: list[str] = []
    said = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        if match := FENCE.match(line):
            indent, ticks, kind = match.groups()
            end = next(n for n in range(at + 1, len(lines)) if lines[n] == indent + ticks)
            inside = [each[len(indent) :] for each in lines[at + 1 : end]]
            name = FILE.search(said)
            found.append(Block(kind, inside, at + 1, comments, name[1] if name else None))
            at, comments, said = end + 1, [], ""
            continue
        if re.match(r"^ *(```+|:::+)\{", line):  # a directive: its content is no code of ours
            ticks = re.match(r"^ *([`:]+)", line)[1]  # type: ignore[index]
            if ticks[0] == "`":
                at = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == ticks)
        elif line.startswith("<!--"):
            comments = [*comments, line]
        elif line.strip():
            comments, said = [], line
        at += 1
    return found


def marks(text: str) -> set[str]:
    """What is said of the whole page."""
    found = PAGE.search(text)
    return {part.strip() for part in found[1].split(",")} if found else set()


def matches(expected: str, printed: str, varies: bool = False) -> bool:
    """Whether an output is what a page shows. "..." stands for anything."""
    expected, printed = (
        "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) for text in (expected, printed)
    )
    if varies:
        expected, printed = (re.sub(r"[ ─━╺╸]+", " ", NUMBER.sub("0", text)) for text in (expected, printed))
    pattern = re.escape(expected).replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def check_command(line: str) -> str | None:
    """Why a command that is not run is wrong: `rkr` has no such command, or the command no such option."""
    from typer.main import get_command

    from rkr.cli import app

    words = shlex.split(line.replace("...", "x"), comments=True)
    if "rkr" not in words[:8] or words[0] not in ("rkr", "torchrun", "srun", "RKR_DATA=DATA"):
        return None
    words = words[words.index("rkr") + 1 :]
    words = list(itertools.takewhile(lambda word: word not in (">", "|", "&", "&&"), words))
    group: Any = get_command(app)
    if words and words[0].startswith("-"):
        return None
    command = group.commands.get(words[0]) if words else None
    if command is None:
        return f"there is no command `rkr {words[0] if words else ''}`"
    try:
        command.make_context(words[0], words[1:])
    except Exception as error:  # of the copy of click that typer brings
        if hasattr(error, "format_message"):
            return f"`{line}`: {error.format_message()}"
    return None


class Session:
    """Runs the blocks of one page in the current folder."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.scope: dict[str, Any] = {"__name__": "__main__"}
        self.stack = stack
        self.served = SERVED

    def python(self, code: str) -> str:
        """What a block of Python prints."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code.replace(SERVED, self.served), "<page>", "exec"), self.scope)
        return out.getvalue().replace(self.served, SERVED)

    def command(self, line: str) -> tuple[str, int]:
        """What a command prints, and its exit code. Errors count where it fails."""
        out, code = self._command(line.replace(SERVED, self.served))
        return out.replace(self.served, SERVED), code

    def _command(self, line: str) -> tuple[str, int]:
        words = shlex.split(line, comments=True)
        if words[:2] == ["rkr", "serve"] and words[-1] == "&":
            return self._serve(words[2:-1])
        if words[0] == "rkr" and not {">", "|"} & set(words):
            return self._rkr(words)
        if words[0] in ("python", "rkr", *SHELL):
            line = re.sub(r"^python\b", shlex.quote(sys.executable), line)
            line = re.sub(r"^rkr\b", f"{shlex.quote(sys.executable)} -m rkr", line)
            done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=900, check=False)
            return done.stdout + (done.stderr if done.returncode else ""), done.returncode
        raise ValueError(f"commands of pages begin with rkr, python or one of {', '.join(SHELL)}: {line}")

    def _serve(self, words: list[str]) -> tuple[str, int]:
        import rkr

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.served = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [sys.executable, "-m", "rkr", "serve", *words, "--port", str(port), "--threads", "1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.stack.callback(process.wait)
        self.stack.callback(process.terminate)
        while not rkr.Client(f"http://{self.served}").ready():
            if process.poll() is not None:
                raise RuntimeError(f"rkr serve {shlex.join(words)} ended with exit code {process.returncode}")
            time.sleep(0.1)
        return "", 0

    def _rkr(self, words: list[str]) -> tuple[str, int]:
        from rkr import cli

        before, out, err = sys.argv, io.StringIO(), io.StringIO()
        code: object = 0
        sys.argv = words
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    cli.main()
                except SystemExit as stopped:
                    code = stopped.code or 0
        finally:
            sys.argv = before
        status = code if isinstance(code, int) else 1
        return PROGRESS.sub("", out.getvalue()) + (err.getvalue() if status else ""), status


def run(text: str, name: str, figures: bool = False) -> tuple[list[Problem], str]:
    """Run a page in an empty folder.

    Args:
        text: The page.
        name: Its name, for messages.
        figures: Whether to replace outputs in which only figures differ that may vary.

    Returns:
        What is wrong with it, and the page with the outputs as they are.
    """
    problems: list[Problem] = []
    lines = text.splitlines()
    changes: list[tuple[int, int, list[str]]] = []  # first line, last line, what comes in their place
    with in_empty_folder(), contextlib.ExitStack() as prepared:
        for mark in sorted(marks(text) - {"slow"}):
            prepared.enter_context(PREPARE[mark]())
        session = Session(prepared)
        printed: tuple[Block, str] | None = None
        for block in blocks(text):
            try:
                if block.kind not in KINDS:
                    raise ValueError(f"a block must be one of {', '.join(KINDS)}, not {block.kind!r}")
                if (
                    block.kind == "text"
                    and printed is not None
                    and block.at - printed[0].at - len(printed[0].lines) < 5
                ):
                    same = matches(block.code, printed[1], block.varies)
                    if not same:
                        problems.append(Problem(name, block.at + 1, f"prints now:\n{printed[1]}"))
                    if not same or (figures and block.varies):
                        changes.append((block.at, block.at + len(block.lines), printed[1].rstrip().splitlines()))
                    printed = None
                    continue
                printed = _run_block(block, session, name, problems, changes, figures)
            except Exception as error:
                where = "".join(traceback.format_exception(error)[-3:])
                problems.append(Problem(name, block.at + 1, f"{type(error).__name__}: {error}\n{where}"))
                printed = None
    for first, last, new in reversed(changes):
        lines[first:last] = new
    return problems, "\n".join(lines) + "\n"


def _run_block(
    block: Block,
    session: Session,
    name: str,
    problems: list[Problem],
    changes: list[tuple[int, int, list[str]]],
    figures: bool,
) -> tuple[Block, str] | None:
    if block.file is not None:
        path = Path(block.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code, encoding="utf-8")
    if block.kind == "toml":
        tomllib.loads(block.code)
    elif block.kind == "json":
        json.loads(block.code)
    elif block.kind == "python" and (block.file is not None or block.why_not is not None):
        compile(block.code, name, "exec")
    elif block.kind == "python":
        return block, session.python(block.code)
    elif block.kind == "console":
        for at, command, shown in _commands(block):
            if block.why_not is not None:
                if wrong := check_command(command):
                    problems.append(Problem(name, at + 1, wrong))
                continue
            out, code = session.command(command)
            same = matches(shown, out, block.varies)
            if not same:
                problems.append(Problem(name, at + 1, f"`{command}` (exit code {code}) prints now:\n{out}"))
            if not same or (figures and block.varies):
                changes.append((at + 1, at + 1 + shown.count("\n"), out.rstrip().splitlines()))
    return None


def _commands(block: Block) -> Iterator[tuple[int, str, str]]:
    """Line, command and shown output of each command. A backslash at its end continues a command."""
    starts = [n for n, line in enumerate(block.lines) if line.startswith("$ ")]
    if starts[:1] != [0]:
        raise ValueError('a block of commands begins with "$ "')
    for start, end in itertools.pairwise([*starts, len(block.lines)]):
        command, first = block.lines[start][2:], start
        while command.endswith("\\"):
            first += 1
            command = command[:-1] + block.lines[first].strip()
        yield block.at + first, command, "".join(f"{line}\n" for line in block.lines[first + 1 : end])


@contextlib.contextmanager
def in_empty_folder() -> Iterator[Path]:
    """Work in a new folder. What is imported from it or registered, and changes of the environment, go again."""
    from rkr import registry

    tables: list[registry.Names[Any]] = [*registry.METHODS.values(), registry.networks, registry.datasets]
    registered = [dict(table._others) for table in tables]
    before, modules, environment, path = os.getcwd(), set(sys.modules), dict(os.environ), list(sys.path)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, os.getcwd())
        os.environ.update(COLUMNS=WIDTH, NO_COLOR="1", TERM="dumb")
        try:
            yield Path(folder)
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:] = path
            for table, known in zip(tables, registered, strict=True):
                table._others = known
            for key in set(sys.modules) - modules:
                if str(getattr(sys.modules[key], "__file__", "") or "").startswith(os.path.realpath(folder)):
                    del sys.modules[key]


@contextlib.contextmanager
def photos() -> Iterator[None]:
    """Drawn pictures in class folders."""
    runpy.run_path(str(ROOT / "examples" / "draw_pictures.py"))["draw"](Path("photos"))
    yield


@contextlib.contextmanager
def small() -> Iterator[None]:
    """New zoos see pictures at 64 pixels, to be quick."""
    from rkr.pictures import backbones

    before, backbones.DEFAULT_SIZE = backbones.DEFAULT_SIZE, 64
    try:
        yield
    finally:
        backbones.DEFAULT_SIZE = before


PREPARE: Mapping[str, Callable[[], contextlib.AbstractContextManager[None]]] = {"photos": photos, "small": small}


def pages() -> list[Path]:
    """README and all pages of docs that are written by hand."""
    made = {ROOT / "docs/results/results.md", ROOT / "docs/results/reproduction.md"}
    return [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in made)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="default: all")
    parser.add_argument("--write", action="store_true", help="replace outputs that are out of date")
    parser.add_argument("--figures", action="store_true", help="also where only figures differ that may vary")
    arguments = parser.parse_args()
    wrong = 0
    for page in arguments.pages or pages():
        text = page.read_text(encoding="utf-8")
        problems, current = run(text, str(page), arguments.figures)
        print(*problems, sep="\n", end="\n" * bool(problems), flush=True)
        wrong += len(problems)
        if (arguments.write or arguments.figures) and current != text:
            page.write_text(current, encoding="utf-8")
            print(f"{page}: written")
    return 1 if wrong and not (arguments.write or arguments.figures) else 0


if __name__ == "__main__":
    sys.exit(main())
