"""MetaCLIP 2: CLIP's towers with a vocabulary of many languages.

The text is pooled at the first `eos_token_id`, which rightly is 2 here: the rule that CLIP keeps for that number does
not hold (transformers 5.24, `MetaClip2TextModel`).
"""

from typing import Any

from transformers import MetaClip2Config, MetaClip2TextModelWithProjection, MetaClip2VisionModelWithProjection

from encoder.models.checkpoint import Checkpoint
from encoder.models.clip import ClipText, ClipVision
from encoder.models.tower import Tower
from encoder.settings import EngineSettings


class MetaClip2Vision(ClipVision):
    """As CLIP's."""

    family = "metaclip_2"
    config_class = MetaClip2Config
    model_class = MetaClip2VisionModelWithProjection


class MetaClip2Text(ClipText):
    """As CLIP's, but for the rule of the end-of-text token."""

    family = "metaclip_2"
    config_class = MetaClip2Config
    model_class = MetaClip2TextModelWithProjection


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision or the text tower of a MetaCLIP 2 checkpoint."""
    if settings.tower == "vision":
        return MetaClip2Vision(checkpoint, settings)
    return MetaClip2Text(checkpoint, settings)
