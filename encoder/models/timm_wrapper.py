"""Models of timm, in transformers' wrapper (`timm_wrapper`): not served, and why is said at load.

Two things are missing. timm imports torchvision, which has no build beside the torch that this project pins
(timm 1.0.31, torchvision 0.29). And timm's layers call torch's attention by themselves: none of it goes through the
one path that backends are resolved, proven and counted on.
"""

from importlib import import_module
from typing import Any

from encoder.errors import CheckpointError
from encoder.models.checkpoint import Checkpoint
from encoder.models.tower import Tower
from encoder.models.vision_only import require_vision
from encoder.settings import EngineSettings

PACKAGES = ("timm", "torchvision")


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """Raises CheckpointError: it names the packages that cannot be imported, or else what is missing here."""
    require_vision(checkpoint, settings)
    model = checkpoint.config.get("architecture", "unnamed")
    faults = [f"{package} ({fault})" for package in PACKAGES if (fault := _fault(package))]
    reason = (
        f"needs packages that cannot be imported here: {', '.join(faults)}"
        if faults
        else "calls torch's attention by itself, so that no backend could be chosen or proven for it"
    )
    raise CheckpointError(
        f"{checkpoint.name}: timm's model {model!r} {reason}: use a checkpoint in an architecture of transformers, "
        "such as vit, dinov2 or siglip"
    )


def _fault(package: str) -> str:
    """Why a package cannot be imported; empty when it can."""
    try:
        import_module(package)
    except Exception as error:  # a torchvision of another torch fails in its own ways
        return " ".join(str(error).split())
    return ""
