"""HEIC photographs: read where pillow-heif is installed, named where it is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from vision.data.images.decode import UnreadableImageError, decode
from vision.data.sources.folder import READS_HEIC

HEADER = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
STAND_IN = """
from PIL import Image, ImageFile

class File(ImageFile.ImageFile):
    format = "HEIF"
    def _open(self):
        self._size, self._mode = (4, 3), "RGB"
    def load(self):
        self.im = Image.new("RGB", (4, 3), (9, 8, 7)).im
        return Image.Image.load(self)

def register_heif_opener():
    Image.register_open("HEIF", File, lambda start: start[4:12] == b"ftypheic")
"""


@pytest.mark.skipif(READS_HEIC, reason="pillow-heif is installed")
def test_heic_without_its_package_names_the_package() -> None:
    with pytest.raises(UnreadableImageError, match=r"IMG_1.heic.*vit-swin\[heic\]"):
        decode(HEADER, 3, "IMG_1.heic")


def test_heic_is_listed_and_read_with_its_package(tmp_path: Path) -> None:
    (tmp_path / "pillow_heif.py").write_text(STAND_IN)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vision.data.images.decode import decode\n"
        "from vision.data.sources.folder import SUFFIXES\n"
        "assert '.heic' in SUFFIXES\n"
        f"assert decode({HEADER!r}, 3, 'a.heic').tolist() == [[[9, 8, 7]] * 4] * 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
