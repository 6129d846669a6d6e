"""What all tests share. Nothing here imports torch: some tests check that something does not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# One thread per process, whether tests run alone or side by side. Read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What several tests share lies in helpers/ and is imported by its plain name.
HELPERS = Path(__file__).parent / "helpers"
sys.path.append(str(HELPERS))
pytest.register_assert_rewrite(*(file.stem for file in HELPERS.glob("*.py")))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with eight megabytes of space."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system needs more rights")
    yield folder
    subprocess.run(["umount", folder], check=True)
