"""The plain networks: sizes as the paper counts them, torchvision's names, and what they compute."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rkr.networks import LeNet, ResNet, VisualEncoder, lenet, resnet18, resnet32
from rkr.networks.resnet import ZeroPad

CLASSIFIERS = {
    "lenet": lenet,
    "lenet-grey": lambda: lenet(classes=10, in_channels=1),
    "resnet18": resnet18,
    "resnet18-narrow": lambda: resnet18(width=4),
    "resnet18-imagenet": lambda: resnet18(classes=1000, stem="imagenet"),
    "resnet32": resnet32,
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def multiply_adds(network: nn.Module) -> int:
    """Multiply-adds of convolutions and linear layers for one sample."""
    total = 0

    def count(layer: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal total
        total += output.numel() * layer.weight[0].numel()

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    with torch.no_grad():
        network.eval()(torch.zeros(1, *network.input_shape))
    return total


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (lambda: LeNet(classes=100), 3_038_110),
        (lambda: resnet18(classes=100), 11_220_132),
        (lambda: resnet18(classes=1000, stem="imagenet"), 11_689_512),
        # 1/16 of the full network's convolutions but the stem, 1/4 of its normalisation, a classifier of 128 features.
        (lambda: resnet18(width=16), (11_159_232 - 1_728) // 16 + 432 + 9_600 // 4 + 12_900),
        (lambda: resnet32(classes=10), 464_154),
        (VisualEncoder, 3_396_248),
    ],
    ids=["lenet", "resnet18", "resnet18-imagenet", "resnet18-narrow", "resnet32", "visual-encoder"],
)
def test_parameter_count(build: Callable[[], nn.Module], parameters: int) -> None:
    assert sum(p.numel() for p in build().parameters()) == parameters


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lenet, 10_946_000),
        (resnet18, 555_468_800),
        (lambda: resnet18(width=16), (555_468_800 - 32 * 32 * 1_728 - 51_200) // 16 + 32 * 32 * 432 + 12_800),
    ],
    ids=["lenet", "resnet18", "resnet18-narrow"],
)
def test_multiply_adds(build: Callable[[], nn.Module], expected: int) -> None:
    assert multiply_adds(build()) == expected


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_output_shape_and_channels_last(name: str) -> None:
    network = CLASSIFIERS[name]().eval()
    x = torch.randn(2, *network.input_shape)
    with torch.no_grad():
        expected = network(x)
        network.to(memory_format=torch.channels_last)
        actual = network(x.to(memory_format=torch.channels_last))
    assert expected.shape == (2, network.fc.out_features)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_input_shapes() -> None:
    assert LeNet(in_channels=1).input_shape == (1, 32, 32)
    assert resnet18().input_shape == resnet32().input_shape == (3, 32, 32)
    assert resnet18(stem="imagenet").input_shape == (3, 224, 224)
    assert VisualEncoder(in_features=7).input_shape == (7,)


def test_resnet18_has_torchvision_names() -> None:
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = ["conv1.weight", *(f"bn1.{field}" for field in norm)]
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            prefix = f"layer{stage}.{block}"
            pairs = [("conv1", "bn1"), ("conv2", "bn2")]
            if stage > 1 and block == 0:
                pairs.append(("downsample.0", "downsample.1"))
            for conv, bn in pairs:
                expected += [f"{prefix}.{conv}.weight", *(f"{prefix}.{bn}.{field}" for field in norm)]
    expected += ["fc.weight", "fc.bias"]
    for stem in ("cifar", "imagenet"):
        assert list(resnet18(stem=stem).state_dict()) == expected


def test_resnet18_equals_an_independent_implementation() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=1000,
    )
    reference = transformers.ResNetForImageClassification(config).eval()
    names = {
        "bn1": "resnet.embedder.embedder.normalization",
        "conv1": "resnet.embedder.embedder.convolution",
        "fc": "classifier.1",
    }
    inner = {"conv1": "layer.0.convolution", "bn1": "layer.0.normalization"}
    inner |= {"conv2": "layer.1.convolution", "bn2": "layer.1.normalization"}
    inner |= {"downsample.0": "shortcut.convolution", "downsample.1": "shortcut.normalization"}
    for stage in range(4):
        for block in range(2):
            for ours, theirs in inner.items():
                names[f"layer{stage + 1}.{block}.{ours}"] = f"resnet.encoder.stages.{stage}.layers.{block}.{theirs}"
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2.0)

    network = resnet18(classes=1000, stem="imagenet").eval()
    state = reference.state_dict()
    network.load_state_dict(
        {
            key: state[f"{names[module]}.{field}"]
            for key in network.state_dict()
            for module, _, field in [key.rpartition(".")]
        }
    )
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(network(x), reference(x).logits, rtol=1e-4, atol=1e-4)


def test_parameter_free_shortcut_subsamples_and_appends_zeros() -> None:
    x = torch.randn(2, 3, 5, 4)
    y = ZeroPad(3, 8, stride=2)(x)
    assert y.shape == (2, 8, 3, 2)
    assert torch.equal(y[:, :3], x[:, :, ::2, ::2])
    assert not y[:, 3:].any()


def test_resnet32_has_no_shortcut_parameters() -> None:
    assert not [key for key in resnet32().state_dict() if "downsample" in key]


def test_resnet_convolutions_start_with_he_variance() -> None:
    network = resnet18()
    weight = network.get_submodule("layer4.1.conv2").weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.01)


def test_visual_encoder_computes_two_separate_heads() -> None:
    encoder = VisualEncoder(in_features=6, hidden=5, latent=3)
    x = torch.randn(4, 6)
    h = (x @ encoder.hidden.weight.T).clamp(min=0)
    mu, logvar = encoder(x)
    torch.testing.assert_close(mu, h @ encoder.mu.weight.T)
    torch.testing.assert_close(logvar, h @ encoder.logvar.weight.T)


def test_visual_encoder_starts_with_half_xavier_range() -> None:
    encoder = VisualEncoder()
    for layer in (encoder.hidden, encoder.mu, encoder.logvar):
        bound = 0.5 * math.sqrt(6 / (layer.in_features + layer.out_features))
        assert layer.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert not layer.bias.any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: lenet(classes=0), "classes must be at least 1, but is 0"),
        (lambda: lenet(in_channels=0), "in_channels must be at least 1"),
        (lambda: resnet18(width=0), "width must be at least 1, but is 0"),
        (lambda: resnet18(classes=-1), "classes must be at least 1, but is -1"),
        (lambda: resnet18(stem="mnist"), "stem must be one of cifar, imagenet, but is 'mnist'"),
        (lambda: resnet32(classes=0), "classes must be at least 1"),
        (lambda: ResNet((2, 2), (64,), classes=10), "blocks and widths must name the same stages"),
        (lambda: VisualEncoder(latent=0), "latent must be at least 1"),
    ],
)
def test_bad_arguments_are_named(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
