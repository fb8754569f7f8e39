"""HNET: what it generates, what it holds on to, and where it looks ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from helpers.learning import double_noise as batch
from helpers.learning import seen_tasks as tasks
from helpers.learning import small_double_cnn as make
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import rkr
import rkr.methods.hnet
from rkr.data import load_source
from rkr.errors import UsageError
from rkr.methods import METHODS
from rkr.methods.hnet import Hnet, outputs, stepped
from rkr.methods.learner import MakeNetwork


def build(make: MakeNetwork = make, **options: Any) -> Hnet:
    """In chunks of 1,000, and as SGD needs it, with which most tests train."""
    torch.manual_seed(0)
    return cast("Hnet", METHODS["hnet"].build(make, "fc", **{"chunk": 1000, "balance": True, **options}))


def sgd(learner: Hnet) -> Optimizer:
    return SGD(learner.groups(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def train(learner: Hnet, optimizer: Optimizer, steps: int = 3, first: int = 0) -> None:
    learner.train()
    for step in range(first, first + steps):
        outcome = learner.loss(*batch(learner.task, seed=step))
        optimizer.zero_grad(set_to_none=True)
        outcome.loss.backward()
        learner.before_step(optimizer)
        optimizer.step()
        learner.after_step()


def learned(learner: Hnet, count: int, steps: int = 3) -> Hnet:
    for task in tasks()[:count]:
        learner.begin(task)
        train(learner, sgd(learner), steps)
    return learner


def moved(learner: Hnet, seed: int = 3) -> list[Tensor]:
    """Some Θ that is not Θ*."""
    draw = torch.Generator().manual_seed(seed)
    return [p.detach() + 0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype).to(p) for p in learner.hyper.theta]


def embeddings(learner: Hnet) -> Tensor:
    """Of earlier tasks."""
    return torch.stack([e.detach() for e in learner.hyper.tasks][: learner.task.number])


def literally(learner: Hnet, theta: list[Tensor], task: Tensor) -> Tensor:
    """All that h generates for a task, (N,): a linear layer on every chunk's embedding beside the task's."""
    weight, bias, chunks = theta
    inputs = torch.cat([task.expand(len(chunks), -1), chunks], 1)
    flat = F.linear(inputs, weight, bias).flatten()[: learner.capacity().network]
    return flat * learner._factors + learner._offsets


def named(network: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Cut into the parameters of a plain network."""
    found, start = {}, 0
    for name, p in network.named_parameters():
        found[name] = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    assert start == len(flat)
    return found


def written_out(learner: Hnet, theta: list[Tensor], tasks: Sequence[Tensor] = ()) -> Tensor:
    """β / (t - 1) Σ_j ||h(e_j, Θ*) - h(e_j, Θ)||², without other tasks' rows of the head."""
    assert learner.before is not None
    star, total = [p.detach() for p in learner.before.theta], torch.zeros((), dtype=torch.float64)
    for number, task in enumerate(learner.seen[:-1]):
        now = named(make(), literally(learner, theta, (tasks or learner.hyper.tasks)[number]))
        then = named(make(), literally(learner, star, learner.before.tasks[number]))
        for name, value in now.items():
            rows = task.labels if name in ("fc.weight", "fc.bias") else slice(None)
            total = total + (then[name] - value)[rows].square().sum()
    return learner.beta / learner.task.number * total


# ---------------------------------------------------------------------------------------------------------
# Sizes


def test_counts_of_the_paper() -> None:
    learner = build(lambda: rkr.networks.resnet32(classes=60), chunk=7000)
    weight, bias, chunks = learner.hyper.theta
    assert weight.numel() + bias.numel() == 455_000
    assert tuple(chunks.shape) == (67, 32)
    assert chunks.numel() == 2_144
    plain = sum(p.numel() for p in rkr.networks.resnet32(classes=60).parameters())
    assert plain == 464_154 + 50 * 65
    statistics = 4 * 2 * (11 * 16 + 10 * 32 + 10 * 64) + 8 * 31  # bytes: of 31 BatchNorms, and their counters
    for task in tasks((10,) * 6):
        learner.begin(task)
        kept = 455_000 + 2_144 + 32 * (task.number + 1)
        capacity = learner.capacity()
        assert (capacity.parameters, capacity.network) == (kept, plain)
        assert capacity.bytes == 4 * kept + (task.number + 1) * statistics
    assert capacity.percent == pytest.approx(97.8, abs=0.1)
    # The state has nothing but Θ and embeddings, now and before the task, and statistics, of tasks and the network's.
    state = learner.state_dict()
    assert sum(v.numel() for k, v in state.items() if not k.startswith("model.")) == 2 * kept - 32
    assert all(key.rpartition(".")[2] in rkr.core.state.STATISTICS for key in state if key.startswith("model."))
    assert sum(p.untyped_storage().nbytes() for p in learner.model.network.parameters()) == 4 * 95


@pytest.mark.parametrize(
    ("network", "chunk"),
    [
        (rkr.networks.lenet, 45_345),  # 3,038,110 / 67
        (lambda: rkr.networks.resnet32(classes=60), 6_977),  # published: 7,000
        (lambda: rkr.networks.resnet18(classes=100), 167_465),
        (rkr.networks.small_cnn, 1_073),  # 71,850 / 67
    ],
    ids=["lenet", "resnet32", "resnet18", "small-cnn"],
)
def test_67_chunks_of_any_network(network: MakeNetwork, chunk: int) -> None:
    """So the hypernetwork has 65 / 67 of the network's size, embeddings and rounding aside."""
    with torch.device("meta"):
        learner = build(network, chunk=None)
    weight, bias, chunks = learner.hyper.theta
    assert (tuple(weight.shape), tuple(bias.shape), tuple(chunks.shape)) == ((chunk, 64), (chunk,), (67, 32))
    learner.begin(tasks()[0])
    capacity = learner.capacity()
    assert capacity.parameters == 65 * chunk + 67 * 32 + 32
    assert 0 <= 67 * chunk - capacity.network < 67
    if capacity.network > 400_000:
        assert 97.0 < capacity.percent < 98.0


def test_trains_as_published() -> None:
    """Adam at 0.001 without weight decay, strengths of the penalty up to 10, and no balance, which is for SGD."""
    method = METHODS["hnet"]
    assert method.learner.own_training == {"optimizer": "adam", "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}
    assert (method.options["beta"], method.options["chunk"], method.options["balance"]) == (0.05, None, False)
    assert (min(method.learner.grid["beta"]), max(method.learner.grid["beta"])) == (0.01, 10.0)


def test_optimised_are_theta_and_the_task_s_embedding_alone() -> None:
    learner = build()
    for task in tasks():
        learner.begin(task)
        hyper, own = learner.hyper, learner.hyper.tasks[task.number]
        decayed, free = learner.groups()
        assert [id(p) for p in decayed["params"]] == [id(hyper.weight), id(hyper.bias)]
        assert [id(p) for p in free["params"]] == [id(hyper.chunks), id(own)]
        assert free["weight_decay"] == 0
        trainable = {id(p) for p in learner.parameters() if p.requires_grad}
        assert trainable == {id(p) for p in (*decayed["params"], *free["params"])}


# ---------------------------------------------------------------------------------------------------------
# Generating


@pytest.mark.parametrize("init", ["fan_in", "xavier"])
def test_a_plain_network_with_the_generated_tensors_answers_the_same(init: str) -> None:
    learner = learned(build(init=init), 3)
    for number, task in enumerate(learner.seen):
        theta, embedding = [p.detach() for p in learner.hyper.theta], learner.hyper.tasks[number].detach()
        network = make()
        tensors = named(network, literally(learner, theta, embedding))
        found = learner.generated(number)
        assert list(found) == [name for name, _ in network.named_parameters()]
        for name, value in found.items():
            torch.testing.assert_close(value, tensors[name], rtol=1e-12, atol=1e-14)
        own = {key: value.clone() for key, value in learner.model.tasks[f"t{number}"].tensors().items()}
        assert set(own) == {name for name, _ in network.named_buffers()}
        others = [copy.deepcopy(t.tensors()) for t in learner.model.tasks.values() if t.name != f"t{number}"]
        x = batch(task, seed=9)[0]
        for mode in (False, True):
            learner.train(mode)
            network.train(mode)
            plain = torch.func.functional_call(network, {**found, **own}, (x,))  # writes its statistics into `own`
            torch.testing.assert_close(learner.predict(x, number), plain[:, task.labels], rtol=1e-12, atol=1e-12)
        for key, value in learner.model.tasks[f"t{number}"].tensors().items():
            torch.testing.assert_close(value, own[key])
        kept = [t.tensors() for t in learner.model.tasks.values() if t.name != f"t{number}"]
        assert all(torch.equal(a[key], b[key]) for a, b in zip(kept, others, strict=True) for key in b)
    means = [t.tensors()["bn1.running_mean"] for t in learner.model.tasks.values()]
    assert not torch.equal(means[0], means[1])


def test_statistics_of_a_new_task_start_anew() -> None:
    learner = learned(build(), 2)
    learner.begin(tasks()[2])
    new = learner.model.tasks["t2"].tensors()
    assert bool((new["bn1.running_mean"] == 0).all())
    assert bool((new["bn1.running_var"] == 1).all())
    assert int(learner.model.tasks["t1"].tensors()["bn1.num_batches_tracked"]) == 3


def test_shared_and_own_parts_add_up() -> None:
    torch.manual_seed(0)
    weight, bias, chunks, embeddings = (torch.randn(s, dtype=torch.float64) for s in ((11, 7), (11,), (5, 4), (2, 3)))
    shared, own = outputs(weight, bias, chunks, embeddings)
    for t in range(2):
        for c in range(5):
            expected = weight @ torch.cat([embeddings[t], chunks[c]]) + bias
            torch.testing.assert_close(shared[c] + own[t], expected)


def test_weights_start_as_their_layers_need_it() -> None:
    """Drawn over many tasks, since all weights of one are drawn together."""
    torch.manual_seed(0)
    parts: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for _ in range(40):
            other = Hnet(make, "fc", chunk=500)
            other.begin(tasks()[0])
            for name, value in other.generated(0).items():
                parts.setdefault(name, []).append(value)
    expected = {"conv1.weight": (2 / 9, 0), "conv2.weight": (2 / 144, 0), "fc1.weight": (2 / 128, 0)}
    expected |= {"fc.weight": (1 / 128, 0), "fc1.bias": (1 / 384, 0), "bn1.weight": (0.01, 1), "bn2.bias": (0.01, 0)}
    for name, (variance, mean) in expected.items():
        values = torch.stack(parts[name])
        assert float(values.std()) == pytest.approx(variance**0.5, rel=0.15), name
        assert float(values.mean()) == pytest.approx(mean, abs=0.15 * variance**0.5), name


def test_xavier_start_as_published() -> None:
    learner = build(init="xavier")
    assert bool((learner._factors == 1).all())
    assert bool((learner._offsets == 0).all())
    weight, bias, chunks = learner.hyper.theta
    assert float(weight.detach().abs().max()) == pytest.approx((6 / 1064) ** 0.5, rel=1e-3)
    assert not bool(bias.any())
    assert float(chunks.detach().std()) == pytest.approx(1, abs=0.1)


def test_generated_once_a_pass_and_kept_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learned(build(), 2)
    calls = 0

    def counted(*arguments: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return outputs(*arguments)

    monkeypatch.setattr(rkr.methods.hnet, "outputs", counted)
    x, y = batch(tasks()[1])
    learner.loss(x, y)
    learner.loss(x, y)
    assert calls == 2
    learner.eval()
    with torch.no_grad():
        before = learner.predict(x, 1)
        assert torch.equal(learner.predict(x, 1), before)
        assert calls == 3
        other = learner.predict(x, 0)
        assert calls == 4
        learner.hyper.chunks.mul_(1.01)
        assert not torch.equal(learner.predict(x, 0), other)
        assert calls == 5
        learner.load_state_dict({**learner.state_dict(), "hyper.bias": learner.hyper.bias + 0.1})
        learner.predict(x, 0)
        assert calls == 6


def test_only_the_learner_computes_with_the_network() -> None:
    learner = learned(build(), 1)
    with pytest.raises(UsageError, match="generated"):
        learner.model(batch(tasks()[0])[0])


# ---------------------------------------------------------------------------------------------------------
# The penalty


@pytest.mark.parametrize("init", ["fan_in", "xavier"])
@pytest.mark.parametrize("chunk", [1000, 40_000])
def test_penalty_and_its_gradient_as_written_out(init: str, chunk: int) -> None:
    learner = learned(build(init=init, chunk=chunk, beta=0.3), 2)
    learner.begin(tasks()[2])
    old = embeddings(learner)
    assert float(learner.penalty(*learner.hyper.theta, old).detach()) == 0  # at Θ*, to the last bit
    theta = [value.requires_grad_() for value in moved(learner)]
    found, expected = learner.penalty(theta[0], theta[1], theta[2], old), written_out(learner, theta)
    assert float(expected.detach()) > 1
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    gradients = torch.autograd.grad(found, theta)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, theta), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-10)


def test_own_rows_of_the_head_are_held_and_others_are_not() -> None:
    """With chunks of one number, every number that is generated has an embedding for itself."""
    learner = build(lambda: rkr.networks.small_cnn(classes=9, size=2).double(), chunk=1, task_embedding=2)
    network = rkr.networks.small_cnn(classes=9, size=2)
    for task in tasks()[:2]:
        learner.begin(task)
    learner.begin(tasks()[2])
    theta = [p.detach().clone().requires_grad_() for p in learner.hyper.theta]
    with torch.no_grad():
        theta[2] += torch.randn_like(theta[2])
    (gradient,) = torch.autograd.grad(learner.penalty(theta[0], theta[1], theta[2], embeddings(learner)), theta[2:])
    held = named(network, (gradient != 0).any(1))
    for name, value in held.items():
        if name in ("fc.weight", "fc.bias"):
            assert bool(value[:5].all())  # classes of the two earlier tasks
            assert not bool(value[5:].any())  # of this task
        else:
            assert bool(value.all()), name
    # Rows of one earlier task count once, weights of all tasks with every one of them: half as much.
    change = (theta[2] - learner.hyper.chunks).detach() @ learner.hyper.weight[0, 2:].detach() * learner._factors
    total = named(network, change.square())
    expected = sum(float(v.sum()) for name, v in total.items() if not name.startswith("fc."))
    expected += sum(float(total[name][:5].sum()) for name in ("fc.weight", "fc.bias")) / 2
    found = learner.penalty(theta[0], theta[1], theta[2], embeddings(learner))
    assert float(found.detach()) == pytest.approx(0.05 * expected, rel=1e-9)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: SGD(groups, lr=0.05),
    "momentum": lambda groups: SGD(groups, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "nesterov": lambda groups: SGD(groups, lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True),
    "adam": lambda groups: Adam(groups, lr=1e-3, betas=(0.5, 0.99), weight_decay=5e-4),
    "amsgrad": lambda groups: Adam(groups, lr=1e-3, amsgrad=True),
    "fused": lambda groups: Adam(groups, lr=1e-3, amsgrad=True, fused=True),
    "adamw": lambda groups: AdamW(groups, lr=1e-3, weight_decay=0.1),
}


def state_of(optimizer: Optimizer) -> list[Any]:
    found: list[Any] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for group in optimizer.param_groups:
        for p in group["params"]:
            values = optimizer.state.get(p, {}).items()
            found.append({k: v.tolist() if isinstance(v, Tensor) else v for k, v in values})
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_looks_ahead_to_where_the_optimiser_really_goes(name: str, steps: int) -> None:
    learner = build(make)
    learned(learner, 1)
    learner.begin(tasks()[1])
    optimizer = OPTIMIZERS[name](learner.groups())
    train(learner, optimizer, steps)
    optimizer.param_groups[0]["lr"] *= 0.5  # as schedules do
    before, known = (copy.deepcopy(learner), state_of(optimizer)), len(optimizer.state)
    learner.loss(*batch(learner.task, seed=7)).loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in learner.hyper.parameters()]
    found = stepped(optimizer, learner.hyper.theta)
    assert state_of(optimizer) == before[1]
    assert len(optimizer.state) == known
    for p, old, gradient in zip(learner.hyper.parameters(), before[0].hyper.parameters(), gradients, strict=True):
        assert torch.equal(p, old)
        assert (p.grad is None and gradient is None) or torch.equal(p.grad, gradient)  # type: ignore[arg-type]
    optimizer.step()
    for value, p in zip(found, learner.hyper.theta, strict=True):
        assert torch.equal(value, p)


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("goes_on", [False, True])
def test_gradients_are_of_the_task_and_of_the_penalty_ahead(name: str, lookahead: bool, goes_on: bool) -> None:
    learner = learned(build(lookahead=lookahead, beta=0.2, continue_embeddings=goes_on), 2)
    learner.begin(tasks()[2])
    optimizer = OPTIMIZERS[name](learner.groups())
    train(learner, optimizer, 2)
    optimizer.zero_grad()
    learner.loss(*batch(learner.task, seed=7)).loss.backward()
    old, own = list(learner.hyper.tasks)[:2], learner.hyper.tasks[2]
    held = [*learner.hyper.theta, *(old if goes_on else [])]
    task = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in held]
    of_own = own.grad.clone()  # type: ignore[union-attr]
    ahead = stepped(optimizer, held) if lookahead else [p.detach().clone() for p in held]
    ahead = [value.requires_grad_() for value in ahead]
    penalty = torch.autograd.grad(written_out(learner, ahead[:3], ahead[3:]), ahead)
    learner.before_step(optimizer)
    for p, of_task, of_penalty, factor in zip(held, task, penalty, (1 / 65, 1 / 65, 1, 1, 1), strict=False):
        assert float(of_penalty.abs().max()) > 1e-4
        torch.testing.assert_close(p.grad, of_task + factor * of_penalty, rtol=1e-9, atol=1e-11)
    assert own.grad is not None
    assert torch.equal(own.grad, of_own)
    assert all((e.grad is not None) is goes_on for e in old)


def test_balance_divides_gradients_of_theta_alone() -> None:
    """By 65 = 32 + 32 + 1; the weights that are generated are the same."""
    balanced, plain = (learned(build(balance=balance), 1, steps=0) for balance in (True, False))
    x, y = batch(tasks()[0])
    for learner in (balanced, plain):
        learner.loss(x, y).loss.backward()
    for (name, a), b in zip(balanced.hyper.named_parameters(), plain.hyper.parameters(), strict=True):
        assert torch.equal(a, b)
        factor = 65 if name in ("weight", "bias") else 1
        torch.testing.assert_close(a.grad * factor, b.grad)  # type: ignore[operator]


@pytest.mark.parametrize("goes_on", [False, True])
def test_embeddings_of_earlier_tasks(goes_on: bool) -> None:
    learner = learned(build(continue_embeddings=goes_on), 2)
    kept = [e.detach().clone() for e in learner.hyper.tasks]
    learner.begin(tasks()[2])
    train(learner, sgd(learner))
    assert learner.before is not None
    for now, then, star in zip(learner.hyper.tasks, kept, learner.before.tasks, strict=False):
        assert torch.equal(now, then) is not goes_on
        assert torch.equal(star, then)  # what they are held to does not move with them
    assert len(learner.groups()[1]["params"]) == (4 if goes_on else 2)


def drift(learner: Hnet, number: int, then: dict[str, Tensor]) -> float:
    rows = learner.seen[number].labels
    now = learner.generated(number)
    parts = [(now[k] - then[k])[rows if k.startswith("fc.") else slice(None)].square().sum() for k in then]
    return float(torch.stack(parts).sum())


def test_earlier_tasks_drift_less_the_more_they_are_held() -> None:
    found: list[float] = []
    for beta in (0.0, 0.05, 1.0):
        learner = learned(build(beta=beta), 1, steps=10)
        with torch.no_grad():
            then = {key: value.clone() for key, value in learner.generated(0).items()}
            learner.begin(tasks()[1])
        train(learner, sgd(learner), 30)
        with torch.no_grad():
            found.append(drift(learner, 0, then))
    assert found[1] < 0.7 * found[0]
    assert found[2] < 0.3 * found[1]


# ---------------------------------------------------------------------------------------------------------
# State


@pytest.mark.parametrize("goes_on", [False, True])
def test_goes_on_amid_a_task_bit_for_bit(goes_on: bool) -> None:
    learner = learned(build(continue_embeddings=goes_on), 2)
    learner.begin(tasks()[2])
    optimizer = sgd(learner)
    train(learner, optimizer)
    torch.manual_seed(5)
    other = cast("Hnet", METHODS["hnet"].build(make, "fc", chunk=1000, balance=True, continue_embeddings=goes_on))
    for task in tasks():
        other.begin(task)
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    again = sgd(other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((learner, optimizer), (other, again)):
        train(each, its, 4, first=3)
    left, right = learner.state_dict(), other.state_dict()
    assert list(left) == list(right)
    assert all(torch.equal(left[key], right[key]) for key in left)
    learner.eval(), other.eval()
    for number in range(3):
        x = batch(tasks()[number])[0]
        assert torch.equal(learner.predict(x, number), other.predict(x, number))


def test_states_that_do_not_fit_are_refused() -> None:
    learner = learned(build(), 1)
    state = learner.state_dict()
    with pytest.raises(RuntimeError, match=r"hyper\.bias"):
        learner.load_state_dict({key: value for key, value in state.items() if key != "hyper.bias"})
    with pytest.raises(RuntimeError, match="surplus"):
        learner.load_state_dict({**state, "surplus": torch.zeros(1)})


# ---------------------------------------------------------------------------------------------------------
# Networks and mistakes


@pytest.mark.parametrize(
    ("network", "shape"),
    [(rkr.networks.lenet, (3, 32, 32)), (rkr.networks.resnet32, (3, 32, 32))],
    ids=["lenet", "resnet32"],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_published_networks(network: Any, shape: tuple[int, ...], layout: torch.memory_format) -> None:
    learner = build(lambda: network(classes=10).to(memory_format=layout), chunk=7000)
    x = torch.randn(4, *shape)
    for task in tasks((4, 6)):
        learner.begin(task)
        optimizer = sgd(learner)
        learner.train()
        for _ in range(2):
            outcome = learner.loss(x, task.start + torch.arange(4))
            assert float(outcome.loss.detach()) < 6  # it starts at a sane scale
            optimizer.zero_grad()
            outcome.loss.backward()
            learner.before_step(optimizer)
            optimizer.step()
    tensors = learner.generated(0)
    assert tensors["conv1.weight"].is_contiguous(memory_format=layout)
    learner.eval()
    plain = network(classes=10).eval()
    state = {**tensors, **learner.model.tasks["t0"].tensors()}
    with torch.no_grad():
        expected = torch.func.functional_call(plain, state, (x,))[:, :4]
        torch.testing.assert_close(learner.predict(x, 0), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_learns_digits_and_keeps_them(optimizer: str) -> None:
    source = load_source("digits")
    x = (source.train.x.float() / 255 - 0.3049) / 0.3757
    test = (source.test.x.float() / 255 - 0.3049) / 0.3757
    learner = build(lambda: rkr.networks.small_cnn(classes=10), chunk=2000)
    for task in tasks((2, 2)):
        learner.begin(task)
        chosen = (source.train.y // 2 == task.number).nonzero()[:, 0]
        made = (
            SGD(learner.groups(), lr=0.05, momentum=0.9, weight_decay=5e-4)
            if optimizer == "sgd"
            else Adam(learner.groups(), lr=1e-3)
        )
        learner.train()
        for _ in range(4):
            for rows in chosen[torch.randperm(len(chosen))].split(32):
                loss = learner.loss(x[rows], source.train.y[rows]).loss
                made.zero_grad()
                loss.backward()
                learner.before_step(made)
                made.step()
    learner.eval()
    with torch.no_grad():
        for task in learner.seen:
            chosen = source.test.y // 2 == task.number
            answers = learner.predict(test[chosen], task.number).argmax(1)
            assert float((answers == source.test.y[chosen] - task.start).float().mean()) > 0.9


def test_more_classes_than_the_network_has() -> None:
    learner = build(lambda: rkr.networks.small_cnn(classes=4, size=4))
    first, second, _ = tasks()
    learner.begin(first)
    with pytest.raises(UsageError, match="the tasks have 5 classes, the network's classification layer 4"):
        learner.begin(second)
    assert learner.seen == [first]


def test_layers_that_it_does_not_generate() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.fc1, self.fc = nn.Linear(4, 4), nn.Linear(4, 2)

    with pytest.raises(UsageError, match="'norm', a LayerNorm"):
        build(Odd)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": -0.1}, "beta must be at least 0"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"task_embedding": 0}, "task_embedding must"),
        ({"chunk_embedding": 0}, "chunk_embedding must"),
        ({"init": "he"}, "fan_in, xavier"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(**options)
