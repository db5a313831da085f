"""AIMv2: the vision models, and the model with a text half (aimv2-*-lit).

The model with both halves is pooled by its attention head and projected, texts at the first end-of-text token. The
vision models come without a head and their card takes the patch features; their vector is the mean of these, after the
last norm.
"""

from typing import Any

import torch
from transformers import Aimv2Config, Aimv2Model, Aimv2VisionConfig, Aimv2VisionModel
from transformers.models.aimv2.modeling_aimv2 import build_2d_sinusoidal_position_embedding

from encoder.attention.backend import MaskNeed
from encoder.models.checkpoint import Checkpoint
from encoder.models.halves import TextTower, one_side
from encoder.models.tower import Inputs, Tower, TowerOutput, TowerSpec
from encoder.models.vision_only import VisionOnlyTower, require_vision
from encoder.models.weights import learned_scale, load_weights
from encoder.preprocess.text import TextPipeline
from encoder.preprocess.transform import ImageTransform
from encoder.settings import EngineSettings

FEATURES = "last layer, after the last norm"


class Half(torch.nn.Module):
    """One half of the model with both, and its projection."""

    def __init__(self, tower: torch.nn.Module, projection: torch.nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.projection = projection


class Aimv2Vision(VisionOnlyTower):
    """A vision model: pooled by its head where it has one, else by the mean of the patches."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config: Any = Aimv2VisionConfig.from_dict(checkpoint.config)
        self.read_preprocessing(checkpoint, settings, config)
        self.has_head = config.use_head
        self.spec = self.describe_as("aimv2", config, FEATURES)
        self.module = load_weights(checkpoint, Aimv2VisionModel)
        fix_grid(self.module, self.transform.output_size)

    def read_preprocessing(self, checkpoint: Checkpoint, settings: EngineSettings, vision: Any) -> None:
        """Reads the preprocessing; raises CheckpointError when its size is not the model's."""
        self.patch_size = one_side(checkpoint.name, "patch_size", vision.patch_size)
        self.transform = ImageTransform.from_config(checkpoint.image_config(), settings.pixel_mode)
        if not vision.is_native:
            self.require_size(checkpoint.name, vision.image_size)

    def forward(self, inputs: Inputs) -> TowerOutput:
        found = self.module(pixel_values=inputs["pixel_values"])
        hidden = found.last_hidden_state
        return TowerOutput(found.pooler_output if self.has_head else hidden.float().mean(dim=1), hidden)


class Aimv2DualVision(Aimv2Vision):
    """The vision half: pooled by its head, projected."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config: Any = Aimv2Config.from_dict(checkpoint.config)
        vision = config.vision_config
        self.read_preprocessing(checkpoint, settings, vision)
        self.spec = TowerSpec(
            family="aimv2",
            tower="vision",
            dimensions=config.projection_dim,
            head_dims=frozenset({vision.hidden_size // vision.num_attention_heads}),
            mask_needs=frozenset({MaskNeed.NONE}),
            logit_scale=min(learned_scale(checkpoint), config.max_logit_scale),
            token_dimensions=vision.hidden_size,
            token_features=f"{FEATURES}, before the pooling head, not projected",
        )
        whole: Any = load_weights(checkpoint, Aimv2Model)
        self.module = Half(whole.vision_model, whole.visual_projection)
        fix_grid(self.module.tower, self.transform.output_size)

    def forward(self, inputs: Inputs) -> TowerOutput:
        module: Any = self.module
        found = module.tower(pixel_values=inputs["pixel_values"])
        return TowerOutput(module.projection(found.pooler_output), found.last_hidden_state)


class Aimv2Text(TextTower):
    """Causal, with padding masked; pooled at the first end-of-text token, projected."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config: Any = Aimv2Config.from_dict(checkpoint.config)
        text = config.text_config
        self.spec = TowerSpec(
            family="aimv2",
            tower="text",
            dimensions=config.projection_dim,
            head_dims=frozenset({text.hidden_size // text.num_attention_heads}),
            mask_needs=frozenset({MaskNeed.CAUSAL, MaskNeed.KEY_PADDING}),
            max_tokens=text.max_position_embeddings,
            logit_scale=min(learned_scale(checkpoint), config.max_logit_scale),
        )
        self.pipeline = TextPipeline.from_folder(checkpoint.folder, text.max_position_embeddings)
        self.pipeline.check_vocabulary(checkpoint.name, text.vocab_size)
        whole: Any = load_weights(checkpoint, Aimv2Model)
        # Its attention says `is_causal=False` in both towers and leaves the triangle to the mask (transformers 5.24);
        # a mask of padding alone, as it is given here, would lose it.
        for layer in whole.text_model.encoder.layers:
            layer.attention.is_causal = True
        self.module = Half(whole.text_model, whole.text_projection)

    def forward(self, inputs: Inputs) -> TowerOutput:
        module: Any = self.module
        found = module.tower(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return TowerOutput(module.projection(found.pooler_output))


def fix_grid(module: Any, size: tuple[int, int]) -> None:
    """Gives a model for any resolution the positions of pictures of `size` (height, width), as learned ones.

    Its own sinusoids are computed in float64 at every forward, which not every device has.
    """
    embeddings = module.embeddings
    if not embeddings.config.is_native:
        return
    side, width = embeddings.patch_size, embeddings.config.hidden_size
    rows_first = build_2d_sinusoidal_position_embedding(size[0] // side, size[1] // side, embed_dim=width)
    # AIMv2 was trained with the columns' half before the rows' (transformers 5.24, `Aimv2VisionEmbeddings`).
    positions = torch.cat([rows_first[:, width // 2 :], rows_first[:, : width // 2]], dim=1)
    learned = torch.nn.Embedding(len(positions), width, _weight=positions)
    embeddings.position_embedding = learned.requires_grad_(False)
    embeddings.position_ids = torch.arange(len(positions))[None]
    embeddings.config.is_native = False


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """A tower of an AIMv2 checkpoint; raises CheckpointError for the text tower of a vision model."""
    if checkpoint.model_type == "aimv2_vision_model":
        require_vision(checkpoint, settings)
        return Aimv2Vision(checkpoint, settings)
    return Aimv2DualVision(checkpoint, settings) if settings.tower == "vision" else Aimv2Text(checkpoint, settings)
