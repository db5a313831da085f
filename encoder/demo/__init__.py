"""The embedded default model and its sample pictures.

Importing this package imports the standard library alone; the scripts beside it need torch and Pillow.
"""

import json
from pathlib import Path

_FOLDER = Path(__file__).parent


def demo_model_path() -> Path:
    """The folder of the demo checkpoint, in the ordinary transformers layout."""
    return _FOLDER / "model"


def _labels() -> dict[str, str]:
    labels: dict[str, str] = json.loads((_FOLDER / "pictures" / "labels.json").read_text())
    return labels


def demo_pictures() -> list[Path]:
    """The sample pictures (JPEG, PNG and WebP), in a fixed order."""
    return [_FOLDER / "pictures" / name for name in _labels()]


def demo_labels() -> list[str]:
    """One right caption for each of `demo_pictures`, in the same order."""
    return list(_labels().values())
