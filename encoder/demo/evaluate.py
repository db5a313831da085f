"""Measure a demo model on held-out pictures, with and without the mask of its text tower."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from transformers import CLIPModel, CLIPTokenizer

from encoder.demo.draw import draw
from encoder.demo.pixels import normalise, to_pixels
from encoder.demo.scenes import (
    NUMBERS,
    SEEN,
    THINGS,
    UNSEEN,
    Scene,
    pick_pair,
    plain_caption,
    relation_candidates,
    siblings,
)

HARD_NEGATIVES = 3  # relation, things or colours swapped
HELD_OUT_SEED = 2_000_003  # training draws from [seed, step] pairs; one number alone is another stream


@dataclass(frozen=True)
class Accuracy:
    """Shares of held-out pictures whose true caption scored highest, in 0..1."""

    singles: float
    singles_seen: float
    singles_unseen: float
    relations: float  # among four captions: the true one and HARD_NEGATIVES
    relations_of_all: float  # among every way to put the two colours, two shapes and a relation together
    counts: float
    relations_unmasked_padded: float
    relations_unmasked: float
    pictures: dict[str, int]


def image_side(model: CLIPModel) -> int:
    """The side of the square pictures a model takes, in pixels."""
    return int(model.vision_model.config.image_size)


def embed_pictures(model: CLIPModel, pictures: Sequence[Image.Image]) -> torch.Tensor:
    """Unit embeddings of pictures, float32 [N, projection_dim]."""
    side = image_side(model)
    pixels = torch.stack([to_pixels(picture, side) for picture in pictures])
    with torch.inference_mode():
        rows = [model.get_image_features(normalise(part)).pooler_output for part in pixels.split(128)]
    return torch.nn.functional.normalize(torch.cat(rows).float(), dim=-1)


def embed_texts(model: CLIPModel, tokenizer: CLIPTokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Unit embeddings of texts, float32 [N, projection_dim], under the causal mask."""
    tokens = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        rows = model.get_text_features(tokens.input_ids, tokens.attention_mask).pooler_output
    return torch.nn.functional.normalize(rows.float(), dim=-1)


def embed_texts_unmasked(
    model: CLIPModel, tokenizer: CLIPTokenizer, texts: Sequence[str], padded: bool
) -> torch.Tensor:
    """As `embed_texts`, but as a backend would that drops the mask: every token attends to every token.

    `padded` fills each text to the whole context and lets it attend to the padding too; otherwise texts of one
    length are embedded together without any padding, so that the causal mask alone is missing.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    fill = "max_length" if padded else False
    rows = tokenizer(list(texts), padding=fill, truncation=True).input_ids
    for index, row in enumerate(rows):
        groups[len(row)].append(index)
    out = torch.empty(len(texts), model.text_projection.out_features)
    for length, members in groups.items():
        ids = torch.tensor([rows[index] for index in members])
        nothing_masked = torch.zeros(len(members), 1, length, length)  # a ready 4-D mask is used as it is
        with torch.inference_mode():
            out[members] = model.get_text_features(ids, nothing_masked).pooler_output.float()
    return torch.nn.functional.normalize(out, dim=-1)


def held_out_singles(per_thing: int, seed: int) -> tuple[list[Scene], list[Image.Image]]:
    rng = np.random.default_rng(seed)
    scenes = [Scene("single", (thing,)) for thing in THINGS for _ in range(per_thing)]
    return scenes, [draw(scene, rng) for scene in scenes]


def held_out_relations(number: int, seed: int) -> tuple[list[Image.Image], list[list[str]]]:
    """Pictures of two things, and for each nine candidate captions (see `relation_candidates`)."""
    rng = np.random.default_rng(seed)
    scenes = []
    for _ in range(number):
        group = siblings(*pick_pair(SEEN, rng))
        scenes.append(group[rng.integers(len(group))])
    return [draw(scene, rng) for scene in scenes], [relation_candidates(scene, rng) for scene in scenes]


def held_out_counts(number: int, seed: int) -> tuple[list[Scene], list[Image.Image]]:
    rng = np.random.default_rng(seed)
    scenes = [Scene("count", (SEEN[rng.integers(len(SEEN))],) * int(rng.integers(2, 5))) for _ in range(number)]
    return scenes, [draw(scene, rng) for scene in scenes]


def right_first(images: torch.Tensor, candidates: torch.Tensor) -> float:
    """The share of pictures [N, D] whose first candidate of [N, K, D] scores above all others; a tie is wrong."""
    scores = torch.einsum("nd,nkd->nk", images, candidates)
    return float((scores[:, 0] > scores[:, 1:].amax(1) + 1e-6).float().mean())


def measure(model: CLIPModel, tokenizer: CLIPTokenizer, scale: int = 1, seed: int = HELD_OUT_SEED) -> Accuracy:
    """Draw held-out pictures and measure zero-shot accuracy; `scale` multiplies the number of pictures."""
    scenes, pictures = held_out_singles(4 * scale, seed)
    labels = embed_texts(model, tokenizer, [plain_caption(Scene("single", (thing,))) for thing in THINGS])
    best = (embed_pictures(model, pictures) @ labels.T).argmax(1)
    right = np.array([THINGS[i] == scene.things[0] for i, scene in zip(best.tolist(), scenes, strict=True)])
    seen = np.array([scene.things[0] not in UNSEEN for scene in scenes])

    pair_pictures, captions = held_out_relations(256 * scale, seed + 1)
    pairs = embed_pictures(model, pair_pictures)
    flat = [text for nine in captions for text in nine]

    def relations(rows: torch.Tensor, wrong: int = HARD_NEGATIVES) -> float:
        return right_first(pairs, rows.view(len(captions), -1, rows.shape[1])[:, : 1 + wrong])

    read = embed_texts(model, tokenizer, flat)

    count_scenes, count_pictures = held_out_counts(128 * scale, seed + 2)
    numbers = []
    for scene in count_scenes:
        true = len(scene.things)
        order = [true, *(n for n in range(1, len(NUMBERS) + 1) if n != true)]
        numbers += [plain_caption(Scene("count" if n > 1 else "single", scene.things[:1] * n)) for n in order]
    by_number = embed_texts(model, tokenizer, numbers).view(len(count_scenes), len(NUMBERS), -1)

    return Accuracy(
        singles=float(right.mean()),
        singles_seen=float(right[seen].mean()),
        singles_unseen=float(right[~seen].mean()),
        relations=relations(read),
        relations_of_all=relations(read, wrong=8),
        counts=right_first(embed_pictures(model, count_pictures), by_number),
        relations_unmasked_padded=relations(embed_texts_unmasked(model, tokenizer, flat, padded=True)),
        relations_unmasked=relations(embed_texts_unmasked(model, tokenizer, flat, padded=False)),
        pictures={"singles": len(scenes), "relations": len(captions), "counts": len(count_scenes)},
    )
