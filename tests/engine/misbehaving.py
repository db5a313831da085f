"""Attention backends that are wrong in ways that were reported of real ones; registered from outside by the tests."""

from dataclasses import replace
from typing import ClassVar

import torch

from encoder.attention.backend import ALL_NEEDS, AttentionBackend, AttentionCall, Capabilities
from encoder.attention.reference import ReferenceAttention
from encoder.device import Device


class _Wrong(AttentionBackend):
    """Claims to take everything."""

    capabilities: ClassVar[Capabilities] = Capabilities(ALL_NEEDS, frozenset({"float32", "bfloat16"}))

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        return None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return ReferenceAttention().attend(self.spoilt(call))

    def spoilt(self, call: AttentionCall) -> AttentionCall:
        return call


class DropsMask(_Wrong):
    name = "drops-mask"

    def spoilt(self, call: AttentionCall) -> AttentionCall:
        return replace(call, mask=None)


class IgnoresCausal(_Wrong):
    name = "ignores-causal"

    def spoilt(self, call: AttentionCall) -> AttentionCall:
        return replace(call, is_causal=False)


class DropsEveryMask(_Wrong):
    """What a custom attention name without a mask entry gets from transformers."""

    name = "drops-every-mask"

    def spoilt(self, call: AttentionCall) -> AttentionCall:
        return replace(call, mask=None, is_causal=False)


class WrongScale(_Wrong):
    """The scale of a padded head dim."""

    name = "wrong-scale"

    def spoilt(self, call: AttentionCall) -> AttentionCall:
        return replace(call, scale=128**-0.5)


class MaskIgnoredPast512(_Wrong):
    name = "mask-ignored-past-512"

    def spoilt(self, call: AttentionCall) -> AttentionCall:
        return replace(call, mask=None) if call.key.shape[-2] > 512 else call


class UniformAverage(_Wrong):
    name = "uniform-average"

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return call.value.mean(dim=2, keepdim=True).expand_as(call.query)


class GivesNan(_Wrong):
    name = "gives-nan"

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return torch.full_like(call.query, float("nan"))


class GoodTwin(_Wrong):
    """Not wrong at all: shows that the tests' frame is not what fails."""

    name = "good-twin"


WRONG: dict[str, type[_Wrong]] = {
    kind.name: kind
    for kind in (DropsMask, IgnoresCausal, DropsEveryMask, WrongScale, MaskIgnoredPast512, UniformAverage, GivesNan)
}
