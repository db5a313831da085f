"""What one encode call asks for, and its batches in wire form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from encoder.client.errors import ItemError, ServiceError
from encoder.client.features import NAMES as FEATURE_DTYPES
from encoder.client.formats import FORMATS, Dtype, VectorFormat
from encoder.client.results import Block, block_without_answer, decode_answer
from encoder.client.sources import Kind, Source, make_source
from encoder.v1 import encoder_pb2 as pb

Overflow = Literal["truncate", "refuse"]
Output = Literal["pooled", "tokens"]
Progress = Callable[[int, int | None], None]
EncodeRequest = pb.EncodeImagesRequest | pb.EncodeTextRequest
EncodeResponse = pb.EncodeImagesResponse | pb.EncodeTextResponse

# Room in a message for what is not payload: the fixed part, and tags, lengths and sizes of one item.
_MESSAGE_OVERHEAD = 4096
ITEM_OVERHEAD = 64


_OUTPUTS = {"pooled": pb.OUTPUT_KIND_POOLED, "tokens": pb.OUTPUT_KIND_TOKENS}
_OVERFLOWS = {"truncate": pb.TEXT_OVERFLOW_TRUNCATE, "refuse": pb.TEXT_OVERFLOW_REFUSE}


@dataclass(frozen=True)
class Wanted:
    """The caller's arguments about the vectors, or features; ValueError names the one that is wrong.

    normalize: None is yes for vectors; features are never normalised.
    """

    dtype: Dtype = "float32"
    dimensions: int = 0
    normalize: bool | None = None
    pool: str = ""
    overflow: Overflow = "truncate"
    output: Output = "pooled"

    def __post_init__(self) -> None:
        if self.dtype not in FORMATS:
            raise ValueError(f"dtype is {self.dtype!r}: pass one of {', '.join(FORMATS)}")
        if self.overflow not in _OVERFLOWS:
            raise ValueError(f"overflow is {self.overflow!r}: pass 'truncate' or 'refuse'")
        if not 0 <= self.dimensions < 2**32:
            raise ValueError(f"dimensions is {self.dimensions}: pass how many to keep, or 0 for all")
        if self.output not in _OUTPUTS:
            raise ValueError(f"output is {self.output!r}: pass 'pooled' or 'tokens'")
        if self.output == "tokens":
            self._check_features()

    def _check_features(self) -> None:
        if self.dtype not in FEATURE_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r} with output='tokens': pass {' or '.join(FEATURE_DTYPES)}")
        if self.dimensions:
            raise ValueError(f"dimensions is {self.dimensions} with output='tokens': features are not truncated")
        if self.normalize:
            raise ValueError("normalize is True with output='tokens': features are raw, normalise them yourself")

    def options(self, kind: Kind, model: str) -> pb.EncodeOptions:
        return pb.EncodeOptions(
            model=model,
            dtype=FORMATS[self.dtype].wire,
            dimensions=self.dimensions,
            normalize=self.output == "pooled" if self.normalize is None else self.normalize,
            pool=self.pool,
            text_overflow=_OVERFLOWS[self.overflow] if kind == "text" else pb.TEXT_OVERFLOW_UNSPECIFIED,
            output=_OUTPUTS[self.output] if self.output != "pooled" else pb.OUTPUT_KIND_UNSPECIFIED,
        )


@dataclass(frozen=True)
class EncodeCall:
    """What one encode call asks for. max_bytes: payload of one request; timeout: seconds for one request."""

    kind: Kind
    options: pb.EncodeOptions
    form: VectorFormat
    timeout: float
    max_items: int
    max_bytes: int

    def source(self, index: int, item: object) -> Source | ItemError:
        """One item of the caller, measured and converted; see make_source."""
        return make_source(self.kind, index, item, self.max_bytes - ITEM_OVERHEAD)


def payload_limit(max_message_bytes: int, options: pb.EncodeOptions) -> int:
    """Bytes of items that fit into a message of `max_message_bytes` beside `options`."""
    return max_message_bytes - _MESSAGE_OVERHEAD - options.ByteSize()


@dataclass(frozen=True)
class Loaded:
    """A batch with its files read. request: None when no item is left to be sent."""

    request: EncodeRequest | None
    sources: tuple[Source, ...]
    refused: tuple[ItemError, ...]


@dataclass(frozen=True)
class Batch:
    """Items that travel together."""

    call: EncodeCall
    sources: tuple[Source, ...]

    def load(self) -> Loaded:
        """Reads the files of the batch. Blocks."""
        sent: list[Source] = []
        payloads: list[pb.Image | str] = []
        refused: list[ItemError] = []
        for source in self.sources:
            payload = source.load()
            if isinstance(payload, ItemError):
                refused.append(payload)
            else:
                sent.append(source)
                payloads.append(payload)
        return Loaded(self._request(payloads) if sent else None, tuple(sent), tuple(refused))

    def _request(self, payloads: list[pb.Image | str]) -> EncodeRequest:
        if self.call.kind == "text":
            return pb.EncodeTextRequest(options=self.call.options, texts=cast("list[str]", payloads))
        return pb.EncodeImagesRequest(options=self.call.options, images=cast("list[pb.Image]", payloads))

    def unsent(self, loaded: Loaded) -> Block:
        """The block of a batch of which nothing could be loaded."""
        return block_without_answer(loaded.refused, self.call.form)

    def decode(self, loaded: Loaded, response: EncodeResponse, attempts: int) -> Block:
        """The block of the answer; raises ServiceError when it has not one result for each item."""
        if len(response.results) != len(loaded.sources):
            raise ServiceError(
                "INTERNAL",
                f"{len(response.results)} results for {len(loaded.sources)} items: the service breaks the contract",
            )
        return decode_answer(loaded.sources, loaded.refused, response, self.call.form, self.call.options, attempts)
