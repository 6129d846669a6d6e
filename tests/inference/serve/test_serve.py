"""The server as a process: answers, bad bodies, slow clients, many at once, and its end."""

import asyncio
import io
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_runs import Server, noise, serving
from untrained_runs import CLASSES, a_run

import vision
from vision.config import ConfigError
from vision.inference.serve import serve as module
from vision.inspection.capture.capture import capture

SWIN = ("model=swin_mini", "model.width=16", "model.depths=[2,2]", "model.heads=[1,2]")
LIMITS = ("max_megabytes=1", "max_pixels=1000000", "timeout=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [a_run(folder / "vit"), a_run(folder / "swin", *SWIN)]


@pytest.fixture(scope="module")
def server(runs: list[Path]) -> Iterator[Server]:
    with serving(f"checkpoint=[{runs[0]},{runs[1]}]", *LIMITS) as started:
        yield started


@pytest.mark.parametrize("number", [0, 1])
def test_answers_are_those_of_the_model(server: Server, runs: list[Path], number: int) -> None:
    loaded = vision.load(runs[number])
    name, image = runs[number].name, noise(50, 35, seed=number)
    expected = loaded.predict(image)
    found = server.post(f"/predict?model={name}", image).json()
    assert found["label"] == expected.label
    tops = {each["label"]: each["probability"] for each in found["top"]}
    assert tops == pytest.approx(dict(expected.top), abs=1e-5)
    features = server.post(f"/features?model={name}", image).json()["features"]
    torch.testing.assert_close(torch.tensor(features), loaded.features(image), atol=1e-4, rtol=1e-4)
    arrays = np.load(io.BytesIO(server.post(f"/attention?model={name}&format=npz", image).content))
    layers = capture(loaded.model, loaded.transform(image)[None]).layers
    for layer in layers:
        stored = torch.from_numpy(arrays[f"weights_{layer.number:02}"])
        torch.testing.assert_close(stored, layer.weights[0], atol=1e-5, rtol=1e-4)


def test_models_and_openapi_are_described_without_paths(server: Server, runs: list[Path]) -> None:
    assert server.client.get("/health").json()["status"] == "ok"
    answer = server.client.get("/model")
    models = answer.json()["models"]
    assert [model["name"] for model in models] == ["vit", "swin"]
    assert models[0]["classes"] == CLASSES and models[1]["patch"] == [4, 4]
    assert str(runs[0].parent) not in answer.text
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/predict", "/features", "/attention", "/health", "/model"} <= paths.keys()
    for path in ("/predict", "/features", "/attention"):
        answers = paths[path]["post"]["responses"]["200"]["content"]
        assert answers.keys() == {"application/json", "application/x-npz"}
    assert server.client.get("/docs").status_code == server.client.get("/redoc").status_code == 404


def test_maps_of_chosen_methods(server: Server) -> None:
    found = server.post("/attention?methods=rollout&methods=chefer&classes=2").json()
    assert [(m["method"], m["class"] is None) for m in found["maps"]] == [
        ("rollout", True),
        ("chefer", False),
        ("chefer", False),
    ]
    assert np.array(found["maps"][0]["values"]).shape == (3, 3)
    wrong = server.post("/attention?methods=nonsense")
    assert wrong.status_code == 422 and "nonsense" in wrong.json()["detail"]


def test_masked_image_has_another_answer(server: Server) -> None:
    hide = '[{"kind": "mask", "box": [0, 0, 1, 1]}]'
    first = server.post("/predict", data={"changes": hide}).json()
    other = server.post("/predict", noise(seed=3), data={"changes": hide}).json()
    plain = server.post("/predict").json()
    assert first == other != plain


def bad_bodies(count: int) -> Iterator[bytes]:
    """Damaged images, other files, and noise."""
    chance = random.Random(0)
    whole = [noise(kind=kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]
    yield from (b"", b"x", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x89PNG\r\n\x1a\n")
    for _ in range(count - 4):
        content = bytearray(chance.choice(whole))
        content = content[: chance.randrange(1, len(content))]
        for _ in range(chance.randrange(1, 20)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        yield bytes(content)


def check_bad_bodies(server: Server, count: int) -> None:
    statuses = [server.post("/predict", body).status_code for body in bad_bodies(count)]
    # A damaged image may still decode.
    assert set(statuses) <= {200, 415} and statuses.count(415) > count // 2
    assert server.post("/predict").status_code == 200


def test_bad_bodies(server: Server) -> None:
    check_bad_bodies(server, 40)


@pytest.mark.slow
def test_500_bad_bodies_leave_memory_flat(server: Server) -> None:
    check_bad_bodies(server, 100)
    before = server.memory()
    check_bad_bodies(server, 500)
    assert server.memory() - before < 50


@pytest.mark.parametrize(
    ("status", "options"),
    [
        (422, {"data": {"file": "/etc/passwd"}}),
        (422, {}),
        (400, {"content": b"\0" * 100, "headers": {"content-type": "multipart/form-data"}}),
        (422, {"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=x"}}),
        (413, {"files": {"file": b"\0" * 2_000_000}}),
        (415, {"files": {"file": noise(1200, 900, kind="JPEG")}}),
        (422, {"files": {"file": noise()}, "data": {"changes": '[{"kind": "burn"}]'}}),
        (422, {"files": {"file": noise()}, "data": {"changes": "[" * 5000}}),
        (404, {"files": {"file": noise()}, "params": {"model": "../../etc"}}),
        (421, {"files": {"file": noise()}, "headers": {"host": "rebound.example"}}),
        (403, {"files": {"file": noise()}, "headers": {"origin": "https://evil.example"}}),
        (403, {"files": {"file": noise()}, "headers": {"sec-fetch-site": "cross-site"}}),
    ],
)
def test_refusal_is_a_clear_4xx(server: Server, status: int, options: dict[str, Any]) -> None:
    answer = server.client.post("/predict", **options)
    assert (answer.status_code, bool(answer.json()["detail"])) == (status, True), answer.text


def test_files_of_the_server_cannot_be_asked_for(server: Server) -> None:
    for path in (
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/static/live.js",
    ):
        assert server.client.get(path).status_code == 404


def test_slow_clients_are_dropped_and_disturb_nobody(server: Server) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    beginnings = [
        b"",
        b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; "
        b"boundary=x\r\nContent-Length: 5000\r\n\r\n--x\r\n",
    ]
    slow = [socket.create_connection((host, int(port)), 10) for _ in range(30)]
    begin = time.monotonic()
    for number, connection in enumerate(slow):
        connection.sendall(beginnings[number % 3])
    assert server.post("/predict").status_code == 200
    answers = []
    for connection in slow:
        connection.settimeout(20)
        answers.append(connection.recv(1000))
        connection.close()
    assert 1 < time.monotonic() - begin < 15
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers[2::3])
    assert all(answer == b"" for answer in answers[0::3])


def test_64_at_once_are_answered_each_with_its_own(server: Server) -> None:
    images = [noise(seed=seed) for seed in range(64)]
    alone = [server.post("/predict", image).json() for image in images[:8]]
    for _ in range(2):  # what threads and allocators keep is kept once
        before = server.memory()
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(lambda image: server.post("/predict", image).json(), images))
    assert server.memory() - before < 60
    for one, other in zip(alone, answers, strict=False):
        assert one["label"] == other["label"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)
    assert len({answer["probability"] for answer in answers}) > 50


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_signal_ends_the_server_and_a_token_is_needed(runs: list[Path], number: int) -> None:
    token = "a-token-of-20-letters"
    with serving(f"checkpoint={runs[0]}", f"token={token}") as started:
        assert started.client.get("/health").status_code == 200
        assert started.client.get("/").status_code == 200
        assert started.client.get("/model").status_code == 401
        assert started.post("/predict").status_code == 401
        for given, status in ((token, 200), (token[:-1], 401), ("x", 401)):
            headers = {"authorization": f"Bearer {given}"}
            assert started.post("/predict", headers=headers).status_code == status
        code, text = started.stop(number)
    assert code == 0 and text.endswith("Stopped.\n") and "Traceback" not in text


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(ConfigError, match=r"needs uvicorn: pip install .*\[serve\]"):
        module.check_packages()


def test_port_in_use_is_an_error_with_a_remedy() -> None:
    with module.open_socket("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="port=0"):
            module.open_socket("127.0.0.1", taken.getsockname()[1])


def test_answers_are_sent_at_once() -> None:
    """With Nagle's algorithm, the second packet of an answer waits for the client: 40 ms each."""

    async def accepted() -> int:
        answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            answered.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with module.open_socket("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(answer, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                writer.close()
                return await answered

    assert asyncio.run(accepted()) != 0
