"""Structured logs: one JSON object a line on stderr. Never the content of a request, never metadata but its id."""

import json
import logging
import sys
import time
from collections.abc import Mapping

from deployments.router.calls import Call

_FIELDS = "router_fields"
access_log = logging.getLogger("deployments.router.access")
# Codes that speak of a fault in the fleet or the router, not of the request or of load.
_FAULTS = {"INTERNAL", "UNKNOWN", "DATA_LOSS"}


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, event, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(getattr(record, _FIELDS, {}))
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str, access: bool) -> None:
    """Sends the router's logs of `level` and above to stderr; other libraries' warnings come along.

    `access`: with a line for each call, whatever the level.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("deployments.router").setLevel(level)
    at_least = logging.getLevelNamesMapping()[level]
    access_log.setLevel(logging.INFO if access else max(logging.WARNING, at_least))


def log_event(
    logger: logging.Logger, level: int, event: str, fields: Mapping[str, object], trace: bool = False
) -> None:
    """Logs `event` with `fields`, and with the exception being handled when `trace` is set."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={_FIELDS: dict(fields)}, exc_info=trace)


def log_call(call: Call, code: str) -> None:
    """A finished call: a line of the access log, and a WARNING without it when something of ours is broken."""
    level = logging.WARNING if code in _FAULTS else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    fields = {
        "method": call.method,
        "code": code,
        "request_id": call.request_id,
        "token": call.quota.name,
        "peer": call.peer,
        "pool": call.pool,
        "attempts": call.attempts,
        "items": call.items,
        "bytes_in": call.bytes_in,
        "bytes_out": call.bytes_out,
        "ms": round((time.monotonic() - call.started) * 1e3, 2),
    }
    log_event(access_log, level, "call", fields)
