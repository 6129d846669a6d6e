"""The HTTP API of `vision serve`: FastAPI's door."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, File, Form, HTTPException, Query, UploadFile
from fastapi.responses import HTMLResponse, Response

import vision
from vision.config import UserError
from vision.data.images.decode import Pixels, UnreadableImageError
from vision.inference.serve.configs import ServeConfig
from vision.inference.serve.guard import App, Guard
from vision.inference.serve.live_page import POLICY, live_page
from vision.inference.serve.model_thread import BusyError, ModelThread
from vision.inference.serve.served_model import Answer, Arrays, ServedModel
from vision.inference.serve.steps import ModelSteps, steps_of
from vision.inference.serve.whatif import changed, parse_changes
from vision.inspection.capture.captured import CaptureError

DECODERS = 4
"""Threads that decode images while the model runs."""
LONGEST_TITLE = 120
NPZ = "application/x-npz"
EITHER: dict[int | str, dict[str, Any]] = {200: {"content": {NPZ: {}}}}
"""For the description of requests that answer in JSON or npz."""
R = TypeVar("R")

Upload = Annotated[UploadFile, File(description="The image: JPEG, PNG, WebP, …")]
Changes = Annotated[
    str, Form(description='JSON: [{"kind": "mask", "box": [top, left, height, width]}, …]')
]
Model = Annotated[str | None, Query(description="Name of a checkpoint; by default the first.")]
Format = Annotated[Literal["json", "npz"], Query(description="JSON, or NumPy's npz file.")]


@dataclass(frozen=True)
class ClassAnswer:
    """A class and its probability."""

    label: str
    probability: float


@dataclass(frozen=True)
class PredictAnswer:
    """The prediction for an image."""

    model: str
    label: str
    probability: float
    top: list[ClassAnswer]
    temperature: float
    """By which logits were divided; 1: not calibrated."""


@dataclass(frozen=True)
class FeaturesAnswer:
    """The input of the head."""

    model: str
    features: list[float]


@dataclass(frozen=True)
class AttentionAnswer:
    """Maps by method and class; values are multiples of a uniform map's, row by row."""

    model: str
    maps: list[dict[str, Any]]
    available: list[str]
    """Methods that this model has."""


@dataclass(frozen=True, eq=False)
class Service:
    """The models, the thread that runs them, and the limits."""

    models: Mapping[str, ServedModel]
    config: ServeConfig
    thread: ModelThread
    decoders: CapacityLimiter

    def model(self, name: str | None) -> ServedModel:
        """A model by its name."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise HTTPException(404, f"Unknown model '{name}'. Served: {', '.join(self.models)}.")
        return self.models[name]

    async def pixels(self, model: ServedModel, file: UploadFile, changes: str = "") -> Pixels:
        """What a model sees of an uploaded image."""
        content = await file.read()
        try:
            edits = parse_changes(changes)
            read = partial(model.pixels, content, self.config.max_pixels)
            pixels = await to_thread.run_sync(read, limiter=self.decoders)
        except UnreadableImageError as error:
            raise HTTPException(415, str(error)) from error
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        return changed(pixels, edits, model.loaded.preprocess)

    async def forward(self, model: ServedModel, file: UploadFile, changes: str = "") -> Answer:
        """The model's answer, from a batch with whoever asks at the same time."""
        with self.thread.announced():
            pixels = await self.pixels(model, file, changes)
            future = self._queued(lambda: self.thread.submit(model.forward, pixels))
        return await self._result(future)

    async def alone(self, function: Callable[[], R]) -> R:
        """The result of a function that runs in the thread of the models."""
        return await self._result(self._queued(lambda: self.thread.call(function)))

    def _queued(self, submit: Callable[[], R]) -> R:
        try:
            return submit()
        except BusyError as error:
            raise HTTPException(503, f"Busy: {error}", {"retry-after": "1"}) from error

    async def _result(self, future: Any) -> Any:
        try:
            async with asyncio.timeout(self.config.timeout):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            text = f"No answer within {self.config.timeout:g} seconds (timeout)."
            raise HTTPException(504, text) from error
        except (CaptureError, UserError, ValueError) as error:
            raise HTTPException(422, str(error)) from error


def create_app(models: Sequence[ServedModel], config: ServeConfig) -> App:
    """The application, behind its guard."""
    thread = ModelThread(config.batch_size, config.batch_wait, config.queue)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        thread.start()
        try:
            yield
        finally:
            await asyncio.to_thread(thread.stop)

    # The pages of FastAPI's documentation load scripts from another server.
    app = FastAPI(
        title="vision serve",
        version=vision.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    named = {model.name: model for model in models}
    service = Service(named, config, thread, CapacityLimiter(DECODERS))
    _add_description(app, service)
    _add_answers(app, service)
    _add_explorer(app, service)
    return Guard(app, config)


def _add_description(app: FastAPI, service: Service) -> None:
    page = live_page()

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": POLICY})

    @app.get("/health", summary="A sign of life")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": service.thread.waiting}

    @app.get("/model", summary="The models with their classes and preprocessing")
    async def model() -> dict[str, Any]:
        config = service.config
        return {
            "models": [model.about() for model in service.models.values()],
            "limits": {"megabytes": config.max_megabytes, "pixels": config.max_pixels},
        }


def _add_answers(app: FastAPI, service: Service) -> None:
    config = service.config

    @app.post("/predict", responses=EITHER, summary="The most probable classes of an image")
    async def predict(
        file: Upload,
        changes: Changes = "",
        model: Model = None,
        top: Annotated[int, Query(ge=1, le=10**6)] = config.top,
        format: Format = "json",
    ) -> PredictAnswer:
        chosen = service.model(model)
        if not chosen.loaded.classes:
            raise HTTPException(422, f"{chosen.name} has no head: ask for its /features.")
        answer = await service.forward(chosen, file, changes)
        found = chosen.prediction(answer, top)
        if format == "npz":
            assert answer.logits is not None
            logits = answer.logits.float().numpy()
            names = np.array(chosen.loaded.classes)
            temperature = np.array(chosen.temperature.value)
            return _npz({"logits": logits, "classes": names, "temperature": temperature})
        listed = [ClassAnswer(label, probability) for label, probability in found.top]
        best, value = listed[0], chosen.temperature.value
        return PredictAnswer(chosen.name, best.label, best.probability, listed, value)

    @app.post("/features", responses=EITHER, summary="The input of the head")
    async def features(
        file: Upload, changes: Changes = "", model: Model = None, format: Format = "json"
    ) -> FeaturesAnswer:
        chosen = service.model(model)
        answer = await service.forward(chosen, file, changes)
        found = answer.features.float()
        if format == "npz":
            return _npz({"features": found.numpy()})
        return FeaturesAnswer(chosen.name, found.tolist())

    @app.post(
        "/attention",
        responses=EITHER,
        summary="Maps of attention; as npz also the weights of every layer",
    )
    async def attention(
        file: Upload,
        changes: Changes = "",
        model: Model = None,
        methods: Annotated[list[str] | None, Query(description="By default three.")] = None,
        classes: Annotated[int, Query(ge=1, le=100)] = config.classes,
        format: Format = "json",
    ) -> AttentionAnswer:
        chosen = service.model(model)
        pixels = await service.pixels(chosen, file, changes)
        found = await service.alone(lambda: chosen.maps(pixels, methods or (), classes))
        if format == "npz":
            return _npz(found.arrays)
        return AttentionAnswer(chosen.name, found.maps, found.available)


def _add_explorer(app: FastAPI, service: Service) -> None:
    @app.post("/explore", response_class=HTMLResponse, summary="The explorer of an image, a page")
    async def explore(file: Upload, changes: Changes = "", model: Model = None) -> Response:
        chosen = service.model(model)
        pixels = await service.pixels(chosen, file, changes)
        title = _title(file.filename)
        page = await service.alone(lambda: chosen.explorer(pixels, service.config.classes, title))
        # Opened as an address of its own it is not trusted with this origin.
        headers = {"content-security-policy": "sandbox allow-scripts allow-downloads"}
        return HTMLResponse(page, headers=headers)

    @app.post("/steps", summary="The numbers of an image on its way through the model")
    async def steps(
        file: Upload,
        changes: Changes = "",
        model: Model = None,
        row: Annotated[float, Query(ge=0, le=1)] = 0.5,
        column: Annotated[float, Query(ge=0, le=1)] = 0.5,
    ) -> ModelSteps:
        chosen = service.model(model)
        pixels = await service.pixels(chosen, file, changes)
        return await service.alone(lambda: steps_of(chosen, pixels, (row, column)))


def _title(name: str | None) -> str:
    """A file name of a client as a title: text of one line."""
    plain = "".join(letter for letter in name or "" if letter.isprintable())
    return plain[:LONGEST_TITLE] or "image"


def _npz(arrays: Arrays) -> Any:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    headers = {"content-disposition": 'attachment; filename="answer.npz"'}
    return Response(buffer.getvalue(), media_type=NPZ, headers=headers)
