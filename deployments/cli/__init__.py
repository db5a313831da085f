"""The `vitfleet` command. A subcommand imports what it needs when it runs, so that `--help` is quick."""

import sys


def main() -> None:
    """Runs the command; an expected error is one line on stderr and exit code 1."""
    import logging

    from deployments.cli.app import app
    from encoder.client import EncodeError, ServiceError
    from encoder.errors import EncoderError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except (EncoderError, ServiceError, EncodeError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(1) from None
