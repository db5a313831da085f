"""The Python client: images or texts in, numpy arrays out.

    from encoder.client import EncoderClient

    with EncoderClient("127.0.0.1:50051") as client:
        vectors = client.encode_images(["cat.jpg", "dog.png"])    # float32 [2, D]
        queries = client.encode_text(["a photo of a cat"])        # float32 [1, D]

What an encode call does about items that fail is said by `on_error`, and nothing else:

- "raise" (the default): returns the array when all went well, else raises EncodeError, which names the failed items
  and carries the good ones in `.result`.
- "mask": returns an EncodeResult: the array with blank rows, `ok`, `errors`, int8 scales, token counts, provenance and
  timings. `result.raise_for_errors()` makes the array or the exception out of it.

With output="tokens" images are answered with the features of their patches: a list of Features, each with
`.values` [t, F] and `.grid`; under "mask" they are in EncodeResult.features.

What concerns the whole call raises ServiceError. AsyncEncoderClient has the same methods as coroutines.
Needs numpy and grpc; neither torch nor ray is imported, and PIL only when PIL images are handed over.
"""

from encoder.client.aio import AsyncEncoderClient
from encoder.client.blocking import EncoderClient
from encoder.client.errors import EncodeError, ItemError, ServiceError
from encoder.client.features import Features
from encoder.client.results import BatchInfo, EncodeResult, StreamResult
from encoder.client.retry import RetryPolicy

__all__ = [
    "AsyncEncoderClient",
    "BatchInfo",
    "EncodeError",
    "EncodeResult",
    "EncoderClient",
    "Features",
    "ItemError",
    "RetryPolicy",
    "ServiceError",
    "StreamResult",
]
