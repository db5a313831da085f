"""What a fleet tells while it starts and runs; travels as one JSON line."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

Stage = Literal["ray", "serve", "pool", "router", "ready", "failed"]

# Begins the stage of a replica whose engine cannot be loaded; the reason follows.
FAILED_STAGE = "failed: "


@dataclass(frozen=True)
class FleetEvent:
    """One step; `seconds` is the time since the start.

    `pool` is set for stage "pool", and `replica` when it is one replica that speaks. "ready" carries the router's port
    in `port` (0 without a router). "failed" is the last event.
    """

    stage: Stage
    message: str
    seconds: float
    pool: str = ""
    replica: str = ""
    port: int = 0

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "FleetEvent":
        return cls(**json.loads(line))
