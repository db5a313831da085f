"""Random requests: well formed with wild values, and wire bytes that were mutated; what the core may do with them."""

from random import Random

from google.protobuf.message import DecodeError

from deployments.service import EncoderCore
from encoder.errors import EncoderError
from encoder.v1 import encoder_pb2 as pb
from tests.fuzz.corpus import TEXTS, pictures
from tests.fuzz.mutate import mutate

SIZES = (0, 1, 2, 3, 5, 17, 4000, 32_768, 70_000, 2**31, 2**32 - 1)


def images_request(rng: Random) -> pb.EncodeImagesRequest:
    request = pb.EncodeImagesRequest(options=_options(rng))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        request.images.append(_image(rng))
    return _with_unknown_fields(rng, request)


def text_request(rng: Random) -> pb.EncodeTextRequest:
    texts = [_text(rng) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
    return _with_unknown_fields(rng, pb.EncodeTextRequest(options=_options(rng), texts=texts))


async def attempt(core: EncoderCore, request: pb.EncodeImagesRequest | pb.EncodeTextRequest) -> str:
    """Sends it; gives what came of it. Raises AssertionError for an answer that does not fit its request."""
    try:
        if isinstance(request, pb.EncodeImagesRequest):
            answer = await core.encode_images(request)
            count = len(request.images)
        else:
            answer = await core.encode_text(request)
            count = len(request.texts)
    except EncoderError as error:
        assert str(error) and "\n" not in str(error)
        return f"call {error.code}"
    assert len(answer.results) == count, f"{len(answer.results)} answers for {count} items"
    for result in answer.results:
        assert result.HasField("embedding") or result.error.code, "an item without an answer"
        assert result.error.code != 13, f"an internal error: {result.error.message}"
    assert pb.EncodeImagesResponse.FromString(answer.SerializeToString()) is not None
    return "answered"


def parsed(rng: Random, request: pb.EncodeImagesRequest | pb.EncodeTextRequest):
    """The request after its wire bytes were mutated, None where they are no message any more."""
    wire = mutate(rng, [request.SerializeToString() or b"\x0a\x00\x12\x00\x1a\x00\x22\x00"])
    try:
        return type(request).FromString(wire)
    except DecodeError:
        return None


def _image(rng: Random) -> pb.Image:
    match rng.randrange(6):
        case 0:
            return pb.Image()
        case 1 | 2:
            height, width, channels = rng.choice(SIZES), rng.choice(SIZES), rng.choice((0, 1, 2, 3, 4, 5, 2**32 - 1))
            length = height * width * channels if height * width * channels < 100_000 else rng.randrange(100)
            data = rng.randbytes(max(0, length + rng.choice((0, 0, 0, -1, 1))))
            return pb.Image(pixels=pb.RawPixels(data=data, height=height, width=width, channels=channels))
        case 3:
            return pb.Image(encoded=rng.choice(pictures()))
        case _:
            return pb.Image(encoded=mutate(rng, pictures()))


def _text(rng: Random) -> str:
    text = rng.choice(TEXTS)
    for _ in range(rng.randrange(4)):
        text += rng.choice(TEXTS) + chr(rng.choice((0, 0x20, 0x301, 0x5D0, 0x202E, 0xFFFF, 0x1F600, 0x10FFFF)))
    return text * rng.choice((1, 1, 1, 30))


def _options(rng: Random) -> pb.EncodeOptions:
    options = pb.EncodeOptions()
    if rng.random() < 0.5:
        options.dtype = rng.choice((0, 1, 2, 3, 4, 4, 5, 99))
    if rng.random() < 0.4:
        options.dimensions = rng.choice((0, 1, 7, 64, 65, 2**32 - 1))
    if rng.random() < 0.3:
        options.normalize = rng.random() < 0.5
    if rng.random() < 0.1:
        options.model = rng.choice(("demo", " demo", "x" * 5000, "\0", "../../etc"))
    if rng.random() < 0.3:
        options.text_overflow = rng.choice((0, 1, 2, 3))
    return options


def _with_unknown_fields(rng: Random, request):
    """Fields of a later version, which are skipped."""
    if rng.random() < 0.3:
        request.MergeFromString(bytes([0xF8, 0x3F, rng.randrange(128)]))
        request.MergeFromString(bytes([0xFA, 0x3F, 3]) + b"new")
    return request
