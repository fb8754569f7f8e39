"""Other people's training loops: each trains two tasks, and the first one then answers with the same bits."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

import rkr

CLASSES = {"first": 3, "second": 7}
X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Convolutions with BatchNorm, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.hidden = nn.Linear(32, 24)
        self.fc = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(F.relu(self.hidden(x.mean((2, 3)))))


def pictures(classes: int, count: int = 32) -> tuple[Tensor, Tensor]:
    """Noise, brighter from class to class."""
    generator = torch.Generator().manual_seed(classes)
    y = torch.arange(count) % classes
    return torch.randn(count, 3, 16, 16, generator=generator) + y.view(-1, 1, 1, 1), y


def logits(model: rkr.RectifiedModel, name: str) -> Tensor:
    mode, current = model.training, model.task
    model.eval().set_task(name)
    with torch.no_grad():
        output = model(X)
    model.set_task(current)
    model.train(mode)
    return getattr(output, "logits", output).clone()


def teach(model: rkr.RectifiedModel, loop: Callable[[rkr.RectifiedModel, Tensor, Tensor], None]) -> None:
    """Train both tasks with a loop. They learn, and the first one does not change with the second."""
    known: tuple[str, Tensor] | None = None
    for name, classes in CLASSES.items():
        model.add_task(name, classes=classes)
        x, y = pictures(classes)
        before = loss_of(model, x, y)
        loop(model, x, y)
        assert loss_of(model, x, y) < before - 0.1
        assert all(p.requires_grad for p in model.task_parameters())
        if name == "first":
            known = model.fingerprint("first"), logits(model, "first")
    assert known is not None
    assert model.task == "second"
    assert torch.equal(logits(model, "first"), known[1])
    assert model.fingerprint("first") == known[0]
    assert not torch.equal(logits(model, "second")[:, :3], known[1])


@torch.no_grad()
def loss_of(model: rkr.RectifiedModel, x: Tensor, y: Tensor) -> float:
    """In training mode, of a copy, so that it moves no statistics."""
    output = copy.deepcopy(model).train()(x)
    return F.cross_entropy(getattr(output, "logits", output), y).item()


def rectified(**options: Any) -> rkr.RectifiedModel:
    torch.manual_seed(0)
    return rkr.rectify(Net(), head="fc", **options)


def steps(
    model: rkr.RectifiedModel, step: Callable[[torch.optim.Optimizer], None], count: int = 10, lr: float = 0.1
) -> None:
    optimizer = torch.optim.SGD(model.task_parameters(groups=True), lr=lr, momentum=0.9)
    model.train()
    for _ in range(count):
        optimizer.zero_grad()
        step(optimizer)
    model.eval()


# ---------------------------------------------------------------------------------------------------------
# transformers


class Labelled(Dataset[dict[str, Any]]):
    """What `datasets` gives: more columns than the network takes."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"pixel_values": self.x[i], "labels": int(self.y[i]), "path": f"{i}.jpg"}


def vit(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.ViTConfig(**{**small, "image_size": 16, "patch_size": 8, "num_labels": 5, **options})
    return transformers.ViTForImageClassification(config)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_transformers_trainer_with_default_arguments(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    network = vit()
    model = rkr.rectify(network, head="classifier", norm="per_task")

    def loop(model: rkr.RectifiedModel, x: Tensor, y: Tensor) -> None:
        data = Labelled(x, y)
        arguments = transformers.TrainingArguments(output_dir=tmp_path / str(model.task), learning_rate=0.01)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
        assert trainer.train().global_step == 12
        found = trainer.evaluate()
        assert found["eval_loss"] == pytest.approx(loss_of(model, x, y), rel=1e-4)
        assert trainer.predict(data).predictions.shape == (32, model.tasks[model.task].classes)
        arguments.num_train_epochs = 5
        again = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        assert again.train(resume_from_checkpoint=True).global_step == 20

    teach(model, loop)
    assert network.config.num_labels == network.num_labels == 5


def test_loss_inside_a_transformers_model_is_that_of_the_task() -> None:
    """For models that look into their configuration and for those that look at themselves; nothing stays behind."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=30, num_labels=4, **small))
    tokens = torch.arange(24).view(4, 6)
    for network, inputs in ((vit(), {"pixel_values": X}), (bert, {"input_ids": tokens})):
        had = dict(vars(network.config))
        model = rkr.rectify(network, head="classifier").eval()
        model.add_task("one", classes=1)
        model.add_task("named", classes=["a", "b", "c"])
        model.add_task("many", classes=9)
        model.eval()
        for name, labels in (
            ("many", torch.tensor([8, 0, 3, 1])),
            ("one", torch.tensor([0.5, 1.0, 0.0, 2.0])),
            ("named", torch.tensor([2, 0, 1, 1])),
            ("many", torch.tensor([1, 5, 5, 8])),
        ):
            model.set_task(name)
            output = model(**inputs, labels=labels)
            expected = (
                F.mse_loss(output.logits[:, 0], labels) if name == "one" else F.cross_entropy(output.logits, labels)
            )
            torch.testing.assert_close(output.loss, expected)
            assert torch.equal(model.for_task(name)(**inputs, labels=labels).loss, output.loss)
            assert vars(network.config) == had
        plain = model.merged("named")
        assert (plain.config.num_labels, plain.num_labels) == (3, 3)
        assert plain.config.id2label == {0: "a", 1: "b", 2: "c"}
        assert vars(network.config) == had
        with pytest.raises(IndexError, match="out of bounds"):
            model(**inputs, labels=torch.tensor([9, 0, 0, 0]))
        assert vars(network.config) == had


def test_signature_is_the_networks() -> None:
    model = rectified()
    assert list(inspect.signature(model.forward).parameters) == ["x", "tasks"]
    model.add_task("a", 2)
    for copied in (model, pickle.loads(pickle.dumps(model))):
        assert copied.forward.__self__ is copied
        assert list(inspect.signature(copied.forward).parameters) == ["x", "tasks"]

    class Odd(Net):
        def forward(self, x: Tensor, *rest: Tensor, tasks: Any = None, scale: float = 1.0, **more: Any) -> Tensor:
            return super().forward(x) * scale

    found = inspect.signature(rkr.rectify(Odd(), head="fc").forward)
    assert str(found).startswith("(x: ")
    assert list(found.parameters) == ["x", "rest", "tasks", "scale", "more"]


# ---------------------------------------------------------------------------------------------------------
# accelerate, Lightning


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of earlier tests

    def loop(model: rkr.RectifiedModel, x: Tensor, y: Tensor) -> None:
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
        optimizer = torch.optim.SGD(model.task_parameters(), lr=0.02, momentum=0.9)
        loader = DataLoader(TensorDataset(x, y), batch_size=16)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model.train()
        for _ in range(8):
            for images, labels in loader:
                with accelerator.accumulate(prepared):
                    loss = F.cross_entropy(prepared(images), labels)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
        assert "forward" in vars(model)
        assert list(inspect.signature(model.forward).parameters) == ["x", "tasks"]
        model.eval()

    teach(rectified(), loop)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, model: rkr.RectifiedModel) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor]) -> None:
            self.log("loss", F.cross_entropy(self.model(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.task_parameters(groups=True), lr=0.02, momentum=0.9)

    def loop(model: rkr.RectifiedModel, x: Tensor, y: Tensor) -> None:
        loader = DataLoader(TensorDataset(x, y), batch_size=16)
        trainer = lightning.Trainer(
            max_epochs=8, accelerator="cpu", default_root_dir=tmp_path / str(model.task), enable_progress_bar=False
        )
        module = Module(model.train())
        trainer.fit(module, loader, loader)
        assert trainer.global_step == 16
        saved = torch.load(trainer.checkpoint_callback.best_model_path)["state_dict"]
        assert set(saved) == {f"model.{key}" for key in model.state_dict()}
        assert all(torch.equal(saved[f"model.{key}"], value) for key, value in model.state_dict().items())
        model.eval()

    teach(rectified(), loop)


# ---------------------------------------------------------------------------------------------------------
# DistributedDataParallel


def distributed(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, prints = rectified(), []
    for name, classes in CLASSES.items():
        model.add_task(name, classes=classes)
        x, y = pictures(classes)
        before = loss_of(model, x, y)
        wrapped = DistributedDataParallel(model, find_unused_parameters=False)

        part = wrapped, x[rank::2], y[rank::2]

        def step(optimizer: torch.optim.Optimizer, part: Any = part) -> None:
            wrapped, x, y = part
            F.cross_entropy(wrapped(x), y).backward()
            assert all(p.grad is not None for p in model.task_parameters())
            optimizer.step()

        steps(model, step)
        assert loss_of(model, x, y) < before - 0.1
        prints.append(model.fingerprint("first"))
    parameters = {key: p.detach() for key, p in model.named_parameters()}
    torch.save({"prints": prints, "parameters": parameters}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel_without_unused_parameters(tmp_path: Path) -> None:
    """Every parameter that takes gradients gets one. Statistics of BatchNorm are those of the first process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(distributed, (port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["prints"][0] == first["prints"][1] == second["prints"][1]
    assert first["parameters"].keys() == second["parameters"].keys()
    assert all(torch.equal(first["parameters"][key], second["parameters"][key]) for key in first["parameters"])


# ---------------------------------------------------------------------------------------------------------
# Gradient checkpointing


class Deep(nn.Module):
    """Six blocks, each computed again in the backward pass if `again` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU()) for _ in range(6)
        )
        self.fc = nn.Linear(16, 5)
        self.again: bool | None = None  # use_reentrant, or None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + (block(x) if self.again is None else checkpoint(block, x, use_reentrant=self.again))
        return self.fc(x.mean((2, 3)))


def kept_bytes(model: rkr.RectifiedModel, forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes of what autograd keeps for the backward pass, parameters aside, and the loss."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    return sum(found.values()), loss


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_saves_memory(reentrant: bool) -> None:
    torch.manual_seed(0)
    network = Deep()
    model = rkr.rectify(network, head="fc")

    def loop(model: rkr.RectifiedModel, x: Tensor, y: Tensor) -> None:
        def step(optimizer: torch.optim.Optimizer) -> None:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        results = []
        for network.again in (None, reentrant):
            model.train().zero_grad()
            kept, loss = kept_bytes(model, lambda: F.cross_entropy(model(x), y))
            loss.backward()
            results.append((kept, {k: p.grad.clone() for k, p in model.named_task_parameters().items()}))
        (plain, gradients), (less, again) = results
        activation = 32 * 16 * 16 * 16 * 4  # bytes of one block's output
        assert less <= 9 * activation  # about one for each block, not the several of a block
        assert less < 0.6 * plain
        for key, gradient in gradients.items():
            torch.testing.assert_close(again[key], gradient, rtol=1e-4, atol=1e-6)
        steps(model, step, 20, lr=0.01)

    teach(model, loop)


def test_gradient_checkpointing_of_transformers_saves_memory() -> None:
    pytest.importorskip("transformers")
    network = vit(num_hidden_layers=4)
    model = rkr.rectify(network, head="classifier", norm="per_task")

    def loop(model: rkr.RectifiedModel, x: Tensor, y: Tensor) -> None:
        def step(optimizer: torch.optim.Optimizer) -> None:
            model(pixel_values=x, labels=y).loss.backward()
            optimizer.step()

        results = []
        for switch in (network.gradient_checkpointing_disable, network.gradient_checkpointing_enable):
            switch()
            model.train().zero_grad()
            kept, loss = kept_bytes(model, lambda: model(pixel_values=x, labels=y).loss)
            loss.backward()
            results.append((kept, {k: p.grad.clone() for k, p in model.named_task_parameters().items()}))
        (plain, gradients), (less, again) = results
        assert less < 0.5 * plain
        for key, gradient in gradients.items():
            torch.testing.assert_close(again[key], gradient, rtol=1e-4, atol=1e-6)
        steps(model, step, 15)

    teach(model, loop)


# ---------------------------------------------------------------------------------------------------------
# Mixed precision


def test_bf16_autocast() -> None:
    def loop(model: rkr.RectifiedModel, x: Tensor, y: Tensor) -> None:
        def step(optimizer: torch.optim.Optimizer) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x)
                loss = F.cross_entropy(output, y)
            assert output.dtype == torch.bfloat16
            loss.backward()
            optimizer.step()

        steps(model, step)
        assert {t.dtype for t in model.tasks[model.task].parameters()} == {torch.float32}

    teach(rectified(), loop)


def test_fp16_with_a_gradient_scaler() -> None:
    """A scale that overflows first: steps are skipped until it fits, then the task learns."""

    def loop(model: rkr.RectifiedModel, x: Tensor, y: Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-24)
        scales = []

        def step(optimizer: torch.optim.Optimizer) -> None:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.task_parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())

        steps(model, step, 12)
        assert scales[0] == scales[-1] == 2.0**16
        assert all(bool(t.isfinite().all()) for t in model.tasks[model.task].parameters())

    teach(rectified(), loop)


# ---------------------------------------------------------------------------------------------------------
# torch.func


def functional_task(**options: Any) -> tuple[rkr.RectifiedModel, dict[str, Tensor], str]:
    model = rectified(bn="affine", **options).double()
    model.add_task("a.b %", classes=3, train_base=False)
    with torch.no_grad():
        for name, p in model.named_task_parameters().items():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    prefix = "tasks.a%2Eb %25."
    parameters = {k: p.detach() for k, p in model.named_parameters() if k.startswith(prefix)}
    assert [k.removeprefix(prefix) for k in parameters] == list(model.named_task_parameters())
    return model.eval(), parameters, prefix


def test_functional_call_with_other_task_parameters() -> None:
    model, parameters, prefix = functional_task()
    other = {k: v + 0.1 for k, v in parameters.items()}
    x = X.double()
    with torch.no_grad():
        before, fingerprint = model(x), model.fingerprint("a.b %")
        found = torch.func.functional_call(model, other, (x,))
        assert torch.equal(model(x), before)
        assert model.fingerprint("a.b %") == fingerprint
        for key, p in model.named_task_parameters().items():
            p.copy_(other[prefix + key])
        torch.testing.assert_close(model(x), found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_gradients_of_each_sample_for_the_tasks_parameters(training: bool) -> None:
    """vmap of grad equals one backward pass for each sample."""
    model, parameters, prefix = functional_task()
    for module in model.network.modules():
        if not isinstance(module, nn.BatchNorm2d):
            module.training = training
    x, y = X.double(), torch.tensor([0, 2, 1, 1])

    def loss(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(model, parameters, (sample.unsqueeze(0),))
        return F.cross_entropy(output, label.unsqueeze(0))

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    for i in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for key, p in model.named_task_parameters().items():
            assert p.grad is not None
            torch.testing.assert_close(each[prefix + key][i], p.grad, rtol=1e-10, atol=1e-12)


def test_ensemble_of_tasks_by_vmap() -> None:
    """One call for several sets of a task's parameters."""
    model, parameters, _ = functional_task()
    x = X.double()
    stacked = {k: torch.stack([v, v + 0.1, v - 0.1]) for k, v in parameters.items()}
    with torch.no_grad():
        together = torch.func.vmap(lambda p: torch.func.functional_call(model, p, (x,)))(stacked)
        for n in range(3):
            alone = torch.func.functional_call(model, {k: v[n] for k, v in stacked.items()}, (x,))
            torch.testing.assert_close(together[n], alone, rtol=1e-10, atol=1e-12)


def test_a_step_by_torch_func_forgets_nothing() -> None:
    def loop(model: rkr.RectifiedModel, x: Tensor, y: Tensor) -> None:
        own = {id(p) for p in model.task_parameters()}
        names = [name for name, p in model.named_parameters() if id(p) in own]

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

        model.eval()
        for _ in range(40):
            found = dict(model.named_parameters())
            gradients = torch.func.grad(loss)({name: found[name].detach() for name in names})
            with torch.no_grad():
                for name, gradient in gradients.items():
                    found[name].sub_(gradient, alpha=0.1)

    teach(rectified(bn="affine"), loop)
