"""Settings of `vision serve`. Free of torch, so that a typo is reported at once."""

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vision.checkpoints.configs import SizedConfig
from vision.config import Amount, PositiveInt
from vision.inference.configs import Device, Places


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ServeConfig(SizedConfig):
    """Settings of `vision serve`."""

    checkpoint: Annotated[Places, Field(min_length=1)]
    """A run's folder, a checkpoint file of any known format, or a name timm:… or hf:…; several as
    [a,b] are served under their names, the first by default."""
    host: Annotated[str, Field(min_length=1)]
    """Address to listen on; any other than this machine's own (127.0.0.1) needs a token."""
    port: Annotated[int, Field(ge=0, le=65535)]
    """0: any free port, which is printed."""
    token: Annotated[str, Field(min_length=16, pattern=r"^[A-Za-z0-9_.~-]+$")] | None
    """Secret that every request must carry (Authorization: Bearer TOKEN); at least 16 letters,
    digits, or characters of _.~-"""
    batch_size: Amount
    """Largest number of images in a forward pass; requests that arrive together share one."""
    batch_wait: Annotated[float, Field(ge=0, le=1)]
    """Seconds that a batch waits for requests that have arrived but are not decoded yet."""
    queue: Amount
    """Number of requests that may wait for the model; further ones are answered with 503."""
    connections: Amount
    """Number of open connections; further ones are answered with 503."""
    max_megabytes: Annotated[float, Field(gt=0, le=1000)]
    """Largest body of a request."""
    max_pixels: PositiveInt
    """Largest image, before it is resized."""
    timeout: Annotated[float, Field(gt=0, le=3600)]
    """Seconds that a request may take to arrive, and again to be answered."""
    top: Amount
    """Number of classes in an answer."""
    classes: Amount
    """Number of most probable classes that the page explains."""
    temperature: Literal["auto"] | Annotated[float, Field(gt=0, le=1000)]
    """Logits are divided by it before they become probabilities; auto: the one that `vision eval`
    fitted for this very checkpoint, or else 1."""
    device: Device

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} can be reached from other machines and needs a token: token=… "
                "of at least 16 characters, such as the output of `openssl rand -hex 16`; or use "
                "host=127.0.0.1."
            )
        return self
