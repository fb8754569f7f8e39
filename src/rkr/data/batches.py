"""Shuffled, augmented and normalised batches that depend only on the seed, not on devices or processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rkr.data import augment as augmentation
from rkr.data.augment import Augment, Crops, Draws
from rkr.data.decode import decoded
from rkr.data.task import Features, ImageFiles, Images, Pictures, Samples
from rkr.errors import UsageError


class Batches:
    """Batches of samples, epoch by epoch: float32 (B, C, H, W) in channels_last or (B, D), and int64 (B,).

    The order and augmentation of an epoch depend only on `seed` and the epoch number, so `epoch` is the whole state and
    `iter_from(epoch, k)` resumes before batch k. With several processes (`rank` of `world`) each process gets its share
    of every batch; the shares in order of rank make up the batch of a single process. The last batch of an epoch may be
    smaller and a share of it empty; divide by `size(k)` for a mean over the whole batch.

    Without `seed`, as for evaluation, samples come in order and without augmentation. With `afresh` every batch is
    drawn from all samples, without repetition within the batch: an epoch has as many batches as a pass but may miss
    samples.
    """

    def __init__(
        self,
        samples: Samples,
        batch: int = 128,
        seed: int | None = None,
        augment: Augment | None = None,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
        afresh: bool = False,
    ) -> None:
        if batch < 1:
            raise UsageError(f"batch must be at least 1, not {batch}")
        if not 0 <= rank < world:
            raise UsageError(f"rank must be 0 to {world - 1} of {world} processes, not {rank}")
        channels = 0 if isinstance(samples, Features) else samples.shape[0]
        if len(mean) != channels or len(std) != channels:
            raise UsageError(f"{channels} channels need {channels} means and stds, not {len(mean)} and {len(std)}")
        if augment is not None and seed is None:
            raise UsageError("augmentation is random: give a seed")
        if augment is not None and isinstance(samples, Features):
            raise UsageError("features cannot be augmented")
        if augment is not None and augment.rotate and isinstance(samples, ImageFiles):
            raise UsageError("image files cannot be rotated: set rotate to 0")
        if augment is not None and isinstance(samples, Pictures) and (augment.rotate or augment.pad):
            raise UsageError("pictures are neither padded nor rotated: set pad and rotate to 0")
        if augment is not None and augment.zoom and not isinstance(samples, Pictures):
            raise UsageError("only pictures are zoomed: set zoom to 0")
        if afresh and (seed is None or not isinstance(samples, Features)):
            raise UsageError("afresh needs features and a seed")
        self.samples, self.batch, self.seed, self.augment, self.afresh = samples, batch, seed, augment, afresh
        self.device, self.rank, self.world = torch.device(device), rank, world
        self.workers = workers if workers is not None else (os.cpu_count() or 1) // world
        self.epoch = 0
        width = 1 if isinstance(samples, Features) else samples.shape[2]
        # Rows of W pixels with C channels: an innermost axis of W C is several times faster than one of C = 3.
        self._mean = (torch.tensor(mean) * 255).repeat(width).to(self.device)  # (W C,)
        self._scale = (1 / (torch.tensor(std) * 255)).repeat(width).to(self.device)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.samples) // self.batch)

    def size(self, k: int) -> int:
        """Samples in batch k, over all processes."""
        left = len(self.samples) if self.afresh else len(self.samples) - k * self.batch
        return min(self.batch, left)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of `epoch`, then increment it."""
        yield from self.iter_from(self.epoch)
        self.epoch += 1

    def iter_from(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over every `step`-th batch of an epoch, from batch `start`."""
        if epoch < 0 or not 0 <= start <= len(self):
            raise UsageError(f"epoch {epoch} has no batch {start}: there are {len(self)}")
        if isinstance(self.samples, ImageFiles):
            yield from self._from_files(self.samples, epoch, start, step)
        elif isinstance(self.samples, Pictures):
            yield from self._from_pictures(self.samples, epoch, start, step)
        elif isinstance(self.samples, Features):
            yield from self._from_features(self.samples, epoch, start, step)
        else:
            yield from self._from_memory(self.samples, epoch, start, step)

    def _share(self, k: int) -> slice:
        """This process's part of batch k, as positions in the epoch."""
        first, size = k * self.size(0), self.size(k)
        return slice(first + size * self.rank // self.world, first + size * (self.rank + 1) // self.world)

    def _from_memory(self, images: Images, epoch: int, start: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = self._generator(epoch)
        order = torch.arange(len(images)) if generator is None else torch.randperm(len(images), generator=generator)
        draws = None
        if self.augment is not None and generator is not None:
            draws = Draws.draw(len(images), self.augment, generator)
        flat = images.x.reshape(len(images), -1)
        for k in range(start, len(self), step):
            share = self._share(k)
            index = order[share]
            x = flat.index_select(0, index).view(-1, *images.shape).to(self.device)  # transfer uint8, not float32
            if draws is not None and self.augment is not None:
                x = augmentation.apply(x, draws[share].to(self.device), self.augment)
            yield self._normalised(x), images.y[index].to(self.device)

    def _from_pictures(self, pictures: Pictures, epoch: int, start: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator, n, size = self._generator(epoch), len(pictures), pictures.size
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        crops = None
        if self.augment is not None and generator is not None:
            crops = Crops.draw(n, self.augment, size / pictures.store.side, generator)
        first = (pictures.store.side - size) // 2
        centre = slice(first, first + size)
        for k in range(start, len(self), step):
            share = self._share(k)
            index = order[share]
            x = pictures.read(index).to(self.device)
            x = x[:, :, centre, centre] if crops is None else crops[share].cut(x, size)
            yield self._normalised(x), pictures.y[index].to(self.device)

    def _from_features(self, features: Features, epoch: int, start: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator, n = self._generator(epoch), len(features)
        if generator is None:
            order = torch.arange(n)
        elif self.afresh:
            order = torch.cat([torch.randperm(n, generator=generator)[: self.batch] for _ in range(len(self))])
        else:
            order = torch.randperm(n, generator=generator)
        for k in range(start, len(self), step):
            index = order[self._share(k)]
            yield features.x.index_select(0, index).to(self.device), features.y[index].to(self.device)

    def _from_files(self, files: ImageFiles, epoch: int, start: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = self._generator(epoch)
        order = torch.arange(len(files)) if generator is None else torch.randperm(len(files), generator=generator)
        seeds = None
        if self.augment is not None:
            seeds = torch.randint(2**62, (len(files),), generator=generator)
        shares = [self._share(k) for k in range(start, len(self), step)]
        flip = self.augment is not None and self.augment.flip
        for x, y in decoded(files, order, seeds, shares, flip, self.workers):
            yield self._normalised(x.to(self.device)), y.to(self.device)

    def _generator(self, epoch: int) -> torch.Generator | None:
        if self.seed is None:
            return None
        mixed = hashlib.sha256(f"rkr batches {self.seed} {epoch}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(mixed[:4], "little"))  # torch's CPU generator takes 32 bits

    def _normalised(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(b * h, w * c).float()
        return rows.sub_(self._mean).mul_(self._scale).view(b, h, w, c).permute(0, 3, 1, 2)
