"""Settings of which parameters are trained. Free of torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vision.config import Config, Count, Rate, Width


class TuneAllConfig(Config):
    """Training of all parameters."""

    kind: Literal["all"]


class TuneHeadConfig(Config):
    """Training of the classifying layer alone (linear probe)."""

    kind: Literal["head"]
    cache: bool
    """Whether the features of every image are computed once and kept in the run's folder. Needs
    images without augmentation."""


class TunePartialConfig(Config):
    """Training of the last blocks, named parts and the head."""

    kind: Literal["partial"]
    blocks: Count
    """Number of blocks from the end, trained with the norm after them."""
    parts: tuple[str, ...]
    """Names of further parameters or modules; * matches anything: patch_embed, blocks.*.attn."""


LoraTarget = Literal["q", "k", "v", "proj", "fc1", "fc2"]


class TuneLoraConfig(Config):
    """Training of low-rank additions to the layers of every block, and of the head (Hu et al., ICLR
    2022).
    """

    kind: Literal["lora"]
    rank: Width
    alpha: Annotated[float, Field(gt=0)]
    """Scale of the additions, which are multiplied by alpha / rank."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)]
    """Queries, keys, values and output of the attention; first and second layer of the MLP."""
    dropout: Rate
    """Dropout rate of the inputs of the additions."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets = {list(self.targets)}: name each one once.")
        return self


class TuneBitfitConfig(Config):
    """Training of biases and the head (Ben Zaken et al., ACL 2022)."""

    kind: Literal["bitfit"]


TuneConfig = Annotated[
    TuneAllConfig | TuneHeadConfig | TunePartialConfig | TuneLoraConfig | TuneBitfitConfig,
    Field(discriminator="kind"),
]
