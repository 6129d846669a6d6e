"""Files that are not checkpoints of a known kind: what they are, and what to do."""

from pathlib import Path

_STATE_DICT = (
    'Where the model was made, store its weights alone: torch.save(model.state_dict(), "model.pth")'
)
_FLAT = "An .npz file with one array per weight can be read."
_TENSORFLOW = (
    "Only weights of torch (.safetensors, .pth, .bin) and .npz can be read; most models are "
    "published in one of these too."
)
_ONNX = f"is an ONNX program. {_STATE_DICT}, and open that file."
_SUFFIXES = {
    ".onnx": _ONNX,
    ".pb": f"is a program of TensorFlow. {_TENSORFLOW}",
    ".tflite": f"is a program of TensorFlow. {_TENSORFLOW}",
    ".msgpack": f"is a msgpack file of flax. Store its arrays with numpy.savez. {_FLAT}",
}
_TAR = (
    "is a tar archive. If other files are packed in it, unpack them; if an old torch wrote it, "
    'store it again with a later torch: torch.save(torch.load(…), "new.pth").'
)
_PACKED = "is compressed with {}. Unpack it first."
_MARKS = (
    (0, b"\x1f\x8b", _PACKED.format("gzip")),
    (0, b"BZh", _PACKED.format("bzip2")),
    (0, b"\xfd7zXZ\x00", _PACKED.format("xz")),
    (0, b"7z\xbc\xaf", _PACKED.format("7-zip")),
    (0, b"\x28\xb5\x2f\xfd", _PACKED.format("zstd")),
    (0, b"Rar!", _PACKED.format("rar")),
    (0, b"version https://git-lfs", "is a pointer of Git LFS, not the file. Run: git lfs pull"),
    (0, b"\x89HDF\r\n\x1a\n", f"is an HDF5 file, as Keras stores. {_TENSORFLOW}"),
    (257, b"ustar", _TAR),
    (0, b"\x93NUMPY", f"is a single array of numpy. {_FLAT}"),
    (0, b"GGUF", f"is a GGUF file, whose numbers are quantised. {_STATE_DICT}."),
    (4, b"TFL3", f"is a program of TensorFlow Lite. {_TENSORFLOW}"),
)
"""Bytes at a place that only one kind of file has."""


def refusal(path: Path, start: bytes) -> str:
    """Why a file with these first bytes is not read, as the end of a sentence about it."""
    if not start:
        return "is empty (0 bytes). Copy or download it again."
    for place, mark, reason in _MARKS:
        if start.startswith(mark, place):
            return reason
    if path.suffix.lower() in _SUFFIXES:
        return _SUFFIXES[path.suffix.lower()]
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<error")):
        return (
            "is a web page, not a checkpoint: the download gave an error or a login page. "
            "Open it in a text editor to see which, then download the file again."
        )
    if start[:1] == b"\x08" and (b"onnx" in start[:256] or b"pytorch" in start[:256]):
        return _ONNX
    if text.startswith((b"{", b"[")):
        return "is JSON, not a checkpoint. Give the file with the weights, or its folder."
    if not any(start):
        return "starts with zeros only: it was not written completely. Copy or download it again."
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start[:256]):
        return f"is a text that starts with {start[:40].decode('ascii')!r}, not a checkpoint."
    return (
        f"is of an unknown kind: it starts with the bytes {start[:8].hex(' ')}. Readable are "
        f"safetensors, files of torch.save (.pth, .pt, .bin, .ckpt) and numpy's .npz."
    )


def archive_refusal(names: set[str]) -> str:
    """Why a zip archive with these members is not read."""
    roots = {name.partition("/")[2] for name in names}
    if "constants.pkl" in roots or any(name.startswith("code/") for name in roots):
        return (
            "is a TorchScript program, which would have to be run to be read. "
            f"{_STATE_DICT.replace('(model.', '(torch.jit.load(…).')}, and open that file."
        )
    if any("archive_format" in name for name in names):
        return f"is a program of torch.export. {_STATE_DICT}, and open that file."
    if "model.weights.h5" in names:
        return f"is a Keras model. {_TENSORFLOW}"
    if "data.pkl" in names:
        return "was unpacked and packed again. Use the file as torch.save wrote it."
    return "is a zip archive, but neither torch nor numpy wrote it. If it was packed, unpack it."


def folder_refusal(folder: Path) -> str:
    """Why no checkpoint was found in a folder."""
    if (folder / ".metadata").is_file() and list(folder.glob("*.distcp")):
        return (
            "is a checkpoint of torch.distributed, in pieces. Join them: "
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pth"
        )
    if (folder / "saved_model.pb").is_file() or list(folder.glob("*.ckpt.index")):
        return f"is a folder of TensorFlow. {_TENSORFLOW}"
    return "has no checkpoint: no .safetensors, .pth, .pt, .bin, .ckpt or .npz file is in it."
