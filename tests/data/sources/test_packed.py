"""Strings in two arrays behave like a list of strings."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vision.data.sources.packed import PackedStrings


@given(st.lists(st.text(max_size=8), max_size=20), st.data())
def test_packed_strings_any_list_gives_back_the_same(
    strings: list[str], data: st.DataObject
) -> None:
    packed = PackedStrings(strings)
    assert list(packed) == strings
    assert list(pickle.loads(pickle.dumps(packed))) == strings
    number = st.integers(0, len(strings) - 1)
    indices = data.draw(st.lists(number, max_size=30)) if strings else []
    taken = packed.take(np.array(indices, dtype=np.int64))
    assert list(taken) == [strings[i] for i in indices]


def test_packed_strings_names_that_are_no_utf8_survive() -> None:
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    assert PackedStrings([name])[0] == name
    with pytest.raises(IndexError):
        PackedStrings([name])[1]
