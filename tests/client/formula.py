"""What the test service computes, as numpy: the oracle. Quantising follows the comments of the wire contract."""

import hashlib

import numpy as np

# Not a multiple of 8, so that packed bits have unused ones.
DIMENSIONS = 12


def pixel_payload(array: np.ndarray) -> bytes:
    """What stands for raw pixels in the formula: their shape and their bytes."""
    height, width = array.shape[:2]
    channels = array.shape[2] if array.ndim == 3 else 1
    return f"{height}x{width}x{channels}:".encode() + array.tobytes()


def expected(payload: bytes | str, dimensions: int = 0, normalize: bool = True) -> np.ndarray:
    """float32 [D] of an item: bytes of its SHA-256 as numbers around 0, cut, then of length 1."""
    data = payload.encode() if isinstance(payload, str) else payload
    digest = np.frombuffer(hashlib.sha256(data).digest(), dtype=np.uint8)
    vector = ((digest[: dimensions or DIMENSIONS].astype(np.float64)) - 128) / 64
    return (vector / np.linalg.norm(vector) if normalize else vector).astype(np.float32)


def expected_rows(payloads: list, **options) -> np.ndarray:
    return np.stack([expected(payload, **options) for payload in payloads])


def patch_numbers(payload: bytes) -> tuple[int, int, list[float]]:
    """Rows, columns and the numbers of all patches, 3 each, of an item: exact in float16."""
    rows, columns = 2, 1 + len(payload) % 3
    return rows, columns, [(payload[0] + place) % 50 / 4 for place in range(rows * columns * 3)]


def int8_of(vector: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """scale = max|v| / 127 in fp32; q = round half to even of v / scale, within [-127, 127]."""
    scale = np.float32(np.abs(vector).max()) / np.float32(127)
    return np.clip(np.rint(vector / scale), -127, 127).astype(np.int8), scale


def bits_of(vector: np.ndarray) -> np.ndarray:
    """1 where v > 0, most significant bit first."""
    return np.packbits(vector > 0, bitorder="big")
