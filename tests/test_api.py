"""The public names: each is documented with arguments, results, errors and an example, and the examples run."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest

import rkr
from rkr.cli import app

NETWORKS = ("lenet", "resnet18", "small_cnn")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PAGE = (pages.ROOT / "docs/reference/api.md").read_text("utf-8")
SHOWN = set(re.findall(r"\.\. auto(?:method|property):: (\w+)$", PAGE, re.MULTILINE))
# In this order: the later ones use what the earlier ones have made.
USES_FILES = ("load_learner", "results", "learn", "open", "Zoo")


def documented(name: str) -> Any:
    found = getattr(rkr, name)
    return type(found) if name == "register" else found


def missing(function: Any) -> list[str]:
    """The arguments, and "Returns", that the docstring of a function leaves out."""
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    named = [p for p in signature.parameters if p != "self" and not re.search(rf"^    {p}: ", text, re.MULTILINE)]
    returns = signature.return_annotation != "None" and not re.search(r"^Returns:$", text, re.MULTILINE)
    return named + ["Returns"] * returns


@pytest.fixture(scope="module")
def here() -> Iterator[Path]:
    """A folder with drawn pictures."""
    with pages.in_empty_folder() as folder, pages.photos(), pages.small():
        yield folder


def run_examples(found: Any, name: str) -> None:
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(found) or "", {"__name__": "__main__"}, name, None, 0)
    assert test.examples, f"rkr.{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in rkr.__all__ if name not in ("networks", *USES_FILES)])
def test_examples(name: str, here: Path) -> None:
    if name.startswith("export"):
        pytest.importorskip("onnxruntime")
    run_examples(documented(name), name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_examples_of_networks(name: str) -> None:
    run_examples(getattr(rkr.networks, name), name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
def test_examples_that_use_runs_and_pictures(here: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("efficientnet_lite_pytorch")
    app(["run", "digits", "--method", "finetune", "--epochs", "1", "--no-figures"], standalone_mode=False)
    for name in USES_FILES:
        run_examples(documented(name), name)


@pytest.mark.parametrize("name", [name for name in rkr.__all__ if name not in ("networks", "register")])
def test_docstrings_have_all_parts(name: str) -> None:
    """Functions name every argument, and say what they return and raise; classes name what they hold."""
    found = documented(name)
    text = inspect.getdoc(found) or ""
    assert "Example:" in text
    if inspect.isclass(found):
        assert issubclass(found, Exception) or re.search(r"^(Args|Attributes):", text, re.MULTILINE)
        return
    assert re.search(r"^Raises:$", text, re.MULTILINE)
    assert missing(found) == []


PUBLIC_METHODS = {
    f"{cls.__name__}.{name}": method
    for cls in (rkr.Client, rkr.RectifiedModel, rkr.Zoo, type(rkr.register))
    for name, method in vars(cls).items()
    if inspect.isfunction(method) and (name in SHOWN or cls in (rkr.Client, type(rkr.register))) and name[0] != "_"
}


@pytest.mark.parametrize("name", PUBLIC_METHODS)
def test_methods_name_their_arguments_and_results(name: str) -> None:
    assert missing(PUBLIC_METHODS[name]) == []


def test_the_reference_shows_every_public_name_and_no_other() -> None:
    shown = re.findall(r"\.\. auto(?:function|class|exception|data|module):: rkr\.(\w+)$", PAGE, re.MULTILINE)
    assert sorted(shown) == sorted(rkr.__all__)
    assert {name for name in SHOWN if not hasattr(rkr.RectifiedModel, name) and not hasattr(rkr.Zoo, name)} == set()


def test_the_package_is_typed() -> None:
    assert (Path(rkr.__file__).parent / "py.typed").is_file()
