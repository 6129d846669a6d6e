"""`vision serve`: models behind an HTTP server on this machine. uvicorn's door."""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from vision.config import ConfigError
from vision.inference.predict import Loaded
from vision.inference.serve.configs import ServeConfig

NEEDED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "python_multipart": "python-multipart"}
"""Modules, and the packages that they come from."""
GRACE = 10
"""Seconds for running requests after a signal to stop."""


def check_packages() -> None:
    """Raise a ConfigError if a package of the extra is missing; before any model is loaded."""
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"vision serve needs {', '.join(missing)}: pip install 'vit-swin[serve]', or in a "
            "checkout: pip install -c constraints.txt -e '.[serve]'."
        )


def open_socket(host: str, port: int) -> socket.socket:
    """A listening address, or a ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sets TCP_NODELAY only where the protocol is named; without it, the second packet
        # of an answer waits 40 ms for the client's acknowledgement of the first.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"host={host} port={port} cannot be listened on: {error.strerror or error}. Choose "
            "another port, or port=0 for any free one."
        ) from error
    return listening


def serve(loaded: Sequence[Loaded], listening: socket.socket, config: ServeConfig) -> int:
    """Serve models until SIGINT or SIGTERM."""
    import uvicorn

    from vision.inference.serve.http_api import create_app
    from vision.inference.serve.served_model import served_models

    models = served_models(loaded, config.temperature)
    for model in models:
        value, origin = model.temperature.value, model.temperature.origin
        print(f"{model.name}: temperature {value:.4g} ({origin})")
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(models, config),
            http=_impatient(config.timeout),
            ws="none",
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            limit_concurrency=config.connections,
            timeout_keep_alive=min(5, int(config.timeout) or 1),
            timeout_graceful_shutdown=GRACE,
        )
    )
    name = f"[{config.host}]" if ":" in config.host else config.host
    address = f"http://{name}:{listening.getsockname()[1]}/"
    # A browser never sends what follows #, so that the token is in no log.
    shown = address if config.token is None else f"{address}#token=TOKEN"
    print(f"Serving on {shown} (Ctrl-C ends it)", flush=True)
    with _quiet_signals():
        server.run(sockets=[listening])
    print("Stopped.", flush=True)
    return 0


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """Signals end the server and nothing else: uvicorn raises them again after it has ended."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda *_: None) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def _impatient(seconds: float) -> Any:
    """uvicorn's protocol with a limit on the time until a request has its headers.

    uvicorn waits for them for ever, and a client that sends none would keep its connection.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class ImpatientProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            asyncio.get_running_loop().call_later(seconds, self._check)

        def _check(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    return ImpatientProtocol
