"""What a fleet tells while it starts and runs; travels as one JSON line."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

Stage = Literal["ray", "serve", "pool", "router", "ready", "failed"]


@dataclass(frozen=True)
class FleetEvent:
    """One step. `pool` is set for stage "pool"; `seconds` is the time since the start.

    "ready" carries the router's port in `port` (0 without a router).
    """

    stage: Stage
    message: str
    seconds: float
    pool: str = ""
    port: int = 0

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "FleetEvent":
        return cls(**json.loads(line))
