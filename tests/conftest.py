"""What all tests share. Nothing here imports torch: some tests check that something does not."""

import os
import sys
from pathlib import Path

import pytest

# One thread per process, whether tests run alone or side by side. Read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `model_settings` composes and parses the YAML of a model, for the tests of every package.
sys.path.append(str(Path(__file__).parent / "models"))
pytest.register_assert_rewrite("model_settings", "peers", "reference")
sys.path.append(str(Path(__file__).parent / "training"))
