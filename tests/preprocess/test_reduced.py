"""The mode `reduced`: what it decodes smaller, how far from the exact mode, and that it is on only where asked for."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from encoder.engine import Engine
from encoder.errors import InvalidImage, SelfCheckFailed, Unsupported
from encoder.golden import golden_pictures
from encoder.preprocess.decode import DecodeLimits, DecodePolicy, decode_image
from encoder.preprocess.isolation import Decoder
from encoder.reduced import drift_items, reduced_side
from encoder.selfcheck import TOWER_THRESHOLDS
from encoder.settings import EngineSettings
from tests.support.checkpoints import worst_cosine


def picture(width: int, height: int, kind: str = "JPEG", mode: str = "RGB", **options: object) -> bytes:
    levels = golden_pictures(height, width)[2].transpose(1, 2, 0)
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(levels)).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def load(**values: object) -> Engine:
    return Engine.load(EngineSettings.model_validate({"runner": "eager", "buckets": [1, 4], **values}))


@pytest.mark.parametrize(
    ("size", "side", "decoded"),
    [
        ((1600, 1200), 0, (1600, 1200)),
        ((1600, 1200), 448, (600, 450)),  # three eighths
        ((1600, 1200), 600, (800, 600)),  # a half
        ((1600, 1200), 601, (1600, 1200)),  # less than a half would only cost time
        ((4000, 1000), 448, (2000, 500)),
        ((800, 600), 448, (800, 600)),
    ],
)
def test_a_side_is_never_shorter_than_asked(size: tuple[int, int], side: int, decoded: tuple[int, int]) -> None:
    for mode in ("RGB", "L", "CMYK"):
        pixels = decode_image(picture(*size, mode=mode), policy=DecodePolicy(reduced_side=side))
        assert pixels.shape == (decoded[1], decoded[0], 3) and pixels.dtype == np.uint8


def test_what_is_no_jpeg_is_decoded_whole() -> None:
    assert decode_image(picture(1600, 1200, "PNG"), policy=DecodePolicy(reduced_side=100)).shape == (1200, 1600, 3)


def test_limits_and_damage_are_those_of_the_whole_picture() -> None:
    data, policy = picture(1600, 1200), DecodePolicy(reduced_side=100)
    with pytest.raises(InvalidImage, match="1600x1200"):
        decode_image(data, DecodeLimits(max_pixels=1_000_000), policy)
    with pytest.raises(InvalidImage, match="truncated JPEG"):
        decode_image(data[: len(data) // 2], policy=policy)


def test_orientation_is_applied_to_the_reduced_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    data = picture(1600, 1200, exif=exif)
    reduced = decode_image(data, policy=DecodePolicy(reduced_side=300))
    whole = decode_image(data)
    assert reduced.shape == (400, 300, 3) and whole.shape == (1600, 1200, 3)
    quartered = np.asarray(Image.fromarray(whole).resize((300, 400), Image.Resampling.BOX), dtype=np.int16)
    assert np.abs(reduced.astype(np.int16) - quartered).mean() < 3


def test_workers_reduce_as_threads_do() -> None:
    data, policy = picture(1600, 1200), DecodePolicy(reduced_side=300)
    decoder = Decoder(DecodeLimits(), policy, "process")
    try:
        assert np.array_equal(decoder.decode(data), decode_image(data, policy=policy))
    finally:
        decoder.close()


def test_the_drift_is_measured_reported_and_small() -> None:
    plain, engine = load(dtype="float32"), load(dtype="float32", preprocess="reduced")
    (check,) = (check for check in engine.report().self_checks if "reduced decoding" in check.detail)
    assert check.passed and 0.98 <= check.worst_cosine < 1 and check.dtype == "reduced"
    data = picture(1600, 1200)
    vectors = [one.forward([one.prepare_image(data)]).vectors for one in (plain, engine)]
    assert 0.98 <= worst_cosine(*vectors) < 0.9999999  # near, and not the same: it did reduce
    small = picture(100, 80)
    assert np.array_equal(plain.prepare_image(small), engine.prepare_image(small))


def test_it_is_in_the_fingerprint_and_in_what_is_told_and_never_on_by_itself() -> None:
    plain, engine = load(), load(preprocess="reduced")
    assert plain.info.fingerprint != engine.info.fingerprint
    assert engine.info.preprocessing["decode"]["reduced_side"] == reduced_side(engine._tower) == 128  # type: ignore[index]
    assert "reduced_side" not in plain.info.preprocessing["decode"]  # type: ignore[operator]
    assert not any("reduced" in check.detail for check in plain.report().self_checks)


def test_too_much_drift_keeps_it_from_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOWER_THRESHOLDS, "reduced", (0.99999999, 1e-9))
    with pytest.raises(SelfCheckFailed, match=r"reduced decoding against whole.*use preprocess torch"):
        load(preprocess="reduced")


def test_texts_do_not_care_and_models_of_many_sizes_refuse() -> None:
    assert load(tower="text", preprocess="reduced").info.fingerprint == load(tower="text").info.fingerprint

    class Many:
        spec = SimpleNamespace(family="siglip2")

    with pytest.raises(Unsupported, match="the siglip2 family does not resize to one size: use preprocess torch"):
        reduced_side(Many())  # type: ignore[arg-type]


def test_the_pictures_that_measure_it_are_reduced() -> None:
    engine = load(preprocess="reduced")
    whole, reduced = drift_items(engine._tower, engine._decoder)  # type: ignore[arg-type]
    assert len(whole) == 4 and all(not np.array_equal(a, b) for a, b in zip(whole[2:], reduced[2:], strict=True))
