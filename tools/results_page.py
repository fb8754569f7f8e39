"""`make results`: docs/results.md from committed result files, so that no number there is typed by hand.

python tools/results_page.py results docs/results.md
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rkr.errors import RkrError, UsageError
from rkr.experiment.recipes import Recipe, load_recipe
from rkr.experiment.results import Result, find_results
from rkr.methods import methods_for
from rkr.report.export import with_deviation
from rkr.report.groups import by_recipe, comparable, flat_options
from rkr.report.summary import NOTHING, Summary, summarise, summary_cells, zero_shot_cells

INTRODUCTION = """\
# Results

Made by `make results` from the files in [results/](../results): no number here is typed by hand. Accuracy is the mean
over all tasks after the last one, in %, the task given; ± is the 95 % interval over orders or seeds where there are
several. Of zero-shot tasks H takes the place of accuracy. `paper` is what the paper prints for its own schedule and 5
orders, `in the paper` the capacity that it prints: copies of the network and stored images, which penalties and
memories need, are in ours and not in that. The other columns are explained in [experiments.md](experiments.md).
"""


def page(results: Sequence[Result]) -> str:
    """The whole page, a section for each recipe (a changed schedule or protocol counts as another)."""
    sections = [INTRODUCTION]
    for name, runs in comparable(results).items():
        sections.append(_section(name, runs))
    return "\n".join(sections)


def _section(name: str, runs: Sequence[Result]) -> str:
    settings = runs[0].settings
    recipe = _recipe(settings)
    training, network = settings["training"], settings["network"]
    momentum = f"momentum {training['momentum']}, " if training["optimizer"] == "sgd" else ""
    seeds = sorted({run.seed for run in runs})
    augment = ", ".join(k if v is True else f"{k} {v}" for k, v in training["augment"].items() if v) or "none"
    lines = [f"## {name}", "", f"{recipe.title}. {recipe.about}.", ""]
    lines.append(
        f"{len(runs[0].tasks)} tasks, {network['name']}; {training['epochs']} epochs a task, {training['optimizer']} "
        f"{_rate(training)}, "
        f"{momentum}weight decay {training['weight_decay']}, batch {training['batch']}, "
        f"augmentation: {augment}; seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}."
    )
    if settings["stream"].get("limit"):
        lines[-1] += f" At most {settings['stream']['limit']} training samples of a class."
    printed = recipe.published_numbers(runs[0].order)
    if training["epochs"] != recipe.training.epochs:
        schedule = f"schedule of {recipe.training.epochs} epochs"
        beside = f"Not the paper's {schedule}: its numbers stand beside ours for the order of the methods only."
        lines += ["", beside if printed else f"Not the recipe's {schedule}."]
    summaries = summarise(runs, printed)
    if summaries:
        cells = _beside_the_paper(summaries, recipe)
        lines += ["", *_table(["method", *cells], zip((s.method for s in summaries), *cells.values(), strict=True))]
        if len({s.runs for s in summaries}) > 1:
            lines += _alike(runs, recipe)
    if recipe.zero_shot:
        lines += _zero_shot(runs)
    begun = [run for run in runs if run.done]
    if begun:
        tasks = len(begun[0].tasks)
        rows = [
            [
                run.method,
                run.label,
                *(f"{100 * a:.1f}" for a in run.matrix[-1]),
                *["–"] * (tasks - run.done),
                _commit(run),
            ]
            for run in begun
        ]
        what = "Each task" if begun[0].measure == "accuracy" else f"{begun[0].measure} of each task"
        lines += ["", f"{what} at the end, in the run's own order; – is not learned yet:", ""]
        lines += _table(["method", "order", *map(str, range(1, tasks + 1)), "commit"], rows)
    open_runs = [f"{run.method} {run.label} ({run.done} of {len(run.tasks)} tasks)" for run in runs if not run.finished]
    if open_runs:
        lines += ["", f"Not complete, and so in no average: {', '.join(open_runs)}."]
    lines += _options(runs) + _times(runs)
    lines += ["", f"Machine: {', '.join(sorted({_machine(run) for run in runs}))}.", ""]
    return "\n".join(lines)


def _alike(runs: Sequence[Result], recipe: Recipe) -> list[str]:
    """Where methods have run in different orders or seeds, those of the one that most have run in, the best first."""
    finished = [run for run in runs if run.finished]
    label, _ = Counter(run.label for run in finished).most_common(1)[0]
    same = [run for run in finished if run.label == label]
    summaries = sorted(summarise(same, recipe.published_numbers()), key=lambda s: -s.accuracy.mean)
    shown = ("accuracy", "H", "paper", "forgets", "inferred", "incremental", "capacity")
    cells = summary_cells(summaries, shown)
    columns = [[cell.text for cell in column] for column in cells.values()]
    said = f"Not all methods have run in the same orders or seeds. One run of each in order {label}, the best first:"
    return ["", said, "", *_table(["method", *cells], zip((s.method for s in summaries), *columns, strict=True))]


def _beside_the_paper(summaries: Sequence[Summary], recipe: Recipe) -> dict[str, list[str]]:
    """The summary with one more column: the capacity that the paper prints, without copies and stored images."""
    printed = [recipe.published(s.method, "capacity") for s in summaries]
    found = {}
    for name, column in summary_cells(summaries).items():
        found[name] = [cell.text for cell in column]
        if name == "capacity" and any(value is not None for value in printed):
            found["in the paper"] = [f"{value:g} %" if isinstance(value, float) else NOTHING for value in printed]
    return found


def _options(runs: Sequence[Result]) -> list[str]:
    """The options that are not the methods' defaults, of each method's first run."""
    said, methods = {}, methods_for(zero_shot=runs[0].measure == "H")
    for run in runs:
        method = methods.get(run.settings["method"])
        if method is not None and run.method not in said:
            usual = flat_options(method.options)
            options = flat_options(run.options).items()
            said[run.method] = [f"{name} = {value}" for name, value in options if value != usual.get(name, value)]
    changed = "; ".join(f"{method}: {', '.join(found)}" for method, found in said.items() if found)
    return ["", f"Options other than the methods' defaults: {changed}."] if changed else []


def _times(runs: Sequence[Result]) -> list[str]:
    """How long methods train a later task, phases and candidates included, against RKR.

    Of each run the median over tasks, as some stand still for a while; of each method the fastest run.
    """
    seconds: dict[str, float] = {}
    for run in runs:
        later = [time.train_seconds for time in run.times[1:]]
        if run.finished and later:
            seconds[run.method] = min(median(later), seconds.get(run.method, math.inf))
    base = seconds.get("rkr")
    if len(seconds) < 2 or not base:
        return []
    said = ", ".join(f"{method} {found / base:.1f}" for method, found in seconds.items() if method != "rkr")
    spent = f"{base:.2g} seconds" if base < 10 else f"{base:.0f} seconds" if base < 120 else f"{base / 60:.0f} minutes"
    text = f"Training time of a later task (the median of each method's fastest run), RKR's {spent} being 1: {said}."
    return ["", f"{text} The machine is shared, and was not equally busy in all runs."]


def _recipe(settings: Mapping[str, Any]) -> Recipe:
    if settings["stream"].get("part") == "validation":
        return load_recipe(settings["recipe"].removesuffix("-validation")).on_validation()
    return load_recipe(settings["recipe"])


def _rate(training: Mapping[str, Any]) -> str:
    """The learning rate of a schedule."""
    steps = ", ".join(map(str, training["milestones"]))
    return f"{training['lr']} x {training['gamma']} at {steps}" if steps else str(training["lr"])


def _zero_shot(runs: Sequence[Result]) -> list[str]:
    """U, S and H of each data set, mean and sample standard deviation over runs, and how the classifier was trained."""
    cells = zero_shot_cells(runs)
    if not cells:
        return []

    header = ["method", *next(iter(cells.values()))]
    rows = [[method, *map(with_deviation, row.values())] for method, row in cells.items()]
    lines = ["", "After the last task, the mean over runs (and their standard deviation):", "", *_table(header, rows)]
    epochs: dict[str, list[str]] = {}  # in words -> the methods that have them; ridge regression has none
    for run in runs:
        if classifier := run.settings["options"].get("classifier"):
            methods = epochs.setdefault(_epochs(classifier["epochs"]), [])
            methods += [run.method] if run.method not in methods else []
    if epochs:
        parts = [said if len(epochs) == 1 else f"{', '.join(methods)}: {said}" for said, methods in epochs.items()]
        lines += ["", f"Epochs of the classifiers: {'; '.join(parts)}."]
    return lines


def _epochs(epochs: Mapping[str, int] | int | str) -> str:
    if epochs == "validation":
        return "those with the best H on these tests"
    return ", ".join(f"{name} {n}" for name, n in epochs.items()) if isinstance(epochs, Mapping) else str(epochs)


def _commit(run: Result) -> str:
    return str(run.record.get("commit") or "unknown")


def _machine(run: Result) -> str:
    machine = run.record.get("machine", {})
    threads = machine.get("threads", "?")
    return f"{machine.get('processor', 'unknown')}, {threads} thread{'' if threads == 1 else 's'} a run"


def _table(header: Sequence[str], rows: Any) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|---|" + "--:|" * (len(header) - 1)]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


HEADLINE = ("cifar100-lenet", "cifar100-lenet-20-epochs", "digits")  # the first that has both of these is shown
CONTRAST = {"rkr", "finetune"}


def headline(results: Sequence[Result]) -> bytes:
    """The README's figure as SVG: accuracy over tasks of one recipe, in its first order.

    Shown are the methods of the paper's table, with fine-tuning and separate networks: more would hide each other.
    """
    from rkr.report.figures import accuracy_over_tasks

    complete = by_recipe(result for result in results if result.finished)
    several = [name for name in HEADLINE if {run.method for run in complete.get(name, [])} >= CONTRAST]
    if not several:
        raise UsageError(f"none of {', '.join(HEADLINE)} has complete runs of {' and '.join(sorted(CONTRAST))}")
    with tempfile.TemporaryDirectory() as folder:
        runs = complete[several[0]]
        recipe = _recipe(runs[0].settings)
        shown = {*CONTRAST, "separate", *(number.method for number in recipe.paper)}
        runs = [run for run in runs if run.method in shown and run.label == str(recipe.orders[0])]
        written = accuracy_over_tasks(runs, Path(folder) / "headline")
        return next(path for path in written if path.suffix == ".svg").read_bytes()


def main() -> None:
    """Write the page, and the README's figure beside it."""
    root, into = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        results = find_results(root)
        text, figure = page(results), headline(results)
    except RkrError as error:
        sys.exit(f"rkr: {error}")
    into.write_text(text)
    (into.parent / "headline.svg").write_bytes(figure)
    print(f"{into}: {len(text.splitlines())} lines, and headline.svg")


if __name__ == "__main__":
    main()
