"""Write the demo model in the ordinary transformers layout, with measured figures and a model card."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import CLIPModel, CLIPTokenizer

from encoder.demo.evaluate import Accuracy, image_side, measure
from encoder.demo.pixels import MEAN, STD
from encoder.demo.scenes import COLOURS, SHAPES, UNSEEN
from encoder.demo.tokenizer import save_tokenizer, write_json


def preprocessor_config(side: int) -> dict[str, object]:
    """The fields that transformers' CLIPImageProcessor reads."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }


def round_to_half(model: CLIPModel) -> None:
    """Round every weight to what float16 can hold, so that a float16 replica holds the very same weights."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.half().float())


def export(model: CLIPModel, tokenizer: CLIPTokenizer, folder: Path, training: dict[str, float]) -> Accuracy:
    """Write checkpoint, tokenizer, preprocessing, metrics and card to `folder`; return what was measured.

    The figures are measured on the weights as they are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    round_to_half(model)
    accuracy = measure(model, tokenizer, scale=4)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written as its owner's alone
    save_tokenizer(tokenizer, folder)
    write_json(folder / "preprocessor_config.json", preprocessor_config(image_side(model)))
    write_json(folder / "metrics.json", {"training": training, "accuracy": asdict(accuracy)})
    write_card(folder)
    return accuracy


def write_card(folder: Path) -> None:
    """Write the model card from the folder's `metrics.json` and `config.json`."""
    metrics = json.loads((folder / "metrics.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    accuracy, training = metrics["accuracy"], metrics["training"]
    vision, text = config["vision_config"], config["text_config"]
    shown = {name: f"{100 * value:.1f} %" for name, value in accuracy.items() if name != "pictures"}
    pictures = accuracy["pictures"]
    unseen = ", ".join(sorted(str(thing) for thing in UNSEEN))
    card = f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: zero-shot-image-classification
---
# The vitfleet demo model

A small CLIP that knows coloured shapes, how many there are, and how two of them lie to each other. It lets the service
start, answer and be tested without a download. It knows nothing else of the world.

- Shapes: {", ".join(SHAPES)}. Colours: {", ".join(COLOURS)}. Counts: two, three, four. \
Relations: left, right, above, below.
- Vision: {vision["image_size"]} px, patch {vision["patch_size"]}, width {vision["hidden_size"]}, \
{vision["num_hidden_layers"]} layers, {vision["num_attention_heads"]} heads. Text: context \
{text["max_position_embeddings"]}, width {text["hidden_size"]}, {text["num_hidden_layers"]} layers, \
{text["num_attention_heads"]} heads, causal, {text["vocab_size"]} tokens. \
Embeddings: {config["projection_dim"]} numbers.
- Weights: float32, each rounded to a float16 value. Padding has a token of its own, whose embedding was never trained.
- Trained by `python -m encoder.demo.train`: {training["steps"]} steps of CLIP's contrastive loss on drawn pictures, \
seed {training["seed"]}, {training["minutes"]} minutes of wall time on two CPU cores shared with other \
work, {training["processor_minutes"]} minutes of processor time without the drawing.

## Zero-shot accuracy on held-out pictures

| what | candidates | chance | pictures | right |
|---|---|---|---|---|
| one coloured shape | all 64 | 1.6 % | {pictures["singles"]} | {shown["singles"]} |
| … of which combinations seen in training | all 64 | 1.6 % | | {shown["singles_seen"]} |
| … of which combinations never seen | all 64 | 1.6 % | | {shown["singles_unseen"]} |
| two things: relation, order or colours swapped | 4 | 25 % | {pictures["relations"]} | {shown["relations"]} |
| … among all ways to put the same words together | 9 | 11.1 % | | {shown["relations_of_all"]} |
| counts, one to four | 4 | 25 % | {pictures["counts"]} | {shown["counts"]} |

Never seen in training: {unseen}.

## What a dropped mask does

| text tower of the same model | relations right |
|---|---|
| as it should be | {shown["relations"]} |
| no mask, texts padded to the whole context | {shown["relations_unmasked_padded"]} |
| no causal mask, texts without padding | {shown["relations_unmasked"]} |

The figures are in `metrics.json`; the script that trains the model measures and writes them.
"""
    (folder / "README.md").write_text(card)
