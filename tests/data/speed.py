"""How long an epoch of 5,000 CIFAR-sized images takes: batched, and one image at a time. Run it by hand."""

import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from rkr.data import Augment, Batches, Images

MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


def best(run: Callable[[], None], times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    torch.set_num_threads(1)
    images = Images(torch.randint(0, 256, (5000, 3, 32, 32), dtype=torch.uint8), torch.zeros(5000, dtype=torch.int64))
    arrays = images.x.permute(0, 2, 3, 1).contiguous().numpy()
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def batched(augment: Augment | None) -> Callable[[], None]:
        batches = Batches(images, 128, 0, augment, mean=MEAN, std=STD)

        def run() -> None:
            for _ in batches:
                pass

        return run

    def one_by_one() -> None:
        """As torchvision's transforms do it."""
        for batch in torch.randperm(5000).split(128):
            made = []
            for i in batch.tolist():
                padded = Image.new("RGB", (40, 40))
                padded.paste(Image.fromarray(arrays[i]), (4, 4))
                dx, dy, flip = torch.randint(9, ()).item(), torch.randint(9, ()).item(), torch.rand(()).item() < 0.5
                image = padded.crop((dx, dy, dx + 32, dy + 32))
                if flip:
                    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
                made.append(x.sub_(mean).div_(std))
            torch.stack(made)

    slow = best(one_by_one, 3)
    print(f"one image at a time     {slow:.3f} s")
    for name, augment in (
        ("shuffle only", None),
        ("crop, flip", Augment()),
        ("crop, flip, rotate", Augment(rotate=10)),
    ):
        seconds = best(batched(augment))
        print(f"batched: {name:19} {seconds:.3f} s, {slow / seconds:.0f} x faster")


if __name__ == "__main__":
    main()
