"""The Trainer of transformers with a vision transformer: each call of `train` learns one task.

pip install transformers accelerate
python examples/trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import rkr


class Digits(Dataset[dict[str, Tensor]]):
    """Images of some digits, as the network takes them."""

    def __init__(self, first: int, last: int, part: int) -> None:
        found = load_digits()
        y = torch.tensor(found.target)
        chosen = (y >= first) & (y <= last)
        images = torch.tensor(found.images, dtype=torch.float32)[chosen] / 8 - 1
        self.x = images.unsqueeze(1).expand(-1, 3, -1, -1)[part::2]  # (N, 3, 8, 8)
        self.y = (y[chosen] - first)[part::2]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"pixel_values": self.x[i], "labels": self.y[i]}


def accuracy(prediction: object) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids  # type: ignore[attr-defined]
    return {"accuracy": float((logits.argmax(1) == labels).mean())}


def main(epochs: int = 20) -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    network = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_labels=10, **size))
    model = rkr.rectify(network, rank=4, head="classifier", norm="per_task")
    with tempfile.TemporaryDirectory() as folder:
        for task, (first, last) in {"low": (0, 4), "high": (5, 9)}.items():
            model.add_task(task, classes=last - first + 1)
            arguments = TrainingArguments(
                folder,
                num_train_epochs=epochs,
                learning_rate=2e-3,
                per_device_train_batch_size=32,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=torch.cuda.is_available(),
                logging_strategy="no",
            )
            trainer = Trainer(model, arguments, train_dataset=Digits(first, last, 0), compute_metrics=accuracy)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        for task, (first, last) in {"low": (0, 4), "high": (5, 9)}.items():
            model.set_task(task)
            found = trainer.evaluate(Digits(first, last, 1))
            print(f"{task}: {100 * found['eval_accuracy']:.1f} %, {model.cost()[task].percent:.2f} % more numbers")


if __name__ == "__main__":
    main()
