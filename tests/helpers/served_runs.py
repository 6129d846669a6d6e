"""A server in a process of its own, and images to send to it."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from PIL import Image
from started_runs import ROOT


@dataclass(frozen=True, eq=False)
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    address: str
    client: httpx.Client

    def memory(self) -> float:
        """Resident megabytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def post(self, path: str, content: bytes | None = None, **options: object) -> httpx.Response:
        """Send an image, by default a noisy one."""
        files = {"file": ("photo.png", noise() if content is None else content)}
        return self.client.post(path, files=files, **options)  # type: ignore[arg-type]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and the rest of the output after a signal."""
        self.process.send_signal(number)
        text = self.process.communicate(timeout=60)[0]
        return self.process.returncode, text


@contextmanager
def serving(*words: str) -> Iterator[Server]:
    """A server for some checkpoints, on any free port of the loopback address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vision", "serve", "port=0", "device=cpu", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        address = _address(process)
        with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
            yield Server(process, address, client)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    text, end = "", time.monotonic() + 180
    while time.monotonic() < end and (line := process.stdout.readline()):
        text += line
        if found := re.search(r"Serving on (http://[^/#]+)", line):
            return found[1]
    raise AssertionError(f"the server did not start:\n{text}")


def noise(height: int = 30, width: int = 40, seed: int = 0, kind: str = "PNG") -> bytes:
    """A file with an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()
