"""One fuzzing run: pictures through a decoder, requests through two engines; what is not an answer is a finding.

A crash is a worker that was lost, a hang what takes longer than the limit, and wrong is whatever is raised that is none
of the project's errors.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import psutil

from deployments.service import EncoderCore
from deployments.settings import parse_pool_settings
from deployments.wire import ReplicaIdentity
from encoder.engine import Engine
from encoder.errors import DecoderLost, InvalidImage
from encoder.preprocess.decode import DecodeLimits, DecodePolicy
from encoder.preprocess.isolation import Decoder
from encoder.settings import parse_engine_settings
from tests.fuzz import requests
from tests.fuzz.corpus import pictures
from tests.fuzz.mutate import mutate

LIMITS = DecodeLimits(max_pixels=1_000_000, max_side=8_000)
HANG_S = 5.0
QUICK = {"model": "demo", "runner": "eager", "buckets": [1, 8], "threads": 1, "self_check": False, "dtype": "float32"}


@dataclass
class Findings:
    """`counts` of what came of the inputs; `faults`: (what happened, the input)."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, bytes]] = field(default_factory=list)


def decode_one(decoder: Decoder, data: bytes, found: Findings) -> None:
    """One file; what is wrong about it goes into `found`."""
    started = time.monotonic()
    try:
        pixels = decoder.decode(data)
    except InvalidImage as error:
        message = str(error)
        found.counts["pictures refused"] += 1
        if "crashed its decoder" in message or "took longer than" in message:
            found.faults.append((message, data))
        elif "\n" in message or len(message) > 400:
            found.faults.append((f"a message that is not one short line: {message!r}", data))
    except DecoderLost as error:
        found.faults.append((str(error), data))
    except Exception as error:
        found.faults.append((f"{type(error).__name__}: {error}", data))
    else:
        found.counts["pictures decoded"] += 1
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.flags.writeable:
            found.faults.append((f"pixels of {pixels.shape} {pixels.dtype}", data))
    if time.monotonic() - started > HANG_S:
        found.faults.append((f"took {time.monotonic() - started:.1f} s", data))


def fuzz_pictures(rng: Random, until: float, found: Findings, decoders: list[Decoder]) -> None:
    while time.monotonic() < until:
        data = mutate(rng, pictures())
        decode_one(rng.choice(decoders), data, found)


async def fuzz_requests(rng: Random, until: float, found: Findings, cores: list[EncoderCore]) -> None:
    while time.monotonic() < until:
        kind = rng.randrange(2)
        request = requests.images_request(rng) if kind == 0 else requests.text_request(rng)
        if rng.random() < 0.5:
            request = requests.parsed(rng, request)
            if request is None:
                found.counts["requests no message"] += 1
                continue
        try:
            async with asyncio.timeout(HANG_S * 4):
                outcome = await requests.attempt(cores[kind], request)
            found.counts[f"requests {outcome}"] += 1
        except Exception as error:
            found.faults.append((f"{type(error).__name__}: {error}", request.SerializeToString()))


def make_decoders() -> list[Decoder]:
    """One that decodes on the thread what it may, one in workers alone, and one that allows truncation."""
    return [
        Decoder(LIMITS, DecodePolicy(), "auto", HANG_S),
        Decoder(LIMITS, DecodePolicy(), "process", HANG_S),
        Decoder(LIMITS, DecodePolicy(allow_truncated=True), "auto", HANG_S),
    ]


def make_core(tower: str) -> EncoderCore:
    """A core around the demo model; belongs to the loop that runs."""
    decode = {"max_pixels": LIMITS.max_pixels, "max_side": LIMITS.max_side, "time_limit_s": HANG_S}
    engine = Engine.load(parse_engine_settings({**QUICK, "tower": tower, "decode": decode}))
    settings = parse_pool_settings({"name": tower, "engine": {}, "max_items_per_request": 5})
    return EncoderCore(engine, settings, ReplicaIdentity(tower, "r", "n", "h", 1))


def memory_mib() -> float:
    """Resident memory of this process and all its workers."""
    own = psutil.Process()
    return sum(one.memory_info().rss for one in [own, *own.children()]) / 2**20
