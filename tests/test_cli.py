"""The command line, as a user sees it: what is printed, where, and with which exit code."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer

import rkr
from rkr.cli import app, complete
from rkr.experiment import recipes
from rkr.experiment.execution import Diverged
from rkr.experiment.recipes.load import recipe_names
from rkr.experiment.recipes.settings import NetworkSettings
from rkr.methods import METHODS, ZERO_SHOT_METHODS
from rkr.methods.describe import about, option_texts
from rkr.registry import datasets, networks
from rkr.report.reproduce import exhibit_names

Command = Callable[..., tuple[int, str, str]]
COMMANDS = (
    *("learn", "predict", "tasks", "serve", "evaluate", "export", "push", "pull"),
    *("demo", "run", "reproduce", "tune", "features", "compare", "queue", "report", "list", "cost"),
)


def test_list_names_all(command: Command) -> None:
    code, out, err = command("list")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    for name in (*recipe_names(), *METHODS, *ZERO_SHOT_METHODS, *networks, *datasets):
        assert any(words[:1] == [name] and len(words) > 1 for words in lines), name
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert titles == ["recipes", "methods", "zero-shot methods", "networks", "datasets"]


def test_list_for_machines(command: Command) -> None:
    code, out, _ = command("list", "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found) == ["recipes", "methods", "zero-shot methods", "networks", "datasets"]
    assert list(found["recipes"]) == recipe_names()
    assert list(found["methods"]) == list(METHODS)
    assert found["datasets"]["mnist"] == datasets["mnist"].description


def test_list_on_a_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = command("list")
    assert code == 0
    assert "\x1b[" in out
    assert all(name in out for name in (*recipe_names(), *METHODS, *ZERO_SHOT_METHODS, *networks, *datasets))


@pytest.mark.parametrize(
    ("words", "percent", "total"),
    [
        (("resnet18", "--rank", "2"), "0.5426", "105.43"),
        (("resnet18", "--rank", "2", "--classes", "100", "--tasks", "1"), "0.5426", "100.54"),
        (("resnet18", "--rank", "8", "--tasks", "1"), "1.7854", "101.79"),
        (("resnet18", "--method", "rkr-k4", "--tasks", "1"), "0.9569", "100.96"),
        (("resnet18", "--stem", "imagenet", "--classes", "1000", "--tasks", "1"), "0.5254", "100.53"),
        (("lenet",), "0.4292", "104.29"),
        (("lenet", "--method", "rkr-lite"), "0.0734", "100.73"),
        (("lenet", "--method", "rectify-only"), "0.3795", "103.80"),
        (("lenet", "--method", "scale-only"), "0.0497", "100.50"),
        (("cada-vae", "--tasks", "4"), "3.2796", "113.12"),
        (("cada-vae", "--tasks", "4", "--method", "rkr-k4"), "0.8572", "103.43"),
        (("cada-vae", "--tasks", "4", "--rank", "32"), "6.5095", "126.04"),
        (("cada-vae", "--tasks", "3", "--input", "1280"), "4.5081", "113.52"),
    ],
)
def test_cost(command: Command, words: tuple[str, ...], percent: str, total: str) -> None:
    code, out, err = command("cost", *words)
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[5] == percent
    assert f" {total} %" in out
    assert "multiply-adds" in out


def test_cost_for_machines(command: Command) -> None:
    code, out, _ = command("cost", "lenet", "--tasks", "2", "--input", "3,32,32", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["network"] == 3_038_110
    assert [task["rectification"] for task in found["tasks"]] == [11_530, 11_530]
    assert found["multiply_adds"]["network"] == 10_946_000
    assert found["total_percent"] == pytest.approx(100 + 2 * found["percent"])


@pytest.mark.parametrize(
    ("method", "percent"),
    [("ccll", "100.70"), ("pgn", "170.73"), ("hnet", "97.53"), ("separate", "1000.00"), ("apd", None), ("icarl", None)],
)
def test_cost_of_other_methods(command: Command, method: str, percent: str | None) -> None:
    """After ten tasks; where training decides on the size, that is said."""
    words = ("resnet32", "--classes", "60", "--tasks", "6") if method == "hnet" else ("lenet",)
    code, out, err = command("cost", *words, "--method", method)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    if percent is None:
        before = "this is before it" if method == "apd" else "this is with a full memory"
        assert lines[-1] == f"training decides on the size of {method}: {before}"
        assert lines[-3].split()[2] == ("100.00" if method == "icarl" else "100.42")
    else:
        assert lines[-2].split()[2] == percent
    found = json.loads(command("cost", *words, "--method", method, "--json")[1])
    assert len(found["after"]) == int(lines[-2 if percent else -3].split()[0])
    assert found["after"][-1]["network"] == (467_404 if method == "hnet" else 3_038_110)


@pytest.mark.parametrize(
    ("method", "percent"),
    [
        ("base", "100.00"),
        ("sft", "100.00"),
        ("l1", "100.00"),
        ("l2", "100.00"),
        ("lzsl", "100.00"),
        ("original", "400.00"),
    ],
)
def test_cost_of_zero_shot_methods(command: Command, method: str, percent: str) -> None:
    """Of the encoder of images, after four tasks: as in the paper's table."""
    code, out, err = command("cost", "cada-vae", "--tasks", "4", "--method", method)
    assert (code, err) == (0, "")
    assert out.splitlines()[-2].split()[2] == percent
    assert "3,396,248 parameters" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("lenett",),
            "rkr: no network is called 'lenett'; did you mean 'lenet'? Choose one of cada-vae, digits-net,",
        ),
        (("lenet", "--rank", "0"), "rkr: rank must be at least 1, not 0"),
        (("lenet", "--tasks", "3"), "rkr: --tasks: 100 classes cannot be divided into 3 tasks of equal size"),
        (("lenet", "--tasks", "0"), "rkr: --tasks must be at least 1, not 0"),
        (("lenet", "--classes", "0"), "rkr: classes must be at least 1, but is 0."),
        (("lenet", "--stem", "cifar"), "rkr: stem: lenet has no such option; choose one of name, head, classes"),
        (("resnet18", "--stem", "big"), 'rkr: stem: must not be "big"; choose one of cifar, imagenet'),
        (("lenet", "--input", "3,a"), "rkr: --input must be a shape such as 3,32,32, not '3,a'"),
        (("lenet", "--input", "1,28,28"), "rkr: the network does not run on an input of shape (1, 28, 28)"),
        (("lenet", "--method", "rkr-lit"), "rkr: --method: no method is called 'rkr-lit'; did you mean 'rkr-lite'?"),
        (("lenet", "--method", "joint", "--rank", "2"), "rkr: --rank: joint has no rank"),
        (
            ("cada-vae", "--method", "ewc"),
            "rkr: --method: no method is called 'ewc'; choose one of base, l1, l2, lzsl, ",
        ),
        (("cada-vae", "--method", "ridge"), "rkr: --method: attributes decide on the size of ridge, not the network"),
    ],
)
def test_errors_are_one_line(command: Command, words: tuple[str, ...], said: str) -> None:
    code, out, err = command("cost", *words)
    assert (code, out) == (2, "")
    assert err.startswith(said)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--order=--5",), "rkr: no order '--5'; give a seed (0, 1, ...)"),
        (("--order", "²"), "rkr: no order '²'; give a seed (0, 1, ...)"),
        (("--seed", "²"), "rkr: --seed: a seed is an integer of at least 0, not '²'"),
        (("--precision", "16-mixed"), "rkr: --precision must be one of 32-true, bf16-mixed, not '16-mixed'"),
    ],
)
def test_errors_of_run(command: Command, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    code, out, err = command("run", "digits", "--out", str(tmp_path), *words)
    assert (code, out) == (2, "")
    assert err.startswith(said)
    assert err.count("\n") == 1


def test_several_recipes(command: Command, tmp_path: Path) -> None:
    """One after the other, but all are read before the first is run."""
    other = tmp_path / "other.toml"
    other.write_text((Path(recipes.__file__).parent / "digits.toml").read_text())
    words = ("--method", "finetune", "--epochs", "1", "--limit", "4", "--threads", "1", "--no-figures", "--out")
    code, out, err = command("run", "digits", str(other), *words, str(tmp_path / "out"))
    assert (code, err) == (0, "")
    for name in ("digits", "other"):
        assert f"results and model in {tmp_path / 'out' / f'{name}-1-epochs-limit-4'}" in out.replace("\n", "")
    code, _, err = command("run", "digits", "nothing", *words, str(tmp_path / "none"))
    assert code == 2
    assert "nothing" in err
    assert not (tmp_path / "none").exists()


def test_what_came_out_is_shown_though_a_run_diverged(command: Command, tmp_path: Path) -> None:
    """Its tables and figures first, then the error, with an exit code of its own."""
    text = (Path(recipes.__file__).parent / "digits.toml").read_text()
    wild = tmp_path / "wild.toml"
    wild.write_text(text + '\n[methods.wild]\nlearner = "lwf"\nstrength = 1e30\n')
    words = ("--method", "wild,finetune", "--epochs", "4", "--limit", "8", "--threads", "1")
    code, out, err = command("run", str(wild), *words, "--out", str(tmp_path / "out"))
    assert code == 3
    assert err.startswith("rkr: wild fixed: training diverged")
    assert "finetune fixed: results and model in" in out
    assert "wild fixed: results" not in out
    assert list((tmp_path / "out").rglob("accuracy_over_tasks.png"))


def test_divergence_has_an_exit_code_of_its_own(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_plan(*arguments: object) -> bool:
        raise Diverged("far off")

    monkeypatch.setattr("rkr.experiment.runner.run_plan", run_plan)
    assert command("run", "digits", "--out", str(tmp_path)) == (3, "", "rkr: far off\n")


def test_version_and_help(command: Command) -> None:
    assert command("--version") == (0, f"rkr {rkr.__version__}\n", "")
    code, out, _ = command("--help")
    assert code == 0
    assert "list" in out
    assert "cost" in out


def sentences(shown: str) -> list[str]:
    """The help texts of a help page, one per option, without borders, names and defaults."""
    found: list[str] = []
    for line in shown.splitlines():
        if line.startswith("│"):
            *names, text = [cell for cell in re.split(r"  +", line.strip("│ ")) if cell]
            if names:
                found.append(text)
            else:
                found[-1] += f" {text}"
    return [re.sub(r" \[(default: .*|required)\]", "", text) for text in found]


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS)])
@pytest.mark.parametrize("terminal", [False, True])
def test_help_is_whole_at_80_columns(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if terminal:
        monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", True)
    code, out, err = command(*words, "--help")
    assert (code, err) == (0, "")
    assert ("\x1b[" in out) == terminal
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert max(map(len, plain.splitlines())) <= 80
    usage, _, rest = plain.lstrip().partition("\n")
    assert usage.startswith(" ".join(["Usage: rkr", *words]))
    assert "…" not in plain
    assert "..." not in rest
    assert not re.search("[\U0001f000-\U0001ffff]", rest)  # rich makes an emoji of :100:
    texts = sentences(plain)
    assert len(texts) > (len(COMMANDS) if not words else 1)
    assert all(re.fullmatch(r"[A-Z0-9].*\.", text) for text in texts), texts


def test_help_has_every_command(command: Command) -> None:
    _, out, _ = command("--help")
    assert re.findall(r"^│ ([a-z]+) ", out, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_the_help_are_valid(command: Command, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every example is parsed as the command would; recipes, methods, networks and exhibits in it exist."""
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = command(name, "--help")
    examples = [line.strip() for line in out.partition("Example")[2].splitlines() if "rkr " in line]
    assert examples
    group = typer.main.get_command(app)
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])
        words = words[words.index("rkr") + 1 :]
        assert words[0] == name
        chosen = group.get_command(group.make_context("rkr", list(words), resilient_parsing=True), name)  # type: ignore[attr-defined]
        given = chosen.make_context(name, words[1:]).params
        known = {
            "recipes": recipe_names(),
            "recipe": recipe_names(),
            "network": list(networks),
            "method": [*METHODS, *ZERO_SHOT_METHODS],
            "exhibit": exhibit_names(),
        }
        for key, names in known.items():
            value = given.get(key)
            for one in value.split(",") if isinstance(value, str) else value or ():
                assert one in names


def in_a_process(code: str, **environment: str) -> str:
    source = str(Path(rkr.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "PYTHONPATH": source, **environment},
    ).stdout


HEAVY = """
import atexit, sys
atexit.register(lambda: print("imported:", sorted({"torch", "numpy", "matplotlib"} & set(sys.modules))))
from rkr.cli import main
"""


@pytest.mark.parametrize("words", ["--help", "run --help", "--version"])
def test_help_imports_nothing_heavy(words: str) -> None:
    out = in_a_process(f"{HEAVY}sys.argv = ['rkr', *{words.split()!r}]\nmain()")
    assert out.splitlines()[-1] == "imported: []"


def test_only_training_imports_what_trains() -> None:
    """Together they take longer to import than torch."""
    slow = {"lightning_fabric", "torch._dynamo"}
    code = f"import sys, rkr.experiment.run, rkr.serve.app; print({slow} & set(sys.modules))"
    assert in_a_process(code) == "set()\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rkr cost resnet", ["resnet18", "resnet32"]),
        ("rkr run cifar100-", ["cifar100-lenet", "cifar100-resnet18", "cifar100-resnet18-narrow"]),
        ("rkr run digits --method finetune,rkr-k", [f"finetune,rkr-k{k}" for k in (1, 32, 4, 8)]),
        ("rkr reproduce table-l", ["table-lenet"]),
        ("rkr tune digits --method ew", ["ewc"]),
        ("rkr list icar", ["icarl"]),
    ],
)
def test_shell_completion(line: str, expected: list[str]) -> None:
    """As bash asks for it, and without torch."""
    asked = {"_RKR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    out = in_a_process(f"{HEAVY}main()", **asked)
    assert out.splitlines() == [*expected, "imported: []"]


def test_completion_knows_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert complete.method("") == sorted({*METHODS, *ZERO_SHOT_METHODS})
    assert complete.networks("") == list(networks)
    assert complete.recipes("") == recipe_names()
    assert complete.exhibits("") == exhibit_names()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.toml").touch()
    (tmp_path / "mine" / "notes.txt").touch()
    assert complete.recipes("mi") == ["mine/"]
    assert complete.recipes("mine/") == ["mine/own.toml"]
    assert complete.recipes("nowhere/") == []


def test_completion_can_be_installed(command: Command) -> None:
    _, out, _ = command("--help")
    assert "--install-completion" in out
    assert "--show-completion" in out


def test_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rkr", "cost", "nothing"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("rkr: no network is called 'nothing'")
    assert "Traceback" not in done.stderr


def test_a_method_is_listed_with_all_its_options(command: Command) -> None:
    code, out, _ = command("list", "pc")
    assert code == 0
    assert "\n  strength = 100.0\n      λ.\n" in out
    assert '\n  bn = "per_task"\n      Of the knowledge base: Batch normalisation: ' in out  # from the base class
    assert out.rstrip().endswith("`rkr tune` tries strength = 1, 10, 100, 1000, 10000.")
    code, out, _ = command("list", "rkr", "--json")
    both = json.loads(out)
    assert (both["images"]["rank"], both["zero-shot tasks"]["rank"]) == (2, 16)
    code, out, _ = command("list", "digits")
    assert out.rstrip() == (Path(recipes.__file__).parent / "digits.toml").read_text().rstrip()
    code, _, err = command("list", "ewcc")
    assert code == 2
    assert err.startswith("rkr: no method, recipe, network or dataset 'ewcc'; did you mean 'ewc'?")


def test_every_option_of_every_method_is_explained() -> None:
    for methods in (METHODS, ZERO_SHOT_METHODS):
        for name, method in methods.items():
            texts = option_texts(method)
            assert about(method), name
            assert all(len(text) > 1 and "`OneNetwork`" not in text for _, text in texts.values()), name


def test_a_second_ctrl_c_says_how_to_go_on(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("rkr.experiment.runner.run_plan", stopped)
    code, out, err = command("demo", "--out", str(tmp_path))
    assert (code, err) == (130, "")
    assert out.splitlines()[-1] == "Interrupted. Run the same command to resume from the last saved state."
    code, out, _ = command("demo", "--out", str(tmp_path), "--json")
    assert (code, out) == (130, "")


@pytest.mark.parametrize("name", networks)
def test_list_of_a_network(command: Command, name: str) -> None:
    """All that a recipe can set, with values that a recipe takes."""
    code, out, _ = command("list", name, "--json")
    arguments = json.loads(out)["network"]
    assert code == 0
    assert isinstance(NetworkSettings.checked({"name": name, **arguments}).build(), torch.nn.Module)
    code, out, _ = command("list", name)
    assert out.splitlines()[0] == f"{name}: {networks[name].summary}"
    assert [line.split()[0] for line in out.splitlines()[-len(arguments) :]] == list(arguments)


def test_list_of_a_dataset(command: Command) -> None:
    code, out, _ = command("list", "digits")  # the recipe of this name
    assert out.startswith("title = ")
    code, out, _ = command("list", "folder")
    assert code == 0
    assert out.startswith("folder: any folder of class folders, with train/ and test/ or cut by a seed\n\nLoad images")
    assert out.endswith("  path = null\n  size = 224\n  resident = false\n  test = 0.2\n  seed = 0\n  name = null\n")
    code, out, _ = command("list", "cifar100", "--json")
    assert json.loads(out) == {"dataset": {}}
