"""Settings of one engine, validated at the edge; an unknown key is an error.

They are read once, when the engine is made; what they led to (device, backend, dtype, buckets) travels on as frozen
decisions. In particular `attention_backend` is read by `encoder.attention.resolve` alone.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from encoder.errors import InvalidInput

TowerName = Literal["vision", "text"]
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
RunnerName = Literal["auto", "eager", "openvino", "cuda", "npu", "inductor", "cuda-inductor"]
PreprocessMode = Literal["torch", "pil", "reduced"]
MIB = 1024 * 1024


class DecodeSettings(BaseModel):
    """Limits and policies of image decoding; the policies are part of the fingerprint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_image_bytes: int = Field(32 * MIB, gt=0, description="bytes of one picture file")
    max_pixels: int = Field(
        64_000_000,
        gt=0,
        le=178_956_970,
        description="width times height, read from the header; at most 178956970, which is all Pillow takes",
    )
    max_side: int = Field(32_768, gt=0, description="width or height, read from the header")
    apply_exif_orientation: bool = Field(True, description="false: pixels as they are stored")
    background: tuple[int, int, int] = Field((255, 255, 255), description="what transparency lets through")
    allow_truncated: bool = Field(False, description="true: what is missing of a file is grey, black or background")
    isolation: Literal["auto", "thread", "process"] = Field(
        "auto", description="what is decoded in worker processes: `thread` nothing, `process` everything"
    )
    time_limit_s: float = Field(20.0, gt=0, description="how long a worker may take for one picture")

    @field_validator("background")
    @classmethod
    def _is_colour(cls, value: tuple[int, int, int]) -> tuple[int, int, int]:
        if any(not 0 <= level <= 255 for level in value):
            raise ValueError("background needs three levels of 0 to 255 (red, green, blue)")
        return value


def default_cache_dir() -> Path:
    """`vitfleet` in the user's cache folder, as the XDG base directory specification says where that is."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitfleet"


class EngineSettings(BaseModel):
    """One tower of one model on one device."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field("demo", description="'demo', a folder, or a hub name such as openai/clip-vit-base-patch32")
    served_name: str | None = Field(None, description="name that callers use; empty: the model's, or its folder's")
    revision: str | None = Field(None, description="commit, tag or branch of a hub model")
    offline: bool = Field(False, description="never contact a hub, use what is in its local cache")
    tower: TowerName = "vision"
    device: str = Field("cpu", description="cpu, cuda, npu, xpu, musa: the device this engine was given")
    device_index: int = Field(0, ge=0)
    claimed_devices: int = Field(1, ge=0, description="how many devices of that kind the replica was granted")
    dtype: ComputeDtype = "auto"
    attention_backend: str | None = Field(None, description="force a backend; empty lets the platform decide")
    strict_backend: bool = Field(False, description="a call the backend does not take is an error")
    runner: RunnerName = Field(
        "auto", description="auto: the platform's graphs; inductor, cuda-inductor: torch.compile, never on by itself"
    )
    buckets: tuple[Annotated[int, Field(gt=0)], ...] = Field((1, 2, 4, 8, 16, 32), min_length=1)
    max_batch_tokens: int | None = Field(
        None, gt=0, description="largest token budget of a model with pictures of many sizes; empty: by the device"
    )
    max_patches: int | None = Field(
        None,
        gt=0,
        description="patches a picture is resized to at most, for a model with pictures of many sizes; empty: its own",
    )
    text_lengths: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        (8, 12, 16, 20, 24, 32, 48, 64),
        description="texts are padded to these tokens, or to the longest that the model takes",
    )
    max_graphs: int = Field(64, ge=0, description="graphs captured at most, the smaller buckets first")
    graph_memory_bytes: int | None = Field(
        None, ge=0, description="device memory that graphs may hold together; empty: what there is"
    )
    preprocess: PreprocessMode = Field(
        "torch", description="torch, pil: exact; reduced: as torch, with large JPEGs decoded at a reduced scale"
    )
    decode: DecodeSettings = DecodeSettings()
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8: vision on OpenVINO, calibrated on pictures; never on by itself"
    )
    calibration: Path | None = Field(
        None, description="folder of pictures that int8 is calibrated on; empty: drawn ones, which yours are not like"
    )
    cache_dir: Path | None = Field(
        default_factory=default_cache_dir, description="where start-ups keep converted models; null: nowhere"
    )
    threads: int | None = Field(
        None, gt=0, description="CPU threads of the forward; empty: a pool's num_cpus, else what torch takes"
    )
    lanes: int = Field(
        1, gt=0, description="forwards that OpenVINO runs side by side, the threads shared out among them"
    )
    self_check: bool = Field(True, description="prove the vectors at start; only benchmarks turn it off")

    @property
    def pixel_mode(self) -> Literal["torch", "pil"]:
        """How decoded pixels are resized and normalised."""
        return "pil" if self.preprocess == "pil" else "torch"

    @field_validator("buckets", "text_lengths")
    @classmethod
    def _rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))


def parse_engine_settings(values: dict[str, object]) -> EngineSettings:
    """Settings from plain values; raises InvalidInput with one line that names each wrong key."""
    from pydantic import ValidationError

    try:
        return EngineSettings.model_validate(values)
    except ValidationError as error:
        raise InvalidInput(f"engine settings: {describe_validation(error, EngineSettings.model_fields)}") from None


def describe_validation(error: Exception, known: Iterable[str] = ()) -> str:
    """One line of a pydantic ValidationError: 'key: what is wrong; key: …'.

    `known`: names of settings, of which the nearest is proposed for one that does not exist.
    """
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc']) or 'value'}: "
        f"{_no_such(str(item['loc'][-1]), known) if item['type'] == 'extra_forbidden' else _wrong(item)}"
        for item in _at_fault(error.errors())
    )


def _at_fault(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without the complaint that a list is short of what was wrong in it."""
    inner = {item["loc"][:-1] for item in items}
    return [item for item in items if item["type"] != "too_short" or item["loc"] not in inner]


def _no_such(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"no such setting, did you mean {near[0]}?" if near else "no such setting, look at its spelling"


def _wrong(item: Any) -> str:
    """The value is repeated where it is one of a few words or a number, and so no secret."""
    told = str(item["msg"])
    kinds = ("literal_error", "greater_than", "greater_than_equal", "less_than", "less_than_equal")
    return f"{told}, not {item['input']!r}" if item["type"] in kinds and len(str(item["input"])) < 40 else told
