"""The only place that writes to the Hugging Face hub."""

import sys
from pathlib import Path

from vision.config import ConfigError, UserError, abridged


class PushError(UserError):
    """An upload that the hub refused, or that did not reach it."""


def check_token() -> None:
    """Raise a ConfigError if nobody is logged in to the hub."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError(
            "push=true needs a token of the hub that may write: hf auth login, or HF_TOKEN=… in "
            "the environment."
        )


def upload(folder: Path, repository: str, private: bool, message: str) -> str:
    """Upload a folder in one commit; returns the address of the repository. What the repository
    has besides stays.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        api = HfApi()
        created = api.create_repo(repository, private=private, exist_ok=True)
        files = [
            CommitOperationAdd(path.relative_to(folder).as_posix(), path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        api.create_commit(created.repo_id, files, commit_message=message)
    except Exception as error:  # those of the hub and, by its version, of several HTTP libraries
        raise PushError(
            f"push: {repository} was not uploaded: {_reason(error)}. The folder {folder} is "
            f"complete; to try again: hf upload {repository} {folder}"
        ) from error
    return str(created)


def _reason(error: Exception) -> str:
    """One line: what the server says, else what the library says."""
    said = getattr(error, "server_message", None) or str(error) or type(error).__name__
    response = getattr(error, "response", None)
    status = f"HTTP {response.status_code}, " if response is not None else ""
    return f"{status}{abridged(' '.join(said.split())).rstrip('.')}"
