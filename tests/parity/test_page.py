"""The page: rows are replaced one by one, and what never ran, or is outside its bounds, is named."""

import json
from pathlib import Path

from tests.parity.measure import CaseResult, PixelRow, TowerRow
from tests.parity.page import merge, page


def row(runner: str, dtype: str, cosine: float = 1.0, failures: tuple[str, ...] = ()) -> TowerRow:
    return TowerRow(runner, dtype, "sdpa", 64, cosine, 1e-7, -1, -1, cosine, 1e-7, list(failures))


def result(*rows: TowerRow) -> CaseResult:
    return CaseResult("some-b-16", "some", "real", [PixelRow("torch", 64, 64)], list(rows), {})


def test_a_run_replaces_its_own_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    path.write_text(json.dumps(merge(path, [result(row("eager", "float32"), row("openvino", "float32"))])))
    merged = merge(path, [result(row("eager", "float32", 0.5, ("too low",)), row("npu", "bfloat16"))])
    (case,) = merged["cases"]
    assert [(one["runner"], one["dtype"], one["tower_cosine"]) for one in case["rows"]] == [
        ("eager", "float32", 0.5), ("openvino", "float32", 1.0), ("npu", "bfloat16", 1.0),
    ]  # fmt: skip
    text = page(merged, [("some-b-16", "some"), ("other-l-14", "other")])
    assert "| some-b-16 | some | real | torch | 64 of 64 |" in text
    assert "- other-l-14 (other): not at real size" in text
    assert "- some-b-16 (some) on openvino in bfloat16: left out of the run at real size" in text
    assert "- some-b-16 eager float32: too low" in text


def test_a_row_that_gave_nothing_is_told_as_failed_not_as_left_out(tmp_path: Path) -> None:
    nothing = TowerRow("eager", "bfloat16", "", 0, -1, -1, -1, -1, -1, -1, ["SelfCheckFailed: why"])
    text = page(merge(tmp_path / "parity.json", [result(row("eager", "float32"), nothing)]), [("some-b-16", "some")])
    assert "- some-b-16 eager bfloat16: SelfCheckFailed: why" in text
    assert "on eager in bfloat16" not in text
