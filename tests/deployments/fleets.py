"""Three local fleets that start side by side: HAProxy, the stock proxy, and one whose model is not there."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from deployments.events import FleetEvent
from deployments.local import LocalFleet
from deployments.settings import LocalSettings, ServeSettings

ENGINE = {"model": "demo", "device": "cpu", "dtype": "float32", "runner": "eager", "buckets": [1, 8], "threads": 1}
VISION, TEXT = "vision-cpu", "text"
MAX_TEXTS = 40


def write_config(path: Path) -> Path:
    """Two replicas for pictures, one for texts with little room."""
    pools = [
        {"name": VISION, "num_replicas": 2, "engine": {**ENGINE, "tower": "vision"}},
        {
            "name": TEXT,
            "engine": {**ENGINE, "tower": "text"},
            "max_items_per_request": MAX_TEXTS,
            "max_waiting_items": MAX_TEXTS,
        },
    ]
    common = {"num_cpus": 0.5, "health_period_s": 1.0, "health_forward_timeout_s": 20.0}
    applications = [
        {
            "name": pool["name"],
            "route_prefix": f"/{pool['name']}",
            "import_path": "deployments.app:build_pool",
            "args": {**common, **pool},
        }
        for pool in pools
    ]
    path.write_text(yaml.safe_dump({"applications": applications}))
    return path


@dataclass
class Started:
    """A fleet, what it told while it started, and the error it ended with."""

    fleet: LocalFleet
    events: list[FleetEvent] = field(default_factory=list)
    error: Exception | None = None


def start_side_by_side(folder: Path) -> dict[str, Started]:
    """Starts all three at once and waits; errors are kept, not raised."""
    config = write_config(folder / "config.yaml")
    free = {"grpc_port": 0, "http_port": 0, "drain_period_s": 0.5}
    fleets = {
        "haproxy": LocalSettings(config=config, serve=ServeSettings(proxy="haproxy", **free), router_port=0),
        "stock": LocalSettings(config=config, serve=ServeSettings(proxy="stock", **free), router_port=0),
        "broken": LocalSettings(
            config=config, serve=ServeSettings(**free), engine={"model": str(folder / "nowhere")}, router=False
        ),
    }
    started = {}
    for name, settings in fleets.items():
        events: list[FleetEvent] = []
        started[name] = Started(LocalFleet(settings, events.append), events)
    threads = [threading.Thread(target=_start, args=(one,)) for one in started.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return started


def _start(started: Started) -> None:
    try:
        started.fleet.start()
    except Exception as error:
        started.error = error
