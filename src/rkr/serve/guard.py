"""What stands before the application: who may ask what, how large a request may be, headers, and the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rkr.serve.limits import Busy, Limits, Refused

OPEN = ("/", "/healthz", "/readyz", "/docs", "/openapi.json")  # without a token: they tell nothing about the tasks
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
Scope = dict[str, Any]


@dataclass(frozen=True)
class Access:
    """Who may do what.

    Attributes:
        token: That requests must bring along; None for none.
        changes: Whether tasks can be added, dropped and learned.
        hosts: Names by which the server may be addressed, so that a web page cannot reach it under a name of its own;
            None for any.
    """

    token: str | None = None
    changes: bool = False
    hosts: tuple[str, ...] | None = LOOPBACK


class Guard:
    """An ASGI application around another one.

    Args:
        app: The other one.
        access: Who may do what.
        limits: Bounds.
        count: Called with route, status and seconds of every request.
        tell: Gets a line of the log for every request.
    """

    def __init__(
        self,
        app: Any,
        access: Access,
        limits: Limits,
        count: Callable[[str, int, float], None],
        tell: Callable[..., None],
    ) -> None:
        self.app, self.access, self.limits = app, access, limits
        self._count, self._tell = count, tell
        self._receiving = self._active = 0

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status, begun = 500, False
        body = _Body(self, scope, receive)

        async def headed(message: dict[str, Any]) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                if status >= 400:
                    await body.discard()
                there = {name.lower() for name, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in there]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        self._active += 1
        try:
            self._check(scope, body)
            await self.app(scope, body.receive, headed)
        except Refused as error:
            if not begun:
                await refusal(error)(scope, receive, headed)
        except asyncio.CancelledError:
            status = 499 if not begun else status
            raise
        finally:
            self._active -= 1
            self._receiving -= body.counted
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", None) or "other"
            self._count(route.replace(":path", ""), status, seconds)
            more = scope.get("state", {}).get("log", {})
            ms = round(1000 * seconds, 1)
            self._tell("request", method=scope["method"], path=scope["path"], status=status, ms=ms, **more)

    def _check(self, scope: Scope, body: _Body) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.access.hosts is not None and _name(host) not in self.access.hosts:
            raise Refused(421, f"this server is not called {_name(host)[:100]!r}: say so with --host if it is")
        if origin is not None and _place(origin) != host.lower():
            raise Refused(403, "requests from other web pages are not answered")
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"] not in OPEN:
            raise Refused(403, "requests from other web pages are not answered")
        if self.access.token is not None and scope["path"] not in OPEN:
            kind, _, given = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode("latin-1"), self.access.token.encode())
            if kind.lower() != "bearer" or not same:
                raise Refused(401, "give the server's token: Authorization: Bearer TOKEN")
        if self._active > 4 * self.limits.queue:
            raise Busy(f"{self._active} requests are being answered already: try again later", 1)
        stated = headers.get("content-length")
        if stated is not None:
            digits = stated if stated.isascii() and stated.isdigit() else "0"
            body.announce(int(digits[-18:]) if len(digits) <= 18 else 10**18)

    def take(self, nbytes: int) -> None:
        """Count bytes of bodies that are being received."""
        if self._receiving + nbytes > self.limits.uploads:
            raise Busy("too much is being uploaded already: try again later", 5)
        self._receiving += nbytes


class _Body:
    """The body of a request, as it arrives: neither too large nor too slow."""

    def __init__(self, guard: Guard, scope: Scope, receive: Any) -> None:
        self._guard, self._receive = guard, receive
        limits = guard.limits
        path, method = scope["path"], scope["method"]
        self._limit = limits.body
        if path.startswith("/v1/tasks/"):
            self._limit = limits.upload if method == "POST" else limits.task
        self._end = time.monotonic() + limits.upload_timeout * max(1.0, self._limit / limits.body)
        self._got = self.counted = 0
        self._complete = False
        self._asks = any(name == b"expect" for name, _ in scope["headers"])  # before it sends the body

    def announce(self, nbytes: int) -> None:
        """The size that the request states."""
        self._check(nbytes)
        self._guard.take(nbytes)
        self.counted = nbytes

    def _check(self, nbytes: int) -> None:
        if nbytes > self._limit:
            raise Refused(413, f"the request is larger than {self._limit:,} bytes")

    async def receive(self) -> dict[str, Any]:
        """The next message."""
        if self._complete:
            return await self._receive()
        message = await self._next()
        if message["type"] == "http.request":
            self._got += len(message.get("body", b""))
            self._check(self._got)
            if self._got > self.counted:
                self._guard.take(self._got - self.counted)
                self.counted = self._got
        return message

    async def discard(self) -> None:
        """Take what of a refused request still comes, up to twice what is allowed: else its sender sees no answer."""
        left = 2 * self._limit - self._got
        with suppress(Refused):
            while not (self._complete or self._asks) and left > 0:
                left -= len((await self._next()).get("body", b""))

    async def _next(self) -> dict[str, Any]:
        try:
            message: dict[str, Any] = await asyncio.wait_for(self._receive(), max(0.0, self._end - time.monotonic()))
        except asyncio.TimeoutError:
            raise Refused(408, "the request did not arrive in time") from None
        self._complete = not message.get("more_body", False)
        return message


def _place(origin: str) -> str | None:
    """Host and port of an origin; None if it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _name(host: str) -> str:
    """A host without its port."""
    host = host.lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def refusal(error: Refused) -> Any:
    """The answer that tells an error."""
    headers = {"retry-after": str(error.after)} if error.after is not None else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return answer(error.status, {"error": sentence(str(error))}, headers)


def answer(status: int, content: Any, headers: dict[str, str] | None = None) -> Any:
    """A JSON answer that ends its line. Text that is no proper Unicode is escaped."""
    from starlette.responses import Response

    body = f"{json.dumps(content, ensure_ascii=True, allow_nan=False)}\n".encode()
    return Response(body, status, headers, media_type="application/json")


def sentence(message: str) -> str:
    """One line, which begins with a capital letter and ends with a full stop."""
    text = " ".join(message.split()) or "Something is wrong"
    text = text if text[:2].isupper() else text[0].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
