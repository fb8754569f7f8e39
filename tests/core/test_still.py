"""What earlier tasks depend on stays still, however a network writes to it or is changed."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A module of the user's in the middle."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.fc = nn.Linear(6, 5), middle, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.middle(self.first(x)).relu())


class OwnNorm(nn.Module):
    """Torch does not count what `F.batch_norm` writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(5))
        self.register_buffer("v", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.m, self.v, training=self.training)


class Average(nn.Module):
    """Nor what is written to `.data`; in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


class Clipped(nn.Linear):
    """A layer with a running range beside its weight."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.register_buffer("range", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.range.mul_(0.9).add_(0.1 * x.detach().abs().max())
        return F.linear(x.clamp(-self.range, self.range), self.weight, self.bias)


class Gained(nn.BatchNorm1d):
    """A BatchNorm with one buffer more."""

    def __init__(self) -> None:
        super().__init__(5)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.gain.mul_(1.1)
        return self.gain * super().forward(x)


def steps(model: rkr.RectifiedModel, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.task_parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy((run or model)(x), torch.arange(8) % 3).backward()
        optimizer.step()
    model.eval()


def answers(model: rkr.RectifiedModel, name: str, x: Tensor = X) -> Tensor:
    model.set_task(name)
    with torch.no_grad():
        return model.eval()(x)  # type: ignore[no-any-return]


def first_task(network: nn.Module, **options: Any) -> rkr.RectifiedModel:
    torch.manual_seed(0)
    model = rkr.rectify(network, head="fc", **options)
    model.add_task("a", classes=3)
    steps(model, X)
    return model


@pytest.mark.parametrize("middle", [OwnNorm, Average, Clipped, Gained])
@pytest.mark.parametrize("directly", [False, True])
def test_whatever_writes_to_shared_buffers(middle: type[nn.Module], directly: bool, tmp_path: Path) -> None:
    """Also where the network itself is called, which is the user's own module."""
    network = Net(middle())
    model = first_task(network)
    trained = {name: b.clone() for name, b in network.named_buffers() if not name.endswith("tracked")}
    model.add_task("b", classes=3)
    known, proof = answers(model, "a"), model.fingerprint("a")
    model.save(tmp_path)
    model.set_task("b")
    steps(model, 3 * X + 1, network if directly else None)
    assert torch.equal(answers(model, "a"), known)
    assert model.fingerprint("a") == proof
    shared = {name: b for name, b in network.named_buffers() if name in trained and "running" not in name}
    assert shared
    assert all(torch.equal(b, trained[name]) for name, b in shared.items())
    assert torch.equal(model.merged("a")(X), known)
    assert torch.equal(answers(pickle.loads(pickle.dumps(model)), "a"), known)
    assert torch.equal(answers(copy.deepcopy(model), "a"), known)
    assert torch.equal(answers(rkr.load(tmp_path, Net(middle())), "a"), known)
    assert answers(model.double(), "a", X.double()).dtype == torch.float64
    for module in network.modules():
        assert all(b.dtype in (torch.float64, torch.int64) for b in module._buffers.values() if b is not None)


@pytest.mark.parametrize("directly", [False, True])
def test_buffers_within_a_module_that_has_some_itself(directly: bool) -> None:
    class Around(Average):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Average()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(super().forward(x))

    network = Net(Around())
    network.register_buffer("calls", torch.zeros(()))

    def count(module: nn.Module, given: Any) -> None:
        network.calls += 1

    network.register_forward_pre_hook(count)
    model = first_task(network)
    before = {name: b.clone() for name, b in network.named_buffers()}
    model.add_task("b", classes=3)
    steps(model, 3 * X + 1, network if directly else None)
    assert {name: b.tolist() for name, b in network.named_buffers()} == {n: b.tolist() for n, b in before.items()}
    assert before["calls"] == 3


class Statistic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(x.detach().mean(0))
        return x


class Centred(Net):
    """Reads what its part has written in the same pass."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.first(x))
        return self.fc((h - self.middle.mean).relu())


def test_a_pass_sees_what_it_has_written_itself() -> None:
    model = first_task(Centred(Statistic()))
    with torch.no_grad():
        known = model(X + 1)
        model(X)
    model.add_task("b", classes=3)
    assert torch.equal(answers(model, "a", X + 1), known)
    answers(model, "b", X - 2)
    assert torch.equal(answers(model, "a", X + 1), known)


def test_tasks_of_one_batch_do_not_see_each_others_writes() -> None:
    model = first_task(Net(Average()))
    model.add_task("b", classes=3)
    model.eval()
    with torch.no_grad():
        mixed = model(X, tasks=["a", "b"] * 4)
    for i, name in enumerate("ab"):
        assert torch.equal(mixed[i::2], answers(model, name, X[i::2].contiguous()))


@pytest.mark.parametrize("bn", ["frozen", "affine"])
def test_shared_statistics_of_a_layer_put_to_training_by_hand(bn: str) -> None:
    network = Net(nn.BatchNorm1d(5))
    model = first_task(network, bn=bn)
    model.add_task("b", classes=3)
    known = answers(model, "a")
    model.set_task("b")
    model.train()
    network.middle.training = True
    model(3 * X + 1).sum().backward()
    assert torch.equal(answers(model, "a"), known)


def test_freezing_leaves_modes_as_they_are() -> None:
    """A user may have put dropout to evaluation mode in a network that is being trained."""
    network = Net(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(5)))
    model = first_task(network)
    model.train()
    network.middle[0].eval()
    model.add_task("b", classes=3)
    assert network.training
    assert not network.middle[0].training
    assert network.middle[1].training


# ---------------------------------------------------------------------------------------------------------
# Networks that change


def test_a_layer_that_was_replaced_is_noticed() -> None:
    for later in (lambda m: m.add_task("b", classes=3), lambda m: m.train(), lambda m: m.merged("a")):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(first_task(Net(nn.BatchNorm1d(5))))
        with pytest.raises(rkr.UsageError, match=r"'middle' was replaced after rectify.*before rectify"):
            later(model)


def test_a_layer_that_came_later_is_noticed() -> None:
    class Late(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "late"):
                self.late = nn.BatchNorm1d(5)
            return self.fc(self.late(self.first(x)).relu())

    torch.manual_seed(0)
    model = rkr.rectify(Late(nn.Identity()), head="fc")
    model.add_task("a", classes=3)
    model(X)
    with pytest.raises(rkr.UsageError, match=r"'late' came after rectify.*running it once"):
        model.add_task("b", classes=3)


def test_a_norm_without_a_shape_is_refused() -> None:
    with pytest.raises(rkr.UsageError, match=r"'middle\.running_mean' has no shape yet: run the network once"):
        rkr.rectify(Net(nn.LazyBatchNorm1d(affine=False)), head="fc")


# ---------------------------------------------------------------------------------------------------------
# Merged weights


@pytest.mark.parametrize("width", [8, 400, 4000])
def test_weights_of_functional_calls_are_merged_anew(width: int) -> None:
    """Each has a weight that is gone after the call, and the next may lie in the same place."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    model = rkr.rectify(network, head="2")
    model.add_task("a", classes=3, train_base=False)
    model.eval()
    weight, plain = network.state_dict()["0.weight"], model.merged("a")
    with torch.no_grad():
        for factor in range(1, 9):
            found = torch.func.functional_call(network, {"0.weight": weight * factor}, (X,))
            expected = torch.func.functional_call(plain, {"0.weight": plain[0].weight * factor}, (X,))
            torch.testing.assert_close(found, expected)


def test_tasks_made_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    model = first_task(Net(nn.BatchNorm1d(5)))
    model.save_task("a", tmp_path / "a.safetensors")
    model.save(tmp_path / "zoo")
    network = Net(nn.BatchNorm1d(5))
    with torch.inference_mode():
        model.add_task("b", classes=3)
        model.load_task(tmp_path / "a.safetensors", name="c")
        loaded = rkr.load(tmp_path / "zoo", network)
        known = loaded(X)
        served = rkr.load(tmp_path / "zoo", Net(nn.BatchNorm1d(5)))  # built for inference alone
        assert torch.equal(served(X), known)
    for made, name in ((model, "b"), (model, "c"), (loaded, "a")):
        made.set_task(name)
        before = made.fingerprint(name)
        steps(made, X)
        assert made.fingerprint(name) != before


def test_a_layers_own_way_of_being_copied() -> None:
    class Locked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 5)
            self.lock = threading.Lock()

        def __getstate__(self) -> dict[str, Any]:
            return {name: value for name, value in self.__dict__.items() if name != "lock"}

    model = first_task(Net(Locked()))
    known = answers(model, "a")
    assert torch.equal(answers(copy.deepcopy(model), "a"), known)
    assert torch.equal(model.merged("a")(X), known)


def test_states_that_are_assigned() -> None:
    model = first_task(Net(nn.BatchNorm1d(5)))
    model.add_task("b", classes=3)
    known, state = answers(model, "a"), {key: t.clone() for key, t in model.state_dict().items()}
    steps(model, X)
    model.set_task("b")
    steps(model, X)
    model.load_state_dict(state, assign=True)
    assert torch.equal(answers(model, "a"), known)
    assert all(torch.equal(t, state[key]) for key, t in model.state_dict().items())


# ---------------------------------------------------------------------------------------------------------
# Batches with several tasks, where one pass for all would be wrong


def two_widths(network: nn.Module) -> rkr.RectifiedModel:
    torch.manual_seed(0)
    model = rkr.rectify(network, head="fc")
    for name, classes in (("a", 3), ("b", 5)):
        model.add_task(name, classes=classes, train_base=False)
        with torch.no_grad():
            for key, p in model.named_task_parameters().items():
                if key.endswith(".rm"):
                    p.normal_()
    return model.eval()


def check_rows(model: rkr.RectifiedModel, x: Tensor, names: list[str]) -> None:
    with torch.no_grad():
        rows = model(x, tasks=names)
        for i, name in enumerate(names):
            model.set_task(name)
            own = model(x[i : i + 1])[0]
            torch.testing.assert_close(rows[i, ..., : own.shape[-1]], own)
            assert bool((rows[i, ..., own.shape[-1] :] == -torch.inf).all())


@pytest.mark.parametrize("after", [torch.sigmoid, lambda y: torch.cat([y, y[:, :1]], 1)])
def test_what_follows_the_head_does_not_see_the_padding(after: Callable[[Tensor], Tensor]) -> None:
    class After(Net):
        def forward(self, x: Tensor) -> Tensor:
            return after(super().forward(x))

    check_rows(two_widths(After(nn.Identity())), X[:4], ["a", "b", "b", "a"])


def test_an_argument_that_is_left_out_leads_elsewhere() -> None:
    class Turned(Net):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is None:  # samples along the second dimension inside
                return super().forward(x.transpose(0, 1)).transpose(0, 1).contiguous()
            return super().forward(x)

    x = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1))
    model = two_widths(Turned(nn.Identity()))
    with torch.no_grad():
        rows = model(x, tasks=["a", "b", "a", "b"])
        for i, name in enumerate(("a", "b")):
            model.set_task(name)
            own = model(x[i::2])
            torch.testing.assert_close(rows[i::2, :, : own.shape[-1]], own)


class Pair(NamedTuple):
    x: Tensor
    shift: Tensor


@pytest.mark.parametrize("form", ["dict", "pair"])
def test_samples_within_another_argument(form: str) -> None:
    class Nested(Net):
        def forward(self, given: Any) -> Tensor:
            x, shift = (given["x"], given["shift"]) if isinstance(given, dict) else (given.x, given.shift)
            return super().forward(x + shift)

    model = two_widths(Nested(nn.Identity()))
    given: Any = Pair(X, 2 * X) if form == "pair" else {"x": X, "shift": 2 * X}
    with torch.no_grad():
        rows = model(given, tasks=["a", "b"] * 4)
        for i, name in enumerate(("a", "b")):
            model.set_task(name)
            own = model(Pair(X[i::2], 2 * X[i::2]))
            torch.testing.assert_close(rows[i::2, : own.shape[1]], own)


def test_outputs_that_cannot_be_filled_up() -> None:
    class Votes(Net):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) > 0).long()

    model = two_widths(Votes(nn.Identity()))
    with torch.no_grad(), pytest.raises(rkr.UsageError, match="int64 has no -inf"):
        model(X, tasks=["a", "b"] * 4)


# ---------------------------------------------------------------------------------------------------------
# Options and names


def test_numbers_of_other_kinds(tmp_path: Path) -> None:
    options: Any = {"rank": np.int64(2), "ranks": {"middle": np.int32(1)}, "cache_bytes": 1e9}
    model = first_task(Net(nn.Linear(5, 5)), **options)
    model.save(tmp_path)
    loaded = rkr.load(tmp_path, Net(nn.Linear(5, 5)))
    assert loaded.options == model.options
    assert (model.options.rank, model.options.ranks, model.options.cache_bytes) == (2, {"middle": 1}, 10**9)
    assert all(type(value) is int for value in (model.options.rank, model.options.cache_bytes))
    for wrong in (0.5, -1, float("inf"), float("nan"), "1"):
        with pytest.raises(rkr.UsageError, match=r"cache_bytes must be (a whole|at least 0|a finite)"):
            rkr.rectify(Net(nn.Identity()), head="fc", cache_bytes=wrong)


def test_tasks_are_read_like_a_dictionary() -> None:
    model = first_task(Net(nn.Identity()))
    model.add_task("b.c", classes=3)
    assert model.tasks.keys() == ["a", "b.c"]
    assert [(name, task.name) for name, task in model.tasks.items()] == [("a", "a"), ("b.c", "b.c")]
    assert dict(model.tasks)["b.c"] is model.tasks["b.c"]
