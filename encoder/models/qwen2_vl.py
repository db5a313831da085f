"""Qwen2-VL's vision tower: every layer attends within the picture; see `encoder.models.qwen_vl`."""

from typing import Any

from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from encoder.models.checkpoint import Checkpoint
from encoder.models.qwen_vl import QwenVision
from encoder.models.tower import Tower
from encoder.settings import EngineSettings


class Qwen2Vision(QwenVision):
    """Patches of 14, rotary positions."""

    family = "qwen2_vl"
    config_class = Qwen2VLVisionConfig
    model_class = Qwen2VisionTransformerPretrainedModel

    @staticmethod
    def width(vision: Any) -> int:
        return int(vision.embed_dim)

    @staticmethod
    def dimensions(vision: Any) -> int:
        return int(vision.hidden_size)


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision tower of a Qwen2-VL checkpoint."""
    return Qwen2Vision(checkpoint, settings)
