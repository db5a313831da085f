"""`python -m deployments.router.tokens make NAME`: a new token.

The token goes to stderr, once, and is kept nowhere; its entry goes to stdout, so that `>> tokens.yaml` adds it.
"""

import argparse
import secrets
import sys
from collections.abc import Sequence

import yaml
from pydantic import ValidationError

from deployments.router.tokens.entries import TokenEntry, digest_of
from encoder.settings import describe_validation

PREFIX = "vf_"
EXIT_REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for a name or limit that no entry can have."""
    parser = argparse.ArgumentParser(prog="python -m deployments.router.tokens", description="Tokens of callers.")
    make = parser.add_subparsers(dest="command", required=True).add_parser(
        "make", help="make a token: it is shown on stderr, its entry on stdout"
    )
    make.add_argument("name", metavar="NAME", help="who gets it")
    make.add_argument("--requests-per-second", type=float, default=100.0)
    make.add_argument("--burst", type=float, default=200.0)
    make.add_argument("--max-in-flight", type=int, default=64)
    make.add_argument("--max-items-per-second", type=float)
    parsed = parser.parse_args(arguments)
    token = PREFIX + secrets.token_urlsafe(32)
    try:
        entry = TokenEntry(
            name=parsed.name,
            sha256=digest_of(token),
            requests_per_second=parsed.requests_per_second,
            burst=parsed.burst,
            max_in_flight=parsed.max_in_flight,
            max_items_per_second=parsed.max_items_per_second,
        )
    except ValidationError as error:
        print(f"error: {describe_validation(error)}", file=sys.stderr)
        return EXIT_REFUSED
    print(f"the token of {entry.name}, shown only now: {token}", file=sys.stderr)
    print(yaml.safe_dump([entry.model_dump(exclude_none=True)], sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
