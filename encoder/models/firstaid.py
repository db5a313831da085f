"""First aid for a checkpoint nobody has served yet: what it is, what would be served of it, what is missing.

Everything is looked at and told, not just the first fault. Weights are read by their headers alone; the towers are made
without them, on torch's meta device, by the very families that would serve them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from encoder.errors import CheckpointError, EncoderError
from encoder.models.checkpoint import DEMO, HUB_NAME, Checkpoint, read_json
from encoder.models.headers import WeightHeaders, read_headers
from encoder.models.tower import FAMILIES, Tower, TowerSpec, load_tower
from encoder.preprocess.text import TOKENIZER_FILES
from encoder.settings import EngineSettings, PreprocessMode, TowerName

TOWERS: tuple[TowerName, ...] = ("vision", "text")
# How the families' errors put it when an architecture is for pictures alone: no fault.
NO_TOWER = "no text tower"
# What is shown of a tower's own description of its preprocessing; `vitfleet models` shows all of it.
PREPROCESSING = ("resize", "crop", "interpolation", "mean", "std", "tokenizer", "pad_rule")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `next_step` says what to do where it is not `good`."""

    topic: str
    good: bool
    told: str
    next_step: str = ""


@dataclass(frozen=True)
class FirstAid:
    """All findings, and the specs of the towers that would be served."""

    name: str
    findings: tuple[Finding, ...]
    towers: tuple[TowerSpec, ...]

    @property
    def served(self) -> bool:
        """Whether every tower that the checkpoint has would be served."""
        return bool(self.towers) and all(finding.good for finding in self.findings)


def examine(path: str) -> FirstAid:
    """Looks at a checkpoint's folder, or 'demo'. Raises nothing for what is wrong with it."""
    findings: list[Finding] = []
    folder = _folder(path, findings)
    if folder is None:
        return FirstAid(path.strip(), tuple(findings), ())
    config = _config(folder, findings)
    headers = _weights(folder, findings)
    checkpoint = Checkpoint(DEMO if path == DEMO else folder.resolve().name, folder, config, headers=headers)
    _preprocessor(checkpoint, findings)
    known = _architecture(checkpoint, findings)
    specs = [_tower(checkpoint, name, findings) for name in TOWERS] if known and headers is not None else []
    _tokenizer(folder, config, findings)
    return FirstAid(checkpoint.name, tuple(findings), tuple(spec for spec in specs if spec is not None))


def _folder(path: str, findings: list[Finding]) -> Path | None:
    if path != path.strip() or not path:
        findings.append(Finding("name", False, f"{path!r} has blanks at its ends or is empty", "write it without them"))
        return None
    if path == DEMO:
        from encoder.demo import demo_model_path

        return demo_model_path()
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    told = "is a file" if folder.exists() else "is not there"
    step = "give the folder that holds config.json"
    if not folder.exists() and HUB_NAME.fullmatch(path):
        step += "; a hub's model is looked at by `vitfleet check --model`"
    findings.append(Finding("folder", False, f"{path} {told}", step))
    return None


def _config(folder: Path, findings: list[Finding]) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json")
    except CheckpointError as error:
        step = "give the folder of a transformers checkpoint, with its config.json"
        findings.append(Finding("config", False, _told(error), step))
        return {}


def _architecture(checkpoint: Checkpoint, findings: list[Finding]) -> bool:
    kind = checkpoint.model_type
    known = kind in FAMILIES
    if known:
        findings.append(Finding("family", True, f"{kind}, served by {FAMILIES[kind].partition(':')[0]}"))
    elif checkpoint.config:
        names = ", ".join(checkpoint.config.get("architectures") or ()) or "no class named"
        step = (
            f"use one of {', '.join(sorted(FAMILIES))}; or add a file to encoder/models and its line to "
            "encoder.models.tower.FAMILIES"
        )
        findings.append(Finding("family", False, f"{kind or 'unnamed'} ({names}) is not served", step))
    return known


def _weights(folder: Path, findings: list[Finding]) -> WeightHeaders | None:
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        told = f"only pickle weights ({pickled[0]}), which can run code" if pickled else "no weights"
        step = "convert it once with transformers' save_pretrained (safetensors)" if pickled else "add its safetensors"
        findings.append(Finding("weights", False, told, step))
        return None
    try:
        headers = read_headers(folder)
    except CheckpointError as error:
        told, _, step = _told(error).rpartition(": " if ";" not in str(error) else "; ")
        findings.append(Finding("weights", False, told, step))
        return None
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in headers.dtypes().items())
    size = f"{headers.size / 1e9:.2f} GB" if headers.size >= 1e8 else f"{headers.size / 1e6:.2f} MB"
    told = f"{headers.parameters / 1e6:.2f} M parameters, {size} in {headers.files} file(s); tensors: {dtypes}"
    findings.append(Finding("weights", True, told))
    return headers


def _preprocessor(checkpoint: Checkpoint, findings: list[Finding]) -> None:
    try:
        settings = checkpoint.image_config()
    except CheckpointError:
        step = "copy it from the publisher's repository (preprocessor_config.json)"
        findings.append(Finding("image processor", False, "preprocessor_config.json is missing", step))
        return
    kind = settings.get("image_processor_type") or settings.get("feature_extractor_type") or "a class not named"
    findings.append(Finding("image processor", True, f"{kind}"))


def _tokenizer(folder: Path, config: Mapping[str, Any], findings: list[Finding]) -> None:
    found = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    if found:
        findings.append(Finding("tokenizer", True, ", ".join(found)))
    elif "text_config" in config and not any(NO_TOWER in finding.told for finding in findings):
        step = f"copy it from the publisher's repository ({TOKENIZER_FILES[0]})"
        findings.append(Finding("tokenizer", False, "the model has a text half and no tokenizer", step))


def _tower(checkpoint: Checkpoint, name: TowerName, findings: list[Finding]) -> TowerSpec | None:
    mode: PreprocessMode = "torch"
    try:
        tower = _made(checkpoint, name, mode)
    except CheckpointError as error:
        if NO_TOWER in str(error):
            findings.append(Finding(name, True, f"none: {checkpoint.model_type} has {NO_TOWER}"))
            return None
        try:
            tower, mode = _made(checkpoint, name, "pil"), "pil"
        except EncoderError:
            told, _, step = _told(error).rpartition("; ")
            findings.append(Finding(name, False, told or step, step if told else "see what is missing above"))
            return None
    except Exception as error:  # a family that reads its weights' values while it is made
        told = f"could not be tried without its weights ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        findings.append(Finding(name, False, told, "try it with them: vitfleet check --model PATH"))
        return None
    findings.append(Finding(name, True, _summary(tower) + (", preprocess: pil" if mode == "pil" else "")))
    return tower.spec


def _made(checkpoint: Checkpoint, name: TowerName, mode: PreprocessMode) -> Tower[Any]:
    settings = EngineSettings(model=str(checkpoint.folder), tower=name, preprocess=mode)
    with torch.device("meta"):  # also for what a family makes beside its module
        return load_tower(checkpoint, settings)


def _summary(tower: Tower[Any]) -> str:
    spec = tower.spec
    parts = [
        f"{spec.dimensions} dimensions",
        f"head dim {', '.join(map(str, sorted(spec.head_dims)))}",
        f"mask needs: {', '.join(sorted(spec.mask_needs))}",
    ]
    if spec.max_tokens:
        parts.append(f"up to {spec.max_tokens} tokens")
    described = tower.describe_preprocessing()
    parts += [f"{key} {described[key]}" for key in PREPROCESSING if described.get(key)]
    return "; ".join(parts)


def _told(error: Exception) -> str:
    return " ".join(str(error).split())
