"""The router's command line."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from deployments.router import logs
from deployments.router.server import run
from deployments.router.settings import RouterSettings, load_settings, read_settings
from encoder.errors import InvalidInput
from encoder.memory import keep_little

EXIT_BAD_SETTINGS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the router until it is told to end; returns the exit status: 0, or 2 for settings that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m deployments.router", description="Routes calls to vitfleet's pools."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="settings as a YAML or JSON file")
    source.add_argument("--settings", metavar="JSON", help="settings as a JSON object")
    parsed = parser.parse_args(arguments)
    try:
        settings = _settings(parsed.config, parsed.settings)
        logs.configure(settings.log_level, settings.access_log)
        keep_little()
        asyncio.run(run(settings))
    except InvalidInput as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    return 0


def _settings(file: Path | None, text: str | None) -> RouterSettings:
    if file is not None:
        return load_settings(file)
    return read_settings(text or "", "--settings")
