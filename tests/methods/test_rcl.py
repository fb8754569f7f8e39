"""RCL: the policy's probabilities and gradients, its candidates, and what a task trains."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.learning import double_noise as batch
from helpers.learning import seen_tasks as tasks
from helpers.learning import small_double_cnn as make
from helpers.tensors import snapshot as state_of
from torch import Tensor, nn

import rkr
from rkr.data import Images, Stream, Task, Training
from rkr.experiment.processes import make_fabric
from rkr.experiment.recipes.settings import TrainingSettings
from rkr.experiment.run import Run
from rkr.experiment.spec import RunSpec
from rkr.methods import METHODS
from rkr.methods.learner import Phase, SeenTask
from rkr.methods.rcl import Controller, ReinforcedLearning


def built(seed: int = 0, **options: Any) -> ReinforcedLearning:
    torch.manual_seed(seed)
    learner = METHODS["rcl"].build(make, "fc", **options)
    assert isinstance(learner, ReinforcedLearning)
    return learner


def train(learner: ReinforcedLearning, steps: int = 3, optimizer: str = "sgd") -> None:
    learner.prepare(Phase(), lambda: iter(()))
    if optimizer == "sgd":
        made: Any = torch.optim.SGD(learner.groups(), lr=0.05, momentum=0.9, weight_decay=0.01)
    else:
        made = torch.optim.Adam(learner.groups(), lr=0.01, weight_decay=0.01, fused=True)
    learner.train()
    for step in range(steps):
        made.zero_grad()
        learner.loss(*batch(learner.task, step)).loss.backward()
        made.step()
        learner.after_step()
    learner.eval()


@torch.no_grad()
def answers(learner: ReinforcedLearning, number: int) -> Tensor:
    learner.eval()
    return learner.predict(batch(tasks()[0], 7)[0], number).clone()


# ---------------------------------------------------------------------------------------------------------
# The controller


def controller(layers: int = 2, actions: int = 3, hidden: int = 5, **rates: float) -> Controller:
    torch.manual_seed(3)
    made = Controller(layers, actions, hidden, **rates).double()
    with torch.no_grad():  # away from the even distribution that it starts with
        for p in made.parameters():
            p.mul_(8)
    return made


def everything(made: Controller) -> list[list[int]]:
    """All actions."""
    return [list(a) for a in itertools.product(range(made.choice.out_features), repeat=made.layers)]


def probabilities(made: Controller) -> Tensor:
    """Of all actions."""
    logs = made()
    return torch.stack([torch.stack([logs[i, a] for i, a in enumerate(action)]).sum() for action in everything(made)])


@pytest.mark.parametrize(("layers", "actions"), [(2, 3), (4, 2), (1, 30), (3, 5)])
def test_probabilities_of_all_actions_sum_to_one(layers: int, actions: int) -> None:
    found = probabilities(controller(layers, actions)).exp()
    assert len(found) == actions**layers
    torch.testing.assert_close(found.sum(), torch.tensor(1.0, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(found.detach().std()) > 1e-3 * float(found.detach().mean())


def test_policy_is_two_layers_of_lstm_whose_probabilities_are_fed_back() -> None:
    """Against the equations of an LSTM, written out."""
    made = controller(layers=3, actions=4, hidden=6)
    w: Any = made.lstm
    h, c = [torch.zeros(6, dtype=torch.float64)] * 2, [torch.zeros(6, dtype=torch.float64)] * 2
    x, expected = made.state, []
    for _ in range(3):
        for k in range(2):
            own, back = getattr(w, f"weight_ih_l{k}"), getattr(w, f"weight_hh_l{k}")
            gates = own @ x + getattr(w, f"bias_ih_l{k}") + back @ h[k] + getattr(w, f"bias_hh_l{k}")
            i, f, g, o = gates.split(6)
            c[k] = f.sigmoid() * c[k] + i.sigmoid() * g.tanh()
            h[k] = x = o.sigmoid() * c[k].tanh()
        x = (made.choice.weight @ x + made.choice.bias).softmax(0)
        expected.append(x.log())
    torch.testing.assert_close(made(), torch.stack(expected), rtol=1e-10, atol=1e-12)


def test_the_sizes_of_the_paper() -> None:
    learner = built()
    for task in tasks()[:2]:
        learner.begin(task)
    assert learner.controller is not None
    lstm = learner.controller.lstm
    assert (lstm.input_size, lstm.hidden_size, lstm.num_layers) == (30, 100, 2)
    assert tuple(learner.controller().shape) == (3, 30)
    at_first = learner.controller().detach().exp()
    assert float(at_first.min()) > 0.5 / 30  # nearly even
    assert float(at_first.max()) < 2 / 30


@pytest.mark.parametrize("bias", [None, 0.0, 3.0])
def test_reinforce_is_the_gradient_of_the_expected_reward(bias: float | None) -> None:
    """Summed over all actions, weighted by their probabilities; the baseline, whatever it is, changes nothing."""
    made = controller()
    if bias is not None:
        with torch.no_grad():
            made.value.bias.fill_(bias)
    actions = everything(made)
    rewards = torch.tensor([math.sin(3 * a) + b * b - a * b for a, b in actions], dtype=torch.float64)
    policy = [*made.lstm.parameters(), *made.choice.parameters()]
    wanted = torch.autograd.grad((probabilities(made).exp() * rewards).sum(), policy)
    weights = probabilities(made).exp().detach()
    found = [torch.zeros_like(p) for p in policy]
    for weight, action, reward in zip(weights, actions, rewards, strict=True):
        loss, _ = made.losses([action], reward[None])
        for total, gradient in zip(found, torch.autograd.grad(loss, policy), strict=True):
            total -= weight * gradient  # the loss is what REINFORCE descends
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert any(float(b.abs().max()) > 1e-3 for b in wanted)


def test_losses_of_a_round_are_means() -> None:
    made = controller()
    actions, rewards = [[0, 2], [1, 1], [0, 2]], torch.tensor([0.3, 0.9, -0.2], dtype=torch.float64)
    policy, value = made.losses(actions, rewards)
    logs, baseline = made(), made.state @ made.value.weight[0] + made.value.bias[0]
    sums = [logs[0, a] + logs[1, b] for a, b in actions]
    expected = -sum((r - baseline.detach()) * s for r, s in zip(rewards, sums, strict=True)) / 3
    torch.testing.assert_close(policy, expected)
    torch.testing.assert_close(value, sum((r - baseline) ** 2 for r in rewards) / 3)
    # Neither trains the other.
    assert set(torch.autograd.grad(policy, list(made.value.parameters()), allow_unused=True)) == {None}
    others = [*made.lstm.parameters(), *made.choice.parameters()]
    assert set(torch.autograd.grad(value, others, allow_unused=True)) == {None}


def test_step_of_the_baseline_in_closed_form() -> None:
    made = controller(value_lr=5e-3)
    state, weight, bias = made.state, made.value.weight.detach().clone(), made.value.bias.detach().clone()
    rewards = [0.7, 0.1]
    error = 0.4 - float(weight[0] @ state + bias)
    made.learn([[0, 1], [2, 2]], rewards)
    for p, before, gradient in (
        (made.value.weight, weight, (-2 * error * state)[None]),
        (made.value.bias, bias, torch.tensor([-2 * error], dtype=torch.float64)),
    ):  # the first step of Adam is the rate times the sign
        torch.testing.assert_close(p, before - 5e-3 * gradient / (gradient.abs() + 1e-8), rtol=1e-12, atol=1e-14)
    size = sum(p.numel() for p in made.parameters())
    torch.testing.assert_close(made.mean[-1], torch.tensor(-0.2 * error, dtype=torch.float64))
    torch.testing.assert_close(made.square[-1], torch.tensor(4e-3 * error**2, dtype=torch.float64))
    assert (made.mean.numel(), made.square.numel(), int(made.steps)) == (size, size, 1)


def test_steps_are_adam_s() -> None:
    """Against torch's own, which keeps its moments elsewhere."""
    made = controller(policy_lr=1e-3, value_lr=5e-3)
    other = copy.deepcopy(made)
    optimizer = torch.optim.Adam(
        [
            {"params": [*other.lstm.parameters(), *other.choice.parameters()], "lr": 1e-3},
            {"params": other.value.parameters(), "lr": 5e-3},
        ]
    )
    for step in range(6):
        actions, rewards = [[step % 3, 1], [2, (step + 1) % 3]], [0.2 * step, 0.5]
        made.learn(actions, rewards)
        optimizer.zero_grad()
        sum(other.losses(actions, torch.tensor(rewards, dtype=torch.float64))).backward()  # type: ignore[union-attr]
        optimizer.step()
    for a, b in zip(made.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_policy_finds_the_best_actions() -> None:
    made = controller(policy_lr=0.02, value_lr=0.05)
    rewards = [1.0 if action == [2, 0] else 0.2 * (action[0] == 2) for action in everything(made)]
    actions = everything(made)
    for step in range(120):
        torch.manual_seed(step)
        chosen = made.sample(torch.rand(4, 2))
        made.learn(chosen, [rewards[actions.index(a)] for a in chosen])
    assert float(probabilities(made).detach().exp()[actions.index([2, 0])]) > 0.9
    assert float(made.value(made.state).detach()) == pytest.approx(1, abs=0.2)


def test_samples_are_as_likely_as_the_policy_says() -> None:
    """Numbers spread evenly between 0 and 1 pick every choice as often as it is likely."""
    made = controller(layers=2, actions=4)
    count = 2000
    grid = (torch.arange(count) + 0.5) / count
    found = torch.tensor(made.sample(torch.stack([grid, 1 - grid], 1)))
    for layer, logs in enumerate(made().detach()):
        share = torch.bincount(found[:, layer], minlength=4) / count
        torch.testing.assert_close(share.double(), logs.exp(), rtol=0, atol=1.01 / count)
    assert made.sample(torch.tensor([[0.0, 1 - 2**-24]])) == [[0, 3]]


# ---------------------------------------------------------------------------------------------------------
# Candidates


def begun(seed: int = 0, adopt: bool = False, **options: Any) -> ReinforcedLearning:
    """A learner whose second task has begun, the first being learned."""
    learner = built(seed, **options)
    learner.begin(tasks()[0])
    train(learner)
    learner.begin(tasks()[1])
    if adopt:
        learner.adopt([20, 20, 10])
    return learner


def test_rounds_of_candidates() -> None:
    learner = built(trials=7, parallel=3)
    learner.begin(tasks()[0])
    assert learner.rounds() == 0  # the network as it is
    learner.begin(tasks()[1])
    assert learner.rounds() == 3
    found = [learner.propose(number) for number in range(3)]
    assert [len(candidates) for candidates in found] == [3, 3, 1]
    assert json.loads(json.dumps(found)) == found
    assert all(type(a) is int and 0 <= a < 30 for candidates in found for one in candidates for a in one)
    assert len({tuple(one) for candidates in found for one in candidates}) == 7
    torch.manual_seed(99)
    assert [learner.propose(number) for number in range(3)] == found  # of the state alone
    assert [METHODS["rcl"].options[name] for name in ("trials", "parallel", "actions")] == [10, 2, 30]
    assert built(trials=10, parallel=2).holds_out == 0.1


def test_each_task_has_a_new_controller() -> None:
    learner = begun()
    first = learner.controller
    assert first is not None
    learner.observe(0, learner.propose(0), [0.5, 0.6])
    learner.begin(tasks()[2])
    assert learner.controller is not None
    assert learner.controller is not first
    assert int(learner.controller.steps) == 0
    assert not torch.equal(learner.controller.state, first.state)


def test_worth_is_accuracy_less_a_penalty_on_new_units() -> None:
    learner = begun(unit=0.05, penalty=0.001)
    assert learner.units([1, 3, 29]) == {"conv1": 1, "conv2": 5, "fc1": 186}  # 0.8, 4.8 and 185.6
    assert learner.score([1, 3, 29], 0.75) == pytest.approx(0.75 - 0.001 * 192)
    assert learner.score([0, 0, 0], 0.75) == 0.75
    learner = begun(unit="absolute")
    assert learner.units([1, 3, 29]) == {"conv1": 1, "conv2": 3, "fc1": 29}
    assert learner.score([1, 3, 29], 0.75) == pytest.approx(0.75 - 1e-4 * 33)


def test_judging_makes_one_step_and_what_diverged_has_no_accuracy() -> None:
    learner = begun()
    other = copy.deepcopy(learner)
    candidates = learner.propose(0)
    before = {k: v for k, v in state_of(learner).items() if not k.startswith("controller")}
    learner.observe(0, candidates, [-math.inf, 0.6])
    other.observe(0, candidates, [other.score(candidates[0], 0.0), 0.6])
    assert learner.controller is not None
    assert int(learner.controller.steps) == 1
    for (k, a), (_, b) in zip(learner.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), k
        assert bool(a.isfinite().all()), k
    after = learner.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())  # nothing but the controller


@pytest.mark.parametrize("done", range(4))
def test_rounds_go_on_from_a_state(done: int) -> None:
    """A new learner that begins the same tasks and takes the state after some rounds proposes and learns alike."""
    learner = begun(trials=6, parallel=2)
    history: list[Any] = []
    for number in range(3):
        if number == done:
            break
        history.append(learner.propose(number))
        learner.observe(number, history[-1], [learner.score(c, sum(c) / 100) for c in history[-1]])
    other = built(5, trials=6, parallel=2)
    for task in tasks()[:2]:
        other.begin(task)
    other.load_state_dict(learner.state_dict())
    for number in range(done, 3):
        proposed = learner.propose(number)
        assert other.propose(number) == proposed
        for each in (learner, other):
            each.observe(number, proposed, [each.score(c, sum(c) / 100) for c in proposed])
    for (k, a), (_, b) in zip(learner.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), k


def test_a_candidate_on_a_learner_of_its_own_and_its_state_taken_back() -> None:
    """What the engine does: the winner's trained state goes into the learner, which has adopted it too."""
    learner = begun()
    kept = answers(learner, 0)
    winner = None
    for number, candidates in enumerate([learner.propose(0), learner.propose(1)]):
        for candidate in candidates:
            fresh = built(11)
            for task in tasks()[:2]:
                fresh.begin(task)
            fresh.load_state_dict(learner.state_dict())
            torch.manual_seed(number)
            fresh.adopt(candidate)
            train(fresh)
            winner = fresh, candidate
        learner.observe(number, candidates, [0.5, 0.4])
    assert winner is not None
    learner.adopt(winner[1])
    learner.load_state_dict(winner[0].state_dict())
    assert torch.equal(answers(learner, 0), kept)
    assert torch.equal(answers(learner, 1), answers(winner[0], 1))
    assert learner.notes() == {"units": learner.units(winner[1])}
    learner.begin(tasks()[2])  # which goes on from the wider network
    assert learner.growth.widths(2) == learner.growth.widths(1)
    assert learner.controller is not None
    assert int(learner.controller.steps) == 0


# ---------------------------------------------------------------------------------------------------------
# What a task trains


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_only_what_is_new_is_trained(optimizer: str) -> None:
    learner = begun(unit="absolute")
    learner.adopt([2, 3, 4])
    train(learner, optimizer=optimizer)
    learner.begin(tasks()[2])
    learner.adopt([1, 2, 3])
    old = {"conv1": (18, 1), "conv2": (35, 18), "fc1": (132, 35 * 4)}
    before, kept = state_of(learner.model.network), [answers(learner, n) for n in (0, 1)]
    own = state_of(learner.model.tasks["t2"])
    earlier = [state_of(learner.model.tasks[n]) for n in ("t0", "t1")]
    learner.model.set_task("t2")
    train(learner, optimizer=optimizer)
    after = learner.model.network.state_dict()
    for layer, (rows, columns) in old.items():
        now, was = after[f"{layer}.weight"], before[f"{layer}.weight"]
        assert torch.equal(now[:rows, :columns], was[:rows, :columns])
        assert bool((now[rows:] != was[rows:]).all())  # new units: what they take of old and new ones
        assert bool((now[:, columns:] != was[:, columns:]).all())  # and what old ones take of new ones
        assert torch.equal(after[f"{layer}.bias"][:rows], before[f"{layer}.bias"][:rows])
        assert bool((after[f"{layer}.bias"][rows:] != before[f"{layer}.bias"][rows:]).all())
        assert now.shape[1] == columns or now[:rows, columns:].numel() > 0
    assert [torch.equal(answers(learner, n), kept[n]) for n in (0, 1)] == [True, True]
    for name, state in zip(("t0", "t1"), earlier, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in learner.model.tasks[name].state_dict().items())
    moved = {k for k, v in learner.model.tasks["t2"].state_dict().items() if not torch.equal(v, own[k])}
    assert moved == set(own)  # its normalisation and its head
    assert learner.notes() == {"units": {"conv1": 1, "conv2": 2, "fc1": 3}}


def test_without_a_candidate_a_task_trains_its_head_and_normalisation() -> None:
    learner = begun()
    before, kept = state_of(learner.model.network), answers(learner, 0)
    learner.model.set_task("t1")
    train(learner)
    assert all(torch.equal(v, before[k]) for k, v in learner.model.network.state_dict().items())
    assert torch.equal(answers(learner, 0), kept)
    assert learner.notes() == {"units": {"conv1": 0, "conv2": 0, "fc1": 0}}


def test_the_first_task_trains_the_network() -> None:
    learner = built()
    learner.begin(tasks()[0])
    before = state_of(learner.model.network)
    train(learner)
    moved = {k for k, v in learner.model.network.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {f"{layer}.{kind}" for layer in ("conv1", "conv2", "fc1") for kind in ("weight", "bias")}
    assert learner.notes() == {}


def test_a_candidate_goes_on_amid_its_training() -> None:
    """Built, begun, loaded, adopted, loaded again: the same bits as without a break."""
    learner = begun(adopt=True)
    train(learner, steps=2)
    other = built(8)
    for task in tasks()[:2]:
        other.begin(task)
    other.adopt([3, 0, 1])  # whatever it was before
    other.load_state_dict(learner.state_dict())
    for each in (learner, other):
        train(each, steps=2)
    for (k, a), (_, b) in zip(learner.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), k


# ---------------------------------------------------------------------------------------------------------
# Cost and networks


def lenet_after(candidates: list[list[int]], **options: Any) -> ReinforcedLearning:
    torch.manual_seed(0)
    learner = METHODS["rcl"].build(lambda: rkr.networks.lenet(classes=100), "fc", **options)
    assert isinstance(learner, ReinforcedLearning)
    for number in range(10):
        names = tuple(f"class {i}" for i in range(10 * number, 10 * number + 10))
        learner.begin(SeenTask(number, f"t{number}", names, 10 * number))
        if number:
            learner.adopt(candidates[number - 1])
    return learner


def lenet_size(units: list[list[int]]) -> int:
    """Ten tasks that add so many units to conv1, conv2, fc1 and fc2."""
    widths = [[20, 50, 800, 500]]
    for more in units:
        widths.append([w + m for w, m in zip(widths[-1], more, strict=True)])
    a, b, c, d = widths[-1]
    total = (75 + 1) * a + (25 * a + 1) * b + (64 * b + 1) * c + (c + 1) * d
    total += 500 * 100 + 100  # the plain network's head
    total += 2 * 70  # and its normalisation, though each task has its own
    for w in widths:
        total += 2 * (w[0] + w[1]) + 10 * (w[3] - 500)
    return total


CAPACITY = {  # candidates of tasks 2 to 10, what they add, options, percent
    "mean of actions": ([[14] * 4, [15] * 4] * 4 + [[14] * 4], [[1, 2, 29, 18], [1, 2, 31, 20]], {}, 180.45),
    "most": ([[29] * 4] * 9, [[2, 4, 60, 38]], {}, 285.04),
    "least": ([[0] * 4] * 9, [[0, 0, 0, 0]], {}, 100.046),
    "absolute": ([[4] * 4, [5] * 4] * 4 + [[4] * 4], [[4] * 4, [5] * 4], {"unit": "absolute"}, 180.62),
}


@pytest.mark.parametrize("name", CAPACITY)
def test_capacity_on_lenet(name: str) -> None:
    """Published are 181 %: what the mean of all actions gives, and with absolute units 4 or 5 for each layer."""
    candidates, added, options, percent = CAPACITY[name]
    units = [added[i % len(added)] for i in range(9)]
    learner = lenet_after(candidates, **options)
    assert [list(learner.units(c).values()) for c in candidates] == units
    found = learner.capacity()
    assert (found.parameters, found.network) == (lenet_size(units), 3_038_110)
    assert found.percent == pytest.approx(percent, abs=0.005)


@pytest.mark.parametrize(("name", "spaces"), [("lenet", 4), ("resnet32", 18), ("resnet18", 12)])
def test_networks(name: str, spaces: int) -> None:
    """One step of a task that grows; in residual networks whole streams do."""
    torch.manual_seed(0)
    learner = METHODS["rcl"].build(lambda: getattr(rkr.networks, name)(classes=4), "fc", unit="absolute", actions=3)
    assert isinstance(learner, ReinforcedLearning)
    size = (3, 32, 32) if name != "resnet18" else (3, 8, 8)
    x, y = torch.randn(3, *size), torch.tensor([0, 1, 0])
    learner.begin(SeenTask(0, "a", ("x", "y"), 0))
    with torch.no_grad():
        learner.eval()
        kept = learner.predict(x, 0).clone()
    learner.begin(SeenTask(1, "b", ("x", "y"), 2))
    (candidate, *_), widths = learner.propose(0), learner.growth.widths(0)
    assert len(candidate) == spaces
    learner.adopt(candidate)
    assert list(learner.growth.widths(1).values()) == [w + a for w, a in zip(widths.values(), candidate, strict=True)]
    assert sum(candidate) > 0
    learner.prepare(Phase(), lambda: iter(()))
    optimizer = torch.optim.SGD(learner.groups(), lr=0.01, momentum=0.9, weight_decay=0.01)
    learner.train()
    learner.loss(x, y + 2).loss.backward()
    optimizer.step()
    learner.after_step()
    learner.eval()
    with torch.no_grad():
        assert tuple(learner.predict(x, 1).shape) == (3, 2)
        assert torch.equal(learner.predict(x, 0), kept)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"trials": 0}, "trials must be at least 1, not 0"),
    ({"parallel": 0}, "parallel must be at least 1"),
    ({"hidden": 0}, "hidden must be at least 1"),
    ({"actions": 1}, "actions must be at least 2"),
    ({"unit": 0.0}, "unit must be a share of the width"),
    ({"unit": 1.5}, "unit must be a share of the width"),
    ({"unit": "whole"}, "or \"absolute\", not 'whole'"),
    ({"unit": [1]}, "unit must be a number or text in quotes, not"),
    ({"unit": True}, "unit must be a number or text in quotes, not true"),
    ({"penalty": -1.0}, "penalty must not be negative"),
    ({"policy_lr": -1.0}, "policy_lr must not be negative"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(rkr.UsageError, match=message):
        built(**options)


def test_a_network_with_nothing_to_grow() -> None:
    class Flat(nn.Module):
        input_shape = (4,)

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    with pytest.raises(rkr.UsageError, match="RCL needs layers besides the head 'fc'"):
        METHODS["rcl"].build(Flat, "fc")


# ---------------------------------------------------------------------------------------------------------
# In the engine


def case() -> tuple[RunSpec, Stream]:
    def images(seed: int) -> Images:
        draw = torch.Generator().manual_seed(seed)
        y = torch.arange(20) % 2
        x = torch.randint(0, 120, (20, 1, 8, 8), generator=draw, dtype=torch.uint8)
        x[y == 1, :, :4] += 100
        return Images(x, y)

    made = tuple(Task(Training(f"task {n}", (f"{n}a", f"{n}b"), images(2 * n)), images(2 * n + 1)) for n in range(3))
    spec = RunSpec(
        recipe="halves",
        method="rcl",
        order="fixed",
        make=lambda: rkr.networks.small_cnn(classes=6),
        head="fc",
        learner=METHODS["rcl"],
        options={"trials": 3, "parallel": 2, "actions": 5, "unit": "absolute", "hidden": 6},
        training=TrainingSettings(epochs=1, batch=8, optimizer="adam", lr=0.01, weight_decay=1e-4),
        settings={"training": {"lr": 0.01, "epochs": 1}},
    )
    return spec, Stream("halves", made, (0.3,), (0.2,), ((0, 1), (2, 3), (4, 5)))


class Stopping(Run):
    """Stops after so many batches, once."""

    left: int

    def _asked(self) -> bool:
        self.left -= 1
        return self.left == 0


def test_a_run_with_its_trials(tmp_path: Path) -> None:
    """The best trial of each task is kept, answers of earlier tasks stay, and interruptions leave no trace."""
    whole = Run(*case(), tmp_path / "whole", make_fabric("cpu"))
    assert whole.execute()
    lines = [json.loads(line) for line in (tmp_path / "whole" / "results.jsonl").read_text().splitlines()]
    tried = [line for line in lines if line["event"] == "candidate"]
    done = [line for line in lines if line["event"] == "task"]
    assert [line["number"] for line in tried] == [2] * 3 + [3] * 3
    learner = whole._learner
    assert isinstance(learner, ReinforcedLearning)
    for number in (2, 3):
        of_task = [line for line in tried if line["number"] == number]
        for line in of_task:
            assert line["score"] == learner.score(line["candidate"], line["accuracy"])
        best = max(of_task, key=lambda line: line["score"])
        assert done[number - 1]["notes"] == {"units": learner.units(best["candidate"])}
    parts, stops = tmp_path / "parts", 0
    while True:
        run = Stopping(*case(), parts, make_fabric("cpu"))
        run.left = 4
        if run.execute():
            break
        stops += 1
    assert stops > 3
    assert (parts / "results.jsonl").read_bytes() == (tmp_path / "whole" / "results.jsonl").read_bytes()
    model = "model/learner.safetensors"
    assert (parts / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()
