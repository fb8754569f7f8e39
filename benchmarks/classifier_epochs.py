"""H on the test against the epochs of a classifier, for finished zero-shot runs: an explanation of their figures, no
choice of them, which the test must not make.

    python benchmarks/classifier_epochs.py runs/gzsl-local/rkr/fixed runs/gzsl-local/original/fixed --task FLO

Classifiers are trained once more, on other draws of latents than the run's; encoders are those after the last task.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

import rkr
from rkr.data import ZeroShotSource, load_xlsa17
from rkr.data.measures import harmonic_mean, unseen_and_seen
from rkr.errors import RkrError
from rkr.experiment.results import read_result
from rkr.methods.zeroshot.classifier import train_classifier
from rkr.methods.zeroshot.learner import ZeroShot

SHOWN = (12, 18, 26, 40)


@torch.no_grad()
def curve(learner: ZeroShot, source: ZeroShotSource, number: int, epochs: int) -> list[float]:
    """H after each epoch of a new classifier of task `number`, on latents of attributes."""
    classes = len(source.class_names)
    z, drawn = learner.latents_of_attributes(number, source.attributes, source.unseen)
    rows = torch.cat((source.test_seen, source.test_unseen))
    latents = learner.encode(learner.scaled(source.features[rows], number), number)[0]
    labels = source.labels[rows]
    head = nn.Linear(learner.vae.latent, classes)
    found: list[float] = []

    def test(epoch: int) -> None:
        predicted: Tensor = head(latents).argmax(1)
        found.append(100 * harmonic_mean(*unseen_and_seen(predicted, labels, classes, source.unseen)))

    options = learner.classifier_options
    train_classifier(head, z, drawn, options, epochs * options.steps_in_epoch(len(z)), test)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, with their models")
    parser.add_argument("--task", help="only this one; default: all")
    parser.add_argument("--draws", type=int, default=3, help="classifiers, of which means are printed")
    parser.add_argument("--epochs", type=int, default=60, help="how long each is trained")
    parser.add_argument("--data", type=Path, help="where the data lie; $RKR_DATA or the user's cache else")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shown = [epoch for epoch in SHOWN if epoch <= arguments.epochs]
    print(f"Mean H of {arguments.draws} classifiers after {', '.join(map(str, shown))} epochs, and at best (after)")
    for run in arguments.runs:
        result = read_result(run, epochs=False)
        stream = result.settings["stream"]
        if (stream["kind"], stream.get("part"), stream.get("scaler")) != ("zero-shot", "test", "train"):
            parser.error(f"{run}: only zero-shot runs of test classes with scaler 'train' can be shown")
        learner = cast(ZeroShot, rkr.load_learner(run))
        if learner.classifier_options.source != "attributes":
            parser.error(f"{run}: its classifiers learn from images, which is not repeated here")
        for number, task in enumerate(learner.seen):
            if arguments.task not in (None, task.name):
                continue
            source = load_xlsa17(task.name, arguments.data, stream["features"], stream["embedding"])
            torch.manual_seed(0)
            curves = torch.tensor([curve(learner, source, number, arguments.epochs) for _ in range(arguments.draws)])
            mean = curves.mean(0)
            latents = len(learner.latents_of_attributes(number, source.attributes, source.unseen)[0])
            options = learner.classifier_options
            ruled = (options.steps_of(task.name, latents) or 0) / options.steps_in_epoch(latents)
            values = "  ".join(f"{mean[epoch - 1]:.1f}" for epoch in shown)
            best = f"{mean.max():.1f} ({int(mean.argmax()) + 1})"
            print(f"{result.method} seed {result.seed} {task.name} (run: {ruled:.1f})  {values}  {best}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except RkrError as error:
        sys.exit(str(error))
