"""The demo checkpoint as transformers loads it: eager attention, float32."""

import pytest
from transformers import AutoTokenizer, CLIPModel, CLIPTokenizer

from encoder.demo import demo_model_path


@pytest.fixture(scope="session")
def model() -> CLIPModel:
    return CLIPModel.from_pretrained(demo_model_path(), attn_implementation="eager").float().eval()


@pytest.fixture(scope="session")
def tokenizer() -> CLIPTokenizer:
    return AutoTokenizer.from_pretrained(demo_model_path())
