"""Files that are not checkpoints of a known kind: what they are, and what to do."""

from pathlib import Path

_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"7z\xbc\xaf": "7-zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"Rar!": "rar",
}
_STATE_DICT = (
    'Where the model was made, store its weights alone: torch.save(model.state_dict(), "model.pth")'
)


def refusal(path: Path, start: bytes) -> str:
    """Why a file with these first bytes is not read, as the end of a sentence about it."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for mark, program in _PACKED.items():
        if start.startswith(mark):
            return f"is compressed with {program}. Unpack it first."
    match path.suffix.lower():
        case ".onnx":
            return f"is an ONNX program. {_STATE_DICT}, and open that file."
        case ".pb" | ".tflite":
            return f"is a program of TensorFlow. {_TENSORFLOW}"
        case ".msgpack":
            return f"is a msgpack file of flax. Store its arrays with numpy.savez. {_FLAT}"
    if not start:
        return "is empty (0 bytes). Copy or download it again."
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the file itself. Run: git lfs pull"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<error")):
        return (
            "is a web page, not a checkpoint: the download gave an error or a login page. "
            "Open it in a text editor to see which, then download the file again."
        )
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return f"is an HDF5 file, as Keras stores. {_TENSORFLOW}"
    if start[257:262] == b"ustar":
        return (
            "is a tar archive. If other files are packed in it, unpack them; if an old torch "
            'wrote it, store it again with a later torch: torch.save(torch.load(…), "new.pth").'
        )
    if start.startswith(b"\x93NUMPY"):
        return f"is a single array of numpy. {_FLAT}"
    if start.startswith(b"GGUF"):
        return f"is a GGUF file, whose numbers are quantised. {_STATE_DICT}."
    if start[4:8] == b"TFL3":
        return f"is a program of TensorFlow Lite. {_TENSORFLOW}"
    if start[:1] == b"\x08" and (b"onnx" in start[:256] or b"pytorch" in start[:256]):
        return f"is an ONNX program. {_STATE_DICT}, and open that file."
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


_FLAT = "An .npz file with one array per weight can be read."
_TENSORFLOW = (
    "Only weights of torch (.safetensors, .pth, .bin) and .npz can be read; most models are "
    "published in one of these too."
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
