"""Tables and JSON of reports, models and timings."""

import sys
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from encoder.client import EncoderClient
from encoder.v1 import encoder_pb2 as pb

# The self-check that measures a drift which was asked for is told by itself.
DRIFT = "reduced"
TOWER_NAMES = {pb.TOWER_VISION: "vision", pb.TOWER_TEXT: "text"}


def console() -> Console:
    """For tables; without a terminal lines are not cut at 80 columns."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def print_json(message: Any) -> None:
    """A wire message as JSON with the field names of the .proto."""
    print(MessageToJson(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))


def run_report(*, address: str, pool: str, as_json: bool) -> None:
    """`vitfleet report`."""
    with EncoderClient(address) as client:
        found = client.backend_report(pool)
    if as_json:
        print_json(found)
        return
    show_report(found.replicas, console())
    for unreachable in found.unreachable:
        print(f"pool {unreachable.pool} cannot be asked: {unreachable.error.message}", file=sys.stderr)


def run_models(*, address: str, as_json: bool) -> None:
    """`vitfleet models`."""
    with EncoderClient(address) as client:
        found = client.list_models()
    if as_json:
        print_json(pb.ListModelsResponse(models=found))
        return
    table = Table("model", "revision", "family", "tower", "dimensions", "features", "dtype", "pools", "fingerprint")
    table.title = "Models"
    for model in found:
        for tower in model.towers:
            table.add_row(
                model.name,
                model.revision[:12],
                model.family,
                TOWER_NAMES.get(tower.tower, "?"),
                str(tower.dimensions),
                str(tower.token_dimensions or "none"),
                tower.compute_dtype,
                ", ".join(tower.pools),
                tower.fingerprint,
            )
    console().print(table)


def show_report(replicas: Sequence[pb.ReplicaReport], to: Console) -> None:
    """What each replica chose and proved."""
    overview = Table(
        "pool", "tower", "device", "dtype", "backend", "asked for by", "why", "graphs", "self-check", "items/s"
    )
    for replica in replicas:
        overview.add_row(
            replica.pool,
            TOWER_NAMES.get(replica.tower, "?"),
            f"{replica.device.kind}:{replica.device.index} {replica.device.name}",
            replica.compute_dtype,
            replica.backend.name,
            replica.backend.source,
            replica.backend.reason,
            _graphs(replica),
            _proof(replica),
            f"{replica.items_per_second:.0f}",
        )
    overview.title = "Backend report"
    to.print(overview)
    for replica in replicas:
        for line in _remarks(replica):
            to.print(f"  {replica.pool} on {replica.host} (pid {replica.pid}): {line}", soft_wrap=True)


def show_timings(timings: Sequence[pb.StageTimings], what: str, to: Console) -> None:
    """Mean milliseconds of each stage over the requests of a call."""
    if not timings:
        return
    table = Table(
        "preprocess", "queue", "forward", "finish", "total", "in one forward", title=f"Time per request: {what}"
    )
    stages = ("preprocess_ms", "queue_ms", "forward_ms", "finish_ms", "total_ms")
    means = [sum(getattr(timing, stage) for timing in timings) / len(timings) for stage in stages]
    table.add_row(*(f"{mean:.1f} ms" for mean in means), str(max(timing.batch_size for timing in timings)))
    to.print(table)


def _graphs(replica: pb.ReplicaReport) -> str:
    if not replica.graphs:
        return "none"
    states = [graph.state for graph in replica.graphs]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"{replica.graphs[0].runner}: {counted}"


def _proof(replica: pb.ReplicaReport) -> str:
    if not replica.self_checks:
        return "not run"
    worst = min(check.worst_cosine for check in replica.self_checks if check.dtype != DRIFT)
    failed = [check for check in replica.self_checks if not check.passed]
    return f"cosine ≥ {worst:.5f}" + (f", {len(failed)} failed" if failed else "")


def _remarks(replica: pb.ReplicaReport) -> list[str]:
    lines = [f"{rejected.name} was rejected: {rejected.reason}" for rejected in replica.backend.rejected]
    lines += [
        f"preprocess reduced: {check.detail}: cosine ≥ {check.worst_cosine:.5f}"
        for check in replica.self_checks
        if check.dtype == DRIFT
    ]
    lines += [
        f"graph {graph.bucket} is {graph.state}: {graph.reason}"
        for graph in replica.graphs
        if graph.state == "disabled" or (graph.state == "eager" and graph.runner != "eager")
    ]
    lines += [
        f"{count} attention calls fell back to {replica.backend.fallback} ({counter.removeprefix('fallback:')})"
        for counter, count in sorted(replica.counters.items())
        if counter.startswith("fallback:")
    ]
    return lines + list(replica.notes)
