"""A pool whose replicas' forwards hang for as long as a file named after their process id exists.

Their processes answer all the same: only the forward is stuck, as it is with a device that hangs.
"""

import os
import time
from pathlib import Path
from typing import Any

from ray.serve import Application

from deployments.pool import PoolReplica, pool_deployment
from deployments.service import EncoderCore
from deployments.settings import parse_pool_settings

BUILDER = "tests.fleet.stuck:build_pool"


class StuckReplica(PoolReplica):
    """`folder` is where the file may appear."""

    async def __init__(self, settings: dict[str, Any], folder: str) -> None:  # type: ignore[misc]  # Serve awaits it
        self._file = Path(folder) / str(os.getpid())
        await super().__init__(settings)

    async def _start(self) -> EncoderCore:
        core = await super()._start()
        engine: Any = core._engine
        forward = engine.forward

        def stuck_forward(*arguments: Any, **named: Any) -> Any:
            while self._file.exists():
                time.sleep(0.05)
            return forward(*arguments, **named)

        engine.forward = stuck_forward
        return core


def build_pool(args: dict[str, Any]) -> Application:
    """As `deployments.app.build_pool`, with `stuck_folder` beside the pool's settings."""
    folder = args.pop("stuck_folder")
    settings = parse_pool_settings(args)
    deployment = pool_deployment(settings).options(func_or_class=StuckReplica)
    return deployment.bind(settings.model_dump(mode="json"), folder)
