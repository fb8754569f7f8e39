"""Training step: RKR on a frozen base against full fine-tuning, the floor, naive RKR and peft's LoRA."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from measure import interleaved
from torch import Tensor, nn

import rkr
from rkr.experiment.processes import keep_freed_memory


@dataclass(frozen=True)
class Setting:
    """A network, its batch and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    head: str | None
    batch: int
    rank: int = 2
    rounds: int = 15
    bar: float | None = None  # RKR against the floor, at most


class Encoder(nn.Module):
    """2048-1560-64x2 as in the zero-shot encoder; one output tensor so that every case has the same loss."""

    input_shape = (2048,)

    def __init__(self) -> None:
        super().__init__()
        self.encoder = rkr.networks.VisualEncoder()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.encoder(x), 1)


SETTINGS = (
    Setting("ResNet-18", lambda: rkr.networks.resnet18(100), "fc", 32, rounds=9, bar=1.15),
    Setting("ResNet-32", lambda: rkr.networks.resnet32(10), "fc", 64, rounds=11, bar=1.25),
    Setting("LeNet", lambda: rkr.networks.lenet(100), "fc", 128, rounds=25, bar=1.15),
    Setting("MLP", Encoder, None, 50, rounds=41, bar=1.15),
)


def plain(setting: Setting, cl: bool) -> nn.Module:
    torch.manual_seed(0)
    network = setting.build().train()
    return network.to(memory_format=torch.channels_last) if cl else network


def batch(setting: Setting, cl: bool) -> Tensor:
    x = torch.randn(setting.batch, *plain(setting, False).input_shape)
    return x.contiguous(memory_format=torch.channels_last) if cl and x.dim() == 4 else x


def stepper(model: nn.Module, params: list[nn.Parameter], x: Tensor, setting: Setting) -> Callable[[], None]:
    optimizer = torch.optim.SGD(params, lr=1e-4, momentum=0.9)
    labels = torch.randint(0, 10, (len(x),))

    def step() -> None:
        optimizer.zero_grad()
        y = model(x)
        loss = F.cross_entropy(y, labels) if setting.head else y.square().mean()
        loss.backward()
        optimizer.step()

    return step


def rkr_step(setting: Setting, cl: bool, x: Tensor, kernels: str) -> Callable[[], None]:
    model = rkr.rectify(plain(setting, cl), rank=setting.rank, head=setting.head, kernels=kernels)
    classes = 10 if setting.head else None
    model.add_task("first", classes)
    model.add_task("second", classes)
    return stepper(model, list(model.task_parameters()), x, setting)


def lora_model(setting: Setting, cl: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    network = own_head(setting, plain(setting, cl))
    targets = [
        name
        for name, module in network.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and name != setting.head
    ]
    config = LoraConfig(
        r=setting.rank,
        lora_alpha=setting.rank,
        target_modules=targets,
        modules_to_save=[setting.head] if setting.head else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(network, config)
    return model.to(memory_format=torch.channels_last) if cl else model


def cases(setting: Setting, cl: bool, only: str | None = None) -> dict[str, Callable[[], None]]:
    """The competitors, or only one of them."""
    x = batch(setting, cl)

    def full() -> Callable[[], None]:
        network = own_head(setting, plain(setting, cl))
        return stepper(network, list(network.parameters()), x, setting)

    def floor() -> Callable[[], None]:
        network = own_head(setting, plain(setting, cl)).requires_grad_(False)
        image = x.clone().requires_grad_(True)
        labels = torch.randint(0, 10, (len(x),))

        def step() -> None:
            y = network(image)
            loss = F.cross_entropy(y, labels) if setting.head else y.square().mean()
            image.grad = None
            loss.backward()

        return step

    def peft() -> Callable[[], None]:
        model = lora_model(setting, cl)
        return stepper(model, [p for p in model.parameters() if p.requires_grad], x, setting)

    builders = {
        "full": full,
        "floor": floor,
        "naive": lambda: rkr_step(setting, cl, x, kernels="formula"),
        "peft": peft,
        "rkr": lambda: rkr_step(setting, cl, x, kernels="auto"),
    }
    if find_spec("peft") is None:
        del builders["peft"]
    return {name: build() for name, build in builders.items() if only in (None, name)}


def own_head(setting: Setting, network: nn.Module) -> nn.Module:
    if setting.head:
        network.fc = nn.Linear(network.fc.in_features, 10)
    return network


def run(only: str = "") -> None:
    """Print one line for each network and memory layout."""
    keep_freed_memory()  # else the floor of ResNet-32 spends a fifth of its time on page faults
    print("training step, relative to full fine-tuning in the same memory layout")
    if find_spec("peft") is None:
        print("without peft, which is not installed")
    for setting in SETTINGS:
        if only and only not in setting.name:
            continue
        for cl in (False, True) if setting.head else (False,):
            times = interleaved(cases(setting, cl), setting.rounds)
            full = times["full"]
            row = "  ".join(f"{name} {t / full:.2f}" for name, t in times.items())
            layout = "channels_last" if cl else "contiguous"
            peft = f"  rkr/peft {times['rkr'] / times['peft']:.2f}" if "peft" in times else ""
            print(
                f"{setting.name:10} {layout:13} {row}{peft}"
                f"  rkr/floor {times['rkr'] / times['floor']:.2f}  (full {full * 1e3:.1f} ms, bar {setting.bar})",
                flush=True,
            )
