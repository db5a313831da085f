"""`vitfleet serve` and `vitfleet demo`: a whole fleet on this machine, with progress while it starts."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
from rich.console import Console
from rich.table import Table

from deployments.cli.show import console, show_report, show_timings
from deployments.cli.zero_shot import logit_scale, probabilities
from deployments.events import FleetEvent
from deployments.local import FleetAddresses, LocalFleet
from deployments.settings import LOCAL_CONFIG, LocalSettings, ProxyKind, ServeSettings
from encoder.client import EncoderClient
from encoder.demo import demo_labels, demo_pictures
from encoder.models.checkpoint import folder_of


def run_serve(
    *,
    config: Path | None,
    engine: dict[str, object],
    host: str,
    port: int,
    serve_port: int,
    http_port: int,
    proxy: ProxyKind,
) -> None:
    """Serves until SIGINT or SIGTERM, then stops everything that it started.

    Raises CheckpointError at once for a model that is neither a folder nor a hub's.
    """
    if isinstance(model := engine.get("model"), str):
        folder_of(model)
    serve = ServeSettings(proxy=proxy, host=host, grpc_port=serve_port, http_port=http_port, drain_period_s=1.0)
    settings = LocalSettings(config=config or LOCAL_CONFIG, serve=serve, engine=engine, router_port=port)
    stopper = Stopper()
    with stopper.running(LocalFleet(settings, Progress(Console(stderr=True)))) as addresses:
        print(how_to_call(addresses.router), flush=True)
        stopper.wait()
        print("stopping", file=sys.stderr, flush=True)


def run_demo(*, proxy: ProxyKind) -> None:
    """Start, classify the sample pictures, show, stop; exit code 1 when a picture is named wrongly."""
    serve = ServeSettings(proxy=proxy, grpc_port=0, http_port=0, drain_period_s=1.0)
    settings = LocalSettings(serve=serve, router_port=0)
    to = console()
    started = time.perf_counter()
    fleet = LocalFleet(settings, Progress(to))
    with Stopper().running(fleet) as addresses:
        to.print(f"ready after {time.perf_counter() - started:.1f} s; the router answers at {addresses.router}\n")
        right = classify_samples(addresses.router, to)
    left = len(fleet.processes())
    to.print(f"stopped; {left or 'no'} process{'es' if left > 1 else ''} left")
    if not right or left:
        raise SystemExit(1)


def classify_samples(address: str, to: Console) -> bool:
    """Encodes the sample pictures and their labels, shows what came out; whether every picture got its own label."""
    pictures, own = demo_pictures(), demo_labels()
    labels = sorted(set(own))
    with EncoderClient(address) as client:
        images = client.encode_images(pictures, on_error="mask")
        texts = client.encode_text(labels, on_error="mask")
        chances = probabilities(
            np.asarray(images.raise_for_errors(), np.float32),
            np.asarray(texts.raise_for_errors(), np.float32),
            logit_scale(client),
        )
        report = client.backend_report()
    table = Table("picture", "best label", "probability", title="Sample pictures, each against all labels")
    best = [labels[int(index)] for index in chances.argmax(axis=1)]
    for picture, label, row in zip(pictures, best, chances, strict=True):
        table.add_row(picture.name, label, f"{row.max():.1%}")
    to.print(table)
    served = images.provenance[0]
    to.print(
        f"vectors have {images.dimensions} dimensions; model {served.model}, revision {served.model_revision}, "
        f"fingerprint {served.fingerprint}\n"
    )
    show_timings(images.timings, f"{len(pictures)} pictures", to)
    show_timings(texts.timings, f"{len(labels)} texts", to)
    show_report(report.replicas, to)
    return best == own


def how_to_call(router: str) -> str:
    """What a person does next."""
    return f"""
ready: the router answers at {router} (gRPC, encoder.v1.EncoderService)

  vitfleet classify PICTURE --labels "a red circle" "a blue square" --address {router}
  vitfleet encode PICTURES --out vectors.npy --address {router}
  vitfleet report --address {router}
  grpcurl -plaintext -d '{{"texts": ["a red circle"]}}' {router} encoder.v1.EncoderService/EncodeText

  from encoder.client import EncoderClient
  with EncoderClient("{router}") as client:
      vectors = client.encode_images(["a.jpg", "b.png"])

Ctrl-C stops it."""


class Stopper:
    """SIGINT and SIGTERM interrupt a fleet that starts, end the wait of one that runs, and let one stop in peace."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._starting = True

    def wait(self) -> None:
        """Until a signal comes."""
        self._told.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = not self._told.is_set()
        self._told.set()
        if first and self._starting:
            raise KeyboardInterrupt

    @contextmanager
    def running(self, fleet: LocalFleet) -> Iterator[FleetAddresses]:
        """The fleet while it runs; exit code 130 when a signal comes before it does."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            addresses = fleet.start()
            self._starting = False
            yield addresses
        except KeyboardInterrupt:
            print("stopped before it was ready", file=sys.stderr)
            raise SystemExit(130) from None
        finally:
            self._starting = False
            fleet.stop()
            for number, handler in before.items():
                signal.signal(number, handler)


class Progress:
    """Prints each step once, with the seconds since the start."""

    def __init__(self, to: Console) -> None:
        self._to = to
        self._last = ""

    def __call__(self, event: FleetEvent) -> None:
        if event.stage == "failed":
            return  # told as the error
        where = f"pool {event.pool}: " if event.pool else ""
        line = f"{where}{event.message}"
        if line != self._last:
            self._to.print(f"{event.seconds:6.1f} s  {line}", highlight=False)
            self._last = line
