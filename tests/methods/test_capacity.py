"""One rule for what must be kept, checked on the tensors of every registered method.

`NEEDLESS` names what of a learner's state need not be kept: to use all tasks, and to go on learning. The tests destroy
just that and compare bits, and count what is left against `Learner.capacity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from helpers import learning, zeroshot
from helpers.learning import learn, reader
from helpers.tensors import changes, snapshot
from torch import Tensor

import rkr
from rkr.core import is_statistic
from rkr.methods import METHODS, ZERO_SHOT_METHODS, Learner
from rkr.methods.icarl import Icarl
from rkr.methods.learner import SeenTask
from rkr.methods.shared.anchored import Anchored
from rkr.methods.shared.rehearsing import Rehearsing

TWO_COPIES = ("teacher.", "newest.", "balanced")
RUNTIME = ("memory.", "sample_bytes", "drawn")
PLAIN_HEAD = 128 * 9 + 9  # of the small network


class Needless(NamedTuple):
    """Beginnings of the names of state entries that need not be kept."""

    to_use: tuple[str, ...] = ()
    to_learn: tuple[str, ...] = ()  # or equal what is kept: see `derived`


UNUSED_HEAD = ("model.network.fc.",)  # tasks have their own; the count has it, as the paper's
NEEDLESS: dict[str, dict[str, Needless]] = {
    "classification": {
        **dict.fromkeys(
            (*("rkr", "rkr-lite", "rectify-only", "scale-only", "rkr-k1", "rkr-k4", "rkr-k8", "rkr-random"),),
            Needless(UNUSED_HEAD, UNUSED_HEAD),
        ),
        "rkr-plus": Needless(UNUSED_HEAD, UNUSED_HEAD),
        **dict.fromkeys(("ccll", "eft", "apd"), Needless(UNUSED_HEAD, UNUSED_HEAD)),
        **dict.fromkeys(("finetune", "finetune-bn", "separate", "head-only"), Needless()),
        "joint": Needless(("sample_bytes",), ("sample_bytes",)),
        "l2t": Needless(("anchor.",), ("anchor.",)),
        "ewc": Needless(("anchor.",)),
        "si": Needless(("anchor.", "path."), ("anchor.values.", "path.")),
        "pc": Needless(
            ("anchor.", "helper.", "active.", "laterals."), ("anchor.values.", "helper.", "active.", "laterals.")
        ),
        "lwf": Needless(("teacher.",), ("teacher.",)),
        "icarl": Needless(("teacher.", *RUNTIME, "network.fc.heads."), ("teacher.", "means_")),
        "eeil": Needless((*TWO_COPIES, *RUNTIME), TWO_COPIES),
        "rps-net": Needless(("teacher.", *RUNTIME), ("teacher.", "drawn")),
        "pgn": Needless(UNUSED_HEAD, UNUSED_HEAD),
        "den": Needless((*UNUSED_HEAD, "old_", "chosen"), (*UNUSED_HEAD, "old_", "chosen")),
        "rcl": Needless((*UNUSED_HEAD, "controller.", "draws"), (*UNUSED_HEAD, "controller.", "draws")),
        "hnet": Needless(("before.",), ("before.",)),
    },
    "zero-shot": {
        **dict.fromkeys(
            ("rkr", "rectify-only", "scale-only", "rkr-k1", "rkr-k4", "rkr-k32", "rkr-random", "sft"),
            Needless(("network.decoder.", "attribute_vaes."), ("attribute_vaes.",)),
        ),
        **dict.fromkeys(
            ("l1", "l2"),
            Needless(("network.decoder.", "attribute_vaes.", "previous."), ("attribute_vaes.", "previous.")),
        ),
        "lzsl": Needless(
            ("network.decoder.", "attribute_vaes.", "previous.", "mask_"), ("attribute_vaes.", "previous.", "mask_")
        ),
        **dict.fromkeys(("base", "original"), Needless(*(("network.decoder.", "attribute_vaes."),) * 2)),
        "ridge": Needless(),
    },
}
CASES = [(setting, name) for setting, methods in NEEDLESS.items() for name in methods]
every_method = pytest.mark.parametrize(("setting", "name"), CASES, ids=["-".join(case) for case in CASES])
KINDS: dict[str, dict[str, Any]] = {
    "classification": {"draw": learning.noise, "make_optimizer": learning.sgd},
    "zero-shot": {"draw": zeroshot.features, "make_optimizer": zeroshot.adam},
}


def tasks_of(setting: str) -> list[SeenTask]:
    return zeroshot.seen_tasks() if setting == "zero-shot" else learning.seen_tasks()


def built(setting: str, name: str, seed: int = 0, **options: Any) -> Learner:
    method = (ZERO_SHOT_METHODS if setting == "zero-shot" else METHODS)[name]
    if "classifier" in method.options:
        options |= {"classifier": zeroshot.CLASSIFIER}
    torch.manual_seed(seed)
    return method.build(zeroshot.small_vae if setting == "zero-shot" else learning.small_cnn, "fc", **options)


def learned(setting: str, name: str, count: int = 2, **options: Any) -> Learner:
    learner = built(setting, name, **options)
    for task in tasks_of(setting)[:count]:
        learn(learner, task, 2, **KINDS[setting])
    return learner


def without(state: Mapping[str, Tensor], needless: tuple[str, ...]) -> dict[str, Tensor]:
    """A state whose needless entries are no numbers, or -7."""
    return {
        key: torch.full_like(value, torch.nan if value.is_floating_point() else -7 if value.dtype != torch.bool else 0)
        if key.startswith(needless)
        else value.clone()
        for key, value in state.items()
    }


def loaded(setting: str, name: str, learner: Learner, needless: tuple[str, ...]) -> Learner:
    """A new learner that began the same tasks and got what is left of the state of another."""
    other = built(setting, name, seed=5)
    for task in learner.seen:
        other.begin(task)
    other.load_state_dict(without(learner.state_dict(), needless))
    return other.eval()


def answers(learner: Learner, setting: str) -> list[Tensor]:
    learner.eval()
    with torch.no_grad():
        draw = KINDS[setting]["draw"]
        return [learner.predict(draw(task, n=20, seed=9)[0], task.number).clone() for task in learner.seen]


def derived(learner: Learner) -> None:
    """What of the state equals what is kept: anchors are the network's own weights, those of L2T matter 1 each."""
    if isinstance(learner, Anchored):
        for value, own in zip(learner.anchor.values, learner.shared(), strict=True):
            if value.isnan().all():
                value.copy_(own)
        for importance in learner.anchor.importance:
            if importance.isnan().all():
                importance.fill_(1)


def test_every_registered_method_is_here() -> None:
    assert set(NEEDLESS["classification"]) == set(METHODS)
    assert set(NEEDLESS["zero-shot"]) == set(ZERO_SHOT_METHODS)


@every_method
def test_what_is_kept_to_use_all_tasks_is_enough(setting: str, name: str) -> None:
    learner = learned(setting, name, 3)
    other = loaded(setting, name, learner, NEEDLESS[setting][name].to_use)
    if name == "hnet":
        assert not any(key.startswith("model.network.") and not is_statistic(key) for key in learner.state_dict())
    for mine, theirs in zip(answers(other, setting), answers(learner, setting), strict=True):
        assert torch.equal(mine, theirs)


@every_method
def test_what_is_kept_to_learn_is_enough(setting: str, name: str) -> None:
    """A learner that has just this learns the next task as the other does, to the last bit of all that is kept."""
    learner, needless = learned(setting, name), NEEDLESS[setting][name].to_learn
    other = loaded(setting, name, learner, needless)
    with torch.no_grad():
        derived(other)
    for each in (learner, other):
        torch.manual_seed(2)
        learn(each, tasks_of(setting)[2], 2, **KINDS[setting])
    changed = changes(snapshot(learner), other)
    assert {
        key for key in changed if not key.startswith((*UNUSED_HEAD, "attribute_vaes.0", "attribute_vaes.1"))
    } == set()
    for mine, theirs in zip(answers(other, setting), answers(learner, setting), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("name", "options"), [("l2t", {}), ("si", {}), ("pc", {}), ("ewc", {"mode": "online"})])
def test_anchors_that_do_not_count_are_the_networks_own_weights(name: str, options: dict[str, Any]) -> None:
    for count in (1, 2, 3):
        learner = cast("Anchored", learned("classification", name, count, **options))
        for value, own in zip(learner.anchor.values, learner.shared(), strict=True):
            assert torch.equal(value, own)


def test_the_middle_of_several_parabolas_counts_from_the_second_task_on() -> None:
    shared = 16 * 9 + 16 + 32 * 16 * 9 + 32 + 128 * 128 + 128
    for count, copies in ((1, 1), (2, 2), (3, 2)):
        learner = cast("Anchored", learned("classification", "ewc", count))
        same = [torch.equal(v, p) for v, p in zip(learner.anchor.values, learner.shared(), strict=True)]
        assert all(same) == (copies == 1)
        assert learner.capacity().further == copies * shared
    assert learned("classification", "ewc", 3, mode="online").capacity().further == shared


def test_means_come_from_what_icarl_keeps_to_learn() -> None:
    learner = cast("Icarl", learned("classification", "icarl", 3))
    x, y = (torch.cat(parts) for parts in zip(*reader(learner)(), strict=True))
    kept = {t.number: learner.memory.of_task(t.number) for t in learner.seen}
    for task in learner.seen:
        own_x, own_y = learning.noise(task)
        own_x, own_y = own_x[kept[task.number]], own_y[kept[task.number]]
        for label in range(task.classes):
            rows = own_x[own_y == task.start + label]
            parts = [F.normalize(learner.features(part), dim=1).mean(0) for part in (rows, rows.flip(-1))]
            mean = F.normalize(torch.stack(parts).mean(0), dim=0)
            torch.testing.assert_close(learner.get_buffer(f"means_{task.number}")[label], mean)
    assert len(x) == len(y)


# ---------------------------------------------------------------------------------------------------------
# Counts


def is_head(key: str) -> bool:
    return any(part in key for part in (".heads.", ".head.", "model.network.fc.", "classifiers.", "means_"))


def numbers(state: Mapping[str, Tensor], needless: tuple[str, ...]) -> int:
    """Learned numbers of a state: not of heads, statistics, or tables of whole numbers."""
    left = [v for key, v in state.items() if not (key.startswith(needless) or is_head(key) or is_statistic(key))]
    return sum(value.numel() for value in left if value.is_floating_point())


COUNTED = [case for case in CASES if case[1] not in ("pgn", "den", "rcl", "apd")]  # by connections, or without zeros


@pytest.mark.parametrize(("setting", "name"), COUNTED, ids=["-".join(case) for case in COUNTED])
def test_the_count_is_that_of_the_tensors_left(setting: str, name: str) -> None:
    """Heads count as the plain network's. What grows, or is sparse, has a count of its own in its own tests."""
    learner, needless = learned(setting, name, 3), NEEDLESS[setting][name]
    found, state = learner.capacity(), learner.state_dict()
    heads = {"separate": 3, "hnet": 0}.get(name, 1) * PLAIN_HEAD if setting == "classification" else 0
    assert found.parameters == numbers(state, needless.to_use) + heads
    samples = 0
    if isinstance(learner, Rehearsing):
        samples = len(learner.memory) * 16
        assert samples > 0
    elif name == "joint":
        samples = 3 * learning.SAMPLES * 16
    assert found.further is not None
    assert found.parameters + found.further == numbers(state, needless.to_learn) + heads + samples // 4
    assert found.percent_to_learn == pytest.approx(100 * (found.parameters + found.further) / found.network)


@every_method
def test_bytes_are_at_least_those_of_the_numbers(setting: str, name: str) -> None:
    found = learned(setting, name).capacity()
    assert found.bytes_to_learn is not None
    assert found.further_bytes is not None
    assert found.further is not None
    assert found.bytes_to_learn >= found.bytes
    assert found.further_bytes >= 4 * found.further


NETWORK, HEADS, NORMS = 3_038_110, 501 * 100, 2 * 70  # LeNet with 100 classes; of a task
SHARED = NETWORK - HEADS - NORMS
IMAGES = 2000 * 3 * 32 * 32 // 4
LENET: dict[str, tuple[int, int]] = {  # ten tasks: beside the network to use them, and beside that to go on learning
    "finetune": (0, 0),
    "finetune-bn": (9 * NORMS, 0),
    "head-only": (0, 0),
    "separate": (9 * NETWORK, 0),
    "lwf": (0, 0),
    "l2t": (9 * NORMS, 0),
    "ewc": (9 * NORMS, 2 * SHARED),
    "si": (9 * NORMS, SHARED),
    "pc": (9 * NORMS, SHARED),
    "icarl": (0, IMAGES),
    "eeil": (0, IMAGES),
    "rps-net": (4 * (NETWORK - HEADS), IMAGES),
    "rkr": (10 * 13_040, 0),
    "rkr-lite": (10 * 2_230, 0),
}
IN_WORDS = {"lwf": (100, 100), "l2t": (100, 100), "si": (100, 198), "pc": (100, 198), "ewc": (100, 297)}
IN_WORDS |= {
    "icarl": (100, 151),
    "eeil": (100, 151),
    "rps-net": (493, 544),
    "rkr": (104, 104),
    "separate": (1000, 1000),
}


@pytest.mark.parametrize("name", LENET)
def test_ten_tasks_on_lenet(name: str) -> None:
    learner = METHODS[name].build(lambda: rkr.networks.lenet(classes=100), "fc")
    for number in range(10):
        learner.begin(SeenTask(number, f"t{number}", tuple(map(str, range(10))), 10 * number))
    found, (used, further) = learner.capacity(), LENET[name]
    assert (found.network, found.parameters, found.further) == (NETWORK, NETWORK + used, further)
    if name in IN_WORDS:
        assert found.percent_to_learn is not None
        assert (round(found.percent), round(found.percent_to_learn)) == IN_WORDS[name]


def test_joint_training_keeps_the_samples_of_all_tasks() -> None:
    for count in (1, 2, 3):
        found = learned("classification", "joint", count).capacity()
        assert found.parameters == found.network
        assert found.further_bytes == count * learning.SAMPLES * 16
        assert found.further == found.further_bytes // 4


def test_zero_shot_methods_go_on_with_the_decoder_unless_each_task_has_its_own() -> None:
    """That of features, 64 - 1660 - 2048. The paper counts encoders only."""
    decoder = 64 * 1660 + 1660 + 1660 * 2048 + 2048
    for name, method in ZERO_SHOT_METHODS.items():
        learner = method.build(rkr.networks.CadaVae, "")
        for number in range(2):
            learner.begin(SeenTask(number, f"t{number}", ("a", "b"), 2 * number, torch.zeros(2, 8), (0,)))
        assert learner.capacity().further == (0 if name in ("base", "original", "ridge") else decoder)
