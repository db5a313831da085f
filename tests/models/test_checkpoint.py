"""Finding and loading checkpoints: each way to be wrong has its own clear error, and a folder contacts nobody."""

import hashlib
import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder.demo import demo_model_path
from encoder.engine import Engine
from encoder.errors import CheckpointError
from encoder.models.checkpoint import find_checkpoint
from encoder.settings import EngineSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path(), tmp_path / "copied"))


def load(model: Path | str, **values: object) -> Engine:
    return Engine.load(
        EngineSettings.model_validate({"model": str(model), "runner": "eager", "buckets": [1], **values})
    )


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("somebody opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("tower", ["vision", "text"])
def test_a_folder_contacts_nobody(folder: Path, tower: str) -> None:
    assert load(folder, tower=tower).info.name == "copied"


@pytest.mark.parametrize("name", ["", " ", " demo", "demo ", "openai/clip-vit-base-patch32 ", "\topenai/x"])
def test_stray_blanks_are_named(name: str) -> None:
    with pytest.raises(CheckpointError, match="blanks"):
        find_checkpoint(name)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "~/nowhere-at-all", "owner/na me"])
def test_neither_folder_nor_hub_name(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        find_checkpoint(name)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file"):
        find_checkpoint(str(folder / "config.json"))


def test_offline_looks_in_the_cache_alone(no_network: None) -> None:
    with pytest.raises(CheckpointError, match="not in the local hub cache"):
        find_checkpoint("openai/clip-vit-base-patch32", offline=True)


def test_a_folder_has_no_revision(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no revision"):
        find_checkpoint(str(folder), revision="main")


@pytest.mark.parametrize(
    ("missing", "tower", "said"),
    [
        ("config.json", "vision", "config.json is missing"),
        ("model.safetensors", "vision", "no safetensors weights"),
        ("preprocessor_config.json", "vision", "preprocessor_config.json is missing"),
    ],
)
def test_a_missing_file_is_named(folder: Path, missing: str, tower: str, said: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=said):
        load(folder, tower=tower)


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    for path in [*folder.glob("*token*"), folder / "vocab.json", folder / "merges.txt"]:
        path.unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="tokenizer"):
        load(folder, tower="text")
    assert load(folder, tower="vision").info.dimensions > 0  # the vision tower needs none


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 300
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="do not belong together"):
        load(folder, tower="text")


def test_pickled_weights_are_never_loaded(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never loaded"):
        load(folder)


def test_another_architecture_is_named(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(CheckpointError, match=r"architecture 'bert' is not served.*clip"):
        load(folder)


def test_broken_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(folder)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing.*visual_projection"):
        load(folder)


def test_misshapen_weights_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["visual_projection.weight"] = weights["visual_projection.weight"][:-1].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"visual_projection|shape"):
        load(folder)


def test_truncated_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(folder)


def test_the_revision_follows_the_files_that_decide_the_vectors(folder: Path) -> None:
    before = find_checkpoint(str(folder)).revision
    (folder / "README.md").write_text("other words")
    assert find_checkpoint(str(folder)).revision == before
    config = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(config | {"image_mean": [0.5, 0.5, 0.5]}))
    assert find_checkpoint(str(folder)).revision != before


def test_the_revision_is_a_digest_of_names_and_contents(folder: Path) -> None:
    (folder / "tokenizer_extra.json").write_bytes(b"")
    names = ["config.json", "model.safetensors", "preprocessor_config.json", "processor_config.json"]
    files = [folder / name for name in names if (folder / name).exists()] + list(folder.glob("tokenizer*.json"))
    expected = hashlib.sha256()
    for file in sorted(files):
        expected.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    assert find_checkpoint(str(folder)).revision == expected.hexdigest()[:16]


def test_a_checkpoint_is_found_without_reading_its_weights(folder: Path) -> None:
    found = find_checkpoint(str(folder))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"other")
    assert found.revision == find_checkpoint(str(folder)).revision


def test_the_fingerprint_follows_revision_preprocessing_and_policies(folder: Path) -> None:
    def of(**values: object) -> str:
        return load(folder, **values).info.fingerprint

    plain = of()
    assert of() == plain
    assert of(preprocess="pil") != plain
    assert of(decode={"background": [0, 0, 0]}) != plain
    assert of(tower="text") != plain
    assert of(decode={"max_pixels": 1000}) == plain  # a limit refuses, it changes no vector
    assert of(dtype="bfloat16") == plain  # the same vectors within the proven tolerance
