"""The engine's proof at start: what the reference says of the golden items, and what the chosen path makes of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from encoder.attention.dispatch import Dispatcher
from encoder.attention.registry import backend_class
from encoder.attention.resolve import ResolvedBackend
from encoder.device import Device, open_device
from encoder.graphs.answers import Rows
from encoder.graphs.bucketed import BucketedForward
from encoder.graphs.eager import EagerRunner
from encoder.graphs.runner import Bucket
from encoder.models.tower import Tower
from encoder.selfcheck import CheckResult, check_attention, check_vectors


class StartupProof:
    """Made before the weights are moved or rounded: the golden items go through float32 math attention on the CPU."""

    def __init__(self, tower: Tower[Any], golden: Sequence[Any]) -> None:
        self._tower = tower
        self._golden = golden
        capabilities = backend_class("reference").capabilities
        oracle = ResolvedBackend("reference", "platform", "the oracle of the self-check", capabilities)
        runner = EagerRunner(tower, Dispatcher(oracle), open_device("cpu"), torch.float32)
        output, _ = runner.run(Bucket(len(golden)), tower.gather(golden), tokens=True)
        self.truth = Rows.of(tower, golden, output)

    def attention(self, dispatcher: Dispatcher, device: Device, dtype: torch.dtype) -> list[CheckResult]:
        """Each mask need of the tower alone, at each of its head dims, on sharp queries and keys."""
        spec = self._tower.spec
        return [
            check_attention(
                dispatcher, device=device.torch_name, dtype=dtype, head_dim=head_dim, need=need, tower=spec.tower
            )
            for head_dim in sorted(spec.head_dims)
            for need in sorted(spec.mask_needs)
        ]

    def vectors(self, forward: BucketedForward, backend: str) -> list[CheckResult]:
        """The golden items together and one by one, and their features, through what will serve."""
        spec, needs = self._tower.spec, "+".join(sorted(self._tower.spec.mask_needs))
        together = forward.run(self._golden, tokens=bool(spec.token_dimensions))
        alone = [forward.run([item]) for item in self._golden]
        runs = [
            ("vectors, together", together.vectors, self.truth.vectors, together.runner),
            (
                "vectors, one by one",
                np.concatenate([one.vectors for one in alone]),
                self.truth.vectors,
                alone[0].runner,
            ),
        ]
        # An item's features are held together as one long vector.
        for place, (ours, theirs) in enumerate(zip(together.tokens, self.truth.tokens, strict=True)):
            runs.append((f"features of {place}", ours.reshape(1, -1), theirs.reshape(1, -1), together.runner))
        return [
            check_vectors(
                found, expected, tower=spec.tower, backend=backend, runner=runner,
                dtype=forward.precision, mask_need=needs, detail=detail,
            )
            for detail, found, expected, runner in runs
        ]  # fmt: skip
