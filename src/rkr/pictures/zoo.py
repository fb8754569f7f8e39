"""A zoo of picture tasks: a model folder that says how to build its network and how to prepare pictures."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from rkr.core import RectifiedModel, load
from rkr.core.about import TaskAbout
from rkr.core.features import base_features
from rkr.core.files import read_task_about
from rkr.core.index import INDEX, Changes
from rkr.core.infer import FALSE_ALARMS, Description, Rule
from rkr.core.state import TaskState
from rkr.core.zoo import add_task_file, drop_task, read_about, rename_task
from rkr.errors import FileError, UsageError
from rkr.pictures import backbones
from rkr.pictures.preparation import Preparation

if TYPE_CHECKING:
    from rkr.pictures.evaluate import Evaluation
    from rkr.pictures.predict import Prediction, Source

LEARNING = ".learning"  # folder within a zoo for what is being learned
AUTO = "auto"  # in the place of a task's name: infer it


@dataclass(frozen=True)
class Record:
    """What is known of a task. Fields are None where its file does not say."""

    name: str
    classes: tuple[str, ...]
    pictures: int | None  # of the training and the validation part
    accuracy: float | None  # on the validation part, 0 to 1
    nbytes: int
    date: str | None  # when it was learned, ISO 8601 in UTC
    about: Mapping[str, Any] = field(repr=False)

    @property
    def settings(self) -> Mapping[str, Any]:
        """How it was trained."""
        found = self.about.get("settings")
        return found if isinstance(found, Mapping) else {}

    def to_json(self) -> dict[str, Any]:
        """As plain values, without what `auto` needs."""
        about = {key: value for key, value in self.about.items() if key != "infer"}
        return {
            "name": self.name,
            "classes": list(self.classes),
            "pictures": self.pictures,
            "accuracy": self.accuracy,
            "bytes": self.nbytes,
            "date": self.date,
            "about": about,
        }


class Tasks(Mapping[str, Record]):
    """The tasks of a zoo by name."""

    def __init__(self, model: RectifiedModel) -> None:
        self._model = model

    def __getitem__(self, name: str) -> Record:
        return record(self._model.tasks[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._model.tasks)

    def __len__(self) -> int:
        return len(self._model.tasks)

    def __contains__(self, name: object) -> bool:
        return name in self._model.tasks


def record(task: TaskState) -> Record:
    """What is known of a task."""
    about = task.about
    pictures, accuracy, date = (about.get(key) for key in ("pictures", "accuracy", "date"))
    classes = task.class_names or tuple(map(str, range(task.classes or 0)))
    return Record(
        task.name,
        classes,
        pictures if isinstance(pictures, int) else None,
        float(accuracy) if isinstance(accuracy, int | float) else None,
        sum(tensor.nbytes for tensor in task.tensors().values()),
        date if isinstance(date, str) else None,
        about,
    )


class Zoo:
    """A network with tasks that classify pictures. Made by `rkr.learn` and `rkr.open`.

    Attributes:
        folder: Where it is saved.
        model: The network with its tasks.
        preparation: How pictures are prepared for it.
        tasks: What is known of each task, by name.

    Example:
        >>> import rkr
        >>> zoo = rkr.open("zoo")
        >>> zoo.rename("colours", "paint")
        >>> zoo.evaluate("photos/colours-test", "paint").accuracy > 0.5
        True
        >>> zoo.drop("paint")
        >>> len(zoo.tasks)
        0
    """

    def __init__(self, folder: Path, model: RectifiedModel, preparation: Preparation) -> None:
        self.folder, self.model, self.preparation = folder, model, preparation
        self.tasks = Tasks(model)
        self.left_out: tuple[str, ...] = ()  # files that `learn` could not use, and why
        self._rule: tuple[tuple[str, ...], Rule] | None = None
        self.model.eval()
        if not hasattr(model.network, "input_shape"):
            network: Any = model.network
            network.input_shape = (3, preparation.size, preparation.size)  # for `model.cost` and export

    def __repr__(self) -> str:
        return f"Zoo({str(self.folder)!r}, tasks={list(self.tasks)})"

    @property
    def backbone(self) -> str:
        """The reference that its network was built from."""
        return str(self.model.about["network"]["backbone"])

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.network.parameters()).device

    def to(self, device: torch.device | str) -> Zoo:
        """Compute elsewhere from now on.

        Args:
            device: A device of torch, such as "cuda".

        Returns:
            The zoo itself.
        """
        self.model.to(device)
        return self

    # -- answers ------------------------------------------------------------------------------------------

    def predict(
        self,
        pictures: Source | Sequence[Source],
        task: str | None = None,
        top: int = 1,
        false_alarms: float = FALSE_ALARMS,
    ) -> list[Prediction]:
        """Classify pictures: files, folders with pictures, the content of files, or images of Pillow.

        Args:
            pictures: One or more.
            task: A task's name, or "auto" to infer it. It can be left out if there is only one.
            top: How many classes to name for each picture.
            false_alarms: With "auto", the share of the tasks' own pictures that may be called none of the tasks.

        Returns:
            For each picture its `path`, `task`, and the most probable `classes` with their `probabilities`; or an
            `error`, if it cannot be read.

        Raises:
            UsageError: No task has this name, or none is given and there are several.
        """
        from rkr.pictures.predict import predictions

        return list(predictions(self, pictures, task, top, false_alarms))

    def evaluate(self, source: str | os.PathLike[str], task: str | None = None) -> Evaluation:
        """Test a task on labelled pictures.

        Args:
            source: Class folders, a CSV file or JSON lines.
            task: A task's name. It can be left out if there is only one.

        Returns:
            The `accuracy`, that of each class, and which classes are confused.

        Raises:
            UsageError: No task has this name, or the pictures have classes that it does not have.
        """
        from rkr.pictures.evaluate import evaluate

        return evaluate(self, source, task)

    def chosen(self, task: str | None, auto: bool = False) -> str:
        """The name of a task that a user asked for; the only one, if none is given."""
        if task is None:
            if len(self.tasks) != 1:
                names = ", ".join(list(self.tasks)[:8]) or "none yet"
                also = f", or {AUTO}" if auto else ""
                raise UsageError(
                    f"{self.folder} has {len(self.tasks)} tasks: give one with --task{also}; tasks: {names}"
                )
            return next(iter(self.tasks))
        if not (auto and task == AUTO):
            self.model.tasks[task]  # a clear error if there is none
        return task

    @torch.no_grad()
    def logits(self, squares: Tensor, task: str) -> Tensor:
        """Logits of squares, uint8 (B, 3, R, R), for a task: (B, C)."""
        self.model.set_task(task)
        return self.model(self._input(squares)).float().cpu()

    def features(self, squares: Tensor) -> Tensor:
        """The base's features of squares: (B, D)."""
        return base_features(self.model, self._input(squares)).cpu()

    def rule(self) -> Rule:
        """How the task of a picture is inferred."""
        names = tuple(self.tasks)
        if self._rule is None or self._rule[0] != names:
            found = {}
            for name in names:
                try:
                    values = self.model.tasks[name].about.get("infer")
                except FileError:  # `model.tasks.damaged` says why; the others can be inferred all the same
                    continue
                if values is None:
                    raise UsageError(f"the task {name!r} cannot be inferred: it was not made by rkr learn; give --task")
                found[name] = Description.from_json(values)
            self._rule = names, Rule(found)
        return self._rule[1]

    def _input(self, squares: Tensor) -> Tensor:
        return self.preparation.normalised(self.preparation.centre(squares.to(self.device)))

    # -- tasks --------------------------------------------------------------------------------------------

    def drop(self, name: str) -> None:
        """Remove a task, from the folder too.

        Args:
            name: The task's name.

        Raises:
            UsageError: No task has this name.
        """
        drop_task(self.folder, name)
        self.follow()

    def rename(self, name: str, new: str) -> None:
        """Give a task another name, in the folder too.

        Args:
            name: The task's name.
            new: Its new name.

        Raises:
            UsageError: No task has this name, or one has the new name already.
        """
        check_task_name(new)
        rename_task(self.folder, name, new)
        self.follow()

    def follow(self) -> Changes:
        """Take over what other processes have changed in the folder.

        Returns:
            The names of the tasks that were `added`, `replaced` and `removed`; false if there are none.
        """
        changes = self.model.follow()
        if changes:
            self._rule = None  # a task may have been replaced by another of the same name
            self.model.eval()
        return changes

    def copy(self, name: str, other: str | os.PathLike[str], new: str | None = None) -> Zoo:
        """Copy a task to another zoo with the same base.

        Args:
            name: The task's name.
            other: The other folder, which is made if it does not exist.
            new: The task's name there; the same by default.

        Returns:
            The other zoo.

        Raises:
            UsageError: No task has this name, or the other zoo has one of this name.
            FileError: The other zoo has another base.
        """
        target, new = Path(other).expanduser(), new or name
        check_task_name(new)
        self.model.tasks[name]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "task.safetensors"
            self.model.save_task(name, file)
            if is_zoo(target):
                check_base(read_task_about(file), target, str(self.folder))
            return add_file(target, file, new, open_zoo(self.folder, device="cpu"))

    def export(self, path: str | os.PathLike[str], tasks: Sequence[str], style: str = "merged") -> None:
        """Write tasks as an ONNX file with `rkr.export`.

        Args:
            path: The file to write.
            tasks: Names of tasks. Only the style "all" takes several.
            style: See `rkr.export`.

        Raises:
            UsageError: No task has this name, or the style does not take so many.
        """
        import rkr

        names = list(tasks)
        if style == "merged" and len(names) != 1:
            raise UsageError(f"--style merged writes one task, not {len(names)}: give --task, or --style all")
        rkr.export(self.model, path, tasks=names if style == "all" else names[0], style=style)


def open_zoo(folder: str | os.PathLike[str], network: nn.Module | None = None, device: str | None = None) -> Zoo:
    """Open a folder that `rkr.learn` made. Its network is built from what the folder says.

    Args:
        folder: The zoo.
        network: A network of the same architecture, for folders that do not say how to build it. Pictures are prepared
            as for ImageNet then.
        device: Where to compute: a GPU if there is one, by default.

    Returns:
        The zoo.

    Raises:
        UsageError: The folder does not say how to build its network, or that library is not installed.
        FileError: The folder is missing or damaged.

    Example:
        >>> import rkr
        >>> zoo = rkr.open("zoo")
        >>> [answer.classes for answer in zoo.predict("photos/new", task="colours")]
        [('blue',), ('red',)]
    """
    path = Path(folder).expanduser()
    preparation = Preparation()
    if network is None:
        about = read_about(path).about
        described = about.get("network")
        if not isinstance(described, Mapping) or not isinstance(described.get("backbone"), str):
            raise UsageError(
                f"{path} does not say how to build its network: give the network, rkr.open({str(path)!r}, network)"
            )
        try:
            built = backbones.build(described["backbone"], described.get("arguments"), pretrained=False)
            preparation = Preparation.from_json(about.get("preparation"))
        except UsageError as error:
            raise UsageError(f"{path}: its network cannot be built: {error}") from error
        network = built.network
    model = load(path, network.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    zoo = Zoo(path, model, preparation)
    return zoo.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def is_zoo(folder: Path) -> bool:
    """Whether there is a model folder."""
    return (folder / INDEX).exists()


def lesson_folder(folder: Path, task: str) -> Path:
    """Where a zoo keeps an unfinished task. With the ending, "..", "." and "lock" are folders like others."""
    return folder / LEARNING / f"{quote(task, safe=' ')[:100]}.task"


def check_task_name(name: str) -> str:
    """A name that a task can have, or UsageError."""
    if not name or not name.strip() or any(not c.isprintable() for c in name):
        raise UsageError(f"a task's name must be printable text, not {name!r}")
    if name == AUTO:
        raise UsageError(f"a task cannot be called {AUTO!r}, which means to infer the task: choose another with --task")
    return name


def check_base(stated: TaskAbout, folder: Path, source: str) -> None:
    """Refuse a task that does not belong to the base of a model folder."""
    there = read_about(folder)
    if stated.base != there.base:
        described = stated.about.get("network")
        made_for = f"; it was made for {described.get('backbone')}" if isinstance(described, Mapping) else ""
        raise FileError(
            f"{source}: its task belongs to another base network (fingerprint {stated.base[:12]}, that of {folder} "
            f"is {there.base[:12]}): choose another model folder{made_for}"
        )
    how, here = stated.about.get("preparation"), there.about.get("preparation")
    if isinstance(how, Mapping) and isinstance(here, Mapping) and how != here:
        key = next((key for key in here if how.get(key) != here[key]), "other keys")
        raise FileError(
            f"{source}: its task learned from pictures that were prepared otherwise ({key}: {how.get(key)}; "
            f"{folder} has {here.get(key)}): choose another model folder"
        )
    if stated.rank != there.options.rank:
        raise FileError(f"{source}: its task has rank {stated.rank}, those of {folder} have {there.options.rank}")


def add_file(folder: Path, file: Path, name: str, base: Zoo) -> Zoo:
    """Add a task file to a model folder, under a name. Without one there, it is made with the base of `base`."""
    check_task_name(name)
    if not is_zoo(folder):
        for other in list(base.tasks):
            base.model.remove_task(other)
        base.model.load_task(file, name)
        base.model.save(folder)
    else:
        add_task_file(folder, file, name)
    return open_zoo(folder)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Be the only one who learns in a zoo. A folder that is made for it goes again if it stays empty."""
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    lock_folder = folder / LEARNING
    try:
        lock_folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_folder / "lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise UsageError(f"{folder}: another process is learning a task there: wait for it, or stop it") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{folder}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    try:
        yield
    finally:
        lock.release()
        if set(os.listdir(lock_folder)) <= {"lock"}:  # nothing to go on with
            shutil.rmtree(lock_folder, ignore_errors=True)
            for path in made:
                with contextlib.suppress(OSError):
                    path.rmdir()
