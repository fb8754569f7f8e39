"""Views: threads that call tasks of one model get the bits that one thread gets, whatever else happens meanwhile."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr

TASKS = [f"task {n}" for n in range(8)]


class Net(nn.Module):
    """Convolutions, BatchNorm, a linear layer, and a buffer that every call writes to."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.hidden = nn.Linear(16, 12)
        self.count = Count() if counts else nn.Identity()
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x))).mean((2, 3))
        return self.fc(self.count(F.relu(self.hidden(x))))


class Count(nn.Module):
    """Adds how often it was called since its buffer was last put back: 1 each time, once the base is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


def learn(model: rkr.RectifiedModel, name: str, steps: int = 2) -> None:
    model.add_task(name, classes=4)
    optimizer = torch.optim.SGD(model.task_parameters(groups=True), lr=0.1)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 3, 8, 8)), torch.randint(4, (8,))).backward()
        optimizer.step()
    model.eval()


def build(counts: bool = False, tasks: list[str] = TASKS, **options: object) -> rkr.RectifiedModel:
    torch.manual_seed(0)
    model = rkr.rectify(Net(counts), head="fc", **options)
    for name in tasks:
        learn(model, name)
    return model


X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def alone(model: rkr.RectifiedModel) -> dict[str, Tensor]:
    """What each task answers when one thread asks."""
    answers = {}
    for name in model.tasks:
        model.set_task(name)
        answers[name] = model(X).clone()
    return answers


def hammer(model: rkr.RectifiedModel, calls: int, disturb: Callable[[], None] = lambda: None) -> int:
    """Eight threads, each calling all tasks in an order of its own. Returns how many answers had the right bits."""
    expected = alone(model)
    views = {name: model.for_task(name) for name in TASKS}
    right, errors, start = [0] * 8, [], threading.Barrier(9)

    def work(number: int) -> None:
        chance = random.Random(number)
        torch.set_num_threads(1)
        start.wait()
        try:
            with torch.no_grad():
                for _ in range(calls):
                    name = chance.choice(TASKS)
                    assert torch.equal(views[name](X), expected[name]), name
                    right[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        disturb()
    assert errors == []
    after = alone(model)
    assert all(torch.equal(after[name], expected[name]) for name in TASKS)
    return sum(right)


@pytest.mark.parametrize("cache_bytes", [1 << 30, 60_000, 0])
@pytest.mark.parametrize("counts", [False, True], ids=["plain", "writes to a buffer"])
def test_eight_threads_with_eight_tasks(counts: bool, cache_bytes: int) -> None:
    model = build(counts, cache_bytes=cache_bytes)
    assert hammer(model, 60) == 480
    if counts:
        assert model.network.count.calls.item() == 2  # of training the first task


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_while_tasks_are_added_trained_and_removed(memory_format: torch.memory_format, tmp_path: Path) -> None:
    model = build()
    model.to(memory_format=memory_format)
    done = []

    def disturb() -> None:
        name = f"other {len(done)}"
        learn(model, name, steps=1)
        model.save_task(name, tmp_path / "other")
        model.remove_task(name)
        model.load_task(tmp_path / "other")
        model.set_task("task 3")
        model.remove_task(name)
        done.append(name)

    assert hammer(model, 60, disturb) == 480
    assert done
    assert list(model.tasks) == TASKS


def test_while_tasks_come_from_a_folder_and_leave_memory(tmp_path: Path) -> None:
    build().save(tmp_path)
    model = rkr.load(tmp_path, Net()).eval()
    model.tasks.memory = 3 * model.cost().tasks[0].bytes
    assert hammer(model, 60, lambda: model.tasks.shrink(0)) == 480
    assert sum(model.tasks.in_memory(name) is not None for name in TASKS) <= 4


def test_view_shares_tensors_and_merged_weights() -> None:
    model = build(tasks=TASKS[:2])
    answers = alone(model)
    held = model.active.cache.nbytes
    with torch.no_grad():
        assert torch.equal(model.for_task("task 0")(X), answers["task 0"])
    assert model.active.cache.nbytes == held
    (replica,) = model.replicas._free
    own = [*model.network.parameters(), *model.network.buffers()]
    assert [id(t) for t in (*replica.network.parameters(), *replica.network.buffers())] == [id(t) for t in own]
    assert replica.tasks is model.tasks
    assert not {id(m) for m in replica.network.modules()} & {id(m) for m in model.network.modules()}


STARTED, GO = threading.Event(), threading.Event()


class Waits(nn.Module):
    """Stops in the middle of the model's pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False

    def forward(self, x: Tensor) -> Tensor:
        self.inside = True
        STARTED.set()
        GO.wait(30)
        self.inside = False
        return x


def test_replica_is_not_made_in_the_middle_of_a_pass() -> None:
    """Layers may keep things in modules during a pass, which a copy would keep for good."""
    torch.manual_seed(0)
    network = Net()
    network.count = Waits()
    model = rkr.rectify(network, head="fc").eval()
    model.add_task("a", classes=2, train_base=False)
    view = model.for_task("a")
    calls = [threading.Thread(target=call, args=(X,)) for call in (model, view)]
    calls[0].start()
    assert STARTED.wait(30)
    calls[1].start()
    calls[1].join(0.2)
    assert model.replicas._free == []
    GO.set()
    for call in calls:
        call.join()
    (replica,) = model.replicas._free
    assert not replica.network.count.inside


def test_one_replica_serves_all_tasks_of_one_thread() -> None:
    model = build()
    for name in TASKS:
        model.for_task(name)(X)
    assert len(model.replicas._free) == 1


def test_view_does_not_care_for_mode_or_task_in_use() -> None:
    model = build(tasks=TASKS[:2])
    answers, view = alone(model), model.for_task("task 0")
    model.train()
    model.set_task("task 1")
    assert torch.equal(view(X), answers["task 0"])
    assert model.training
    assert model.task == "task 1"
    assert model.network.bn1.training
    assert (view.name, view.task.classes, repr(view)) == ("task 0", 4, "View('task 0')")


def test_view_of_the_first_task_while_it_is_trained() -> None:
    """The base is being trained too: the view follows, and takes no part in it."""
    torch.manual_seed(0)
    model = rkr.rectify(Net(), head="fc")
    model.add_task("task 0", classes=4)
    view, optimizer = model.for_task("task 0"), torch.optim.SGD(model.task_parameters(), lr=0.1)
    answers = []
    for _ in range(3):
        with torch.no_grad():
            answers.append(view(X))
            assert torch.equal(answers[-1], model.eval()(X))
        model.zero_grad()
        view(X).sum().backward()
        assert all(p.grad is None for p in model.network.parameters())
        assert all(p.requires_grad for p in model.network.conv1._parameters.values())
        loss = F.cross_entropy(model.train()(X), torch.tensor([0, 1, 2, 3, 0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert not torch.equal(answers[0], answers[2])
    learn(model, "task 1")
    with torch.no_grad():
        model.set_task("task 0")
        assert torch.equal(view(X), model(X))


def test_view_follows_what_happens_to_the_model(tmp_path: Path) -> None:
    model = build(tasks=TASKS[:2])
    view = model.for_task("task 0")
    view(X)
    state = copy.deepcopy(model.state_dict())
    for change in (
        lambda: model.double(),
        lambda: model.float(),
        lambda: model.to(memory_format=torch.channels_last),
        lambda: model.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in state.items()}),
        lambda: model.load_state_dict(state, assign=True),
    ):
        change()
        x = X.to(model.network.hidden.weight.dtype)
        model.set_task("task 0")
        with torch.no_grad():
            assert torch.equal(view(x), model(x))
    calls: list[int] = []
    model.network.hidden.register_forward_hook(lambda *_: calls.append(1))
    model.refresh()
    view(X)
    assert calls == [1]
    model.save_task("task 0", tmp_path / "task")
    model.remove_task("task 0")
    with pytest.raises(rkr.UsageError, match="no task is named 'task 0'"):
        view(X)
    model.load_task(tmp_path / "task")
    assert view(X).shape == (6, 4)


def test_copies_of_a_model_have_replicas_of_their_own(tmp_path: Path) -> None:
    model = build(tasks=TASKS[:2])
    model.for_task("task 0")(X)
    assert copy.deepcopy(model).replicas._free == []
    model.save(tmp_path)
    view = model.for_task("task 0")
    taken = rkr.load(tmp_path, model.network)
    assert taken.replicas._free == []
    with pytest.raises(rkr.UsageError, match="given to another rectified model"):
        view(X)


def test_view_of_no_task_is_refused() -> None:
    with pytest.raises(rkr.UsageError, match="no task is named 'x'; tasks: 'task 0'"):
        build(tasks=TASKS[:1]).for_task("x")


def test_gradients_through_a_view() -> None:
    """Of the input; tasks that are not in use have none."""
    model = build(tasks=TASKS[:2])
    x = X.clone().requires_grad_()
    model.for_task("task 0")(x).sum().backward()
    assert x.grad is not None
    model.set_task("task 0")
    again = X.clone().requires_grad_()
    model(again).sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in model.tasks["task 1"].parameters())
