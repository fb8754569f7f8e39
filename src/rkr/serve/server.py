"""A server: an engine, what it learns, and how its tasks are changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rkr.core.files import load_task, read_task_about
from rkr.core.zoo import add_task_file, drop_task
from rkr.errors import FileError, RkrError, UsageError
from rkr.pictures.predict import Prediction
from rkr.pictures.zoo import Zoo, check_base, check_task_name
from rkr.serve import schema
from rkr.serve.decode import decoded
from rkr.serve.engine import Engine
from rkr.serve.guard import Access
from rkr.serve.learning import Learning
from rkr.serve.limits import Busy, Limits, NotFound, Refused, without
from rkr.serve.metrics import Metrics

T = TypeVar("T")
LONGEST_NAME = 200  # characters of a task's name


class Server:
    """What the routes ask.

    Args:
        zoo: The tasks.
        limits: Bounds.
        access: Who may do what.
        threads: For computing and decoding; None for torch's own number.
        cache: Bytes of merged weights.
        tell: Gets what belongs into the log.
    """

    def __init__(
        self,
        zoo: Zoo,
        limits: Limits | None = None,
        access: Access | None = None,
        *,
        threads: int | None = None,
        cache: int | None = None,
        tell: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        self.zoo, self.tell = zoo, tell
        self.limits, self.access = limits or Limits(), access or Access()
        self.metrics = Metrics(lambda: self.engine.accepted, lambda: len(self.engine.tasks))
        self.engine = Engine(zoo, self.limits, threads=threads, cache=cache, tell=tell, watch=self.metrics.batch)
        self._decoders = ThreadPoolExecutor(max(2, threads or 2), "rkr-decode")
        self._workers = ThreadPoolExecutor(4, "rkr-changes")
        self._threads = threads
        self._learning: Learning | None = None

    @property
    def learning(self) -> Learning:
        """What is learned by request."""
        assert self._learning is not None
        return self._learning

    @asynccontextmanager
    async def running(self, _: object = None) -> AsyncIterator[None]:
        """From the start to the end of the server."""
        self._learning = Learning(self.zoo.folder, self.limits, self._threads, self.tell, self._learned)
        self.engine.start()
        try:
            yield
        finally:
            loop = asyncio.get_running_loop()
            await asyncio.gather(
                loop.run_in_executor(None, self._learning.close), loop.run_in_executor(None, self.engine.close)
            )
            self._decoders.shutdown(wait=False, cancel_futures=True)
            self._workers.shutdown(wait=False, cancel_futures=True)

    def _learned(self) -> None:
        with suppress(RkrError, TimeoutError):  # it is taken over later
            self.engine.refresh().result(10)

    async def work(self, run: Callable[[], T]) -> T:
        """Do what waits for a disk, outside of the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, run)

    async def refresh(self) -> None:
        """Take over what has changed in the folder."""
        await asyncio.wait_for(asyncio.wrap_future(self.engine.refresh()), self.limits.timeout)

    def changing(self) -> None:
        """Raise Refused if tasks cannot be changed."""
        if not self.access.changes:
            raise Refused(403, "changes are off: start the server with --allow-changes")

    # -- predicting ---------------------------------------------------------------------------------------

    async def predict(
        self, pictures: Sequence[tuple[str, bytes]], asked: schema.PredictRequest, gone: Callable[[], Awaitable[object]]
    ) -> list[Prediction]:
        """The answers for pictures, unless the client goes away first."""
        task = self.engine.check(asked.task)
        most = min(self.limits.pictures, self.limits.queue)
        if len(pictures) > most:
            raise Refused(413, f"the request has {len(pictures)} pictures, {most} is the limit")
        self.engine.accept(len(pictures))
        watcher = asyncio.ensure_future(gone())
        answers = asyncio.ensure_future(self._answers(pictures, task, asked))
        try:
            await asyncio.wait((answers, watcher), timeout=self.limits.timeout, return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                return answers.result()
            if watcher.done():
                raise Refused(499, "the client has gone")
            raise Busy(f"there was no answer within {self.limits.timeout:g} seconds: try again later", 5)
        finally:
            watcher.cancel()
            answers.cancel()
            await asyncio.gather(answers, watcher, return_exceptions=True)
            self.engine.release(len(pictures))

    async def _answers(
        self, pictures: Sequence[tuple[str, bytes]], task: str, asked: schema.PredictRequest
    ) -> list[Prediction]:
        loop = asyncio.get_running_loop()

        def decode(name: str, data: bytes) -> Tensor:
            return decoded(data, self.zoo.preparation, self.limits.pixels, name)

        decoding = [loop.run_in_executor(self._decoders, decode, name, data) for name, data in pictures]
        waiting: list[asyncio.Future[Prediction]] = []
        try:
            for future in decoding:
                square = await future
                asking = self.engine.submit(square, task, asked.top, asked.false_alarms)
                waiting.append(asyncio.wrap_future(asking))
            return [await future for future in waiting]
        finally:
            left: list[asyncio.Future[Any]] = [*decoding, *waiting]
            for one in left:
                one.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    # -- changing -----------------------------------------------------------------------------------------

    def add(self, name: str, file: Path, replace: bool) -> None:
        """Check a task file, and add it to the folder."""
        model, folder = self.zoo.model, self.zoo.folder
        try:
            check_new_name(name)
            stated = read_task_about(file)
            check_base(stated, folder, "the file")
            if (stated.classes or 0) > self.limits.classes:
                raise FileError(f"the task has {stated.classes:,} classes, {self.limits.classes:,} is the limit")
            load_task(model, file, name, stated.base, model.tasks.cast)
        except RkrError as error:
            raise Refused(422, without(without(str(error), file, "the file"), folder, "the server")) from error
        try:
            add_task_file(folder, file, name, replace)
        except RkrError as error:  # of the folder
            raise Refused(409, without(str(error), folder, "the server")) from error

    def drop(self, name: str) -> None:
        """Drop a task from the folder."""
        try:
            drop_task(self.zoo.folder, name)
        except UsageError:
            raise NotFound(f"there is no task {name!r}") from None
        except FileError as error:
            raise Refused(409, without(str(error), self.zoo.folder, "the server")) from error


def check_new_name(name: str) -> None:
    """Refuse a name that a task cannot have."""
    check_task_name(name)
    if len(name) > LONGEST_NAME:
        raise UsageError(f"a task's name may have {LONGEST_NAME} characters, not {len(name)}")
    if name.endswith("/learn"):
        raise UsageError(f"a task's name must not end with '/learn', as its address does while it is learned: {name!r}")
