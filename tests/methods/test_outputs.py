"""Methods that change what leaves a layer: CCLL and EFT, against formulas written out and published sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.errors import UsageError
from rkr.methods import METHODS, Learner
from rkr.methods.ccll import Ccll, calibrated
from rkr.methods.eft import Eft, group_size
from rkr.methods.learner import SeenTask
from rkr.methods.shared.changed import Changed
from rkr.methods.shared.graph import norm_after


def task(number: int, classes: int = 10) -> SeenTask:
    names = tuple(f"{number}-{i}" for i in range(classes))
    return SeenTask(number, f"t{number}", names, number * classes)


def begun(method: str, make: Callable[[], nn.Module], tasks: int = 1, **options: object) -> Changed:
    torch.manual_seed(0)
    learner = METHODS[method].build(make, "fc", **options)
    for number in range(tasks):
        learner.begin(task(number))
    assert isinstance(learner, Changed)
    return learner


def steps(learner: Learner, x: Tensor, y: Tensor, count: int = 2) -> None:
    learner.train()
    optimizer = torch.optim.SGD(learner.groups(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(count):
        optimizer.zero_grad()
        learner.loss(x, y).loss.backward()
        optimizer.step()
        learner.after_step()
    learner.eval()


def tensors(learner: Changed, number: int) -> dict[str, Tensor]:
    return learner.model.tasks[f"t{number}"].tensors()


# -- CCLL -----------------------------------------------------------------------------------------------------


def test_ccll_takes_12_numbers_a_channel_and_1_a_unit() -> None:
    """0.51 % a task on ResNet-18 with 100 classes, 100.7 % for 10 tasks on LeNet: the published figures."""
    cost = begun("ccll", rkr.networks.resnet18).model.cost()
    channels = sum(m.out_channels for m in rkr.networks.resnet18().modules() if isinstance(m, nn.Conv2d))
    assert channels == 4800
    assert cost.tasks[0].parameters == 12 * channels == 57_600
    assert f"{cost.percent:.2f}" == "0.51"
    learner = begun("ccll", rkr.networks.lenet, tasks=10)
    capacity = learner.capacity()
    assert capacity.parameters - capacity.network == 10 * (12 * 70 + 1300)
    assert f"{capacity.percent:.1f}" == "100.7"


def test_ccll_on_10_000_classes() -> None:
    """0.35 %: the second published increment that settles 12 numbers a channel."""
    assert f"{begun('ccll', lambda: rkr.networks.resnet18(10_000)).model.cost().percent:.2f}" == "0.35"


def test_calibration_is_the_formula_element_by_element() -> None:
    torch.manual_seed(1)
    maps, spatial, channel = torch.randn(2, 3, 5, 4), torch.randn(3, 1, 3, 3), torch.randn(3)
    padded = F.pad(maps, (1, 1, 1, 1))
    expected = torch.empty_like(maps)
    for b in range(2):
        for c in range(3):
            star = torch.empty(5, 4)
            for i in range(5):
                for j in range(4):
                    star[i, j] = maps[b, c, i, j] + (padded[b, c, i : i + 3, j : j + 3] * spatial[c, 0]).sum()
            expected[b, c] = star / (1 + torch.exp(-channel[c] * star.mean()))
    torch.testing.assert_close(calibrated(maps, spatial, channel), expected)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("unit", ["scale", "gate"])
def test_ccll_computes_a_network_written_out(where: str, unit: str) -> None:
    learner = begun("ccll", rkr.networks.lenet, 2, where=where, unit=unit)
    torch.manual_seed(2)
    own = learner.model.tasks["t1"]
    with torch.no_grad():
        for value in own.tensors().values():
            if value.is_floating_point():
                value.add_(0.1 * torch.rand_like(value))
    learner.eval()
    x, t = torch.randn(3, 3, 32, 32), own.tensors()
    base = learner.model.network.state_dict()

    def conv(x: Tensor, number: int) -> Tensor:
        y = F.conv2d(x, base[f"conv{number}.weight"], base[f"conv{number}.bias"], padding=2)
        kernels = t[f"conv{number}.spatial"], t[f"conv{number}.channel"]
        y = calibrated(y, *kernels) if where == "before" else y
        bn = f"bn{number}."
        y = F.batch_norm(y, t[bn + "running_mean"], t[bn + "running_var"], t[bn + "weight"], t[bn + "bias"])
        y = calibrated(y, *kernels) if where == "after" else y
        return F.relu(F.max_pool2d(y, 3, 2, 1))

    def linear(x: Tensor, name: str) -> Tensor:
        y, number = F.linear(x, base[f"{name}.weight"], base[f"{name}.bias"]), t[f"{name}.unit"]
        return F.relu(y * number if unit == "scale" else y * torch.sigmoid(number * y))

    features = linear(linear(conv(conv(x, 1), 2).flatten(1), "fc1"), "fc2")
    expected = F.linear(features, t["head.weight"], t["head.bias"])
    with torch.no_grad():
        torch.testing.assert_close(learner.predict(x, 1), expected, rtol=1e-4, atol=1e-5)


def test_a_new_calibration_lets_maps_pass_half() -> None:
    maps = torch.randn(2, 4, 3, 3)
    assert torch.equal(calibrated(maps, torch.zeros(4, 1, 3, 3), torch.zeros(4)), maps / 2)


def test_batch_norms_behind_layers_are_found() -> None:
    assert norm_after(rkr.networks.lenet(), "CCLL") == {"conv1": "bn1", "conv2": "bn2"}
    found = norm_after(rkr.networks.resnet18(), "CCLL")
    assert len(found) == 20
    assert found["layer2.0.downsample.0"] == "layer2.0.downsample.1"


def test_a_network_that_cannot_be_traced_is_refused_with_a_word() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).mean((2, 3))
            return self.fc(x if x.sum() > 0 else -x)

    with pytest.raises(UsageError, match=r"CCLL needs a network whose forward can be traced"):
        Ccll(Odd, "fc", where="after")
    Ccll(Odd, "fc")  # which nothing needs to be known for


def test_what_a_calibration_adds_in_computation() -> None:
    """LeNet puts out 20 x 32 x 32 and 50 x 16 x 16 values of maps, and 1,300 units."""
    assert begun("ccll", rkr.networks.lenet).capacity().multiply_adds == 10_946_000 + 10 * (20480 + 12800) + 1300
    of_all, eft = (begun("eft", rkr.networks.lenet, stem=stem).capacity().multiply_adds for stem in (True, False))
    assert of_all == 10_946_000 + (20480 + 12800) * (9 * 5 + 10) + 1300
    assert eft == 10_946_000 + 12800 * (9 * 5 + 10) + 1300


# -- EFT ------------------------------------------------------------------------------------------------------


def test_eft_transforms_by_two_grouped_convolutions() -> None:
    learner = begun("eft", lambda: rkr.networks.lenet(10), spatial=8, pointwise=16, stem=True)
    t = tensors(learner, 0)
    assert {k: tuple(v.shape) for k, v in t.items() if k.startswith("conv2")} == {
        "conv2.spatial": (50, 5, 3, 3),
        "conv2.spatial_bias": (50,),
        "conv2.pointwise": (50, 10, 1, 1),
        "conv2.pointwise_bias": (50,),
    }
    torch.manual_seed(3)
    x = torch.randn(2, 3, 32, 32)
    learner.train()  # the module's own forward, before and after
    conv: nn.Conv2d = learner.model.network.get_submodule("conv1")  # type: ignore[assignment]
    with torch.no_grad():
        y = F.conv2d(x, conv._parameters["weight"], conv._parameters["bias"], padding=2)  # type: ignore[arg-type]
        expected = torch.empty_like(y)
        for group in range(4):  # 20 channels in groups of 5
            part = slice(5 * group, 5 * group + 5)
            expected[:, part] = F.conv2d(y[:, part], t["conv1.spatial"][part], padding=1)
        for group in range(2):  # and of 10
            part = slice(10 * group, 10 * group + 10)
            expected[:, part] += F.conv2d(y[:, part], t["conv1.pointwise"][part])
        expected += (t["conv1.spatial_bias"] + t["conv1.pointwise_bias"])[:, None, None]
        torch.testing.assert_close(conv(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stem", [False, True])
def test_eft_leaves_the_stem_as_it_is(stem: bool) -> None:
    """As in the authors' ResNet-18, whose other 19 convolutions have groups of 8 and of 16 channels, with biases."""
    learner = begun("eft", rkr.networks.resnet18, stem=stem)
    t = tensors(learner, 0)
    adapted = {key.rpartition(".")[0] for key in t if key.endswith("spatial")}
    convolutions = {path for path, m in learner.model.network.named_modules() if isinstance(m, nn.Conv2d)}
    assert len(convolutions) == 20
    assert convolutions - adapted == (set() if stem else {"conv1"})
    channels = 4_800 - (0 if stem else 64)
    numbers = sum(v.numel() for k, v in t.items() if "spatial" in k or "pointwise" in k)
    assert numbers == channels * (9 * 8 + 16 + 2)
    if not stem:
        x, conv = torch.randn(2, 3, 32, 32), learner.model.network.get_submodule("conv1")
        with torch.no_grad():
            expected = F.conv2d(x, conv._parameters["weight"], padding=1)  # type: ignore[arg-type]
            torch.testing.assert_close(conv(x), expected)


def test_eft_starts_as_torch_draws_convolutions() -> None:
    t = tensors(begun("eft", rkr.networks.resnet18), 0)
    spatial, pointwise = t["layer4.0.conv1.spatial"], t["layer4.0.conv1.pointwise"]
    assert tuple(spatial.shape) == (512, 8, 3, 3)
    assert tuple(pointwise.shape) == (512, 16, 1, 1)
    for tensor, fan in ((spatial, 72), (pointwise, 16)):
        assert tensor.abs().max() <= fan**-0.5
        torch.testing.assert_close(tensor.std(), torch.tensor((fan * 3) ** -0.5), rtol=0.02, atol=0)


@pytest.mark.parametrize(("channels", "wanted", "size"), [(64, 8, 8), (20, 8, 5), (50, 16, 10), (3, 8, 3), (7, 4, 1)])
def test_a_group_divides_the_channels(channels: int, wanted: int, size: int) -> None:
    assert group_size(channels, wanted) == size


# -- both -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ccll", "eft"])
@pytest.mark.parametrize("network", ["lenet", "resnet18", "resnet32"])
def test_earlier_tasks_stay_bit_identical(method: str, network: str) -> None:
    make: Callable[[], nn.Module] = lambda: getattr(rkr.networks, network)(20).to(  # noqa: E731
        memory_format=torch.channels_last
    )
    learner = begun(method, make)
    torch.manual_seed(4)
    x = torch.randn(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    steps(learner, x, torch.randint(10, (4,)))
    with torch.no_grad():
        before = learner.predict(x, 0)
    start = {key: value.clone() for key, value in tensors(learner, 0).items() if not key.startswith("head")}
    learner.begin(task(1))
    for key, value in start.items():
        if "bn" not in key and "downsample.1" not in key:
            assert torch.equal(tensors(learner, 1)[key], value)  # new tasks start at the one before
    steps(learner, x, torch.randint(10, (4,)) + 10)
    with torch.no_grad():
        assert torch.equal(learner.predict(x, 0), before)
        assert not torch.equal(learner.predict(x, 1), before)


@pytest.mark.parametrize(
    ("learner", "options", "message"),
    [
        (Ccll, {"where": "beside"}, "where must be 'before' or 'after'"),
        (Ccll, {"unit": "none"}, "unit must be 'scale' or 'gate'"),
        (Ccll, {"init": "zero"}, 'init must be "previous" or "random"'),
        (Eft, {"spatial": 0}, "must be at least 1"),
    ],
)
def test_bad_options_get_a_word(learner: type[Learner], options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        learner(rkr.networks.lenet, "fc", **options)  # type: ignore[arg-type]


def test_a_calibrated_network_has_no_plain_form() -> None:
    with pytest.raises(UsageError, match="does not fold into plain weights"):
        begun("ccll", rkr.networks.lenet).model.merged("t0")
