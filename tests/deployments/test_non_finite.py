"""A forward that gives NaN: an INTERNAL error for each item, counted in the replica's report, and never a vector."""

import threading

import numpy as np
import pytest
import torch

from encoder.demo import demo_pictures
from encoder.engine import Engine
from encoder.errors import EncoderError
from encoder.settings import EngineSettings
from encoder.v1 import encoder_pb2 as pb
from tests.deployments.plain_server import images, serving


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_it_is_never_sent(dtype: str) -> None:
    settings = {"runner": "eager", "buckets": [1, 4], "threads": 1, "self_check": False, "dtype": dtype}
    engine = Engine.load(EngineSettings.model_validate(settings))
    pictures = [path.read_bytes() for path in demo_pictures()[:3]]
    with torch.no_grad():
        next(engine._tower.module.parameters()).fill_(float("inf"))
    assert not np.isfinite(engine.forward([engine.prepare_image(pictures[0])]).vectors).all()
    engine.gate = engine.decode_gate = threading.Event()  # type: ignore[attr-defined]  # `serving` opens them at its end
    async with serving(engine) as (client, _):  # type: ignore[arg-type]
        pooled = await client.EncodeImages(images(*pictures))
        features = await client.EncodeImages(images(*pictures[:2], output=pb.OUTPUT_KIND_TOKENS))
        (replica,) = (await client.GetBackendReport(pb.GetBackendReportRequest())).replicas
    results = [*pooled.results, *features.results]
    assert [(result.WhichOneof("outcome"), result.error.code) for result in results] == [("error", 13)] * 5
    assert all("NaN or infinity" in result.error.message for result in results)
    assert (replica.counters["non_finite"], replica.counters["item_errors"]) == (5, 5)
    with pytest.raises(EncoderError, match="NaN or infinity"):
        engine.probe()
