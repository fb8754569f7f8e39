"""Tasks on the Hugging Face Hub: one task is one small repository, with its file and a card."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rkr.atomic import write_atomic
from rkr.core.about import TaskAbout
from rkr.core.files import base_fingerprint, read_task_about
from rkr.errors import FileError, UsageError
from rkr.pictures.learn import new_zoo
from rkr.pictures.preparation import Preparation
from rkr.pictures.zoo import Zoo, add_file, check_base, check_task_name, is_zoo, open_zoo

TASK_FILE, CARD = "task.safetensors", "README.md"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
T = TypeVar("T")


def push(
    zoo: Zoo,
    task: str,
    repository: str | None = None,
    folder: Path | None = None,
    *,
    private: bool = False,
    licence: str | None = None,
) -> str:
    """Write the files of a task's repository, and upload them. Returns where they are.

    Args:
        zoo: Has the task.
        task: Its name.
        repository: "owner/name" on the Hub, which is made if necessary; None to write a folder only.
        folder: Where to write the files; None for a temporary folder.
        private: Make a new repository private.
        licence: For the card; by default that of the base.
    """
    zoo.chosen(task)
    if repository is None and folder is None:
        raise UsageError("say where to: give OWNER/NAME, or --folder DIR")
    if repository is not None and not NAME.fullmatch(repository):
        raise UsageError(f"a repository is called OWNER/NAME, not {repository!r}")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) if folder is None else folder
        zoo.model.save_task(task, place / TASK_FILE)
        write_atomic(place / CARD, card(zoo, task, repository, licence).encode())
        if repository is None:
            return str(place)
        api = _hub().HfApi()
        _asked(lambda: api.create_repo(repository, private=private, exist_ok=True), repository)
        done = _asked(
            lambda: api.upload_folder(
                repo_id=repository,
                folder_path=place,
                allow_patterns=[TASK_FILE, CARD],
                commit_message=f"Task {task!r}",
            ),
            repository,
        )
    return str(getattr(done, "repo_url", None) or repository)


def pull(source: str, model: Path, name: str | None = None, revision: str | None = None) -> tuple[Zoo, str]:
    """Add a task from the Hub, or from a folder that `push` wrote, to a zoo. The base is compared before anything else.

    Without a zoo at `model` one is made, if the task's base is a network whose weights can be had by reference.

    Args:
        source: "owner/name", or a folder.
        model: The zoo.
        name: Another name for the task.
        revision: Branch, tag or commit.
    """
    local = Path(source).expanduser()
    if local.is_dir():
        file = local / TASK_FILE
        if not file.is_file():
            raise FileError(f"{local}: has no {TASK_FILE}: it is not the repository of a task")
    elif NAME.fullmatch(source):
        hub = _hub()
        file = Path(_asked(lambda: hub.hf_hub_download(source, TASK_FILE, revision=revision), source))
    else:
        raise UsageError(f"{source!r} is neither a folder nor OWNER/NAME on the Hub")
    stated = read_task_about(file)
    title = check_task_name(name or stated.name)
    if is_zoo(model):
        check_base(stated, model, source)
        return add_file(model, file, title, open_zoo(model, device="cpu")), title
    zoo = _with_base_of(stated, model, source)
    return add_file(model, file, title, zoo), title


def _with_base_of(stated: TaskAbout, model: Path, source: str) -> Zoo:
    """A new zoo for a task's base. Functions of other people are not called."""
    described = stated.about.get("network")
    if not isinstance(described, Mapping):
        raise UsageError(f"{source}: does not say what its base network is: give a model folder that has it")
    reference = str(described.get("backbone"))
    kind, colon, _ = reference.partition(":")
    if colon and kind not in ("timm", "torchvision", "transformers"):
        raise UsageError(
            f"{source}: its base is made by the function {reference}, which is not called for you: make {model} with "
            f"rkr learn --backbone {reference} first, if you trust it"
        )
    arguments = described.get("arguments") or {}
    if kind == "transformers":
        arguments = {}  # they only matter for opening again
    elif not isinstance(arguments, Mapping) or not all(isinstance(v, int | float) for v in arguments.values()):
        raise UsageError(
            f"{source}: its base is {reference} with arguments that could name files or addresses; they are not used "
            f"for you: make {model} with rkr.learn first, if you trust them: {json.dumps(arguments)[:200]}"
        )
    size = Preparation.from_json(stated.about.get("preparation")).size
    zoo = new_zoo(model, reference, arguments, stated.rank, size)
    if base_fingerprint(zoo.model) != stated.base:
        raise FileError(
            f"{source}: its base network is not {reference} as it is installed here (fingerprint {stated.base[:12]})"
        )
    return zoo


def card(zoo: Zoo, task: str, repository: str | None, licence: str | None = None) -> str:
    """The model card: what the task's record says, and how to use it."""
    record = zoo.tasks[task]
    about = record.about
    network = zoo.model.about.get("network", {})
    head: dict[str, Any] = {
        "library_name": "rkr",
        "pipeline_tag": "image-classification",
        "tags": ["rkr", "image-classification"],
    }
    licence = licence or network.get("licence")
    if licence:
        head["license"] = licence
    base = str(network.get("backbone", "unknown"))
    if record.accuracy is not None:
        metric = {"type": "accuracy", "name": "validation accuracy", "value": round(record.accuracy, 4)}
        head["model-index"] = [
            {
                "name": task,
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"name": f"{task} (the author's pictures)", "type": "images"},
                        "metrics": [metric],
                    }
                ],
            }
        ]
    counts = about.get("per_class") or {}
    source = repository or "FOLDER"
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
        "---",
        "",
        f"# {_plain(task)}",
        "",
    ]
    lines += [f"A task for {_plain(base)}: {record.nbytes / 1e6:.2f} MB beside the network, which stays as it is.", ""]
    rows = [("base", base), ("base fingerprint", base_fingerprint(zoo.model)), ("rank", zoo.model.options.rank)]
    rows += (
        [("pictures", f"{record.pictures}, {about.get('validation')} of them for validation")]
        if record.pictures
        else []
    )
    rows += [("validation accuracy", f"{100 * record.accuracy:.1f} %")] if record.accuracy is not None else []
    rows += [("picture size", zoo.preparation.size), ("learned", record.date), ("licence", licence or "not stated")]
    lines += ["| | |", "|---|---|", *(f"| {key} | {_plain(value)} |" for key, value in rows), ""]
    lines += [
        "## Use",
        "",
        "```",
        f"rkr pull {source} --model zoo/",
        f"rkr predict zoo/ pictures/ --task {task!r}",
        "```",
        "",
    ]
    lines += ["## Classes", ""]
    lines += [f"* {_plain(c)}{f' ({counts[c]} pictures)' if c in counts else ''}" for c in record.classes]
    return "\n".join(lines) + "\n"


def _plain(text: Any) -> str:
    """Text in which Markdown and HTML mean nothing."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", str(text))


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(f"the Hub needs huggingface_hub ({error}): pip install huggingface_hub") from None
    return huggingface_hub


def _asked(question: Callable[[], T], repository: str) -> T:
    """An answer of the Hub, or one clear line."""
    from huggingface_hub import errors

    try:
        return question()
    except errors.RepositoryNotFoundError as error:
        raise FileError(
            f"{repository}: not found on the Hub, or not yours to see: log in with `hf auth login`"
        ) from error
    except errors.EntryNotFoundError as error:
        raise FileError(f"{repository}: has no {TASK_FILE}: it is not the repository of a task") from error
    except Exception as error:  # connection errors of several libraries
        why = " ".join(str(error).split())[:200]
        raise FileError(
            f"{repository}: the Hub cannot be reached or refuses ({type(error).__name__}: {why})"
        ) from error
