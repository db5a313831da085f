"""What a served tower is to its callers, and the fingerprint by which vectors are known to belong together."""

import hashlib
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import encoder.attention
import encoder.models
from encoder.graphs.runner import Calibration
from encoder.models.checkpoint import Checkpoint
from encoder.models.tower import Tower
from encoder.preprocess.decode import DecodePolicy
from encoder.report import ModelInfo
from encoder.settings import EngineSettings


def describe_model(
    tower: Tower[Any],
    checkpoint: Checkpoint,
    settings: EngineSettings,
    policy: DecodePolicy,
    dtype: str,
    int8: Calibration | None = None,
) -> ModelInfo:
    """The tower as it is served, computed in `dtype`, or in int8 where it was calibrated.

    The fingerprint is a hash of revision, tower and preprocessing, the decode policy of pictures included. Vectors in
    int8 are another space's as far as anyone can promise: what they were calibrated on is part of it as well.
    """
    spec = tower.spec
    preprocessing = dict(tower.describe_preprocessing())
    if spec.tower == "vision":
        preprocessing["decode"] = policy.describe()
    if int8 is not None:
        preprocessing["quantization"] = {"dtype": "int8", "calibration": int8.digest}
    identity = {"revision": checkpoint.revision, "tower": spec.tower, "preprocessing": preprocessing}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return ModelInfo(
        name=settings.served_name or checkpoint.name,
        revision=checkpoint.revision,
        family=spec.family,
        tower=spec.tower,
        dimensions=spec.dimensions,
        fingerprint=digest[:16],
        preprocessing=preprocessing,
        mask_needs=tuple(sorted(spec.mask_needs)),
        max_tokens=spec.max_tokens,
        token_dimensions=spec.token_dimensions,
        token_features=spec.token_features,
        vision_only=spec.vision_only,
        compute_dtype=dtype if int8 is None else "int8",
        max_batch=max(settings.buckets),
        logit_scale=spec.logit_scale,
    )


def code_digest(tower: Tower[Any]) -> str:
    """Of the source that decides how a tower computes: what was converted from other source is not this tower."""
    folders = [Path(path) for package in (encoder.models, encoder.attention) for path in package.__path__]
    return source_digest({file for folder in folders for file in folder.glob("*.py")} | {_file_of(tower)})


def source_digest(files: Iterable[Path]) -> str:
    """Of the content of files, in whatever order they come; several may have one name."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _file_of(tower: Tower[Any]) -> Path:
    return Path(inspect.getfile(type(tower)))
