"""`vitfleet check`: all that a replica does before it is ready, here and now, with no service."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from rich.table import Table

from deployments.cli.show import TOWER_NAMES, console, print_json, show_report
from encoder.errors import InvalidInput
from encoder.v1 import encoder_pb2 as pb

TOWERS = {"vision": ("vision",), "text": ("text",), "both": ("vision", "text")}


def run_check(
    engine: Mapping[str, object], for_pictures: Mapping[str, object], *, tower: str, buckets: str = "", as_json: bool
) -> None:
    """Raises EncoderError, hence exit code 1, when a tower cannot be made ready or its proof does not hold.

    `for_pictures`: engine settings of the vision tower alone. `buckets`: batch sizes with commas between them; empty:
    the default of the settings.
    """
    if tower not in TOWERS:
        raise InvalidInput(f"--tower {tower!r} is unknown: use {', '.join(TOWERS)}")
    if tower == "text" and (quantization := for_pictures.get("quantization", "none")) != "none":
        raise InvalidInput(f"--quantization {quantization} is for pictures: check the vision tower, or both")
    from deployments.wire import ReplicaIdentity, report_to_proto
    from encoder.engine import Engine
    from encoder.settings import parse_engine_settings

    identity = ReplicaIdentity(pool="check", replica="", node="", host=socket.gethostname(), pid=os.getpid())
    chosen = {"buckets": buckets.split(",")} if buckets else {}
    reports = []
    for name in TOWERS[tower]:
        own = for_pictures if name == "vision" else {}
        settings = parse_engine_settings({**engine, **own, **chosen, "tower": name})
        loaded = Engine.load(settings, progress=lambda message, name=name: _say(f"{name}: {message}"))  # type: ignore[misc]
        reports.append(report_to_proto(loaded.report(), identity))
        loaded.close()
    if as_json:
        print_json(pb.GetBackendReportResponse(replicas=reports))
        return
    to = console()
    show_report(reports, to)
    for table in (_graphs(reports), _self_checks(reports), _stages(reports)):
        to.print(table)


def _graphs(reports: Sequence[pb.ReplicaReport]) -> Table:
    """Each bucket, and how its replays compared with eager; "-" stands for what was not run or not timed."""
    from encoder.graphs.proof import GRAPH_THRESHOLDS

    table = Table(
        "tower", "bucket", "runner", "backend", "dtype", "state", "worst cosine", "max error", "capture", "replay",
        "eager", title="Graphs, replays against eager",
    )  # fmt: skip
    for report in reports:
        for graph in report.graphs:
            least, most = GRAPH_THRESHOLDS[graph.dtype]
            compared = graph.worst_cosine != 0
            table.add_row(
                TOWER_NAMES.get(report.tower, "?"),
                graph.bucket,
                graph.runner,
                graph.backend,
                graph.dtype,
                graph.state,
                f"{graph.worst_cosine:.6f} ≥ {least:g}" if compared else "-",
                f"{graph.max_abs_error:.1e} ≤ {most:g}" if compared else "-",
                *(f"{ms:.1f} ms" if ms else "-" for ms in (graph.capture_ms, graph.replay_ms, graph.eager_ms)),
            )
    return table


def _self_checks(reports: Sequence[pb.ReplicaReport]) -> Table:
    """The chosen path against the float32 reference."""
    table = Table(
        "tower", "what", "mask need", "backend", "runner", "dtype", "worst cosine", "max error", "holds",
        title="Self-check",
    )  # fmt: skip
    for report in reports:
        for check in report.self_checks:
            table.add_row(
                TOWER_NAMES.get(check.tower, "?"),
                check.detail,
                check.mask_need,
                check.backend,
                check.runner,
                check.dtype,
                f"{check.worst_cosine:.6f} ≥ {check.cosine_threshold:g}",
                f"{check.max_abs_error:.1e} ≤ {check.max_abs_threshold:g}",
                "yes" if check.passed else "no",
            )
    return table


def _stages(reports: Sequence[pb.ReplicaReport]) -> Table:
    """Where the start-up went."""
    table = Table("tower", "stage", "time", title="Start-up")
    for report in reports:
        for stage in report.startup:
            table.add_row(TOWER_NAMES.get(report.tower, "?"), stage.name, f"{stage.milliseconds / 1e3:.2f} s")
    return table


def _say(message: str) -> None:
    print(message, file=sys.stderr)
