"""Concurrent clients of `vision serve`, of a plain FastAPI loop, and of Gradio's Interface.

    python benchmarks/serve.py                            # ViT-Ti/16 at 224, 1, 8 and 32 clients
    python benchmarks/serve.py --clients 64 --requests 200

The same checkpoint (random weights) and the same image for everyone, each server in a process of
its own on the loopback address, one after another. The plain loop calls the model once per request,
as in FastAPI's tutorial. Gradio takes part where it is installed. Images/s and the 50th and 95th
percentile of the time of a request, as a client sees it, and the CPU time of the server for an
image, which says most on a busy machine. Linux only.
"""

import argparse
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

OURS, PLAIN, GRADIO = "vision serve", "plain FastAPI", "Gradio Interface"
MODEL = "deit_tiny_patch16_224"


def write_weights(folder: Path) -> Path:
    """A checkpoint with random weights."""
    import timm
    from safetensors.torch import save_file

    path = folder / "weights.safetensors"
    save_file(timm.create_model(MODEL, pretrained=False).state_dict(), path)
    return path


def run_plain(weights: str, port: int) -> None:
    """FastAPI without batches: every request runs the model by itself."""
    import uvicorn
    from fastapi import FastAPI, UploadFile

    import vision

    loaded, app = vision.load(weights, heads=3), FastAPI()

    @app.post("/predict")
    def predict(file: UploadFile) -> dict[str, Any]:
        found = loaded.predict(file.file.read())
        return {"label": found.label, "probability": found.probability}

    @app.get("/health")
    def health() -> str:
        return "ok"

    uvicorn.run(app, port=port, log_level="warning")


def run_gradio(weights: str, port: int) -> None:
    """Gradio's Interface with the same model."""
    import gradio

    import vision

    loaded = vision.load(weights, heads=3)

    def predict(image: Image.Image) -> dict[str, float]:
        return dict(loaded.predict(image).top)

    face = gradio.Interface(predict, gradio.Image(type="pil"), gradio.Label(), api_name="predict")
    face.launch(server_port=port, share=False, quiet=True)


def ask_form(client: httpx.Client, content: bytes) -> None:
    """One request of ours and of the plain loop."""
    client.post("/predict", files={"file": ("image.jpg", content)}).raise_for_status()


def ask_gradio(client: httpx.Client, content: bytes) -> None:
    """Upload, call, and wait for the result, as Gradio's own client does."""
    uploaded = client.post("/gradio_api/upload", files={"files": ("image.jpg", content)}).json()
    data = [{"path": uploaded[0], "meta": {"_type": "gradio.FileData"}}]
    call = client.post("/gradio_api/call/predict", json={"data": data}).json()
    answer = client.get(f"/gradio_api/call/predict/{call['event_id']}")
    assert "event: complete" in answer.text, answer.text


@contextmanager
def started(contender: str, weights: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of a server that answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--run", contender, str(weights), str(port)]
    if contender == OURS:
        words = [f"checkpoint={weights}", "model.heads=3", f"port={port}", "device=cpu"]
        command = [sys.executable, "-m", "vision", "serve", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ)
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 180
    path = "/" if contender == GRADIO else "/health"
    try:
        while True:
            try:
                if httpx.get(address + path, trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                if time.monotonic() > end or process.poll() is not None:
                    raise
                time.sleep(0.2)
        yield address, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def cpu_seconds(process: int) -> float:
    """User and system time of a process until now."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    server: tuple[str, int],
    ask: Callable[[httpx.Client, bytes], None],
    clients: int,
    requests: int,
) -> dict[str, float]:
    """Images per second, percentiles of the time of a request, and CPU time of the server."""
    address, process = server
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG")
    content = buffer.getvalue()
    limits = httpx.Limits(max_connections=clients)
    with httpx.Client(base_url=address, timeout=300, trust_env=False, limits=limits) as client:

        def one(_: int) -> float:
            begin = time.perf_counter()
            ask(client, content)
            return 1000 * (time.perf_counter() - begin)

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(one, range(min(clients, 8))))  # warm
            begin, spent = time.perf_counter(), cpu_seconds(process)
            times = list(pool.map(one, range(requests)))
            seconds, spent = time.perf_counter() - begin, cpu_seconds(process) - spent
    parts = statistics.quantiles(times, n=20)
    return {
        "images/s": requests / seconds,
        "p50 ms": parts[9],
        "p95 ms": parts[18],
        "CPU ms": 1000 * spent / requests,
    }


def main() -> None:
    """Measure everyone and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=100, help="for each number of clients")
    parser.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--run", nargs=3, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        contender, weights, port = given.run
        {PLAIN: run_plain, GRADIO: run_gradio}[contender](weights, int(port))
        return
    asks = {OURS: ask_form, PLAIN: ask_form}
    if find_spec("gradio") is not None:
        asks[GRADIO] = ask_gradio
    rows = []
    print(f"{'server':<18}{'clients':>8}{'images/s':>10}{'p50 ms':>9}{'p95 ms':>9}{'CPU ms':>9}")
    with tempfile.TemporaryDirectory() as folder:
        weights = write_weights(Path(folder))
        for name, ask in asks.items():
            with started(name, weights) as server:
                for clients in given.clients:
                    found = measure(server, ask, clients, given.requests)
                    rows.append({"server": name, "clients": clients} | found)
                    speed, *times = found.values()
                    shown = "".join(f"{each:>9.1f}" for each in times)
                    print(f"{name:<18}{clients:>8}{speed:>10.1f}{shown}", flush=True)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
