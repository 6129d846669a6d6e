"""What a request must fulfil before anything reads it: host, origin, token, size and time.

- A page of another site can make a browser send requests to this machine, also under a name of its
  own (DNS rebinding). A server on a loopback address therefore answers only to names of this
  machine, and never to a request whose Origin is another one.
- A body is read here, up to a limit and within a time, so that a slow client occupies nothing but
  its connection.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from vision.inference.serve.configs import ServeConfig, is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/health")
"""Answered without a token: the page, which has no data of its own, and the sign of life."""
DRAIN = 2
"""Seconds for the rest of a body that is refused."""
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class RefusalError(Exception):
    """An answer instead of the one that was asked for."""

    def __init__(self, status: int, detail: str, unread: bool = True) -> None:
        super().__init__(detail)
        self.status, self.detail, self.unread = status, detail, unread


@dataclass(frozen=True, eq=False)
class Guard:
    """The outermost layer of the application."""

    app: App
    config: ServeConfig

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its whole body, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        try:
            check_headers(scope, self.config)
            body = await self._body(scope, receive)
        except RefusalError as refusal:
            if refusal.unread:
                await _drain(receive, int(4e6 * self.config.max_megabytes))
            await _refuse(refusal, answer)
            return
        if body is None:  # the client is gone
            return
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(parts, None) or await receive()

        await self.app(scope, replay, answer)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        limit, seconds = int(self.config.max_megabytes * 1e6), self.config.timeout
        too_large = RefusalError(
            413, f"The body is larger than {self.config.max_megabytes:g} MB (max_megabytes)."
        )
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > limit:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    content += message.get("body", b"")
                    if len(content) > limit:
                        too_large.unread = message.get("more_body", False)
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(content)
        except TimeoutError:
            raise RefusalError(
                408,
                f"The request did not arrive within {seconds:g} seconds (timeout).",
                unread=False,
            ) from None


def check_headers(scope: Scope, config: ServeConfig) -> None:
    """Raise a RefusalError for a foreign host, a foreign origin, or a wrong token."""
    host = _header(scope, b"host")
    name = urlsplit(f"//{host}").hostname if _is_plain(host) else None
    if is_loopback(config.host) and (name is None or not is_loopback(name)):
        raise RefusalError(421, "This server answers to names of its own machine only (Host).")
    origin = _header(scope, b"origin")
    foreign = _header(scope, b"sec-fetch-site") in ("cross-site", "same-site")
    if origin:
        foreign = foreign or origin not in (f"http://{host}", f"https://{host}")
    if foreign and (scope["method"] != "GET" or origin):
        raise RefusalError(403, "Requests from pages of other sites are refused (Origin).")
    if config.token is not None and scope["path"] not in OPEN_PATHS:
        given = _header(scope, b"authorization").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), config.token.encode()):
            raise RefusalError(401, "This server needs a token: Authorization: Bearer TOKEN.")


def _header(scope: Scope, name: bytes) -> str:
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1").strip() if len(values) == 1 else ""


def _is_plain(host: str) -> bool:
    """Whether a Host header is a name or an address with a port, and nothing else."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.netloc == host and "@" not in host and (parts.port or 0) >= 0
    except ValueError:
        return False


async def _drain(receive: Receive, most: int) -> None:
    """Discard the rest of a body: a connection closed with unread data is reset, and the client
    would not see the answer.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def _refuse(refusal: RefusalError, send: Send) -> None:
    body = json.dumps({"detail": refusal.detail}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
