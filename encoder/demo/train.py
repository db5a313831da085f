"""Train the demo model and write it to `encoder/demo/model/`: `python -m encoder.demo.train`."""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from encoder.demo import demo_model_path
from encoder.demo.draw import draw
from encoder.demo.evaluate import measure
from encoder.demo.export import export
from encoder.demo.pixels import normalise, to_pixels
from encoder.demo.scenes import caption, training_scenes
from encoder.demo.tokenizer import CONTEXT, build_tokenizer

SIDE, PATCH, WIDTH, HEADS, PROJECTION = 64, 8, 128, 2, 64
PAIRS, SINGLES, COUNTS = 16, 48, 32
LEARNING_RATE, WEIGHT_DECAY, WARMUP = 1e-3, 0.05, 100


class Batches(Dataset[tuple[torch.Tensor, list[str]]]):
    """Batch `step` of pixels, uint8 [N, 3, SIDE, SIDE], and captions; drawn afresh, the same for the same seed."""

    def __init__(self, steps: int, seed: int) -> None:
        self.steps, self.seed = steps, seed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, list[str]]:
        rng = np.random.default_rng([self.seed, step])
        scenes = training_scenes(rng, PAIRS, SINGLES, COUNTS)
        pixels = torch.stack([to_pixels(draw(scene, rng), SIDE) for scene in scenes])
        return pixels, [caption(scene, rng) for scene in scenes]


def new_model(tokenizer: CLIPTokenizer) -> CLIPModel:
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "projection_dim": PROJECTION,
    }
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,  # the true id: transformers pools at its first place
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"image_size": SIDE, "patch_size": PATCH}
    config = CLIPConfig(text_config=tower | text, vision_config=tower | vision, projection_dim=PROJECTION)
    return CLIPModel(config)


def new_optimizer(model: CLIPModel) -> torch.optim.AdamW:
    """AdamW that decays matrices alone; embeddings keep their scale, above all the padding's, which never trains."""
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and "embedding" not in n]
    kept = [p for n, p in model.named_parameters() if p.ndim <= 1 or "embedding" in n]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))


def rate(step: int, steps: int) -> float:
    """The learning rate of a step: a linear warm-up, then half a cosine down to a fiftieth."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return LEARNING_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def train(model: CLIPModel, tokenizer: CLIPTokenizer, steps: int, seed: int) -> None:
    """Train in place with CLIP's contrastive loss; every batch holds the hard negatives of its pairs."""
    optimizer = new_optimizer(model)
    model.train()
    start, losses = time.monotonic(), []
    for step, (pixels, texts) in enumerate(DataLoader(Batches(steps, seed), batch_size=None, num_workers=1)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        loss = model(tokens.input_ids, normalise(pixels), tokens.attention_mask, return_loss=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))  # CLIP's own bound
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - start
            mean = sum(losses[-50:]) / 50
            print(
                f"step {step + 1}/{steps} loss {mean:.4f} scale {model.logit_scale.exp():.1f} {seconds:.0f} s",
                flush=True,
            )
        if (step + 1) % 400 == 0:
            model.eval()
            print(measure(model, tokenizer), flush=True)
            model.train()
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model and export it.")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=demo_model_path())
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    start = time.monotonic()
    tokenizer = build_tokenizer()
    model = new_model(tokenizer)
    train(model, tokenizer, arguments.steps, arguments.seed)
    minutes = (time.monotonic() - start) / 60
    facts = {"steps": arguments.steps, "seed": arguments.seed, "minutes": round(minutes, 1)}
    print(export(model, tokenizer, arguments.out, facts))


if __name__ == "__main__":
    main()
