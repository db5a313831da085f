"""What a replica on OpenVINO keeps between starts, what it lets go of once it is ready, and int8."""

import importlib.util
import mmap
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from encoder.demo import demo_pictures
from encoder.devices import cpu
from encoder.engine import Engine
from encoder.errors import InvalidInput, SelfCheckFailed, Unsupported
from encoder.graphs import conversion, proof
from encoder.graphs.int8 import quantised
from encoder.graphs.openvino import Form
from encoder.graphs.runner import GraphRunner
from encoder.identity import code_digest, source_digest
from encoder.memory import drop_mapped_pages
from encoder.models.tower import Tower
from encoder.settings import EngineSettings
from tests.support.checkpoints import VIT_B_32, unit, worst_cosine, write_clip
from tests.support.clip_vocab import clip_tokenizer_folder

PICTURES = [path.read_bytes() for path in demo_pictures()]


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times must not decide here whether a bucket serves."""
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    """An engine sets torch's number of threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(cache: Path | None, **values: object) -> Engine:
    settings = {"dtype": "float32", "runner": "openvino", "buckets": [1, 4], "cache_dir": cache, **values}
    return Engine.load(EngineSettings.model_validate(settings))


def vectors_of(engine: Engine) -> np.ndarray:
    if engine.tower == "text":
        return engine.forward([engine.prepare_text(text) for text in ("a red circle", "two stars")]).vectors
    return engine.forward([engine.prepare_image(picture) for picture in PICTURES]).vectors


def forms(engine: Engine) -> dict[Form, Any]:
    found: dict[Form, Any] = engine._forward._runner._compiled  # type: ignore[attr-defined]
    return found


def compiled_for(engine: Engine, lanes: int) -> Any:
    with forms(engine)[Form(lanes, sliced=False)].lane() as lane:
        return lane.vectors.get_compiled_model()


def entries(cache: Path) -> set[str]:
    return {path.name for path in (cache / "openvino").iterdir()}


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One name for each conversion that was made."""
    made: list[str] = []
    convert = conversion.convert

    def counted(runner: GraphRunner, inputs: Any, length: int) -> conversion.Converted:
        made.append(runner.precision)
        return convert(runner, inputs, length)

    monkeypatch.setattr(conversion, "convert", counted)
    return made


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_the_second_start_converts_nothing_and_gives_the_same_bits(
    tower: str, tmp_path: Path, conversions: list[str]
) -> None:
    first, second = (load(tmp_path, tower=tower, text_lengths=[16]) for _ in range(2))
    assert conversions == ["float32"] and len(entries(tmp_path)) == 1
    assert np.array_equal(vectors_of(first), vectors_of(second))
    eager = load(None, tower=tower, runner="eager")
    assert np.abs(unit(vectors_of(second)) - unit(vectors_of(eager))).max() <= 1e-5
    for engine in (first, second):
        assert {graph.state for graph in engine.report().graphs} == {"ready"}
        before = engine.report().counters["fused"]
        vectors_of(engine)
        assert engine.report().counters["fused"] > before  # counted as well where nothing was traced


def test_each_dtype_and_backend_is_kept_apart(tmp_path: Path, conversions: list[str]) -> None:
    for values in ({}, {"dtype": "bfloat16"}, {"attention_backend": "reference"}):
        load(tmp_path, **values)
    assert conversions == ["float32", "bfloat16", "float32"] and len(entries(tmp_path)) == 3


def test_a_damaged_entry_is_converted_again(tmp_path: Path, conversions: list[str]) -> None:
    right = vectors_of(load(tmp_path))
    (weights,) = (tmp_path / "openvino").glob("*/model.bin")
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 0x40
    weights.write_bytes(content)
    assert np.array_equal(vectors_of(load(tmp_path)), right) and len(conversions) == 2


def test_a_cache_that_cannot_be_written_is_told_and_serves(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    engine = load(tmp_path / "file")
    assert any("is not kept for the next start" in note for note in engine.report().notes)
    assert len(vectors_of(engine)) == len(PICTURES)


def test_without_a_cache_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(vectors_of(load(None))) == len(PICTURES) and list(tmp_path.iterdir()) == []
    assert EngineSettings().cache_dir == tmp_path / "vitfleet"


def test_other_source_is_another_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that is mended must not be served from what was converted before."""

    def tower_of(source: str) -> Tower[Any]:
        file = tmp_path / "family.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location("family", file)
        assert spec is not None and spec.loader is not None
        monkeypatch.setitem(sys.modules, "family", importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules["family"])
        made: Tower[Any] = object.__new__(sys.modules["family"].Family)
        return made

    source = "from encoder.models.halves import PictureTower\nclass Family(PictureTower):\n    forward = None\n"
    first = code_digest(tower_of(source))
    assert code_digest(tower_of(source)) == first != code_digest(tower_of(source + "    scale = 2\n"))


def test_the_source_has_one_digest_in_whatever_order_its_files_are_found(tmp_path: Path) -> None:
    """A set gives paths in another order in each process, and packages have files of one name."""
    files = [tmp_path / folder / name for folder in ("attention", "models") for name in ("__init__.py", "a.py")]
    for number, file in enumerate(files):
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"value = {number}")
    digests = {source_digest(order) for order in permutations(files)}
    assert len(digests) == 1
    files[0].write_text("value = 2")
    files[2].write_text("value = 0")  # as if the two had changed places
    assert source_digest(files) not in digests


def test_once_ready_the_weights_are_held_once() -> None:
    """By the compiled model; torch's copy is given back, and the probe and the goldens do without."""
    engine = load(None)
    assert {parameter.device.type for parameter in engine._tower.module.parameters()} == {"meta"}
    engine.probe()
    assert np.isfinite(engine.golden_vectors()).all() and len(vectors_of(engine)) == len(PICTURES)
    eager = load(None, runner="eager")
    assert {parameter.device.type for parameter in eager._tower.module.parameters()} == {"cpu"}


def test_a_bucket_left_to_eager_keeps_the_weights() -> None:
    engine = load(None, max_graphs=1)
    assert [graph.state for graph in engine.report().graphs] == ["ready", "eager"]
    assert {parameter.device.type for parameter in engine._tower.module.parameters()} == {"cpu"}
    assert engine.forward([engine.prepare_image(picture) for picture in PICTURES[:4]]).runner == "eager"


def test_threads_are_the_engines() -> None:
    torch.set_num_threads(2)  # also where the tests are given one
    engine = load(None, threads=1)
    assert compiled_for(engine, lanes=1).get_property("INFERENCE_NUM_THREADS") == 1 and engine.lanes == 1
    engine = load(None, threads=2, lanes=2)
    for lanes in (1, 2):  # the threads are shared out, and none is there twice
        compiled = compiled_for(engine, lanes)
        assert compiled.get_property("INFERENCE_NUM_THREADS") == 2
        assert compiled.get_property("NUM_STREAMS") == lanes


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of ViT-B/32, 50 tokens a picture, and one of its text tower."""
    parts = {part: {**VIT_B_32[part], "num_hidden_layers": 1} for part in ("vision_config", "text_config")}  # type: ignore[dict-item]
    folder = write_clip(tmp_path_factory.mktemp("wide"), VIT_B_32 | parts)
    for file in clip_tokenizer_folder().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


class TestSlices:
    """On a processor with AMX, batches of many rows are computed with MLPs in slices."""

    WHOLE, SLICED = Form(1, sliced=False), Form(1, sliced=True)

    @pytest.fixture
    def with_amx(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu, "_processor", lambda: ("a processor", {"avx512_bf16", "amx_bf16", "amx_int8"}))

    def open(self, wide: Path, cache: Path | None, **values: object) -> Engine:
        return load(
            cache, **{"model": str(wide), "dtype": "bfloat16", "threads": 2, "buckets": [1, 11, 12, 16], **values}
        )

    def batches(self, engine: Engine) -> dict[Form, set[int]]:
        return {form: {bucket.batch for bucket in found.buckets} for form, found in forms(engine).items()}

    @pytest.mark.usefixtures("with_amx")
    def test_large_batches_are(self, wide: Path, tmp_path: Path, conversions: list[str]) -> None:
        first, second = (self.open(wide, tmp_path) for _ in range(2))
        assert conversions == ["bfloat16"] and len(entries(tmp_path)) == 2  # whole and in slices, kept for the second
        for engine in (first, second):
            assert self.batches(engine) == {self.WHOLE: {1, 11}, self.SLICED: {12, 16}}  # 275 rows a thread, and 300
            assert {graph.state for graph in engine.report().graphs} == {"ready"}
        eager = self.open(wide, None, runner="eager")
        items = [first.prepare_image(picture) for picture in (PICTURES * 16)[:16]]
        right = unit(eager.forward(items).vectors)
        found = [unit(engine.forward(items).vectors) for engine in (first, second)]
        assert np.array_equal(*found)
        assert worst_cosine(found[0], right) >= 0.9999
        alone = np.concatenate([unit(first.forward([item]).vectors) for item in items])
        assert worst_cosine(found[0], alone) >= 0.9999

    @pytest.mark.usefixtures("with_amx")
    def test_one_thread_has_no_other_model(self, wide: Path) -> None:
        assert self.batches(self.open(wide, None, threads=1)) == {self.SLICED: {1, 11, 12, 16}}

    @pytest.mark.usefixtures("with_amx")
    def test_nor_have_lanes(self, wide: Path) -> None:
        found = self.batches(self.open(wide, None, lanes=2, buckets=[1, 4]))
        assert found == {self.WHOLE: {1}, Form(2, sliced=True): {1, 2}}

    @pytest.mark.usefixtures("with_amx")
    def test_their_model_goes_with_the_last_of_its_buckets(self, wide: Path) -> None:
        engine = self.open(wide, None)
        runner = engine._forward._runner  # type: ignore[attr-defined]
        for bucket in list(forms(engine)[self.SLICED].buckets):
            assert self.SLICED in forms(engine)
            runner.release(bucket)
        assert set(forms(engine)) == {self.WHOLE}

    @pytest.mark.usefixtures("with_amx")
    def test_texts_by_the_length_of_their_bucket(self, wide: Path) -> None:
        engine = self.open(wide, None, tower="text", buckets=[8], text_lengths=[64, 77])
        in_form = {form: {bucket.length for bucket in found.buckets} for form, found in forms(engine).items()}
        assert in_form == {self.WHOLE: {64}, self.SLICED: {77}}  # 256 rows a thread, and 308

    @pytest.mark.usefixtures("with_amx")
    def test_none_in_float32(self, wide: Path) -> None:
        assert set(forms(self.open(wide, None, dtype="float32"))) == {self.WHOLE}

    @pytest.mark.usefixtures("with_amx")
    def test_none_of_a_small_model(self) -> None:
        assert set(forms(load(None, dtype="bfloat16", buckets=[32]))) == {self.WHOLE}

    def test_none_elsewhere(self, wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu, "_processor", lambda: ("a processor", {"avx512_bf16"}))
        assert set(forms(self.open(wide, None))) == {self.WHOLE}


class TestLanes:
    @pytest.mark.parametrize("tower", ["vision", "text"])
    def test_a_vector_is_the_same_whichever_lane_it_took(self, tmp_path: Path, tower: str) -> None:
        plain = load(tmp_path, tower=tower, runner="eager", text_lengths=[16])
        shared = load(tmp_path, tower=tower, lanes=2, threads=2, text_lengths=[16])
        assert {graph.state for graph in shared.report().graphs} == {"ready"} and shared.lanes == 2
        captions = [f"{count} {colour} circles" for colour in ("red", "blue", "green") for count in range(4)]
        items = (
            [plain.prepare_image(picture) for picture in PICTURES]
            if tower == "vision"
            else [plain.prepare_text(text) for text in captions]
        )
        expected = unit(plain.forward(items).vectors)
        for places in ([0], [0, 1, 2], list(range(12))):
            found = shared.forward([items[place] for place in places])
            assert found.runner == "openvino"
            assert np.abs(unit(found.vectors) - expected[places]).max() <= 1e-5

    def test_lanes_do_not_write_into_each_others_rows(self, tmp_path: Path) -> None:
        """Four threads for two lanes, each with pictures of its own, in batches of one and two, many times over."""
        engine = load(tmp_path, lanes=2, threads=2)
        items = [engine.prepare_image(picture) for picture in PICTURES]
        expected, features = vectors_of(engine), engine.forward(items, tokens=True).tokens

        def many(start: int) -> float:
            worst = 0.0
            for turn in range(25):
                places = [start, start + 1][: 1 + turn % 2]
                found = engine.forward([items[place] for place in places], tokens=True, alone=False)
                worst = max(worst, float(np.abs(found.vectors - expected[places]).max()))
                for place, ours in zip(places, found.tokens, strict=True):
                    worst = max(worst, float(np.abs(ours - features[place]).max()))
            return worst

        with ThreadPoolExecutor(4) as threads:
            assert max(threads.map(many, (0, 3, 6, 9))) <= 1e-4  # not of length 1; another picture's is off by 0.1
        assert np.abs(expected[0] - expected[3]).max() > 0.1
        counters = engine.report().counters
        assert counters["graph_replay"] >= 100 and "eager_run" not in counters
        assert counters["items"] == 12 + 12 + 4 * (13 + 2 * 12)

    def test_only_openvino_has_them(self) -> None:
        with pytest.raises(Unsupported, match="lanes are for OpenVINO, and this engine runs with eager"):
            load(None, runner="eager", lanes=2, threads=2)


def test_no_thread_is_tied_to_a_processor() -> None:
    """Else the replicas of a node would all compute on its first ones."""
    engine = load(None)
    vectors_of(engine)
    assert compiled_for(engine, lanes=1).get_property("ENABLE_CPU_PINNING") is False
    allowed = {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}
    assert len(allowed) > 1 and set(map(frozenset, allowed.values())) == {frozenset(os.sched_getaffinity(0))}


class TestInt8:
    def test_close_to_fp32_named_everywhere_and_kept(self, tmp_path: Path, conversions: list[str]) -> None:
        plain, engine = load(tmp_path), load(tmp_path, quantization="int8")
        cosine = worst_cosine(vectors_of(engine), vectors_of(plain))
        assert 0.99 <= cosine < 0.999999  # near, and not the same: it is int8
        report = engine.report()
        assert report.model.compute_dtype == "int8" and {graph.dtype for graph in report.graphs} == {"int8"}
        checks = [check for check in report.self_checks if check.runner == "openvino"]
        assert checks and {check.dtype for check in checks} == {"int8"} and all(check.passed for check in checks)
        assert {check.cosine_threshold for check in checks} == {0.99}
        quantisation = report.model.preprocessing["quantization"]
        assert isinstance(quantisation, dict) and quantisation["dtype"] == "int8" and quantisation["calibration"]
        assert report.model.fingerprint != plain.report().model.fingerprint
        assert "quantization" not in plain.report().model.preprocessing
        again = load(tmp_path, quantization="int8")
        assert conversions == ["float32", "int8"] and np.array_equal(vectors_of(again), vectors_of(engine))

    def test_calibration_is_part_of_the_fingerprint(self, tmp_path: Path) -> None:
        for repeat in range(2):
            for path in demo_pictures():
                (tmp_path / f"{repeat}-{path.name}").write_bytes(path.read_bytes())
        (tmp_path / "notes.txt").write_text("no picture")
        plain = load(None)
        mine, drawn = load(None, quantization="int8", calibration=tmp_path), load(None, quantization="int8")
        assert len({engine.info.fingerprint for engine in (mine, drawn, plain)}) == 3
        for engine in (mine, drawn):
            assert 0.99 <= worst_cosine(vectors_of(engine), vectors_of(plain)) < 0.999999

    def test_wrong_vectors_keep_it_from_serving(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(proof.GRAPH_THRESHOLDS, "int8", (0.9999999, 1e-9))
        with pytest.raises(
            SelfCheckFailed, match=r"int8 does not compute the right vectors: replay differs.*calibrate"
        ):
            load(None, quantization="int8")

    @pytest.mark.parametrize(
        ("values", "error", "words"),
        [
            ({"tower": "text"}, Unsupported, "int8 is for the vision tower"),
            ({"runner": "eager"}, Unsupported, "int8 runs on OpenVINO, and this engine runs on cpu.*with eager"),
            ({"calibration": "nowhere"}, InvalidInput, "calibration folder nowhere: No such file.*: name a folder"),
        ],
    )
    def test_what_it_cannot_do_it_says(self, values: dict[str, object], error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            load(None, quantization="int8", **values)

    def test_a_folder_without_good_pictures_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="holds 0 pictures, int8 needs at least 16"):
            load(None, quantization="int8", calibration=tmp_path)
        for number in range(16):
            (tmp_path / f"{number}.jpg").write_bytes(PICTURES[number % len(PICTURES)])
        (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
        with pytest.raises(InvalidInput, match=r"calibration picture broken\.jpg: .*: take it out of the folder"):
            load(None, quantization="int8", calibration=tmp_path)

    def test_without_nncf_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "nncf", None)
        with pytest.raises(Unsupported, match=r"pip install 'vitfleet\[int8\]'"):
            quantised(None, None, None)  # type: ignore[arg-type]


def test_mapped_pages_are_dropped_and_come_back(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    size = 64 << 20
    file.write_bytes(b"\x07" * size)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 7 * size // mmap.PAGESIZE
        before = psutil.Process().memory_info().rss
        drop_mapped_pages(file)
        assert psutil.Process().memory_info().rss <= before - 0.9 * size
        assert mapped[size - 1] == 7
