"""`rkr.learn`: a folder of pictures becomes a task of a pretrained network."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from rkr.core import RectifiedModel
from rkr.core.index import LOCK
from rkr.core.infer import describe
from rkr.core.zoo import add_task_file, read_about
from rkr.data import Pictures
from rkr.errors import FileError, UsageError
from rkr.experiment.events import Preparing, Watch
from rkr.experiment.execution import Interrupted
from rkr.experiment.processes import make_fabric
from rkr.experiment.signals import signals
from rkr.pictures import backbones
from rkr.pictures.cache import Squares
from rkr.pictures.dataset import Checked, Listing, divide, list_pictures
from rkr.pictures.lesson import Learned, Lesson
from rkr.pictures.preparation import Preparation
from rkr.pictures.settings import RANK, Settings, options_for
from rkr.pictures.zoo import LEARNING, Zoo, check_task_name, is_zoo, lesson_folder, open_zoo, writing

ENDINGS = (".csv", ".tsv", ".txt", ".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Request:
    """What a user asked for, checked as far as that takes no network.

    Attributes:
        listing: The pictures.
        folder: The zoo.
        task: The name of the new task.
        new: Whether the zoo is to be made.
        backbone: The reference of its network.
        arguments: For the function that builds it.
        size: Height and width of pictures; None for what the zoo or the network has.
        settings: How to train.
    """

    listing: Listing
    folder: Path
    task: str
    new: bool
    backbone: str
    arguments: Mapping[str, Any]
    size: int | None
    settings: Settings

    @property
    def lesson_folder(self) -> Path:
        """Where the unfinished task is kept."""
        return lesson_folder(self.folder, self.task)


def learn(
    source: str | PathLike[str],
    model: str | PathLike[str],
    task: str | None = None,
    *,
    backbone: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    size: int | None = None,
    accelerator: str = "auto",
    precision: str | None = None,
    threads: int | None = None,
    memory: int | None = None,
    watch: Watch = lambda event: None,
    **settings: Any,
) -> Zoo:
    """Learn a task from labelled pictures, and add it to a model folder, which is made if necessary.

    Repeat an interrupted call to go on. Until it is complete the folder's tasks stay as they are.

    Args:
        source: Class folders (or `train/` and `val/` with class folders), a CSV file or JSON lines with path and label.
        model: The zoo's folder.
        task: Name of the task; by default that of `source`.
        backbone: For a new zoo: "efficientnet-lite0" (the default), "timm:NAME", "torchvision:NAME",
            "transformers:NAME" or "package.module:function".
        arguments: For the function that builds the network.
        size: For a new zoo: height and width of pictures.
        accelerator: auto, cpu, cuda or mps.
        precision: Of the training: 32-true or bf16-mixed. By default the latter on GPUs that have it.
        threads: For computing and decoding.
        memory: Bytes of decoded pictures that may be kept in memory; more go to a file.
        watch: Called with events, as displays are.
        settings: Fields of `rkr.pictures.Settings`, such as `rank`, `epochs` or `seed`.

    Returns:
        The zoo, with the task in use.

    Raises:
        UsageError: An argument does not fit, or there is a task with this name already.
        FileError: No pictures can be read, or the folder cannot be written.

    Example:
        >>> import rkr
        >>> zoo = rkr.learn("photos/colours", model="zoo", epochs=1)
        >>> zoo.tasks["colours"].classes
        ('blue', 'green', 'red')
    """
    request = prepare(source, model, task, backbone, arguments, size, settings)
    stopped: list[bool] = []
    lesson: list[Lesson] = []

    def stop() -> None:
        stopped.append(True)
        for one in lesson:
            one.stop()

    with signals(stop):
        try:
            return _learn(request, accelerator, precision, threads, memory, watch, stopped, lesson)
        except Interrupted:
            raise KeyboardInterrupt from None


def prepare(
    source: str | PathLike[str],
    model: str | PathLike[str],
    task: str | None,
    backbone: str | None,
    arguments: Mapping[str, Any] | None,
    size: int | None,
    settings: Mapping[str, Any],
) -> Request:
    """Check a request without building a network or writing anything."""
    known = {field.name for field in dataclasses.fields(Settings)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise UsageError(f"learn has no option {unknown[0]!r}; its settings are {', '.join(sorted(known))}")
    given = {key: value for key, value in settings.items() if value is not None}
    folder, path = Path(model).expanduser(), Path(source).expanduser()
    new = not is_zoo(folder)
    name = check_task_name(task if task is not None else default_name(path))
    reference = backbone or backbones.DEFAULT
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder}: is a file; --model needs a folder")
    if new:
        others = [p.name for p in folder.iterdir() if p.name not in (LEARNING, LOCK)] if folder.is_dir() else []
        if others:
            raise FileError(
                f"{folder}: is not a saved model, but has files ({others[0]}): give a new folder for --model"
            )
    else:
        stated = read_about(folder)
        about = stated.about
        described = about.get("network")
        if not isinstance(described, Mapping):
            raise UsageError(f"{folder} does not say how to build its network: it was not made by rkr learn")
        if backbone is not None and backbone != described["backbone"]:
            raise UsageError(
                f"{folder} has the network {described['backbone']}, not {backbone}: leave --backbone out, or choose "
                "another folder with --model"
            )
        there = about["preparation"]["size"]
        if size is not None and size != there:
            raise UsageError(
                f"{folder} has pictures of {there} pixels, not {size}: leave --size out, or choose another folder"
            )
        reference, arguments, size = described["backbone"], described.get("arguments", {}), None
    chosen = Settings(**given)
    listing = list_pictures(path)
    tests = len(listing.pictures)
    listing = listing.only("train", "validation", "")
    if not listing.pictures:
        raise FileError(f"{path}: all of its {tests} pictures are for testing: none is left to learn from")
    if len(listing.classes) < 2:
        raise FileError(f"{path}: has one class only, {listing.classes[0]!r}; a task needs two or more")
    request = Request(listing, folder, name, new, reference, arguments or {}, size, chosen)
    if not new and name in stated.tasks:
        raise UsageError(
            f"{folder} has a task {name!r} already: choose another name with --task, or drop it first: "
            f"rkr tasks {folder} --drop {name}"
        )
    return request


def default_name(path: Path) -> str:
    """The name of a task that is not given: that of the folder or file."""
    name = path.resolve().name
    return name[: -len(path.suffix)] if path.suffix.lower() in ENDINGS else name


def begin_zoo(request: Request) -> Zoo:
    """The zoo that the task is added to: opened, or built anew in memory."""
    if not request.new:
        zoo = open_zoo(request.folder, device="cpu")
        rank, there = request.settings.rank, zoo.model.options.rank
        if rank and rank != there:
            raise UsageError(
                f"{request.folder} has rank {there}, which all of its tasks share, not {rank}: leave --rank out, or "
                "choose another folder with --model"
            )
        return zoo
    rank = request.settings.rank or RANK
    return new_zoo(request.folder, request.backbone, request.arguments, rank, request.size)


def new_zoo(folder: Path, backbone: str, arguments: Mapping[str, Any] | None, rank: int, size: int | None) -> Zoo:
    """A zoo without tasks, in memory, with the backbone's own weights."""
    built = backbones.build(backbone, arguments, size=size)
    network = built.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = RectifiedModel(network, options_for(network, rank), built.head)
    model.freeze_base()
    model.about = {
        "network": {"backbone": backbone, "arguments": built.arguments, "licence": built.licence},
        "preparation": built.preparation.to_json(),
    }
    return Zoo(folder, model, built.preparation)


def _learn(
    request: Request,
    accelerator: str,
    precision: str | None,
    threads: int | None,
    memory: int | None,
    watch: Watch,
    stopped: list[bool],
    lessons: list[Lesson],
) -> Zoo:
    began = time.time()
    if threads is not None:
        torch.set_num_threads(threads)
    fabric = make_fabric(accelerator, precision or default_precision(accelerator))
    zoo = begin_zoo(request)
    with writing(request.folder):
        folder = request.lesson_folder
        try:
            squares = Squares(
                [p.path for p in request.listing.pictures],
                zoo.preparation,
                folder,
                **({} if memory is None else {"memory": memory}),
                threads=threads,
            )
            try:
                checked = check_pictures(request, squares, watch, stopped)
                train, held_out = parts(checked, squares, zoo.preparation)
                lesson = Lesson(
                    zoo.model,
                    request.task,
                    checked.classes,
                    train,
                    held_out,
                    request.settings,
                    zoo.preparation,
                    folder,
                    fabric,
                    watch,
                )
                lessons.append(lesson)
                if stopped:
                    raise Interrupted
                learned = lesson.run()
            finally:
                squares.close()
            task = zoo.model.tasks[request.task]
            task.about = about_task(request, zoo, checked, learned, began)
            commit(request, zoo)
            zoo.left_out = left_out(checked, request.listing)
        except Interrupted:
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            if request.new:
                _remove_unfinished(request.folder)
            raise
        shutil.rmtree(folder, ignore_errors=True)
    if not request.new:
        left, zoo = zoo.left_out, open_zoo(request.folder, device=str(zoo.device))
        zoo.model.set_task(request.task)
        zoo.left_out = left
    zoo.model.eval()
    return zoo


def _remove_unfinished(folder: Path) -> None:
    """What a new zoo has got before its index could be written."""
    if is_zoo(folder):
        return
    for path in folder.iterdir():
        if path.name != LEARNING:
            with contextlib.suppress(OSError):
                path.unlink()


def default_precision(accelerator: str) -> str | None:
    """Mixed precision where the hardware has it."""
    gpu = accelerator in ("auto", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if gpu and torch.cuda.is_bf16_supported() else None


def check_pictures(request: Request, squares: Squares, watch: Watch, stopped: list[bool]) -> Checked:
    """Read every picture, and divide them."""

    def done(count: int, total: int) -> None:
        if stopped:
            raise Interrupted
        watch(Preparing(request.task, "pictures", count, total))

    content = squares.load(done)
    return divide(request.listing, content, request.settings.validation, request.settings.seed)


def left_out(checked: Checked, listing: Listing) -> tuple[str, ...]:
    """Files that are not used, each with the reason."""
    return (
        *(why if path in why else f"{path}: {why}" for path, why in checked.broken),
        *(f"{path}: the same picture is there already" for path in checked.copies),
        *(f"{path}: the same picture stands in another class too" for path in checked.contradictions),
        *(f"{path}: is in no class folder" for path in listing.loose),
    )


def parts(checked: Checked, squares: Squares, preparation: Preparation) -> tuple[Pictures, Pictures]:
    """The training and the validation part."""
    return tuple(  # type: ignore[return-value]
        Pictures(squares, checked.rows[which], checked.y[which], preparation.size)
        for which in (~checked.validation, checked.validation)
    )


def about_task(request: Request, zoo: Zoo, checked: Checked, learned: Learned, began: float) -> dict[str, Any]:
    """The record of a task, for its file."""
    from rkr import __version__

    description = describe(learned.features.cpu(), learned.y.cpu(), len(checked.classes))
    counts = checked.counts()
    return {
        "pictures": len(checked.rows),
        "validation": int(checked.validation.sum()),
        "per_class": dict(zip(checked.classes, counts, strict=True)),
        "broken": len(checked.broken),
        "copies": len(checked.copies) + len(checked.contradictions),
        "accuracy": learned.accuracy,
        "probe": learned.probe,
        "kept": learned.kept,
        "epochs": learned.epochs,
        "seconds": round(learned.seconds, 1),
        "settings": request.settings.to_json(),
        "date": datetime.datetime.fromtimestamp(began, datetime.timezone.utc).isoformat(timespec="seconds"),
        "rkr": __version__,
        "network": zoo.model.about["network"],
        "preparation": zoo.model.about["preparation"],
        "infer": description.to_json(),
    }


def commit(request: Request, zoo: Zoo) -> None:
    """Save the new task. What other processes have changed in the folder meanwhile stays."""
    if request.new:
        zoo.model.save(request.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.safetensors"
        zoo.model.save_task(request.task, file)
        add_task_file(request.folder, file, request.task)
