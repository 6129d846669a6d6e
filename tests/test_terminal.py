"""Names that look like rich's markup are shown as they are, wherever people read them."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from model_settings import model_config, small_model
from rich.console import Console

from vision.checkpoints.load_report import LoadReport
from vision.checkpoints.open import OpenedModel
from vision.data.tools.check import DataCheck, SplitCheck
from vision.inference.predict import Prediction
from vision.inference.predicted_files import PredictedFile
from vision.inference.predicted_files import table as table_of_answers
from vision.inference.visualize.score_table import table as table_of_scores
from vision.terminal import plain, print_wide, progress_bar, tracked
from vision.training.run.log import Reporter

NAMES = ["[/b]", "[red]x[/red]", "[bold", ":cat:", "a\\", "\\[b]", "[link=x]y[/link]"]
"""What rich would read as an error, a colour, an emoji, an escape or a link."""
EVERY_NAME = pytest.mark.parametrize("name", NAMES)


def printed(result: Any) -> str:
    stream = io.StringIO()
    print_wide(result, stream)
    return stream.getvalue()


@EVERY_NAME
def test_plain_text_is_shown_as_it_is(name: str) -> None:
    assert printed(plain(name)).rstrip("\n") == name


def test_control_characters_are_shown_by_their_codes() -> None:
    """Neither a class that clears the screen nor a file name that is not UTF-8 gets through."""
    assert printed(plain("a\x1b[2Jb\rc\x9bd\udce9")).rstrip() == r"a\x1b[2Jb\rc\x9bd\udce9"


@EVERY_NAME
def test_opened_model_is_shown_as_it_is(name: str) -> None:
    opened = OpenedModel(
        model=small_model("vit_base", (32, 32), classes=1),
        config=model_config("vit_base"),
        image_size=(32, 32),
        trained_size=(32, 32),
        channels=3,
        classes=1,
        class_names=(name,),
        known=[(f"from {name}", {"mean": [0.5]})],
        path=Path(f"file {name}"),
        tensors={},
        report=LoadReport("", "timm ViT", assumed=(f"assumed {name}",)),
    )
    text = printed(opened.table())
    assert all(f"{word}{name}" in text for word in ("file ", "1 (", "from ", "assumed "))


@EVERY_NAME
def test_predictions_are_shown_as_they_are(name: str) -> None:
    prediction = Prediction(name, 0.75, ((name, 0.75), ("other", 0.25)))
    answer = PredictedFile(Path(f"photo {name}"), prediction, None)
    text = printed(table_of_answers([answer]))
    assert f"photo {name} " in text and f" {name} " in text.replace(f"photo {name}", "")


@EVERY_NAME
def test_scores_are_shown_under_the_names_of_their_models(name: str) -> None:
    scores = {model: {"random": {"pointing": 50.0}} for model in (f"run {name}", "other")}
    assert f"run {name} " in printed(table_of_scores(scores))


@EVERY_NAME
def test_check_of_data_names_its_classes(name: str) -> None:
    split = SplitCheck(count=3, per_class={name: 3}, sizes=Counter({(2, 2): 3}), unreadable=[])
    check = DataCheck({"train": split}, [], [], [])
    assert f" {name} " in printed(check.table())


@EVERY_NAME
def test_training_says_names_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(main=True)
    reporter.say(f"The run is in {name}.")
    reporter.warn(f"init: {name} is odd.")
    with reporter.progress_bar(f"features of {name}", 3) as advance:
        advance(3)
    lines = capsys.readouterr().out.splitlines()
    expected = [f"The run is in {name}.", f"warning: init: {name} is odd.", f"features of {name} …"]
    assert lines == expected


@EVERY_NAME
def test_progress_has_its_title_as_it_is(name: str) -> None:
    with progress_bar() as progress:
        progress.add_task(name, total=2)
    console = Console(file=io.StringIO(), record=True, width=200)
    console.print(progress.get_renderable())
    assert name in console.export_text()


def test_long_task_gives_every_item_whether_or_not_it_is_watched() -> None:
    assert list(tracked(iter("abc"), "letters [/b]", 4, completed=1)) == ["a", "b", "c"]
