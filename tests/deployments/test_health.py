"""When a replica says that it is well: by its traffic, by a probe, and never with a forward that is stuck."""

import asyncio
import threading

import pytest

from encoder.errors import EncoderError, NotReady
from tests.deployments.formula import FormulaEngine, seed_of
from tests.deployments.plain_server import images, serving
from tests.deployments.test_service import until


class TestHealth:
    async def test_a_forward_that_works(self):
        engine = FormulaEngine()
        async with serving(engine) as (_, core):
            await core.check_health()
        assert engine.probes == 1

    async def test_traffic_is_proof_enough(self):
        engine = FormulaEngine()
        async with serving(engine, health_period_s=60.0) as (client, core):
            await client.EncodeImages(images(b"a"))
            await core.check_health()
        assert engine.probes == 0

    async def test_old_traffic_is_not(self):
        engine = FormulaEngine()
        async with serving(engine, health_period_s=0.01) as (client, core):
            await client.EncodeImages(images(b"a"))
            await asyncio.sleep(0.02)
            await core.check_health()
        assert engine.probes == 1

    async def test_a_stalled_forward_thread(self):
        engine = FormulaEngine()
        engine.gate.clear()
        async with serving(engine, health_forward_timeout_s=0.05) as (client, core):
            stuck = client.EncodeImages(images(b"a"))
            await until(lambda: core._room.items == 1)
            with pytest.raises(NotReady, match="stalled"):
                await core.check_health()
            engine.gate.set()
            await stuck

    async def test_a_lane_that_is_stalled_beside_one_that_works(self):
        """Traffic through the one is no proof of the other."""
        gates = {seed_of(data): threading.Event() for data in (b"first", b"stuck")}

        class StuckInOneLane(FormulaEngine):
            def forward(self, items, **how):
                for item in items:
                    gates.get(item.seed, self.gate).wait(20)
                return super().forward(items, **how)

        engine = StuckInOneLane()
        engine.lanes, engine.lane_batch = 2, 1
        async with serving(engine, health_period_s=60.0, health_forward_timeout_s=0.2) as (client, core):
            first = client.EncodeImages(images(b"first"))  # it has the whole device, so that what comes must wait
            await until(lambda: core._pipeline._batcher.longest_forward_s() > 0)
            waiting = [client.EncodeImages(images(data)) for data in (b"stuck", b"works")]
            await until(lambda: core._pipeline._batcher.waiting == 2)
            gates[seed_of(b"first")].set()
            await asyncio.gather(first, waiting[1])
            await core.check_health()
            await asyncio.sleep(0.25)
            await client.EncodeImages(images(b"works too"))
            with pytest.raises(NotReady, match="stalled"):
                await core.check_health()
            gates[seed_of(b"stuck")].set()
            await waiting[0]
            await core.check_health()
        assert engine.probes == 0

    async def test_a_broken_device(self):
        engine = FormulaEngine()
        engine.probe_error = EncoderError("NaN")
        async with serving(engine) as (_, core):
            with pytest.raises(EncoderError, match="NaN"):
                await core.check_health()

    async def test_large_requests_are_followed_by_a_trim(self, monkeypatch):
        trims: list[str] = []
        monkeypatch.setattr("deployments.service.trim", lambda: trims.append(threading.current_thread().name))
        monkeypatch.setattr("deployments.service.TRIM_AFTER_BYTES", 10_000)
        async with serving(FormulaEngine()) as (client, core):
            await client.EncodeImages(images(b"a" * 100))
            await core.check_health()
            assert trims == []
            await client.EncodeImages(images(b"a" * 10_000))
            await core.check_health()
            await core.check_health()
        assert len(trims) == 1 and trims[0] != threading.main_thread().name
