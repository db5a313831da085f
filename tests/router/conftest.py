"""What the router's tests share."""

import io
import logging
from collections.abc import Iterator

import pytest

from deployments.router import logs


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the router logs at INFO, as it would stand on stderr."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonLines())
    logger = logging.getLogger("deployments.router")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)
