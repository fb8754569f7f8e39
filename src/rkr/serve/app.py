"""The application: the routes by which a server is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from rkr.errors import UsageError
from rkr.serve import schema
from rkr.serve.decode import from_base64, remove
from rkr.serve.guard import Guard, answer, refusal
from rkr.serve.learning import Job
from rkr.serve.limits import Busy, Limits, NotFound, Refused
from rkr.serve.pages import documentation, page
from rkr.serve.server import Server, check_new_name

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
        work = await server.work(server.learning.work)
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
        work = await server.work(server.learning.work)
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
    except HTTPException as error:  # of the form
        status = 413 if error.detail.startswith("Too many") else error.status_code
        raise Refused(status, f"the form cannot be read: {error.detail}") from error
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
