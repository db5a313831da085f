"""The state of one encode call without its transport: items into batches, answers into the result."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from encoder.client.errors import ItemError, ServiceError
from encoder.client.features import Features
from encoder.client.formats import Dtype
from encoder.client.request import ITEM_OVERHEAD, Batch, EncodeCall, Progress
from encoder.client.results import BatchInfo, Block, EncodeResult
from encoder.client.sources import Source
from encoder.v1 import encoder_pb2 as pb

_log = logging.getLogger("encoder.client")


@dataclass
class EncodeJob:
    """The state of one encode call; used from one thread (or task) only.

    total: how many items there will be; None for a generator.
    """

    call: EncodeCall
    total: int | None = None
    progress: Progress | None = None
    _seen: int = 0
    _done: int = 0
    _told: int = 0
    _dimensions: int = 0
    _waiting: list[Source] = field(default_factory=list)
    _waiting_bytes: int = 0
    _blocks: list[Block] = field(default_factory=list)
    _errors: dict[int, ItemError] = field(default_factory=dict)
    _open: dict[int, str] = field(default_factory=dict)

    def take(self) -> int:
        """The index of the item that comes next."""
        self._seen += 1
        return self._seen - 1

    def place(self, source: Source | ItemError) -> Batch | None:
        """Adds an item; returns the batch that this made complete, if it did."""
        if isinstance(source, ItemError):
            self._errors[source.index] = source
            self._done += 1
            return None
        size = source.size + ITEM_OVERHEAD
        complete = self.flush() if self._waiting_bytes + size > self.call.max_bytes else None
        self._waiting.append(source)
        self._waiting_bytes += size
        self._open[source.index] = source.name
        return self.flush() if len(self._waiting) >= self.call.max_items else complete

    def flush(self) -> Batch | None:
        """The items that wait for company, as a batch; None when there are none."""
        waiting, self._waiting, self._waiting_bytes = tuple(self._waiting), [], 0
        return Batch(self.call, waiting) if waiting else None

    def settle(self, block: Block) -> None:
        """Takes in what came of one batch, and tells the caller's progress function."""
        names = self._close(block)
        self._errors.update({error.index: error for error in block.errors})
        # The first answer sets the dimension: rows of one array are of one length.
        self._dimensions = self._dimensions or block.dimensions
        if block.dimensions not in (0, self._dimensions):
            for index in block.indices.tolist():
                reason = (
                    f"{block.dimensions} dimensions beside vectors of {self._dimensions}: name a model= and a pool="
                )
                self._errors[index] = ItemError(index, names[index], "INTERNAL", reason)
        self._blocks.append(block)
        self.tell()

    def _close(self, block: Block) -> dict[int, str]:
        """Counts the items of a block as done; returns their names."""
        indices = [error.index for error in block.errors] + block.indices.tolist()
        self._done += len(indices)
        return {index: self._open.pop(index) for index in indices}

    def tell(self) -> None:
        """Calls progress(done, total) if there is news."""
        if self.progress is not None and self._done > self._told:
            self._told = self._done
            self.progress(self._done, self.total)

    def abandon(self, failure: ServiceError) -> ServiceError:
        """The failure with what was collected until now; items without an answer carry its code."""
        for index, name in self._open.items():
            self._errors[index] = ItemError(index, name, failure.code, failure.message)
        self._open.clear()
        return ServiceError(failure.code, failure.message, self.result())

    def result(self) -> EncodeResult:
        """All blocks as one, in the order of the items."""
        form, n = self.call.form, self._seen
        dimensions = self._dimensions or self.call.options.dimensions
        tokens = self.call.options.output == pb.OUTPUT_KIND_TOKENS
        blocks = [block for block in self._blocks if block.dimensions == self._dimensions and len(block.indices)]
        ok = np.zeros(n, dtype=np.bool_)
        scales = np.zeros(n, dtype=np.float32)
        for block in blocks:
            ok[block.indices] = True
            scales[block.indices] = block.scales
        if len(blocks) == 1 and bool(ok.all()):
            vectors = blocks[0].rows
        else:
            vectors = form.blank(n, 0 if tokens else dimensions)
            for block in blocks:
                vectors[block.indices] = block.rows
        features: list[Features | None] = [None] * (n if tokens else 0)
        for block in blocks:
            for index, one in zip(block.indices.tolist(), block.features, strict=tokens):
                features[index] = one
        token_counts, truncated = self._text_columns()
        result = EncodeResult(
            vectors=vectors,
            ok=ok,
            errors=dict(sorted(self._errors.items())),
            dtype=cast("Dtype", form.name),
            dimensions=dimensions,
            scales=scales if form.name == "int8" else None,
            token_counts=token_counts,
            truncated=truncated,
            batches=self._batches(),
            features=tuple(features),
        )
        if len(result.fingerprints) > 1:
            _log.warning(
                "one call was answered under several fingerprints: %s; its vectors may not belong together, "
                "name a pool= to keep to one",
                ", ".join(result.fingerprints),
            )
        return result

    def _text_columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]] | tuple[None, None]:
        if self.call.kind != "text":
            return None, None
        token_counts = np.zeros(self._seen, dtype=np.int64)
        truncated = np.zeros(self._seen, dtype=np.bool_)
        for block in self._blocks:
            if block.info is not None and block.texts is not None:
                token_counts[block.info.indices] = block.texts.token_counts
                truncated[block.info.indices] = block.texts.truncated
        return token_counts, truncated

    def _batches(self) -> tuple[BatchInfo, ...]:
        answered = [block.info for block in self._blocks if block.info is not None]
        return tuple(sorted(answered, key=lambda info: int(info.indices[0])))
