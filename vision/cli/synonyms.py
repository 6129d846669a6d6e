"""Names of settings in other tools, and former names of ours, with what to write here instead."""

import re
from collections.abc import Iterable
from typing import Any

from vision.cli.listing import CONFIGS
from vision.config import Config, field_paths, shown

_TIMM_NAME = "timm:vit_small_patch16_224.augreg_in21k_ft_in1k"

_ROWS: dict[str, tuple[str, ...]] = {
    "epochs num_epochs max_epochs duration": ("duration={number}epochs",),
    "max_steps num_steps iterations": ("duration={number}steps",),
    "evaluate_every eval_every": ("evaluate_every={number}epochs",),
    "warmup warmup_epochs": ("schedule.warmup={number}epochs",),
    "warmup_steps": ("schedule.warmup={number}steps",),
    "log.every log_every": ("log.every={number}steps",),
    "checkpoint.every save_every": ("checkpoint.every={number}epochs",),
    "lr learning_rate": ("optimizer.learning_rate={}",),
    "wd weight_decay": ("optimizer.weight_decay={}",),
    "opt optim optimizer": ("optimizer.name={}",),
    "sched scheduler schedule": ("schedule.shape={}",),
    "loss criterion": ("loss.kind={}",),
    "clip_grad grad_clip": ("optimizer.clip=norm optimizer.clip_at={}",),
    "batch bs batch_size": ("batch_size={}", "count={}"),
    "workers num_workers": ("workers={}", "loader.workers={}"),
    "img_size image_size input_size resolution": ("image_size={}", "data.image_size={}"),
    "arch architecture backbone model_name": ("model={}", "model=timm model.name={}"),
    "dataset": ("data={}", "data=torchvision data.name={} data.root=data"),
    "data_dir data_path": ("data=folder data.root={}",),
    "drop_path_rate": ("model.drop_path={}",),
    "amp=false": ("precision=fp32",),
    "amp": ("precision=bf16",),
    "fp16=true half=true": ("precision=fp16",),
    "bf16=true": ("precision=bf16",),
    "gpus=0 devices=0 num_gpus=0": ("device=cpu",),
    "gpus devices num_gpus": ("torchrun --nproc-per-node {} train.py parallel=ddp", "device=cuda"),
    "pretrained=true": (
        "recipe=finetune model=vit_small init=pretrained",
        f"init={_TIMM_NAME}",
        f"checkpoint={_TIMM_NAME}",
        f"source={_TIMM_NAME}",
    ),
    "pretrained=false": ("init=null",),
    "pretrained weights checkpoint ckpt": ("init={}", "checkpoint={}", "source={}"),
    "teacher teacher_path teacher_checkpoint distill": ("task=distill task.teacher={}",),
    "teacher_model": ("task=distill task.teacher=timm:{}",),
    "distillation_type": ("task=distill task.teacher=outputs/RUN task.loss={}",),
    "distillation_alpha": ("task=distill task.teacher=outputs/RUN task.alpha={}",),
    "distillation_tau tau": ("task=distill task.teacher=outputs/RUN task.temperature={}",),
    "task.loss": ("task.loss={}",),  # not loss.kind
    "resume": ("Repeat the command of a run to resume it (on_existing=resume).",),
    "num_classes nb_classes": (
        "Leave it out: the number of classes follows from the data or the weights (data=cifar10).",
        "Leave it out: the number of classes follows from the weights.",
    ),
    # Former names
    "pictures": ("count={}",),
    "heads": ("model.heads={}",),
    "window": ("model.window={}",),
    "model.mlp=gelu": ("model.mlp=plain model.activation=gelu",),
    "model.mlp=swiglu": ("model.mlp=gated model.activation=silu",),
}
"""By name, path or path=value: ways to write it. The first that a command understands is taken."""

_SETTING = re.compile(r"([\w.]+)=([^\s()]+)")


def remedy(config: type[Config], groups: Iterable[str], path: str, value: Any) -> str:
    """Return what to write instead of a setting that is unknown or has a value of another type.

    The settings of `config` and the groups are those of the command. "" means no advice.
    """
    known = {*field_paths(config), *groups}
    ways = {name: ways for names, ways in _ROWS.items() for name in names.split()}
    value = shown(value)
    number = value if value.replace(".", "", 1).isdigit() else "1"
    written, name = f"{path}={value}", path.rpartition(".")[2]
    keys = (written, f"{name}={value}", path, name)
    for way in next((ways[key] for key in keys if key in ways), ()):
        text = way.format(value, number=number)
        if path in known and text == written:  # the right name with a wrong value
            return ""
        if all(_exists(known, *setting) for setting in _SETTING.findall(text)):
            return text if text[0].isupper() else f"Write {text}."
    return ""


def _exists(known: set[str], key: str, value: str) -> bool:
    """Whether a command has a setting and, if it is a group of YAML files, the choice."""
    group = CONFIGS / key
    return key in known and (not group.is_dir() or (group / f"{value}.yaml").is_file())
