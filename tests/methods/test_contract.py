"""What every method promises, checked for all registered methods, those of plug-ins included.

Each method learns three small tasks once, through the hooks that the engine calls. The tests compare what was recorded
on the way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import learning, zeroshot
from helpers.learning import Checkpoint, Draw, choose_candidate, learn, reader, rehearsed, train
from helpers.tensors import assert_same, snapshot
from torch import Tensor, nn
from torch.optim import Optimizer

from rkr.errors import UsageError
from rkr.methods import METHODS, ZERO_SHOT_METHODS, Learner, Method
from rkr.methods.learner import Capacity, SeenTask


def registered() -> dict[str, dict[str, Method]]:
    """All methods by setting and name."""
    return {"classification": METHODS, "zero-shot": ZERO_SHOT_METHODS}


STEPS = 6  # of a phase
COMPUTE_MORE = {"ccll", "den", "eft", "pgn", "rcl", "rps-net"}  # than the plain network, for one sample


@dataclass(frozen=True)
class Setting:
    """The tasks and the network for one kind of method."""

    make: Callable[[], nn.Module]
    head: str
    tasks: Sequence[SeenTask]
    draw: Draw
    make_optimizer: Callable[[Learner], Optimizer]
    counted: Callable[[nn.Module], nn.Module]  # the part of the network that is 100 % of the capacity


SETTINGS = {
    "classification": Setting(
        learning.small_cnn, "fc", learning.seen_tasks(), learning.noise, learning.sgd, lambda network: network
    ),
    "zero-shot": Setting(
        zeroshot.small_vae,
        "",
        zeroshot.seen_tasks(),
        zeroshot.features,
        zeroshot.adam,
        lambda network: network.encoder,  # type: ignore[return-value]
    ),
}
CASES = [(setting, name) for setting, methods in registered().items() for name in methods]


def method_of(setting: str, name: str) -> Method:
    return registered()[setting][name]


def methods_that(promise: Callable[[type[Learner]], bool]) -> pytest.MarkDecorator:
    """Parametrize a test over the methods whose learner makes a promise."""
    chosen = [case for case in CASES if promise(method_of(*case).learner)]
    return pytest.mark.parametrize(("setting", "name"), chosen, ids=["-".join(case) for case in chosen])


every_method = methods_that(lambda learner: True)


def build(setting: str, name: str, seed: int = 0, **options: Any) -> Learner:
    method, kind = method_of(setting, name), SETTINGS[setting]
    if "classifier" in method.options:
        options = {"classifier": zeroshot.CLASSIFIER, **options}
    torch.manual_seed(seed)
    learner = method.build(kind.make, kind.head, **options)
    learner.expects([task.classes for task in kind.tasks])
    return learner


def begun(setting: str, name: str) -> Learner:
    """A new learner, with other random values, that has begun all tasks and is in evaluation mode."""
    learner = build(setting, name, seed=1)
    for task in SETTINGS[setting].tasks:
        learner.begin(task)
    return learner.eval()


@torch.no_grad()
def answers(learner: Learner, setting: str) -> list[Tensor]:
    """The logits of every task that has begun, on samples that were not trained on."""
    learner.eval()
    draw = SETTINGS[setting].draw
    return [learner.predict(draw(task, n=20, seed=9)[0], task.number).clone() for task in learner.seen]


@dataclass
class History:
    """A learner of three tasks and what was recorded while it learned them."""

    learner: Learner
    losses: list[list[list[float]]] = field(default_factory=list)  # of each task, phase and step
    answers: list[list[Tensor]] = field(default_factory=list)  # after each task
    capacities: list[Capacity] = field(default_factory=list)  # after each task
    checkpoints: list[Checkpoint] = field(default_factory=list)  # of the last task
    state: dict[str, Tensor] = field(default_factory=dict)  # at the end
    notes: dict[str, Any] = field(default_factory=dict)  # of the last task


@cache
def history(setting: str, name: str) -> History:
    """Learn all tasks. Tests must not change what is returned."""
    kind, found = SETTINGS[setting], History(build(setting, name))
    learner = found.learner
    for task in kind.tasks:
        learner.begin(task)
        choose_candidate(learner)
        found.checkpoints = [Checkpoint.of(learner)]
        how = {"draw": kind.draw, "make_optimizer": kind.make_optimizer, "save": found.checkpoints.append}
        found.losses.append(train(learner, STEPS, **how))
        learner.eval()
        learner.end(reader(learner, kind.draw))
        found.answers.append(answers(learner, setting))
        found.capacities.append(learner.capacity())
    found.state, found.notes = snapshot(learner), learner.notes()
    return found


# ---------------------------------------------------------------------------------------------------------
# Learning


@every_method
def test_training_lowers_the_loss(setting: str, name: str) -> None:
    """In a phase of each task. The loss of zero-shot tasks has weights that rise, so there it only has to be finite."""
    for phases in history(setting, name).losses:
        assert all(math.isfinite(loss) for losses in phases for loss in losses)
        if setting == "classification":
            assert any(losses and losses[-1] < losses[0] for losses in phases)


VARIANTS: list[tuple[str, str, dict[str, Any]]] = [(*case, {}) for case in CASES]
VARIANTS += [("classification", "pgn", {"lateral": "adapter"})]


@pytest.mark.parametrize(
    ("setting", "name", "options"), VARIANTS, ids=["-".join((*case[:2], *case[2])) for case in VARIANTS]
)
def test_everything_with_a_gradient_is_optimized(setting: str, name: str, options: dict[str, Any]) -> None:
    """No parameter gets gradients that no optimizer uses."""
    kind, learner = SETTINGS[setting], build(setting, name, **options)
    for task in kind.tasks[:2]:
        learn(learner, task, 2, draw=kind.draw, make_optimizer=kind.make_optimizer)
    learner.begin(kind.tasks[2])
    choose_candidate(learner)
    for phase in learner.phases():
        learner.prepare(phase, reader(learner, kind.draw))
        trained = {id(p) for group in learner.groups() for p in group["params"]}
        learner.train()
        learner.zero_grad(set_to_none=True)
        x, y = (torch.cat(parts) for parts in zip(*rehearsed(learner, kind.draw), strict=True))
        learner.loss(x, y).loss.backward()
        assert [key for key, p in learner.named_parameters() if p.grad is not None and id(p) not in trained] == []


# ---------------------------------------------------------------------------------------------------------
# Answers


@every_method
def test_answers_are_finite_logits_over_the_classes_of_each_task(setting: str, name: str) -> None:
    classes = [task.classes for task in SETTINGS[setting].tasks]
    for count, logits in enumerate(history(setting, name).answers, 1):
        assert [tuple(each.shape) for each in logits] == [(20, number) for number in classes[:count]]
        assert all(each.isfinite().all() for each in logits)


@every_method
def test_the_same_samples_get_the_same_answers_and_leave_the_state_alone(setting: str, name: str) -> None:
    found = history(setting, name)
    torch.manual_seed(7)  # answers do not depend on random numbers
    for again, before in zip(answers(found.learner, setting), found.answers[-1], strict=True):
        assert torch.equal(again, before)
    assert_same(found.state, found.learner)


@methods_that(lambda learner: learner.isolating)
def test_isolating_methods_answer_bit_for_bit_as_before(setting: str, name: str) -> None:
    found = history(setting, name)
    for earlier in found.answers[:-1]:
        for before, now in zip(earlier, found.answers[-1], strict=False):
            assert torch.equal(before, now)


@methods_that(lambda learner: learner.agnostic != "never")
def test_an_inferred_task_is_one_of_those_seen(setting: str, name: str) -> None:
    learner = history(setting, name).learner
    with torch.no_grad():
        tasks, labels = learner.infer(SETTINGS[setting].draw(learner.seen[0], n=20, seed=9)[0])
    assert tasks.shape == labels.shape == (20,)
    assert all(
        0 <= label < learner.seen[task].classes for task, label in zip(tasks.tolist(), labels.tolist(), strict=True)
    )


# ---------------------------------------------------------------------------------------------------------
# Resuming, saving and loading


@every_method
@pytest.mark.parametrize("where", ["start", "middle", "last"])
def test_a_resumed_task_ends_with_the_same_bytes(setting: str, name: str, where: str) -> None:
    """Resumed before the first step of the last task, in the middle of its phases, and after its last step."""
    kind, found = SETTINGS[setting], history(setting, name)
    place = {"start": 0, "middle": len(found.checkpoints) // 2, "last": -1}[where]
    checkpoint = found.checkpoints[place]
    other = begun(setting, name)
    other.load_state_dict(checkpoint.learner)
    torch.set_rng_state(checkpoint.rng)
    train(other, STEPS, draw=kind.draw, make_optimizer=kind.make_optimizer, resume=checkpoint)
    other.eval()
    other.end(reader(other, kind.draw))
    assert_same(found.state, other)
    for mine, theirs in zip(answers(other, setting), found.answers[-1], strict=True):
        assert torch.equal(mine, theirs)
    assert other.notes() == found.notes


@every_method
def test_a_loaded_state_answers_the_same_and_goes_on_the_same(setting: str, name: str) -> None:
    """Between two tasks: a new learner that began the same tasks learns the next one as the old learner does."""
    kind, first = SETTINGS[setting], build(setting, name)
    for task in kind.tasks[:2]:
        learn(first, task, 2, draw=kind.draw, make_optimizer=kind.make_optimizer)
    other = build(setting, name, seed=1)
    for task in kind.tasks[:2]:
        other.begin(task)
    other.load_state_dict(first.state_dict())
    assert other.capacity() == first.capacity()
    for each in (first, other):
        torch.manual_seed(2)
        learn(each, kind.tasks[2], 2, draw=kind.draw, make_optimizer=kind.make_optimizer)
    assert_same(snapshot(first), other)
    for mine, theirs in zip(answers(other, setting), answers(first, setting), strict=True):
        assert torch.equal(mine, theirs)


@every_method
def test_an_exported_learner_is_restored_with_the_same_answers_and_capacity(
    setting: str, name: str, tmp_path: Path
) -> None:
    found = history(setting, name)
    found.learner.export(tmp_path / "model")
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    assert {path.suffix for path in files if path.name != "zoo.lock"} <= {".safetensors", ".json"}
    other = begun(setting, name)
    other.restore(tmp_path / "model")
    for mine, theirs in zip(answers(other, setting), found.answers[-1], strict=True):
        assert torch.equal(mine, theirs)
    assert other.capacity() == found.capacities[-1]
    assert_same(found.state, found.learner)


# ---------------------------------------------------------------------------------------------------------
# Capacity


@every_method
def test_capacity_is_counted_against_the_plain_network(setting: str, name: str) -> None:
    kind, found = SETTINGS[setting], history(setting, name)
    plain = sum(p.numel() for p in kind.counted(kind.make()).parameters())
    for capacity in found.capacities:
        assert capacity.network == plain
        assert capacity.parameters > 0
        assert capacity.percent == pytest.approx(100 * capacity.parameters / plain)
        assert capacity.bytes > 0
        assert capacity.multiply_adds is None or capacity.multiply_adds > 0


@methods_that(lambda learner: learner.isolating or not learner.learns_its_size)  # others may remove parameters
def test_capacity_does_not_shrink_with_further_tasks(setting: str, name: str) -> None:
    parameters = [capacity.parameters for capacity in history(setting, name).capacities]
    assert parameters == sorted(parameters)


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_of_the_package_stores_and_computes(name: str) -> None:
    capacity = history("classification", name).capacities[-1]
    assert capacity.bytes >= 4 * capacity.network * 0.9  # heads of 3 classes are smaller than one of 9
    plain = 16 * 9 * 16 + 16 * 32 * 16 * 9 + 128 * 128 + 128 * 9
    assert capacity.multiply_adds is not None
    if name in COMPUTE_MORE:  # how much is tested with each method
        assert capacity.multiply_adds > plain
    else:
        assert capacity.multiply_adds == plain


# ---------------------------------------------------------------------------------------------------------
# Options


@every_method
def test_an_unknown_option_is_refused(setting: str, name: str) -> None:
    with pytest.raises(UsageError, match=r"^no_such_option: .* has no such option"):
        build(setting, name, no_such_option=3)


@every_method
def test_an_option_of_the_wrong_type_is_refused(setting: str, name: str) -> None:
    for option in method_of(setting, name).options:
        wrong: Any = 3 if option == "classifier" else {"of": "a wrong type"}
        with pytest.raises(UsageError, match=rf"\b{re.escape(option)}\b"):
            build(setting, name, **{option: wrong})


@every_method
def test_a_network_instead_of_a_function_is_refused(setting: str, name: str) -> None:
    kind = SETTINGS[setting]
    with pytest.raises(UsageError, match="give a function that builds the network"):
        method_of(setting, name).build(kind.make(), kind.head)  # type: ignore[arg-type]
