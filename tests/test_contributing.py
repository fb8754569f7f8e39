"""The recipes of CONTRIBUTING.md, followed literally on a copy of the package."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import rkr

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = re.findall(r"^### (.*?)\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code, and the line of text above it."""

    said: str
    kind: str
    code: str


def blocks(section: str) -> list[Block]:
    found: list[Block] = []
    said = ""
    lines = iter(section.splitlines())
    for line in lines:
        if line.startswith("```"):
            code = "".join(f"{inside}\n" for inside in itertools.takewhile(lambda inside: inside != "```", lines))
            found.append(Block(said, line[3:], code))
        elif line:
            said = line
    return found


def put(root: Path, said: str, code: str) -> Path:
    """Do what the line above a block says: write a file, or add to one."""
    path = root / re.findall(r"`([\w./]+\.\w+)`", said)[-1]
    if table := re.match(r"Add to `(\w+)`", said):
        text, found = re.subn(
            rf"^({table[1]} = [({{].*\n)", lambda match: match[0] + code, path.read_text(), flags=re.M
        )
        assert found == 1, said
        path.write_text(text)
    elif said.startswith("Add to the end of the commands"):
        start, last, rest = path.read_text().rpartition("\n_add(")
        line, _, rest = rest.partition("\n")
        path.write_text(f"{start}{last}{line}\n{code}{rest}")
    elif said.startswith("Add to the end of"):
        path.write_text(f"{path.read_text()}\n\n{code}")
    else:
        assert re.search(r"`[\w./]+`:$", said), said
        path.write_text(code)
    return path


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy of the package with all additions, and what each command and script printed."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(Path(rkr.__file__).parent, root / "src" / "rkr", ignore=shutil.ignore_patterns("__pycache__"))
    asked: list[list[str]] = []
    for _, section in SECTIONS:
        for block in blocks(section):
            if block.kind != "console":
                path = put(root, block.said, block.code)
                if path.parent == root and path.suffix == ".py":
                    asked.append([path.name])
                continue
            asked += [shlex.split(line[2:]) for line in block.code.splitlines() if line.startswith("$ ")]
    (root / "all.json").write_text(json.dumps(asked))
    script = """
        import contextlib, io, json, runpy, sys
        from rkr.cli import app
        said = {}
        for words in json.load(open("all.json")):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                if words[0] == "rkr":
                    app(words[1:], standalone_mode=False)
                else:
                    runpy.run_path(words[0], run_name="__main__")
            said[" ".join(words)] = out.getvalue()
        print(json.dumps(said))
    """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in script.splitlines())],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
    )
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout.splitlines()[-1])


def test_every_kind_of_addition_has_a_recipe() -> None:
    kinds = ["method", "network", "dataset", "kind of layer", "metric", "chart", "command"]
    assert [title for title, _ in SECTIONS] == [f"A {kind}" for kind in kinds]
    assert all(blocks(section) for _, section in SECTIONS)


def test_commands_print_what_the_page_says(followed: tuple[Path, dict[str, str]]) -> None:
    _, said = followed
    for _, section in SECTIONS:
        for block in blocks(section):
            if block.kind == "console":
                command, _, output = block.code.partition("\n")
                assert output.strip() in said[command.removeprefix("$ ")], command


def test_what_was_added_works(followed: tuple[Path, dict[str, str]]) -> None:
    """The run learns, its metric is the minimum of its matrix, and report, figures and adapter have what was added."""
    root, said = followed
    lines = (root / "runs" / "mine" / "smooth" / "fixed" / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    last = next(row for row in reversed(rows) if row["event"] == "task")
    accuracies = last["accuracy"]
    assert min(accuracies) > 0.9
    compared = json.loads(said["rkr compare runs/mine/smooth runs/mine/finetune --json"])
    assert f'"worst": {{"mean": {100 * min(accuracies)}' in json.dumps(compared)
    page = (root / "report" / "index.html").read_text()
    assert 'data-chart="worst"' in page
    assert "Worst task" in page
    assert list((root / "report").rglob("*final_accuracies.svg"))
    assert said["my_layers.py"] == "28 numbers in LM and RM\n"


def test_additions_are_typed_like_the_package() -> None:
    """What goes into the package parses, and has a docstring where it is a file."""
    for title, section in SECTIONS:
        for block in blocks(section):
            if block.kind == "python" and block.said.startswith("`src/"):
                assert ast.get_docstring(ast.parse(block.code)), title


@pytest.mark.parametrize("file", ["benchmarks/avalanche.txt", "tests/vision.txt"])
def test_separate_installations_have_the_pinned_versions(file: str) -> None:
    """pip gets both files at once, and installs nothing if they differ."""

    def versions(path: str) -> dict[str, str]:
        return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / path).read_text(), re.MULTILINE))

    pinned, own = versions("constraints.txt"), versions(file)
    assert {name: version for name, version in own.items() if pinned.get(name, version) != version} == {}
    assert own
