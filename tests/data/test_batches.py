"""Batches of images in memory: the same as one image at a time, for the same random numbers, however they are read."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import rkr
from rkr.data import Augment, Batches, Images, Pictures
from rkr.data.augment import Crops, Draws, apply
from rkr.errors import UsageError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)


def images(n: int = 50, shape: tuple[int, int, int] = (3, 12, 10)) -> Images:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
    return Images(x, torch.arange(n))  # a label of its own for each image, so that it can be recognised


def all_of(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def slow(x: Tensor, dy: int, dx: int, flip: bool, angle: float, pad: int, rotate: bool) -> Tensor:
    """One image, one step after the other."""
    c, h, w = x.shape
    padded = torch.zeros(c, h + 2 * pad, w + 2 * pad, dtype=torch.uint8)
    padded[:, pad : pad + h, pad : pad + w] = x
    image = padded[:, dy : dy + h, dx : dx + w]
    if flip:
        image = image.flip(2)
    if not rotate:
        return image
    out = torch.zeros_like(image)
    cos, sin = torch.tensor(angle).cos(), torch.tensor(angle).sin()  # float32, as pixels on an edge depend on it
    for i in range(h):
        for j in range(w):
            y, x_ = i + 0.5 - h / 2, j + 0.5 - w / 2
            r, s = math.floor(float(sin * x_ + cos * y + h / 2)), math.floor(float(cos * x_ - sin * y + w / 2))
            if 0 <= r < h and 0 <= s < w:
                out[:, i, j] = image[:, r, s]
    return out


@pytest.mark.parametrize(
    "augment",
    [Augment(), Augment(flip=False), Augment(pad=0), Augment(pad=2, rotate=10), Augment(pad=0, flip=False, rotate=90)],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_equals_one_image_at_a_time(augment: Augment, channels: int) -> None:
    x = images(40, (channels, 12, 10)).x
    draws = Draws.draw(40, augment, torch.Generator().manual_seed(0))
    fast = apply(x, draws, augment)
    for i in range(40):
        numbers = int(draws.dy[i]), int(draws.dx[i]), bool(draws.flip[i]), float(draws.angle[i])
        assert torch.equal(fast[i], slow(x[i], *numbers, augment.pad, augment.rotate > 0)), i


def test_rotation_is_pillows() -> None:
    x = images(8, (3, 32, 32)).x
    augment = Augment(pad=0, flip=False, rotate=10)
    draws = Draws.draw(8, augment, torch.Generator().manual_seed(0))
    fast = apply(x, draws, augment)
    for i in range(8):
        image = Image.fromarray(x[i].permute(1, 2, 0).numpy()).rotate(math.degrees(float(draws.angle[i])))
        same = (np.asarray(image) == fast[i].permute(1, 2, 0).numpy()).mean()
        assert same > 0.99  # it rounds angles a little


def test_draws() -> None:
    """Every shift from 0 to 8 equally often, every second image flipped, angles even up to the limit."""
    n = 90000
    draws = Draws.draw(n, Augment(rotate=10), torch.Generator().manual_seed(0))
    for shift in (draws.dy, draws.dx):
        assert shift.bincount().tolist() == pytest.approx([n / 9] * 9, abs=5 * math.sqrt(n / 9))
    assert float(draws.flip.double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(n))
    assert float(torch.corrcoef(torch.stack([draws.dy, draws.dx]).double())[0, 1]) == pytest.approx(0, abs=0.02)
    degrees = draws.angle.rad2deg()
    assert -10 <= float(degrees.min()) < -9.99
    assert 9.99 < float(degrees.max()) <= 10
    assert float(degrees.std()) == pytest.approx(10 / math.sqrt(3), rel=0.01)
    plain = Draws.draw(n, Augment(flip=False), torch.Generator().manual_seed(0))
    assert torch.equal(plain.dy, draws.dy)
    assert not plain.flip.any()
    assert not plain.angle.any()


def test_evaluation() -> None:
    data = images()
    x, y = all_of(Batches(data, 16, mean=MEAN, std=STD))
    assert torch.equal(y, data.y)
    expected = (data.x / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(x, expected, atol=1e-6)
    assert x.dtype == torch.float32


def test_training_epoch() -> None:
    data = images()
    batches = Batches(data, 16, 7, Augment(), mean=MEAN, std=STD)
    assert (len(batches), [batches.size(k) for k in range(4)]) == (4, [16, 16, 16, 2])
    epochs = [list(batches) for _ in range(3)]
    assert batches.epoch == 3
    for epoch in epochs:
        assert [len(y) for _, y in epoch] == [16, 16, 16, 2]
        assert sorted(all_of(epoch)[1].tolist()) == list(range(50))  # each image once
        assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in epoch)
    assert len({tuple(all_of(epoch)[1].tolist()) for epoch in epochs}) == 3
    again = Batches(data, 16, 7, Augment(), mean=MEAN, std=STD)
    assert torch.equal(all_of(again.iter_from(2))[0], all_of(epochs[2])[0])
    assert not torch.equal(all_of(Batches(data, 16, 8, mean=MEAN, std=STD))[1], all_of(epochs[0])[1])
    unchanged, y = all_of(Batches(data, 16, 7, mean=MEAN, std=STD))
    assert torch.equal(y, all_of(epochs[0])[1])  # augmentation does not change the order
    assert torch.equal(unchanged, all_of(Batches(data, 50, mean=MEAN, std=STD))[0][y])


def test_batch_size_does_not_change_samples() -> None:
    one, other = (all_of(Batches(images(), b, 7, Augment(rotate=10), mean=MEAN, std=STD)) for b in (7, 50))
    assert torch.equal(one[0], other[0])


def test_global_randomness_is_left_alone() -> None:
    batches = Batches(images(), 16, 7, Augment(), mean=MEAN, std=STD)
    torch.manual_seed(0)
    first = all_of(batches.iter_from(0))[0]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, all_of(batches.iter_from(0))[0])
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("start", range(5))
def test_resumption_in_mid_epoch(start: int) -> None:
    batches = Batches(images(), 16, 7, Augment(), mean=MEAN, std=STD)
    whole = list(batches.iter_from(5))
    rest = list(Batches(images(), 16, 7, Augment(), mean=MEAN, std=STD).iter_from(5, start))
    assert len(rest) == 4 - start
    for (x, y), (x2, y2) in zip(whole[start:], rest, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", [None, 7])
def test_shares_make_up_the_batch(world: int, seed: int | None) -> None:
    augment = None if seed is None else Augment(rotate=10)

    def epoch(**share: int) -> list[tuple[Tensor, Tensor]]:
        return list(Batches(images(), 16, seed, augment, mean=MEAN, std=STD, **share).iter_from(1))

    for (x, y), *parts in zip(epoch(), *(epoch(rank=rank, world=world) for rank in range(world)), strict=True):
        assert torch.equal(x, torch.cat([part[0] for part in parts]))
        assert torch.equal(y, torch.cat([part[1] for part in parts]))
        sizes = [len(part[1]) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_other_memory_formats() -> None:
    data = images()
    last = Images(data.x.contiguous(memory_format=torch.channels_last), data.y)
    first, second = (all_of(Batches(i, 16, 7, Augment(), mean=MEAN, std=STD))[0] for i in (data, last))
    assert torch.equal(first, second)
    assert data.digest() == last.digest()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch": 0}, "batch must be at least 1, not 0"),
        ({"augment": Augment()}, "give a seed"),
        ({"rank": 2, "world": 2}, "rank must be 0 to 1"),
        ({"mean": (0.5,)}, "3 channels need 3 means"),
    ],
)
def test_errors(options: dict, match: str) -> None:
    with pytest.raises(rkr.UsageError, match=match):
        Batches(images(), **{"mean": MEAN, "std": STD, **options})
    with pytest.raises(rkr.UsageError, match="has no batch 5"):
        next(Batches(images(), 16, mean=MEAN, std=STD).iter_from(0, 5))
    with pytest.raises(rkr.UsageError, match="pad must be"):
        Augment(pad=-1)
    with pytest.raises(rkr.UsageError, match="rotate must be"):
        Augment(rotate=200)


class Squares:
    """Squares of pictures in memory."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.side, self.names = x, x.shape[-1], [bytes([i]) for i in range(len(x))]

    def read(self, rows: Tensor) -> Tensor:
        return self.x[rows]


def pictures(n: int = 10, side: int = 20, size: int = 16) -> Pictures:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, side, side), generator=draw, dtype=torch.uint8)
    return Pictures(Squares(x), torch.arange(n), torch.arange(n) % 3, size)


PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}


def test_pictures_are_cut_from_the_centre() -> None:
    given = pictures()
    found = torch.cat([x for x, _ in Batches(given, 4, **PLAIN)])
    torch.testing.assert_close(found, given.read(torch.arange(10))[:, :, 2:18, 2:18].float())


def test_crops_without_zoom_have_the_network_s_size() -> None:
    crops = Crops.draw(1000, Augment(pad=0, flip=True), 0.8, torch.Generator().manual_seed(0))
    assert (crops.half.abs() == 0.8).all()
    assert crops.centre.abs().max() <= 0.2 + 1e-6
    assert (crops.half[:, 0] < 0).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_a_crop_is_the_box_resized() -> None:
    x = torch.arange(64.0).view(1, 1, 8, 8).to(torch.uint8)
    whole = Crops(torch.zeros(1, 2), torch.ones(1, 2))
    assert torch.equal(whole.cut(x, 8), x.float())
    flipped = Crops(torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]))
    assert torch.equal(flipped.cut(x, 8), x.float().flip(3))
    corner = Crops(torch.tensor([[-0.5, 0.5]]), torch.tensor([[0.5, 0.5]]))  # left below
    assert torch.equal(corner.cut(x, 4), x[:, :, 4:, :4].float())


def test_zoom_draws_areas_uniformly() -> None:
    crops = Crops.draw(20_000, Augment(pad=0, flip=False, zoom=0.25), 0.8, torch.Generator().manual_seed(1))
    area, ratio = crops.half.prod(1), crops.half[:, 0] / crops.half[:, 1]
    assert crops.half.max() <= 1
    assert (crops.centre.abs() + crops.half <= 1 + 1e-6).all()
    assert area.min() >= 0.25 * 0.75  # a box too wide is cut
    assert ratio.min() >= 3 / 4 - 1e-6
    assert ratio.max() <= 4 / 3 + 1e-6
    assert area.mean().item() == pytest.approx(0.6, abs=0.02)


def test_an_epoch_of_pictures_resumes_anywhere() -> None:
    batches = Batches(pictures(), 3, seed=7, augment=Augment(pad=0, zoom=0.3), **PLAIN)
    whole, rest = list(batches.iter_from(2)), list(batches.iter_from(2, 2))
    for (x, y), (a, b) in zip(whole[2:], rest, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)
    assert not torch.equal(whole[0][0], next(batches.iter_from(3))[0])


@pytest.mark.parametrize("augment", [Augment(pad=4), Augment(pad=0, rotate=5.0)])
def test_pictures_are_neither_padded_nor_rotated(augment: Augment) -> None:
    with pytest.raises(UsageError, match="neither padded nor rotated"):
        Batches(pictures(), seed=0, augment=augment, **PLAIN)
