"""First aid for unknown checkpoints: what is told, what to do next, the exit code; no value of a weight is read."""

import json
import resource
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import CLIPConfig, CLIPModel
from typer.testing import CliRunner

from deployments.cli.app import app
from encoder.demo import demo_model_path
from encoder.engine import Engine
from encoder.errors import CheckpointError
from encoder.models.checkpoint import find_checkpoint
from encoder.models.firstaid import FirstAid, examine
from encoder.models.headers import read_headers
from encoder.models.tower import load_tower
from encoder.settings import EngineSettings, parse_engine_settings
from tests.parity.cases import Case
from tests.parity.registry import all_cases
from tests.support.variable_families import FAMILIES as VARIABLE

CASES = all_cases()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo's checkpoint, to be spoilt."""
    return Path(shutil.copytree(demo_model_path(), tmp_path / "my-clip"))


def bad(found: FirstAid) -> dict[str, tuple[str, str]]:
    return {finding.topic: (finding.told, finding.next_step) for finding in found.findings if not finding.good}


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_hollow(path: Path, tensors: Mapping[str, torch.Size]) -> None:
    """A safetensors file whose data is one hole: sizes as they should be, no value ever written."""
    header, end = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + 4 * shape.numel()]}
        end += 4 * shape.numel()
    packed = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        file.truncate(8 + len(packed) + end)


class TestGood:
    def test_the_demo_is_told_as_it_is_served(self, folder: Path) -> None:
        found = examine(str(folder))
        assert found.served and found.name == "my-clip" and bad(found) == {}
        told = {finding.topic: finding.told for finding in found.findings}
        assert set(told) == {"family", "weights", "image processor", "tokenizer", "vision", "text"}
        assert "clip" in told["family"] and "142 F32" in told["weights"] and "1.20 M parameters" in told["weights"]
        assert "'height': 64" in told["vision"] and "bicubic" in told["vision"] and "mask needs: none" in told["vision"]
        assert "mask needs: causal, key_padding; up to 32 tokens" in told["text"]
        for spec in found.towers:
            settings = {"model": str(folder), "tower": spec.tower, "runner": "eager", "self_check": False}
            engine = Engine.load(parse_engine_settings({**settings, "buckets": [1]}))
            assert engine._tower.spec == spec
            engine.close()

    def test_weights_are_never_read(self, folder: Path) -> None:
        """Eight gigabytes of them, in a file that takes a few blocks."""
        vision = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 10, "num_attention_heads": 32}
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"].update(vision)
        (folder / "config.json").write_text(json.dumps(config))
        with torch.device("meta"):
            expected = CLIPModel(CLIPConfig.from_dict(config)).state_dict()
        write_hollow(folder / "model.safetensors", {name: tensor.shape for name, tensor in expected.items()})
        assert (folder / "model.safetensors").stat().st_size > 8e9
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = examine(str(folder))
        assert bad(found) == {} and found.served and found.towers[0].head_dims == {128}
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000  # KiB

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_the_vision_tower_of_every_family_is_told_without_its_weights(self, case: Case, tmp_path: Path) -> None:
        folder = case.write(tmp_path / case.name, "small")
        found = examine(str(folder))
        assert "vision" not in bad(found) and "weights" not in bad(found) and "family" not in bad(found)
        loaded = load_tower(find_checkpoint(str(folder)), EngineSettings(model=str(folder)))
        told = next(spec for spec in found.towers if spec.tower == "vision")
        assert told == loaded.spec
        if loaded.spec.vision_only:
            assert found.served
            assert any(one.topic == "text" and one.told.startswith("none") for one in found.findings)

    @pytest.mark.parametrize("name", VARIABLE)
    def test_towers_for_pictures_of_any_size_are_told_too(self, name: str, tmp_path: Path) -> None:
        """A vision-language model has a text half that is not served, and needs no tokenizer here."""
        found = examine(str(VARIABLE[name].write(tmp_path / name)))
        told = {finding.topic: finding.told for finding in found.findings}
        assert "mask needs: " in told["vision"] and "segments" in told["vision"]
        assert found.served == (name != "siglip2")
        assert set(bad(found)) == ({"text", "tokenizer"} if name == "siglip2" else set())

    def test_shards(self, folder: Path) -> None:
        model = CLIPModel.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="1MB")
        assert len(list(folder.glob("*.safetensors"))) > 2 and examine(str(folder)).served
        shard = sorted(folder.glob("*.safetensors"))[1]
        shard.unlink()
        told, step = bad(examine(str(folder)))["weights"]
        assert told.startswith("1 of ") and shard.name in told and step == "download them"


class TestMissing:
    def test_another_architecture(self, folder: Path) -> None:
        edit(folder / "config.json", model_type="bert", architectures=["BertModel"])
        found = examine(str(folder))
        told, step = bad(found)["family"]
        assert told == "bert (BertModel) is not served" and not found.served and found.towers == ()
        assert "clip" in step and "encoder.models.tower.FAMILIES" in step

    def test_an_id_that_says_clip_and_holds_another_architecture(self, folder: Path) -> None:
        """infinity: the name said CLIP, the architecture was another one."""
        edit(folder / "config.json", model_type="vision-text-dual-encoder")
        assert "vision-text-dual-encoder" in bad(examine(str(folder)))["family"][0]

    def test_no_tokenizer(self, folder: Path) -> None:
        for path in [*folder.glob("tokenizer*"), folder / "vocab.json", folder / "merges.txt"]:
            path.unlink()
        found = examine(str(folder))
        assert bad(found)["tokenizer"][0] == "the model has a text half and no tokenizer"
        assert "copy it from the publisher's repository" in bad(found)["tokenizer"][1]
        assert "text" in bad(found) and [spec.tower for spec in found.towers] == ["vision"] and not found.served

    def test_no_image_processor(self, folder: Path) -> None:
        (folder / "preprocessor_config.json").unlink()
        found = examine(str(folder))
        assert set(bad(found)) == {"image processor", "vision"}
        assert [spec.tower for spec in found.towers] == ["text"] and not found.served

    def test_a_setting_of_the_image_processor_that_is_not_understood(self, folder: Path) -> None:
        edit(folder / "preprocessor_config.json", do_magic=True)
        told, step = bad(examine(str(folder)))["vision"]
        assert "'do_magic' is not known" in told and step == "remove it if it does not change the pixels"

    def test_a_filter_that_needs_the_other_mode(self, folder: Path) -> None:
        edit(folder / "preprocessor_config.json", resample=1)
        found = examine(str(folder))
        assert found.served
        assert next(finding.told for finding in found.findings if finding.topic == "vision").endswith("preprocess: pil")

    def test_pickle_weights_alone(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        told, step = bad(examine(str(folder)))["weights"]
        assert told == "only pickle weights (pytorch_model.bin), which can run code" and "save_pretrained" in step

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        assert bad(examine(str(folder)))["weights"] == ("no weights", "add its safetensors")

    @pytest.mark.parametrize("kept", [0, 5, 8, 200, -1])
    def test_truncated_weights(self, folder: Path, kept: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:kept])
        found = examine(str(folder))
        told, step = bad(found)["weights"]
        assert "model.safetensors" in told and step == "download it again" and not found.served
        if kept == -1:
            assert "is truncated" in told

    def test_a_pointer_of_git_lfs(self, folder: Path) -> None:
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        assert "Git LFS pointer" in bad(examine(str(folder)))["weights"][0]

    @pytest.mark.parametrize("header", [b"[]", b"{ ", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": 3}}'])
    def test_a_header_that_is_none(self, tmp_path: Path, header: bytes) -> None:
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(CheckpointError, match="header that cannot be read"):
            read_headers(tmp_path)

    def test_a_tensor_that_is_not_there(self, folder: Path) -> None:
        shapes = {name: torch.Size(one.shape) for name, one in read_headers(folder).tensors.items()}
        gone = "vision_model.encoder.layers.1.mlp.fc1.weight"
        del shapes[gone]
        shapes["text_projection.weight"] = torch.Size((3, 3))
        write_hollow(folder / "model.safetensors", shapes)
        found = bad(examine(str(folder)))
        assert gone in found["vision"][0] and "text_projection.weight" in found["text"][0]

    def test_a_tokenizer_of_another_model(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["vocab_size"] = 10
        (folder / "config.json").write_text(json.dumps(config))
        assert "text" in bad(examine(str(folder)))

    @pytest.mark.parametrize("content", [None, "{", "[]"])
    def test_no_config(self, folder: Path, content: str | None) -> None:
        (folder / "config.json").unlink()
        if content is not None:
            (folder / "config.json").write_text(content)
        found = examine(str(folder))
        assert "config" in bad(found) and not found.served
        assert "weights" not in bad(found)  # all the rest is told too

    @pytest.mark.parametrize("path", [" demo", "demo ", "", "\tdemo\n"])
    def test_stray_blanks(self, path: str) -> None:
        """immich: a leading blank in a model's name."""
        assert "blanks at its ends" in bad(examine(path))["name"][0]

    def test_a_file_and_nothing_at_all(self, folder: Path) -> None:
        assert "is a file" in bad(examine(str(folder / "config.json")))["folder"][0]
        assert "is not there" in bad(examine(str(folder / "nowhere")))["folder"][0]
        told, step = bad(examine("openai/clip-vit-base-patch32"))["folder"]
        assert "is not there" in told and "a hub's model is looked at by `vitfleet check --model`" in step


class TestCommand:
    def test_exit_code_and_words(self, folder: Path) -> None:
        good = CliRunner().invoke(app, ["add-check", str(folder)])
        assert good.exit_code == 0 and "would be served" in good.output
        (folder / "preprocessor_config.json").unlink()
        spoilt = CliRunner().invoke(app, ["add-check", str(folder)])
        assert spoilt.exit_code == 1 and "would not be served" in spoilt.output

    def test_json(self, folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").unlink()
        result = CliRunner().invoke(app, ["add-check", str(folder), "--json"])
        told = json.loads(result.output)
        assert result.exit_code == 1 and told["served"] is False and told["towers"] == ["vision"]
        assert {"topic", "good", "told", "next_step"} == set(told["findings"][0])
