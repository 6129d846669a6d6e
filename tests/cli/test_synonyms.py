"""Words that users of other tools type, and former names, are answered with words that work."""

import re

import pytest

from vision.cli.app import COMMANDS, main
from vision.cli.composition import compose
from vision.config import parse

ANSWERS = {
    "train epochs=5": "duration=5epochs",
    "train duration=10": "duration=10epochs",
    "train evaluate_every=2": "evaluate_every=2epochs",
    "train evaluate_every=null": "evaluate_every=1epochs",
    "train schedule.warmup=5": "schedule.warmup=5epochs",
    "train max_steps=1000": "duration=1000steps",
    "train lr=0.1": "optimizer.learning_rate=0.1",
    "train optimizer.lr=0.1": "optimizer.learning_rate=0.1",
    "train weight_decay=0.02": "optimizer.weight_decay=0.02",
    "train optimizer=sgd": "optimizer.name=sgd",
    "train scheduler=cosine": "schedule.shape=cosine",
    "train loss=bce": "loss.kind=bce",
    "train clip_grad=1.5": "optimizer.clip=norm optimizer.clip_at=1.5",
    "train batch=64": "batch_size=64",
    "predict batch=8": "batch_size=8",
    "data batch_size=64": "count=64",
    "train workers=4": "loader.workers=4",
    "train data.num_workers=4": "loader.workers=4",
    "prepare num_workers=4": "workers=4",
    "train image_size=64": "data.image_size=64",
    "train img_size=64": "data.image_size=64",
    "predict img_size=64": "image_size=64",
    "train arch=vit_base": "model=vit_base",
    "train arch=resnet50": "model=timm model.name=resnet50",
    "train model_name=vit_small_patch16_224": "model=timm model.name=vit_small_patch16_224",
    "train model=resnet50": "model=timm model.name=resnet50",
    "train dataset=cifar10": "data=cifar10",
    "train data_path=photos": "data=folder data.root=photos",
    "train amp=true": "precision=bf16",
    "train amp=false": "precision=fp32",
    "eval fp16=true": "precision=fp16",
    "train gpus=2": "torchrun --nproc-per-node 2 train.py parallel=ddp",
    "train gpus=0": "device=cpu",
    "predict gpus=1": "device=cuda",
    "train num_classes=10": "data=cifar10",
    "train model.num_classes=10": "data=cifar10",
    "predict num_classes=10": "follows from the weights",
    "train pretrained=true": "recipe=finetune model=vit_small init=pretrained",
    "predict pretrained=true": "checkpoint=timm:",
    "train pretrained=a.pth": "init=a.pth",
    "train checkpoint=a.pth": "init=a.pth",
    "convert checkpoint=a.pth": "source=a.pth",
    "train resume=true": "on_existing=resume",
    "train teacher=a.pth": "task=distill task.teacher=a.pth",
    "train teacher_model=regnety_160": "task=distill task.teacher=timm:regnety_160",
    "train distillation_type=soft": "task.loss=soft",
    "train distillation_alpha=0.5": "task.alpha=0.5",
    "train tau=3.0": "task.temperature=3.0",
    "data pictures=4": "count=4",
    "visualize pictures=4": "count=4",
    "predict heads=4": "model.heads=4",
    "export heads=4": "model.heads=4",
    "eval window=8": "model.window=8",
    "train model.mlp=swiglu": "model.mlp=gated model.activation=silu",
}
MANDATORY = {
    **{name: ["checkpoint=a"] for name in ("predict", "export", "eval", "visualize")},
    "convert": ["source=a", "output=b"],
    "prepare": ["data.root=a", "output=b"],
}


@pytest.mark.parametrize("typed", ANSWERS)
def test_word_of_another_tool_is_answered_with_words_that_parse(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, word = typed.split()
    more = MANDATORY.get(command, [])
    assert main([command, word, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {word.partition('=')[0]}")
    assert ANSWERS[typed] in error
    remedy = re.findall(r"[\w.]+=[^\s()]*[^\s().]", error.partition(". ")[2])
    values, _ = compose(command, [*more, *(w for w in remedy if w not in more)])
    parse(COMMANDS[command].config, values)


@pytest.mark.parametrize("typed", ["train batch_size=many", "visualize batch_size=many"])
def test_right_name_with_a_wrong_value_gets_no_other_name(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, word = typed.split()
    assert main([command, word, *MANDATORY.get(command, [])]) == 2
    assert capsys.readouterr().err.rstrip().endswith('found "many".')
