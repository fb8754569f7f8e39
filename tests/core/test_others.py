"""Other people's networks: transformers' ResNet and ViT, torch's own transformer layers, and odd wiring.

Each is rectified, learns two tasks, forgets nothing, is saved, loaded, merged, and answers a mixed batch.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CLASSES = {"first": 4, "second": 3}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def plain_logits(output: Any) -> Tensor:
    return getattr(output, "logits", output)


def logits(model: rkr.RectifiedModel, name: str, args: Sequence[Tensor]) -> Tensor:
    mode, current = model.training, model.task
    model.eval()
    model.set_task(name)
    with torch.no_grad():
        answer = plain_logits(model(*args)).clone()
    if current is not None:
        model.set_task(current)
    model.train(mode)
    return answer


def train(model: rkr.RectifiedModel, args: Sequence[Tensor], classes: int, steps: int = 15) -> list[float]:
    y = torch.arange(len(args[0])) % classes
    optimiser = torch.optim.Adam(model.task_parameters(groups=True), lr=0.02, weight_decay=1e-4)
    model.train()
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = F.cross_entropy(plain_logits(model(*args)), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def live(
    build: Callable[[], nn.Module], head: str, args: Sequence[Tensor], folder: Path, **options: Any
) -> rkr.RectifiedModel:
    """The whole life of a model, with every promise checked on the way."""
    network = build()
    keys, kinds = list(network.state_dict()), [type(m) for m in network.modules()]
    model = rkr.rectify(network, head=head, **options)
    known: dict[str, Tensor] = {}
    base: dict[str, Tensor] = {}
    for name, classes in CLASSES.items():
        model.add_task(name, classes=classes)
        if known:
            base = {k: v.clone() for k, v in network.state_dict().items()}
        losses = train(model, args, classes)
        assert min(losses[-3:]) < 0.95 * losses[0], f"{name} does not learn: {losses}"
        known = {**known, name: logits(model, name, args)}
        assert known[name].shape == (len(args[0]), classes)
        for old, answer in known.items():
            assert torch.equal(logits(model, old, args), answer), f"{old} has forgotten"
    assert list(network.state_dict()) == keys
    assert all(torch.equal(v, base[k]) for k, v in network.state_dict().items())
    assert not torch.equal(known["first"][:, :3], known["second"])
    model.eval()

    names = ["second", "first", "first"] * len(args[0])
    names = names[: len(args[0])]
    with torch.no_grad():
        for _ in range(2):
            mixed = model(*args, tasks=names)
            assert mixed.shape == (len(names), 4)
            for row, name, i in zip(mixed, names, range(len(names)), strict=True):
                torch.testing.assert_close(row[: CLASSES[name]], known[name][i], rtol=1e-4, atol=1e-5)
                assert bool((row[CLASSES[name] :] == -torch.inf).all())

    for name in known:
        plain = model.merged(name).eval()
        assert [type(m) for m in plain.modules()] == kinds
        assert list(plain.state_dict()) == keys
        with torch.no_grad():
            torch.testing.assert_close(plain_logits(plain(*args)), known[name], rtol=1e-5, atol=1e-6)

    clone = copy.deepcopy(model)
    model.save(folder / "zoo")
    loaded = rkr.load(folder / "zoo", build())
    loaded.save_task("second", folder / "second.safetensors")
    loaded.remove_task("second")
    loaded.load_task(folder / "second.safetensors")
    for other in (clone, loaded):
        assert all(torch.equal(logits(other, name, args), known[name]) for name in known)
        assert [other.fingerprint(name) for name in known] == [model.fingerprint(name) for name in known]
    assert all(torch.equal(logits(model, name, args), known[name]) for name in known)
    return model


# ---------------------------------------------------------------------------------------------------------
# transformers


def hf_resnet(kind: str = "basic") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type=kind, num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def hf_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.0,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_transformers_resnet(kind: str, tmp_path: Path) -> None:
    model = live(lambda: hf_resnet(kind), "classifier.1", [torch.randn(6, 3, 32, 32)], tmp_path)
    convs = [m for m in model.network.modules() if isinstance(m, nn.Conv2d)]
    rectified = [k for k in model.tasks["first"].tensors() if k.endswith(".lm")]
    assert len(rectified) == len(convs)
    assert model.cost((3, 32, 32)).shared == ()


@pytest.mark.parametrize("norm", ["frozen", "per_task"])
def test_transformers_vit(norm: str, tmp_path: Path) -> None:
    model = live(hf_vit, "classifier", [torch.randn(6, 3, 16, 16)], tmp_path, norm=norm)
    linears = [m for m in model.network.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    rectified = [k for k in model.tasks["first"].tensors() if k.endswith(".lm")]
    assert len(rectified) == len(linears) - 1  # all but the head
    shared = {s.name: s.parameters for s in model.cost((3, 16, 16)).shared}
    assert shared["vit.embeddings"] == 16 + 5 * 16  # class token and positions
    assert any("layernorm" in name for name in shared) == (norm == "frozen")


def test_transformers_by_keyword_and_mixed() -> None:
    model = rkr.rectify(hf_vit(), head="classifier")
    for name, classes in CLASSES.items():
        model.add_task(name, classes=classes)
    x = torch.randn(4, 3, 16, 16)
    model.eval()
    with torch.no_grad():
        mixed = model(pixel_values=x, tasks=["first", "second", "first", "second"])
        torch.testing.assert_close(mixed[1::2, :3], model(pixel_values=x).logits[1::2], rtol=1e-5, atol=1e-5)
    assert mixed.shape == (4, 4)


def hf_gpt2() -> nn.Module:
    """Its layers are transformers' `Conv1D`, whose weight is stored as (inputs, outputs)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        num_labels=5,
    )
    return transformers.GPT2ForSequenceClassification(config)


def test_transformers_gpt2(tmp_path: Path) -> None:
    model = live(hf_gpt2, "score", [torch.randint(1, 17, (6, 7))], tmp_path)
    shapes = {k: tuple(t.shape) for k, t in model.tasks["first"].tensors().items()}
    for layer, inputs, outputs in (("attn.c_attn", 16, 48), ("attn.c_proj", 16, 16), ("mlp.c_fc", 16, 64)):
        for block in range(2):
            path = f"transformer.h.{block}.{layer}"
            found = [shapes[f"{path}.{name}"] for name in ("lm", "rm", "f")]
            assert found == [(inputs, 2), (2, outputs), (outputs,)]
    assert shapes["transformer.wte.lm"] == (17, 2)
    assert {s.type for s in model.cost().shared} == {"LayerNorm"}
    cost = model.cost(torch.randint(1, 17, (1, 7)))
    assert cost.multiply_adds is not None
    per_token = 2 * (16 * 48 + 16 * 16 + 2 * 16 * 64) + 16 * 5
    assert cost.multiply_adds.network == 7 * per_token


def test_gpt2_computes_what_its_own_forward_computes() -> None:
    """The fast paths, by the formula, and the plain copy with the merged weights agree in float64, with gradients."""
    x, found = torch.randint(1, 17, (3, 7)), []
    for fast in (True, False):
        torch.manual_seed(3)
        model = rkr.rectify(hf_gpt2().double(), head="score", fast=fast)
        model.add_task("a", classes=4, train_base=False)
        torch.manual_seed(4)
        with torch.no_grad():
            for p in model.task_parameters():
                p.add_(0.1 * torch.randn_like(p))
        y = model.train()(x).logits
        y.square().sum().backward()
        found.append((y.detach(), [p.grad for p in model.task_parameters()]))
        with torch.no_grad():
            plain = model.merged("a")(x).logits
        torch.testing.assert_close(plain, y.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------
# torch's own transformer layers


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, **{"dropout": 0.0, **options})
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 5)
        self.batch_first = options.get("batch_first", False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)  # (B, T, 8)
        if self.batch_first:
            return self.fc(self.encoder(x).mean(1))
        return self.fc(self.encoder(x.transpose(0, 1)).mean(0))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 2, 8))
        self.embed = nn.Linear(6, 8)
        layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.decoder(self.queries.expand(len(x), -1, -1), self.embed(x)).mean(1))


class Both(nn.Module):
    """nn.Transformer with a source, a target and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(9, 8), nn.Embedding(9, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.fc = nn.Linear(8, 5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return self.fc(x[:, -1])


class Attention(nn.Module):
    """One nn.MultiheadAttention; with sizes of its own for keys and values it has no packed projection."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        sizes = options.get("kdim", 8), options.get("vdim", 8)
        self.query = nn.Linear(6, 8)
        self.key, self.value = nn.Linear(6, sizes[0]), nn.Linear(6, sizes[1])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(self.query(x), self.key(x), self.value(x), need_weights=False)
        return self.fc(y.mean(1))


TORCH: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder,
    "encoder_batch_first": lambda: Encoder(batch_first=True),
    "encoder_norm_first": lambda: Encoder(batch_first=True, norm_first=True, activation="gelu"),
    "encoder_no_bias": lambda: Encoder(batch_first=True, bias=False),
    "encoder_dropout": lambda: Encoder(batch_first=True, dropout=0.1),
    "decoder": Decoder,
    "attention": Attention,
    "attention_kdim_vdim": lambda: Attention(kdim=5, vdim=7),
    "attention_no_bias": lambda: Attention(bias=False),
    "attention_bias_kv": lambda: Attention(add_bias_kv=True, add_zero_attn=True),
}


@pytest.mark.parametrize("kind", TORCH)
def test_torch_transformer_layers(kind: str, tmp_path: Path) -> None:
    live(TORCH[kind], "fc", [torch.randn(6, 5, 6)], tmp_path)


def test_torch_transformer(tmp_path: Path) -> None:
    model = live(Both, "fc", [torch.randint(0, 9, (6, 5)), torch.randint(0, 9, (6, 4))], tmp_path)
    assert {"source.lm", "target.lm"} <= set(model.tasks["second"].tensors())
    assert {s.type for s in model.cost().shared} == {"LayerNorm"}


def test_what_is_rectified_in_attention() -> None:
    """The packed projection and the output projection; with kdim and vdim only the latter, the rest is listed."""
    for network, expected, shared in (
        (Attention(), {"attention.lm": (8, 2), "attention.rm": (2, 24), "attention.f": (24,)}, []),
        (Attention(kdim=5, vdim=7), {}, ["attention"]),
    ):
        model = rkr.rectify(network, head="fc")
        task = model.add_task("a", classes=5)
        own = {k: tuple(t.shape) for k, t in task.tensors().items() if k.count(".") == 1 and k.startswith("attention")}
        assert own == expected
        assert tuple(task.get("attention.out_proj.rm").shape) == (2, 8)
        assert [s.name for s in model.cost().shared] == shared


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_fast_path_of_the_encoder_layer(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluation torch computes the whole layer in one call from weights it reads: they must be the task's."""
    model = rkr.rectify(Encoder(batch_first=True, **options), head="fc", norm="per_task")
    x = torch.randn(6, 5, 6)
    for name, classes in CLASSES.items():
        model.add_task(name, classes=classes)
        train(model, [x], classes)
    calls = []
    original = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(len(args)) or original(*args)
    )
    for name in CLASSES:
        fast = logits(model, name, [x])
        assert calls, "the fast path was not taken"
        calls.clear()
        model.set_task(name)
        slow = model.train()(x)
        assert not calls
        torch.testing.assert_close(fast, slow.detach(), rtol=1e-4, atol=1e-5)
        model.eval()
        with torch.enable_grad():
            torch.testing.assert_close(fast, model(x).detach(), rtol=1e-4, atol=1e-5)


def test_padding_masks_and_nested_tensors() -> None:
    """`src_key_padding_mask` turns on nested tensors in evaluation; padded positions must not count."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.fc = nn.Linear(8, 5)

        def forward(self, x: Tensor, *, padding: Tensor) -> Tensor:
            return self.fc(self.encoder(self.embed(x), src_key_padding_mask=padding)[:, 0])

    model = rkr.rectify(Padded(), head="fc")
    for name, classes in CLASSES.items():
        model.add_task(name, classes=classes)
        with torch.no_grad():
            for p in model.task_parameters():
                p.add_(0.1 * torch.randn_like(p))
    x = torch.randn(4, 5, 6)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4], [2]])
    slow = model.train()(x, padding=padding).detach()
    model.eval()
    with torch.no_grad():
        fast = model(x, padding=padding)
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
        moved = torch.where(padding[..., None], torch.randn_like(x), x)
        torch.testing.assert_close(model(moved, padding=padding), fast, rtol=1e-4, atol=1e-5)
        mixed = model(x, padding=padding, tasks=["second", "first", "second", "first"])
    torch.testing.assert_close(mixed[::2, :3], fast[::2], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------
# Odd wiring


class Tied(nn.Module):
    """The output layer's weight is the embedding's, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.mix = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 9, bias=False)
        self.decoder.weight = self.embedding.weight
        self.fc = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.decoder(torch.tanh(self.mix(self.embedding(x).mean(1))))))


class TiedLinears(nn.Module):
    """Two linear layers with one weight; each has its own factors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.two(torch.tanh(self.one(x)))))


class TiedHead(nn.Module):
    """The head itself is tied: tasks bring their own, and the embedding is still trained with the base."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.mix = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 9, bias=False)
        self.fc.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.mix(self.embedding(x).mean(1))))


class UsedTwice(nn.Module):
    """One layer applied twice, known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.again = self.layer
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.again(torch.tanh(self.norm(self.layer(x))))))


class Views(nn.Module):
    """`x.view(B, -1)` after convolutions, as older code does: memory must stay in the usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 40, 1)
        self.conv2 = nn.Conv2d(40, 40, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(40)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(40 * 16, 16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn(self.conv2(F.relu(self.conv1(x))))))
        x = x.view(x.size(0), -1)
        return self.fc(F.relu(self.hidden(x)))


class Direct(nn.Module):
    """Multiplies by parameters of its own, as CLIP does, and reads a layer's weight directly."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(12, 8)
        self.projection = nn.Parameter(torch.randn(8, 7) / 3)
        self.fc = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.one.weight, self.one.bias))  # (B, T, 12)
        x = torch.tanh(self.two(x)).transpose(0, 1) @ self.projection  # (T, B, 7)
        return self.fc(torch.tanh(x).mean(0))


class InPlace(nn.Module):
    """Changes activations in place, as torchvision's AlexNet, VGG and much other code do."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 40, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(40, 40, 3, padding=1), nn.ReLU(inplace)
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.0, inplace), nn.Linear(40, 32), nn.ReLU(inplace), nn.Linear(32, 16), nn.Dropout(0.0, inplace)
        )
        self.fc = nn.Linear(16, 5)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        x = self.classifier(self.features(x).mean(dim=(2, 3)))
        if self.inplace:
            x *= 2
            x += 1
            return self.fc(x)
        return self.fc(2 * x + 1)


def fixed(*shape: int) -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(1))]


TOKENS = [torch.arange(30).view(6, 5) * 7 % 9]
VECTORS = fixed(6, 8)
IMAGES = fixed(6, 3, 8, 8)

ODD: dict[str, tuple[Callable[[], nn.Module], Sequence[Tensor]]] = {
    "tied_embedding": (Tied, TOKENS),
    "tied_linears": (TiedLinears, VECTORS),
    "tied_head": (TiedHead, TOKENS),
    "used_twice": (UsedTwice, VECTORS),
    "views": (Views, IMAGES),
    "in_place": (InPlace, IMAGES),
    "direct": (Direct, fixed(6, 5, 6)),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_wiring(kind: str, tmp_path: Path) -> None:
    build, args = ODD[kind]
    live(build, "fc", args, tmp_path, rank=1)


@pytest.mark.parametrize("kind", ["tied_embedding", "tied_linears", "tied_head"])
def test_tied_weights_do_not_forget(kind: str) -> None:
    """The part of `live` that needs neither files nor merging."""
    build, args = ODD[kind]
    model = rkr.rectify(build(), head="fc")
    known = {}
    for name, classes in CLASSES.items():
        model.add_task(name, classes=classes)
        ids = [id(p) for p in model.task_parameters()]
        assert len(ids) == len(set(ids))
        losses = train(model, args, classes)
        assert losses[-1] < 0.95 * losses[0]
        known[name] = logits(model, name, args)
    assert all(torch.equal(logits(model, name, args), known[name]) for name in known)
    clone = copy.deepcopy(model)
    assert all(torch.equal(logits(clone, name, args), known[name]) for name in known)


@pytest.mark.parametrize("kind", ["tied_embedding", "tied_linears", "tied_head"])
def test_tied_weights_are_merged_apart(kind: str) -> None:
    """Merged, the two users of one weight need different ones: the tie must be cut, not one of them overwritten."""
    build, args = ODD[kind]
    model = rkr.rectify(build(), head="fc")
    for name, classes in CLASSES.items():
        model.add_task(name, classes=classes)
        train(model, args, classes)
    model.eval()
    for name in CLASSES:
        plain = model.merged(name)
        with torch.no_grad():
            torch.testing.assert_close(plain(*args), logits(model, name, args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["tied_embedding", "tied_linears", "tied_head"])
def test_tied_weights_are_saved(kind: str, tmp_path: Path) -> None:
    build, args = ODD[kind]
    model = rkr.rectify(build(), head="fc")
    model.add_task("first", classes=4)
    train(model, args, 4)
    model.save(tmp_path)
    loaded = rkr.load(tmp_path, build())
    assert torch.equal(logits(loaded, "first", args), logits(model, "first", args))
    state = loaded.network.state_dict()
    assert len({state[name].data_ptr() for name in tied_names(kind)}) == 1
    assert all(torch.equal(v, state[k]) for k, v in model.network.state_dict().items())


def tied_names(kind: str) -> set[str]:
    return {
        "tied_embedding": {"embedding.weight", "decoder.weight"},
        "tied_linears": {"one.weight", "two.weight"},
        "tied_head": {"embedding.weight", "fc.weight"},
    }[kind]


@pytest.mark.parametrize("tasks", [["first"], ["first", "second"]], ids=["base trained", "base frozen"])
def test_gradients_with_activations_changed_in_place(tasks: list[str]) -> None:
    """In place or not, fast or by the formula: the same loss and the same gradients."""
    results = []
    for inplace, fast in ((False, False), (False, True), (True, True)):
        torch.manual_seed(0)
        model = rkr.rectify(InPlace(inplace), head="fc", rank=1, fast=fast)
        for name in tasks:
            model.add_task(name, classes=3)
        with torch.no_grad():
            for key, p in model.named_task_parameters().items():
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(key))))
        loss = F.cross_entropy(model.train()(*IMAGES), torch.arange(6) % 3)
        loss.backward()
        results.append((loss.item(), {k: p.grad for k, p in model.named_task_parameters().items()}))
    for loss_value, gradients in results[1:]:
        assert loss_value == pytest.approx(results[0][0], rel=1e-5)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, results[0][1][key], rtol=1e-3, atol=1e-5, msg=key)


def test_views_also_in_channels_last_input() -> None:
    """A user's channels_last input meets weights in the usual order, in training and evaluation, before and after."""
    network = Views()
    network.forward = lambda x, f=network: f.fc(  # reshape, because this memory format has no such view
        F.relu(f.hidden(f.pool(F.relu(f.bn(f.conv2(F.relu(f.conv1(x)))))).reshape(len(x), -1)))
    )
    model = rkr.rectify(network, head="fc", rank=1)
    x = torch.randn(6, 3, 8, 8)
    for name, classes in CLASSES.items():
        model.add_task(name, classes=classes)
        train(model, [x.to(memory_format=torch.channels_last)], classes, steps=3)
    for name in CLASSES:
        torch.testing.assert_close(
            logits(model, name, [x.to(memory_format=torch.channels_last)]),
            logits(model, name, [x]),
            rtol=1e-4,
            atol=1e-5,
        )
