"""Captions, and methods as people write them."""

from pathlib import Path

import pytest
from explained_models import noise, seen

from vision.inspection.explain import look_at
from vision.inspection.figures.captions import Caption, method_lines, record_of, stored_record
from vision.inspection.methods.requests import parse_request, parse_requests


def test_request_with_options_reads_numbers_words_and_truth() -> None:
    request = parse_request("rollout:fusion:max:residual:0.25:start_layer:1")
    assert request.options == {"fusion": "max", "residual": 0.25, "start_layer": 1}
    assert parse_request("chefer:normalize:true").options == {"normalize": True}
    assert str(parse_request("chefer:normalize:true")) == "chefer:normalize:true"
    assert parse_request("attention:layer:blocks.1.attn").options == {"layer": "blocks.1.attn"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rolout", "no method 'rolout'. Did you mean 'rollout'"),
        ("rollout:fuse:max", "'fuse' is no option of rollout with a value. Options: fusion"),
        ("rollout:fusion", "'fusion' is no option"),
        ("rollout:fusion:median", "must be one of mean, max, min, found 'median'"),
        ("norm:layer:1", "Options: none"),
    ],
)
def test_request_that_is_wrong_says_what_there_is(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_request(text)


def test_requests_come_once_each() -> None:
    assert len(parse_requests(["rollout", "cam", "rollout"])) == 2


def test_caption_names_method_layer_query_options_and_reference() -> None:
    requests = parse_requests(["attention:layer:1", "chefer"])
    look = look_at(seen(), noise(), requests, classes=2)[0]
    text = Caption("What is seen.", (("Model", "x"),), method_lines(look.panels)).text()
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
