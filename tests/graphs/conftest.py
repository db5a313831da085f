"""What the tests of graphs share."""

import pytest

from encoder.graphs import proof


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are measured here as well, and must not decide: the one test of speed says its own."""
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)
