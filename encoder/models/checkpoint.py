"""Finds a checkpoint: the demo's, a folder, or a hub name with revision. A folder never makes anyone contact a hub."""

import hashlib
import json
import mmap
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from encoder.errors import CheckpointError
from encoder.models.headers import WeightHeaders

DEMO = "demo"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
# Architectures with a text half that is served; all others are for pictures alone.
WITH_TEXT = frozenset({"aimv2", "clip", "metaclip_2", "siglip", "siglip2"})
REVISION_FILES = (
    "*.safetensors",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer*.json",
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. `commit`: the hub's, empty for a folder.

    `headers`: given when the weights' values are not to be read, only whether they are there.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    commit: str = ""
    headers: WeightHeaders | None = None

    @cached_property
    def revision(self) -> str:
        """The hub's commit, or a digest of the files that decide the vectors, which takes a second for each 1.5 GB."""
        return self.commit or _digest(self.folder)

    @property
    def model_type(self) -> str:
        """The architecture's name in config.json, e.g. 'clip'."""
        return str(self.config.get("model_type", ""))

    @property
    def has_text(self) -> bool:
        """Whether its architecture has a text tower."""
        return self.model_type in WITH_TEXT

    def image_config(self) -> dict[str, Any]:
        """The image processor's settings; raises CheckpointError when there are none."""
        path = self.folder / "preprocessor_config.json"
        if path.exists():
            return read_json(path)
        merged = self.folder / "processor_config.json"
        if merged.exists():
            found = read_json(merged).get("image_processor")
            if isinstance(found, dict):
                return found
        raise CheckpointError(f"{self.name}: preprocessor_config.json is missing in {self.folder}: add it")


def find_checkpoint(model: str, *, revision: str | None = None, offline: bool = False) -> Checkpoint:
    """The checkpoint that `model` names; raises CheckpointError with the reason when it cannot be had.

    A folder that exists is taken as it is; 'demo' is the embedded model; all else is a hub name, which `offline` looks
    up in the local hub cache alone.
    """
    folder = folder_of(model)
    if folder is None:
        return _from_hub(model, revision, offline)
    if model == DEMO:
        return _from_folder(DEMO, folder)
    if revision is not None:
        raise CheckpointError(f"{model} is a folder and has no revision {revision!r}: leave the revision empty")
    return _from_folder(folder.resolve().name, folder)


def folder_of(model: str) -> Path | None:
    """The folder that `model` names, the demo's for 'demo', None for a hub name; nothing in it is read.

    Raises CheckpointError for what is neither.
    """
    if model != model.strip() or not model:
        raise CheckpointError(f"model name {model!r} has blanks at its ends or is empty: write it without them")
    if model == DEMO:
        from encoder.demo import demo_model_path

        return demo_model_path()
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{model} is a file: name the folder that holds config.json and model.safetensors")
    if not HUB_NAME.fullmatch(model):
        raise CheckpointError(
            f"{model}: there is no such folder, and it is no hub name such as openai/clip-vit-base-patch32"
        )
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises CheckpointError when it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} in {path.parent} cannot be read: {error}: download it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name} in {path.parent} is no JSON object")
    return found


def _from_folder(name: str, folder: Path) -> Checkpoint:
    return Checkpoint(name, folder, _checked(name, folder))


def _from_hub(name: str, revision: str | None, offline: bool) -> Checkpoint:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, local_files_only=offline))
    except RevisionNotFoundError:
        raise CheckpointError(
            f"{name} has no revision {revision!r} on the hub: check the commit, tag or branch"
        ) from None
    except GatedRepoError:
        raise CheckpointError(
            f"{name} is gated on the hub: ask for access there and log in, or give a folder"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise CheckpointError(f"{name} is not on the hub (or is private): check the name, or give a folder") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        where = (
            "is not in the local hub cache"
            if offline
            else "is not in the local hub cache and the hub cannot be reached"
        )
        raise CheckpointError(f"{name} {where}: download it first, or give a folder") from None
    except (HfHubHTTPError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name} cannot be downloaded: {first_line}; try again, or give a folder") from None
    return Checkpoint(name, folder, _checked(name, folder), commit=folder.name)


def _checked(name: str, folder: Path) -> dict[str, Any]:
    config_path = folder / "config.json"
    if not config_path.exists():
        raise CheckpointError(f"{name}: config.json is missing in {folder}: is it a transformers checkpoint?")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        hint = f" (only {pickled[0]}, which is never loaded: pickle files can run code)" if pickled else ""
        raise CheckpointError(
            f"{name}: no safetensors weights in {folder}{hint}: convert it with "
            "transformers' save_pretrained and give that folder, or name a revision that has them"
        )
    return read_json(config_path)


def _digest(folder: Path) -> str:
    """sha256 over names and contents of the files that decide the vectors, 16 hex digits."""
    total = hashlib.sha256()
    for path in sorted({path for pattern in REVISION_FILES for path in folder.glob(pattern)}):
        total.update(path.name.encode() + b"\0" + _sha256(path))
    return total.hexdigest()[:16]


def _sha256(path: Path) -> bytes:
    """Of a file's content, in one call: it holds up no other thread, where each block read would wait for its turn."""
    if not path.stat().st_size:
        return hashlib.sha256().digest()  # nothing cannot be mapped
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return hashlib.sha256(content).digest()
