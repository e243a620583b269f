"""The folder of a checkpoint, fetched from the Hugging Face Hub where no folder of that name exists."""

import os
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from nosa_jax.errors import InputError

# What a checkpoint needs: no code, no weights in other formats.
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model"]
_NO_FILES = ["*/*"]  # folders of a repository hold the same weights in other forms
_FORMS = "a run's folder, a checkpoint's folder, or a repository of the Hugging Face Hub as owner/name"
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def checkpoint_folder(path_or_id: str | Path, revision: str | None = None) -> Path:
    """An existing folder as it is; otherwise the downloaded copy of a repository, which is kept for the next time.

    Raises:
      InputError: the name is empty, neither exists, or the repository cannot be reached; says how to give a folder
        instead.
    """
    if not str(path_or_id).strip():  # as a path it would be the current folder
        raise InputError(f"the model's name is empty. Give {_FORMS}.")
    path = Path(path_or_id).expanduser()
    if os.path.isdir(path):  # unlike Path, it takes any text for a name
        return path.absolute()
    name = str(path_or_id)
    if os.path.exists(path):
        raise InputError(f"{name!r} is a file. Give the checkpoint's folder.")
    if isinstance(path_or_id, Path) or not _ID.fullmatch(name):
        raise InputError(f"there is no checkpoint folder {str(path.absolute())!r}. Give {_FORMS}.")
    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_FILES, ignore_patterns=_NO_FILES)
        )
    except GatedRepoError as error:
        raise InputError(
            f"the repository {name!r} asks for permission. Log in with `hf auth login`, or {_folder_form(name)}"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise InputError(
            f"there is neither a folder nor a repository {name!r}{at}. Check its name, or {_folder_form(name)}"
        ) from error
    except LocalEntryNotFoundError as error:  # the library has looked among its copies because there is no connection
        raise InputError(
            f"there is no folder {name!r}, and the hub cannot be reached ({_cause(error)}). Get the files on a machine "
            f"with a network, and {_folder_form(name)}"
        ) from error
    except Exception as error:  # the network's, the disk's and the hub's own
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(
            f"there is no folder {name!r}, and the repository of that name could not be fetched: {reason} Get the "
            f"files on a machine with a network, and {_folder_form(name)}"
        ) from error


def _cause(error: BaseException) -> str:
    """What lies at the bottom of the library's errors, in a few words."""
    while error.__cause__ is not None and not isinstance(error, OfflineModeIsEnabled):
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    reason = " ".join(str(error).split())
    return _ERRNO.sub("", reason)[:100] or type(error).__name__


def _folder_form(name: str) -> str:
    return f"give the path of a folder that holds config.json and the safetensors files, like ./{name.split('/')[-1]}."
