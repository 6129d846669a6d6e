"""Captions, and methods as people write them."""

from pathlib import Path

import pytest
from explained_models import noise, seen

from vision.inspection.explain import explain
from vision.inspection.figures.drawing import Caption, method_lines, record_of, stored_record
from vision.inspection.methods.spec import parse_method, parse_methods


def test_request_with_options_reads_numbers_words_and_truth() -> None:
    choice = parse_method("rollout:fusion:max:residual:0.25:start_layer:1")
    assert choice.options == {"fusion": "max", "residual": 0.25, "start_layer": 1}
    assert parse_method("chefer:normalize:true").options == {"normalize": True}
    assert str(parse_method("chefer:normalize:true")) == "chefer:normalize:true"
    assert parse_method("attention:layer:blocks.1.attn").options == {"layer": "blocks.1.attn"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rolout", "'rolout'.*Did you mean 'rollout'"),
        ("rollout:fuson:max", "'fuson'.*Did you mean 'fusion'"),
        ("rollout:fusion", "'fusion'.*rollout:option:value"),
        ("rollout:fusion:median", "mean, max or min, found 'median'"),
        ("rollout:residual:2", "0 to 1.*found '2'"),
        ("rollout:discard:1", "below 1, found '1'"),
        ("chefer:normalize:1", "true or false, found '1'"),
        ("norm:layer:1", "norm: unknown option 'layer'"),
    ],
)
def test_request_that_is_wrong_says_what_there_is(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_method(text)


def test_requests_come_once_each() -> None:
    assert len(parse_methods(["rollout", "cam", "rollout"])) == 2


def test_caption_names_method_layer_query_options_and_reference() -> None:
    choices = parse_methods(["attention:layer:1", "chefer"])
    explanation = explain(seen(), noise(), choices, classes=2)[0]
    text = Caption("What is seen.", (("Model", "x"),), method_lines(explanation.heatmaps)).text()
    assert text.startswith("What is seen.\n\nModel: x\n")
    lines = text.replace("\n  ", " ").splitlines()
    (attention,) = [line for line in lines if line.startswith("- Attention")]
    assert "layer blocks.1.attn" in attention and "query pool" in attention
    assert "head mean" in attention and "Vaswani" in attention
    assert len([line for line in lines if line.startswith("- Chefer")]) == 1


def test_record_changes_with_settings_and_with_files(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a")
    first = record_of({"a": 1}, [file])
    assert first == record_of({"a": 1}, [file]) != record_of({"a": 2}, [file])
    file.write_bytes(b"ab")
    assert record_of({"a": 1}, [file]) != first


def test_stored_record_is_found_only_in_a_whole_caption(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    assert stored_record(file) is None
    file.write_text(Caption("x").text("abc"))
    assert stored_record(file) == "abc"
    file.write_text("Half a capt")
    assert stored_record(file) is None
