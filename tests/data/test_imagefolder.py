"""Folders of class folders, and image files that worker processes decode."""

import multiprocessing
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import rkr
from rkr.data import Augment, Batches, ImageFiles, load_source, split
from rkr.data.decode import RATIO, SCALE, decode_centre, decode_random, random_box

PLAIN = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


def picture(path: Path, seed: int, size: tuple[int, int] = (40, 30), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """ImageNet in small: 4 classes, 6 + 3 images of many sizes and modes."""
    for part, count in (("train", 6), ("val", 3)):
        for c in range(4):
            for i in range(count):
                seed = 100 * c + i + (50 if part == "val" else 0)
                mode = ("RGB", "L", "RGB", "RGBA", "P", "RGB")[i]
                picture(
                    tmp_path / "imagenet" / part / f"n0{c}" / f"{i}.{'PNG' if i else 'png'}",
                    seed,
                    (30 + 3 * i, 50 - 4 * i),
                    mode,
                )
    (tmp_path / "imagenet" / "train" / "n00" / "notes.txt").write_text("no image")
    return tmp_path


def test_imagenet(root: Path, alone: Path) -> None:
    source = load_source("imagenet", root, size=16)
    assert source.class_names == ("n00", "n01", "n02", "n03")
    assert source.train.y.tolist() == [c for c in range(4) for _ in range(6)]
    assert source.test.y.tolist() == [c for c in range(4) for _ in range(3)]
    assert isinstance(source.train, ImageFiles)
    assert source.train.path(7).endswith("imagenet/train/n01/1.PNG")
    assert source.train.shape == (3, 16, 16)
    assert load_source("imagenet", root / "imagenet", size=16).train.digest() == source.train.digest()
    stream = split(source, tasks=2, order=[3, 0, 1, 2], validation=0.5)
    first = stream.tasks[0]
    assert isinstance(first.training.validation, ImageFiles)
    assert (len(first.training.train), len(first.training.validation), len(first.test)) == (6, 6, 6)
    assert not {*first.training.train.paths} & {*first.training.validation.paths}
    assert first.test.y.tolist() == [1, 1, 1, 0, 0, 0]


def test_imagenet_missing(tmp_path: Path, alone: Path) -> None:
    with pytest.raises(rkr.FileError, match=r"imagenet/train/<class>.*image-net|image-net.*imagenet/train/<class>"):
        load_source("imagenet", tmp_path)
    picture(tmp_path / "imagenet" / "train" / "a" / "1.png", 0)
    picture(tmp_path / "imagenet" / "val" / "1.png", 0)
    with pytest.raises(rkr.FileError, match=r"val: has no class folders"):
        load_source("imagenet", tmp_path)
    picture(tmp_path / "imagenet" / "val" / "b" / "1.png", 0)
    with pytest.raises(rkr.FileError, match=r"'b' is not among"):
        load_source("imagenet", tmp_path)


def test_folder_cut_by_seed(root: Path) -> None:
    folder = root / "imagenet" / "train"
    source = load_source("folder", folder, size=16, test=1 / 3)
    assert isinstance(source.train, ImageFiles)
    assert isinstance(source.test, ImageFiles)
    assert source.train.y.bincount().tolist() == [4] * 4
    assert source.test.y.bincount().tolist() == [2] * 4
    assert not {*source.train.paths} & {*source.test.paths}
    again, other = (load_source("folder", folder, size=16, test=1 / 3, seed=seed) for seed in (0, 1))
    assert again.test.digest() == source.test.digest() != other.test.digest()
    parts = load_source("folder", root / "imagenet", size=16)
    assert (len(parts.train), len(parts.test)) == (24, 12)


def test_folder_resident(root: Path) -> None:
    files = load_source("folder", root / "imagenet", size=16)
    source = load_source("folder", root / "imagenet", size=16, resident=True)
    assert isinstance(files.train, ImageFiles)
    assert source.train.x.shape == (24, 3, 16, 16)
    assert torch.equal(source.train.x[9], decode_centre(files.train.path(9), 16, resize=16))


def test_evaluation_crop(tmp_path: Path) -> None:
    """Resize the shorter side to 256, cut 224 from the centre, step by step."""
    picture(tmp_path / "a.png", 0, (400, 300))
    image = Image.open(tmp_path / "a.png").resize((341, 256), Image.Resampling.BILINEAR)
    expected = np.asarray(image)[16 : 16 + 224, 58 : 58 + 224]
    assert (decode_centre(str(tmp_path / "a.png"), 224).permute(1, 2, 0).numpy() == expected).all()


def test_random_boxes() -> None:
    draws = random.Random(0)
    boxes = [random_box(500, 375, draws) for _ in range(4000)]
    area = [(r - x) * (b - t) / (500 * 375) for x, t, r, b in boxes]
    ratio = [(r - x) / (b - t) for x, t, r, b in boxes]
    assert all(0 <= x < r <= 500 and 0 <= t < b <= 375 for x, t, r, b in boxes)
    assert SCALE[0] - 0.01 < min(area) < 0.09
    assert 0.97 < max(area) <= 1
    assert RATIO[0] - 0.02 < min(ratio) < max(ratio) < RATIO[1] + 0.02
    # The same by rejection, drawn another way: large boxes often do not fit, so the mean is below 0.54.
    generator = np.random.default_rng(0)
    areas, ratios = generator.uniform(0.08, 1, 100000), np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3), 100000))
    fits = (np.sqrt(500 * 375 * areas * ratios) <= 500) & (np.sqrt(500 * 375 * areas / ratios) <= 375)
    assert float(np.mean(area)) == pytest.approx(float(areas[fits].mean()), abs=0.015)
    left = np.array([x / max(1, 500 - (r - x)) for x, _, r, _ in boxes])
    assert float(left.mean()) == pytest.approx(0.5, abs=0.03)
    assert random_box(1000, 10, draws) == (493, 0, 506, 10)  # no crop fits: the centre, 4:3


def test_flip(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 0)
    flipped = 0
    for seed in range(200):
        plain, maybe = (decode_random(str(tmp_path / "a.png"), 8, seed, flip) for flip in (False, True))
        flipped += torch.equal(plain.flip(2), maybe)
        assert torch.equal(plain, maybe) or torch.equal(plain.flip(2), maybe)
    assert 80 < flipped < 120


def test_batches_of_files(root: Path) -> None:
    """Neither workers, nor processes, nor a resumption change what a sample becomes."""
    files = load_source("imagenet", root, size=16).train
    state = torch.get_rng_state()

    def epoch(start: int = 0, **options: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(Batches(files, 5, 3, Augment(), **PLAIN, **options).iter_from(2, start))

    alone = epoch(workers=0)
    assert [len(y) for _, y in alone] == [5, 5, 5, 5, 4]
    assert alone[0][0].shape == (5, 3, 16, 16)
    assert alone[0][0].is_contiguous(memory_format=torch.channels_last)
    assert 0 <= float(alone[0][0].min()) < float(alone[0][0].max()) <= 1
    shared = zip(*(epoch(workers=0, rank=rank, world=3) for rank in range(3)), strict=True)
    joined = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in shared]
    for other in (epoch(workers=2), [*alone[:2], *epoch(start=2, workers=0)], joined):
        for (x, y), (x2, y2) in zip(alone, other, strict=True):
            assert torch.equal(x, x2)
            assert torch.equal(y, y2)
    assert not torch.equal(alone[0][0], next(Batches(files, 5, 3, Augment(), **PLAIN, workers=0).iter_from(3))[0])
    assert torch.equal(state, torch.get_rng_state())
    plain = [x for x, _ in Batches(files, 5, **PLAIN, workers=0)]
    assert torch.allclose(plain[1][2], decode_centre(files.path(7), 16) / 255, atol=1e-6)


def test_a_damaged_image_is_named(root: Path) -> None:
    files = load_source("imagenet", root, size=16).train
    path = root / "imagenet" / "train" / "n01" / "2.PNG"
    path.write_bytes(path.read_bytes()[:200])
    for workers in (0, 1):
        with pytest.raises(rkr.FileError, match=r"n01/2\.PNG: cannot be read as an image") as caught:
            list(Batches(files, 5, **PLAIN, workers=workers))
        assert "Traceback" not in str(caught.value)
        assert not multiprocessing.active_children()  # workers end at once, though the exception is still held


def test_workers_end_with_an_epoch_that_is_broken_off(root: Path) -> None:
    epoch = Batches(load_source("imagenet", root, size=16).train, 5, 0, Augment(), **PLAIN, workers=2).iter_from(0)
    next(epoch)
    assert len(multiprocessing.active_children()) == 2
    epoch.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
