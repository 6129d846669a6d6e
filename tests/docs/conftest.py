"""The scripts under docs/ import each other by their plain names; so do their tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "docs"))
