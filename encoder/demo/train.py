"""Train the demo model and write it to `encoder/demo/model/`: `python -m encoder.demo.train`."""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPModel, CLIPTokenizer

from encoder.demo import demo_model_path
from encoder.demo.draw import draw
from encoder.demo.evaluate import measure
from encoder.demo.export import export
from encoder.demo.pixels import to_pixels
from encoder.demo.scenes import caption, training_scenes
from encoder.demo.tokenizer import build_tokenizer
from encoder.demo.towers import ALL_PATCHES, SIDE, new_model, training_image_embeddings


@dataclass(frozen=True)
class Stage:
    """Some steps of one kind: what a batch shows, and how many patches of a picture the model sees."""

    steps: int
    pairs: int  # each brings eight pictures: its hard negatives are in the batch
    singles: int
    counts: int
    patches: int


# Colours and shapes first, then how two things lie to each other, at last whole pictures as they are served.
STAGES = (
    Stage(steps=400, pairs=0, singles=56, counts=24, patches=ALL_PATCHES // 2),
    Stage(steps=2600, pairs=8, singles=24, counts=16, patches=ALL_PATCHES // 2),
    Stage(steps=300, pairs=8, singles=24, counts=16, patches=ALL_PATCHES),
)
SCHEDULE = [stage for stage in STAGES for _ in range(stage.steps)]
MUON_RATE, ADAM_RATE, WEIGHT_DECAY, WARMUP, COOLDOWN = 3e-3, 1e-3, 0.05, 50, 0.4


class Batches(Dataset[tuple[torch.Tensor, list[str]]]):
    """Batch `step` of pixels, uint8 [N, 3, SIDE, SIDE], and captions; drawn afresh, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return len(SCHEDULE)

    def __getitem__(self, step: int) -> tuple[torch.Tensor, list[str]]:
        rng, stage = np.random.default_rng([self.seed, step]), SCHEDULE[step]
        scenes = training_scenes(rng, stage.pairs, stage.singles, stage.counts)
        pixels = torch.stack([to_pixels(draw(scene, rng), SIDE) for scene in scenes])
        return pixels, [caption(scene, rng) for scene in scenes]


class Optimizer:
    """Muon for the layers' matrices, AdamW for the rest.

    Embeddings are not decayed, so that the padding's, which no gradient ever reaches, stays as it was drawn.
    """

    def __init__(self, model: CLIPModel) -> None:
        named = dict(model.named_parameters())
        hidden = [n for n, p in named.items() if p.ndim == 2 and ".layers." in n]
        decayed = [n for n in named if n.endswith("projection.weight")]
        kept = [n for n in named if n not in {*hidden, *decayed}]
        adam_groups = [
            {"params": [named[n] for n in decayed], "weight_decay": WEIGHT_DECAY},
            {"params": [named[n] for n in kept], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(adam_groups, lr=ADAM_RATE, betas=(0.9, 0.98))
        self.muon = torch.optim.Muon(
            [named[n] for n in hidden], lr=MUON_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        )

    def step(self, share: float) -> None:
        """Take one step at `share` of the full learning rates, and clear the gradients."""
        for optimizer, rate in ((self.adam, ADAM_RATE), (self.muon, MUON_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad()


def rate_share(step: int, steps: int) -> float:
    """The share of the full learning rate: a linear rise, a plateau, and a linear fall over the last COOLDOWN."""
    return min(1.0, (step + 1) / WARMUP, 0.01 + (steps - step) / (steps * COOLDOWN))


def clip_loss(model: CLIPModel, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """CLIP's contrastive loss of unit embeddings [N, D], picture i and text i belonging together."""
    logits = model.logit_scale.exp() * images @ texts.T
    target = torch.arange(len(logits))
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


def train(model: CLIPModel, tokenizer: CLIPTokenizer, seed: int, measure_every: int) -> None:
    """Train `model` in place over the whole schedule, printing the loss as it goes."""
    optimizer, steps, losses = Optimizer(model), len(SCHEDULE), []
    start = time.monotonic()
    model.train()
    for step, (pixels, texts) in enumerate(DataLoader(Batches(seed), batch_size=None, num_workers=1)):
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        rows = model.get_text_features(tokens.input_ids, tokens.attention_mask).pooler_output
        images = training_image_embeddings(model, pixels, SCHEDULE[step].patches)
        loss = clip_loss(model, images, normalize(rows, dim=-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(rate_share(step, steps))
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))  # CLIP's own bound
        losses.append(loss.item())
        done = step + 1
        if done % 50 == 0:
            mean, minutes = sum(losses[-50:]) / 50, (time.monotonic() - start) / 60
            print(
                f"step {done}/{steps} loss {mean:.3f} scale {model.logit_scale.exp():.1f} {minutes:.1f} min", flush=True
            )
        if done % measure_every == 0 and done < steps:
            model.eval()
            print(measure(model, tokenizer), flush=True)
            model.train()
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model, measure it, and write its folder.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="torch threads; one more process draws the pictures")
    parser.add_argument(
        "--measure-every", type=int, default=500, help="steps between measurements on held-out pictures"
    )
    parser.add_argument("--out", type=Path, default=demo_model_path())
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    start = time.monotonic()
    tokenizer = build_tokenizer()
    model = new_model(tokenizer)
    train(model, tokenizer, arguments.seed, arguments.measure_every)
    facts = {
        "steps": len(SCHEDULE),
        "seed": arguments.seed,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "processor_minutes": round(time.process_time() / 60, 1),  # of the training process, without the drawing's
    }
    print(export(model, tokenizer, arguments.out, facts))


if __name__ == "__main__":
    main()
