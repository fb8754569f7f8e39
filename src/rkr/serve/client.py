"""A client for `rkr serve`. It needs nothing but Python's standard library."""

from __future__ import annotations

import http.client
import io
import json
import os
import secrets
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from rkr.errors import FileError, RkrError, UsageError


class ServerError(RkrError):
    """What the server answered instead of what was asked for.

    Attributes:
        status: Of HTTP; 0 if there was no answer.
        retry_after: Seconds until it is worth trying again, if the server says so.
    """

    def __init__(self, message: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class _NoRedirects(HTTPRedirectHandler):
    """The token goes to no other server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """Asks a server.

    Args:
        url: Where it is, such as "http://127.0.0.1:8000".
        token: Its token, if it has one.
        timeout: Seconds to wait for an answer.
        retries: How often a request is repeated that the server was too busy for, or, if it changes nothing, that did
            not reach it or that it failed at, as those of a cluster do when one of them is killed.

    Raises:
        UsageError: The address is not one of HTTP. Every request raises `ServerError`, an `RkrError`, with the server's
            sentence, if it is refused or gets no answer.

    Example:
        >>> import rkr
        >>> client = rkr.Client("http://127.0.0.1:8000")
        >>> client  # then client.predict("a.jpg", task="birds"), if `rkr serve` runs there
        Client('http://127.0.0.1:8000')
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0, retries: int = 3) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"the server's address must begin with http:// or https://, not {url!r}")
        self.url, self.token, self.timeout, self.retries = url.rstrip("/"), token, timeout, retries
        self._opener = build_opener(_NoRedirects, ProxyHandler())

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def predict(
        self, pictures: Any, task: str | None = None, top: int = 1, false_alarms: float | None = None
    ) -> list[dict[str, Any]]:
        """Classify pictures: files, the content of files, or images of Pillow.

        Args:
            pictures: One or more.
            task: A task's name, or "auto". Not needed if there is one only.
            top: How many classes to name.
            false_alarms: With "auto", the share of the tasks' own pictures that may be called none of the tasks.

        Returns:
            For each picture a dictionary with `picture`, `task` and `answers`, a list of `class` and `probability`.
        """
        many = not isinstance(pictures, str | bytes | os.PathLike) and isinstance(pictures, Iterable)
        files = [_file(one, n) for n, one in enumerate(list(pictures) if many else [pictures], 1)]
        values = {"task": task, "top": top, "false_alarms": false_alarms}
        body, kind = _form(files, {k: str(v) for k, v in values.items() if v is not None})
        found: list[dict[str, Any]] = self._ask("POST", "/v1/predict", body, kind)["predictions"]
        return found

    def tasks(self) -> list[dict[str, Any]]:
        """List all tasks.

        Returns:
            For each a dictionary with `name`, `classes`, `accuracy`, `bytes` and `fingerprint`.
        """
        found: list[dict[str, Any]] = self._ask("GET", "/v1/tasks")["tasks"]
        return found

    def task(self, name: str) -> dict[str, Any]:
        """Describe one task.

        Args:
            name: The task's name.

        Returns:
            The dictionary that `tasks` has for it.
        """
        return self._ask("GET", _place(name))

    def add(self, name: str, path: str | os.PathLike[str], replace: bool = False) -> dict[str, Any]:
        """Add a task from its file. It is served when this returns.

        Args:
            name: The name to serve it under.
            path: The file, as `rkr push` and `RectifiedModel.save_task` write it.
            replace: Whether it may take the place of a task of this name.

        Returns:
            The dictionary that `tasks` has for it.
        """
        place = f"{_place(name)}?replace=true" if replace else _place(name)
        return self._ask("PUT", place, _content(path), "application/octet-stream")

    def drop(self, name: str) -> None:
        """Drop a task.

        Args:
            name: The task's name.
        """
        self._ask("DELETE", _place(name))

    def learn(self, name: str, source: str | os.PathLike[str], wait: bool = True) -> dict[str, Any]:
        """Learn a task from a folder with a folder for each class, or a zip file of one.

        Args:
            name: The task's name.
            source: The folder or zip file.
            wait: Whether to wait until it is learned. If not, `learning` tells how far it is.

        Returns:
            What `learning` returns.

        Raises:
            ServerError: The task was not learned.
        """
        data = _zipped(Path(source)) if os.path.isdir(source) else _content(source)
        job = self._ask("POST", f"{_place(name)}/learn", data, "application/zip")
        while wait and job["state"] in ("waiting", "learning"):
            time.sleep(0.5)
            job = self.learning(name)
        if wait and job["state"] != "learned":
            raise ServerError(f"the task {name!r} was not learned: {job['error'] or job['state']}")
        return job

    def learning(self, name: str) -> dict[str, Any]:
        """Tell how far learning a task is.

        Args:
            name: The task's name.

        Returns:
            A dictionary with `state`, `done`, `accuracy` and `error`.
        """
        return self._ask("GET", f"{_place(name)}/learn")

    def stop_learning(self, name: str) -> dict[str, Any]:
        """Stop learning a task.

        Args:
            name: The task's name.

        Returns:
            What `learning` returns.
        """
        return self._ask("DELETE", f"{_place(name)}/learn")

    def ready(self) -> bool:
        """Tell whether the server answers.

        Returns:
            Whether it does.
        """
        try:
            self._once("GET", "/readyz", None, None)
        except ServerError:
            return False
        return True

    # -- asking -------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: bytes | None = None, kind: str | None = None) -> dict[str, Any]:
        """The answer; repeated while the server is too busy."""
        for attempt in range(self.retries + 1):
            try:
                return self._once(method, path, body, kind)
            except ServerError as error:
                changes_nothing = method == "GET" or path == "/v1/predict"
                again = error.status == 503 or (changes_nothing and error.status in (0, 500, 502, 504))
                if attempt == self.retries or not again:
                    raise
                time.sleep(min(error.retry_after or 0.2 * 2**attempt, self.timeout))
        raise AssertionError

    def _once(self, method: str, path: str, body: bytes | None, kind: str | None) -> dict[str, Any]:
        headers = {"content-type": kind} if kind else {}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        request = Request(self.url + path, body, headers, method=method)
        try:
            with self._opener.open(request, timeout=self.timeout) as reply:
                data = reply.read()
        except HTTPError as error:
            with error:
                raise ServerError(_said(error), error.code, _seconds(error.headers.get("retry-after"))) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise ServerError(f"{self.url} does not answer: {why}") from None
        try:
            found: dict[str, Any] = json.loads(data) if data else {}
        except ValueError:
            raise ServerError(f"{self.url} does not answer in JSON: is it rkr serve?") from None
        return found


def _place(name: str) -> str:
    if not name:
        raise UsageError("a task has a name")
    return f"/v1/tasks/{quote(name, safe='')}"


def _said(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"the server answered {error.code} {error.reason}"


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _content(path: Any) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error


def _file(one: Any, number: int) -> tuple[str, bytes]:
    if isinstance(one, bytes):
        return f"picture {number}", one
    if isinstance(one, str | os.PathLike):
        return Path(one).name, _content(one)
    if hasattr(one, "save"):  # an image of Pillow
        data = io.BytesIO()
        one.convert("RGB" if one.mode not in ("L", "RGBA") else one.mode).save(data, "PNG")
        return str(getattr(one, "filename", "") or f"picture {number}"), data.getvalue()
    raise UsageError(f"a picture is a path, bytes or an image of Pillow, not {type(one).__name__}")


def _form(files: Sequence[tuple[str, bytes]], values: Mapping[str, str]) -> tuple[bytes, str]:
    """multipart/form-data."""
    boundary = secrets.token_hex(16)
    parts = []
    for key, value in values.items():
        parts += [f'--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode()]
    for name, data in files:
        safe = name.replace("\\", "_").replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="pictures"; filename="{safe}"\r\n\r\n'
        parts += [head.encode(), data, b"\r\n"]
    return b"".join([*parts, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"


def _zipped(folder: Path) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
                file.write(path, path.relative_to(folder).as_posix())
    return data.getvalue()
