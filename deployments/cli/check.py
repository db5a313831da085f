"""`vitfleet check`: all that a replica does before it is ready, here and now, with no service."""

import os
import socket
import sys
from collections.abc import Mapping

from rich.table import Table

from deployments.cli.show import console, print_json, show_report
from encoder.errors import InvalidInput
from encoder.v1 import encoder_pb2 as pb

TOWERS = {"vision": ("vision",), "text": ("text",), "both": ("vision", "text")}


def run_check(engine: Mapping[str, object], *, tower: str, as_json: bool) -> None:
    """Raises EncoderError, hence exit code 1, when a tower cannot be made ready or its proof does not hold."""
    if tower not in TOWERS:
        raise InvalidInput(f"--tower {tower!r} is unknown: use {', '.join(TOWERS)}")
    from deployments.wire import ReplicaIdentity, report_to_proto
    from encoder.engine import Engine
    from encoder.settings import parse_engine_settings

    identity = ReplicaIdentity(pool="check", replica="", node="", host=socket.gethostname(), pid=os.getpid())
    reports = []
    for name in TOWERS[tower]:
        settings = parse_engine_settings({**engine, "tower": name})
        loaded = Engine.load(settings, progress=lambda message, name=name: _say(f"{name}: {message}"))  # type: ignore[misc]
        reports.append(report_to_proto(loaded.report(), identity))
        loaded.close()
    if as_json:
        print_json(pb.GetBackendReportResponse(replicas=reports))
        return
    to = console()
    show_report(reports, to)
    table = Table(
        "tower",
        "what",
        "mask need",
        "backend",
        "runner",
        "dtype",
        "worst cosine",
        "max error",
        "holds",
        title="Self-check",
    )
    for report in reports:
        for check in report.self_checks:
            table.add_row(
                {pb.TOWER_VISION: "vision", pb.TOWER_TEXT: "text"}[check.tower],
                check.detail,
                check.mask_need,
                check.backend,
                check.runner,
                check.dtype,
                f"{check.worst_cosine:.6f} ≥ {check.cosine_threshold:g}",
                f"{check.max_abs_error:.1e} ≤ {check.max_abs_threshold:g}",
                "yes" if check.passed else "no",
            )
    to.print(table)


def _say(message: str) -> None:
    print(message, file=sys.stderr)
