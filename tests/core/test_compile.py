"""`torch.compile(model, fullgraph=True)`: answers, gradients, retention, and when it compiles again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn

import rkr


def logits(output: Any) -> Tensor:
    return getattr(output, "logits", output)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(logits(model(x)), torch.arange(len(x)))


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    network: nn.Module = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
    )
    return network


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(network: nn.Module, head: str, x: Tensor, backend: str) -> None:
    """Train four tasks compiled and eager side by side; then answer. In float64: training magnifies rounding."""
    torch.manual_seed(0)
    x = x.double()
    eager = rkr.rectify(network.double(), head=head)
    model = copy.deepcopy(eager)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    answers: dict[str, tuple[str, Tensor]] = {}
    seen = []
    for number, name in enumerate("abcd"):
        for each in (eager, model):
            torch.manual_seed(number)
            each.add_task(name, 10)
            each.train()
        steps = [(eager, eager), (model, compiled)]
        for each, call in steps:
            optimizer = torch.optim.SGD(each.task_parameters(), lr=0.01)
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(call, x).backward()
                optimizer.step()
            each.eval()
        with torch.no_grad():
            if number:
                answers[name] = model.fingerprint(name), logits(compiled(x))
        seen.append(counter.frame_count)
        mine = eager.named_task_parameters()
        for key, p in model.named_task_parameters().items():
            torch.testing.assert_close(p, mine[key], rtol=1e-6, atol=1e-9)
    assert seen[1:] == [seen[1]] * 3, seen  # nothing is compiled for the third and fourth task
    for name, (fingerprint, said) in answers.items():
        model.set_task(name)
        assert model.fingerprint(name) == fingerprint  # nothing of an earlier task has changed
        with torch.no_grad():
            assert torch.equal(logits(compiled(x)), said)
            torch.testing.assert_close(said, logits(model(x)), rtol=1e-6, atol=1e-9)
    assert counter.frame_count == seen[1]


def test_lenet() -> None:
    check(rkr.networks.lenet(10), "fc", torch.randn(4, 3, 32, 32), "aot_eager")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a compiler of C++ at work
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["lenet", "resnet18", "vit"])
def test_all(name: str, backend: str) -> None:
    networks = {"lenet": lambda: rkr.networks.lenet(10), "resnet18": lambda: rkr.networks.resnet18(10, width=16)}
    network, head = (vit(), "classifier") if name == "vit" else (networks[name](), "fc")
    check(network, head, torch.randn(4, 3, 32, 32), backend)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_replaced_layer(fullgraph: bool) -> None:
    """Tasks cannot change a layer, or a block of layers, that came after `rectify`, compiled or not."""
    block = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model = rkr.rectify(nn.Sequential(block, nn.Linear(3, 2)), head="1")
    model.add_task("a", 2, train_base=False)
    compiled: Any = torch.compile(model, fullgraph=fullgraph, backend="eager")
    x = torch.randn(2, 3)
    said = compiled(x)
    F.cross_entropy(said, torch.tensor([0, 1])).backward()
    message = "layer '0.0' was replaced after rectify"
    for parent, name, new in (block, "0", nn.Linear(3, 3)), (model.network, "0", nn.Sequential(nn.Linear(3, 3))):
        old = parent._modules[name]
        parent._modules[name] = new
        for act in (lambda: model(x), model.eval, lambda: model.add_task("b", 2), compiled.eval):
            with pytest.raises(rkr.UsageError, match=message):
                act()
        # Torch says it in an error of its own if it may not leave the graph.
        with pytest.raises(torch._dynamo.exc.Unsupported if fullgraph else rkr.UsageError, match=message):
            compiled(x)
        parent._modules[name] = old
        assert torch.equal(compiled(x), said)
