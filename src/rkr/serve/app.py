"""The application: an engine, what it learns, and the routes by which they are asked."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from torch import Tensor

from rkr.core.files import load_task, read_task_about
from rkr.core.zoo import add_task_file, drop_task
from rkr.errors import FileError, RkrError, UsageError
from rkr.pictures.predict import Prediction
from rkr.pictures.zoo import Zoo, check_base, check_task_name
from rkr.serve import schema
from rkr.serve.decode import decoded, from_base64, remove
from rkr.serve.engine import Engine
from rkr.serve.guard import Access, Guard, answer, refusal
from rkr.serve.learning import Job, Learning
from rkr.serve.limits import Busy, Limits, NotFound, Refused
from rkr.serve.metrics import Metrics
from rkr.serve.pages import documentation, page

T = TypeVar("T")
LONGEST_NAME = 200  # characters of a task's name
_READ: dict[int | str, dict[str, Any]] = {
    401: {"model": schema.Error, "description": "The token is missing or wrong."},
    403: {"model": schema.Error, "description": "The request comes from another web page, or changes are off."},
    404: {"model": schema.Error, "description": "There is no such task."},
    421: {"model": schema.Error, "description": "The server is not called that."},
    503: {"model": schema.Error, "description": "Too much is waiting; the header Retry-After says when to try again."},
}
_SENT: dict[int | str, dict[str, Any]] = {
    **_READ,
    400: {"model": schema.Error, "description": "The body cannot be read."},
    408: {"model": schema.Error, "description": "The body did not arrive in time."},
    409: {"model": schema.Error, "description": "It does not fit the tasks that are there."},
    413: {"model": schema.Error, "description": "The body is too large."},
    415: {"model": schema.Error, "description": "The body is of another kind."},
    422: {"model": schema.Error, "description": "Something in the request is wrong."},
}
_CHANGED: dict[int | str, dict[str, Any]] = {k: v for k, v in _SENT.items() if k not in (400, 408, 413, 415)}


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
        if len(pictures) > self.limits.pictures:
            raise Refused(413, f"the request has {len(pictures)} pictures, {self.limits.pictures} is the limit")
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
            add_task_file(folder, file, name, replace)
        except UsageError as error:
            status = 409 if "already" in str(error) else 422
            raise Refused(status, self._without(error, file)) from error
        except FileError as error:
            raise Refused(422, self._without(error, file)) from error

    def drop(self, name: str) -> None:
        """Drop a task from the folder."""
        try:
            drop_task(self.zoo.folder, name)
        except UsageError:
            raise NotFound(f"there is no task {name!r}") from None

    def _without(self, error: RkrError, file: Path) -> str:
        """A message without paths of this machine."""
        return str(error).replace(str(file), "the file").replace(str(self.zoo.folder), "the server")


def check_new_name(name: str) -> None:
    """Refuse a name that a task cannot have."""
    check_task_name(name)
    if len(name) > LONGEST_NAME:
        raise UsageError(f"a task's name may have {LONGEST_NAME} characters, not {len(name)}")


def build_app(server: Server) -> Any:
    """The ASGI application of a server."""
    from rkr import __version__

    app = FastAPI(
        title="rkr",
        version=__version__,
        summary="One base, many tasks: pictures are classified by the task that a request names.",
        docs_url=None,
        redoc_url=None,
        lifespan=server.running,
        separate_input_output_schemas=False,
    )
    _handle_errors(app)
    _answering(app, server)
    _changing(app, server)
    _about(app, server)
    app.add_middleware(
        Guard, access=server.access, limits=server.limits, count=server.metrics.request, tell=server.tell
    )
    return app


def _handle_errors(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return refusal(error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return refusal(Refused(422, _said(error.errors())))

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return refusal(Refused(error.status_code, str(error.detail)))

    async def unexpected(request: Request, error: Exception) -> Response:
        return refusal(Refused(500, "this is a fault of the server; its log says more"))

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, known)
    app.add_exception_handler(Exception, unexpected)


def _said(errors: Sequence[Any]) -> str:
    """The first thing that is wrong with a request."""
    first = errors[0]
    place = ".".join(str(part) for part in first.get("loc", ()) if part not in ("body", "query", "path"))
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def _answering(app: FastAPI, server: Server) -> None:
    @app.post(
        "/v1/predict",
        summary="Classify pictures",
        response_model=schema.Predictions,
        responses=_SENT,
        openapi_extra={"requestBody": schema.PREDICT_BODY},
        tags=["answers"],
    )
    async def predict(request: Request) -> Response:
        """One or more pictures, as files of a form or as base64 in JSON, for a task or for "auto"."""
        pictures, asked = await _asked(request, server.limits)
        request.state.log = {"task": asked.task, "pictures": len(pictures)}
        found = await server.predict(pictures, asked, lambda: _gone(request))
        predictions = []
        for (name, _), one in zip(pictures, found, strict=True):
            values = one.to_json()
            predictions.append({"picture": name, **{k: v for k, v in values.items() if k != "path"}})
        return answer(200, {"predictions": predictions})

    @app.get("/v1/tasks", summary="All tasks", response_model=schema.TaskList, responses=_READ, tags=["tasks"])
    async def tasks() -> Response:
        """Names, classes, accuracy, sizes and fingerprints. A task whose file is damaged says so."""
        entries = [entry.to_json() for entry in server.engine.tasks.values()]
        about: dict[str, Any] = {
            "network": server.zoo.model.about.get("network", {}).get("backbone", ""),
            "tasks": entries,
            "changes": server.access.changes,
        }
        if server.engine.trouble:
            about["trouble"] = server.engine.trouble
        return answer(200, about)


def _changing(app: FastAPI, server: Server) -> None:
    job_url = "/v1/tasks/{name:path}/learn"

    @app.get("/v1/learning", summary="What is learned", response_model=schema.Jobs, responses=_READ, tags=["learning"])
    async def jobs() -> Response:
        """The tasks that are being learned or were learned by request, the last one first."""
        found = await server.work(server.learning.jobs)
        return answer(200, {"jobs": [job.to_json() for job in found]})

    @app.post(
        job_url,
        summary="Learn a task",
        status_code=202,
        response_model=schema.LearningJob,
        responses=_SENT,
        openapi_extra={"requestBody": schema.ZIP_BODY},
        tags=["learning"],
    )
    async def learn(name: str, request: Request) -> Response:
        """From a zip file with a folder for each class. It is learned in the background and served when it is done."""
        server.changing()
        _named(name)
        if name in server.engine.tasks:
            raise Refused(409, f"there is a task {name!r} already: choose another name, or drop it first")
        server.learning.check(name)
        work = Path(await server.work(lambda: tempfile.mkdtemp(prefix="rkr-")))
        try:
            await _received(request, work / "upload.zip")
            job = await server.work(lambda: server.learning.add(name, work / "upload.zip", work))
        except BaseException:
            remove(work)
            raise
        return _job(job, 202)

    @app.get(
        job_url, summary="How learning goes", response_model=schema.LearningJob, responses=_READ, tags=["learning"]
    )
    async def learning(name: str) -> Response:
        """How far a task is."""
        return _job(await server.work(lambda: server.learning.job(name)))

    @app.delete(
        job_url, summary="Stop learning", response_model=schema.LearningJob, responses=_CHANGED, tags=["learning"]
    )
    async def cancel(name: str) -> Response:
        """Stop learning a task."""
        server.changing()
        return _job(await server.work(lambda: server.learning.cancel(name)))

    task_url = "/v1/tasks/{name:path}"

    @app.get(task_url, summary="One task", response_model=schema.Task, responses=_READ, tags=["tasks"])
    async def task(name: str) -> Response:
        """What is known of a task."""
        return _task(server, name)

    @app.put(
        task_url,
        summary="Add a task",
        status_code=201,
        response_model=schema.Task,
        responses=_SENT,
        openapi_extra={"requestBody": schema.TASK_BODY},
        tags=["tasks"],
    )
    async def put(
        name: str,
        request: Request,
        replace: Annotated[bool, Query(description="Whether a task of that name is replaced.")] = False,
    ) -> Response:
        """From a task file, as model folders and `save_task` have it. It is served when the answer comes."""
        server.changing()
        _named(name)
        work = Path(await server.work(lambda: tempfile.mkdtemp(prefix="rkr-")))
        try:
            file = work / "task.safetensors"
            await _received(request, file)
            await server.work(lambda: server.add(name, file, replace))
        finally:
            await server.work(lambda: remove(work))
        await server.refresh()
        return _task(server, name, 201)

    @app.delete(
        task_url, summary="Drop a task", status_code=204, response_class=Response, responses=_CHANGED, tags=["tasks"]
    )
    async def drop(name: str) -> Response:
        """Remove a task, with its file. Requests for it get 404 from then on."""
        server.changing()
        await server.work(lambda: server.drop(name))
        await server.refresh()
        return Response(status_code=204)


def _about(app: FastAPI, server: Server) -> None:
    @app.get("/healthz", summary="Whether it is alive", response_model=schema.Health, tags=["operation"])
    async def healthz() -> Response:
        """Always, as long as the process answers."""
        return answer(200, {"status": "ok"})

    @app.get(
        "/readyz",
        summary="Whether it answers",
        response_model=schema.Health,
        responses={503: {"model": schema.Error, "description": "Not yet, or not any more."}},
        tags=["operation"],
    )
    async def readyz() -> Response:
        """Once the base is loaded and measured, until the server shuts down."""
        if not server.engine.ready:
            raise Busy("the server is starting or shutting down", 1)
        return answer(200, {"status": "ok"})

    @app.get(
        "/metrics",
        summary="For Prometheus",
        response_class=PlainTextResponse,
        responses={k: _READ[k] for k in (401, 421)},
        tags=["operation"],
    )
    async def metrics() -> Response:
        """Requests, latency, batches and memory in the text format of Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/live", summary="The last seconds", response_model=schema.Live, responses=_READ, tags=["operation"])
    async def live() -> Response:
        """Requests per second, latency, batch sizes."""
        return answer(200, server.metrics.live())

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        text, policy = page()
        return HTMLResponse(text, headers={"content-security-policy": policy})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        text, policy = documentation(app.openapi())
        return HTMLResponse(text, headers={"content-security-policy": policy})


def _named(name: str) -> None:
    try:
        check_new_name(name)
    except UsageError as error:
        raise Refused(422, str(error)) from error


def _task(server: Server, name: str, status: int = 200) -> Response:
    entry = server.engine.tasks.get(name)
    if entry is None:
        raise NotFound(f"there is no task {name!r}")
    return answer(status, entry.to_json())


def _job(job: Job, status: int = 200) -> Response:
    return answer(status, job.to_json())


async def _gone(request: Request) -> None:
    """Return when the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _received(request: Request, path: Path) -> None:
    """Write the body of a request to a file."""
    with open(path, "xb") as file:
        async for chunk in request.stream():
            file.write(chunk)


async def _asked(request: Request, limits: Limits) -> tuple[list[tuple[str, bytes]], schema.PredictRequest]:
    """The pictures of a request, each with a name, and what is asked of them."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "application/json":
            asked = schema.PredictRequest.model_validate_json(await request.body())
            names = [f"picture {number}" for number in range(1, len(asked.pictures) + 1)]
            return [(n, from_base64(text, n)) for n, text in zip(names, asked.pictures, strict=True)], asked
        if kind == "multipart/form-data":
            return await _form(request, limits)
    except ValidationError as error:
        raise Refused(422, _said(error.errors())) from error
    except MultiPartException as error:
        raise Refused(400, f"the form cannot be read: {error.message}") from error
    raise Refused(415, "send pictures as multipart/form-data, or as application/json with base64")


async def _form(request: Request, limits: Limits) -> tuple[list[tuple[str, bytes]], schema.PredictRequest]:
    async with request.form(max_files=limits.pictures, max_fields=8) as form:
        pictures: list[tuple[str, bytes]] = []
        values: dict[str, Any] = {}
        for key, value in form.multi_items():
            if isinstance(value, str):
                if key not in ("task", "top", "false_alarms"):
                    raise Refused(422, f"the form has no field {key[:80]!r}: it has pictures (files), task and top")
                values[key] = value
            elif key == "pictures":
                pictures.append((value.filename or f"picture {len(pictures) + 1}", await value.read()))
            else:
                raise Refused(422, f"the form has a file {key[:80]!r}: pictures are called 'pictures'")
    if not pictures:
        raise Refused(422, "the form has no pictures: send files as 'pictures'")
    stated = {"pictures": ["-"], **values}
    return pictures, schema.PredictRequest.model_validate(stated, strict=False)
