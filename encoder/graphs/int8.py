"""int8 weights and activations for an OpenVINO model: NNCF's post-training quantisation on calibration items."""

import logging
import sys
from contextlib import redirect_stdout
from typing import Any

from encoder.errors import Unsupported
from encoder.graphs.runner import Calibration
from encoder.models.tower import Tower


def quantised(model: Any, tower: Tower[Any], calibration: Calibration) -> Any:
    """The model in int8, as NNCF quantises transformers: symmetric weights, asymmetric activations.

    The golden items are looked at as well: they are unlike most pictures, and the proof is made of them.
    Raises Unsupported when NNCF is not installed.
    """
    try:
        import nncf
    except ImportError:
        raise Unsupported("int8 needs NNCF, which is not installed: pip install 'vitfleet[int8]'") from None
    logging.getLogger("nncf").setLevel(logging.ERROR)
    items = [*calibration.items(), *tower.golden_items()]
    dataset = nncf.Dataset(items, lambda item: [tensor.numpy() for tensor in tower.collate([item]).values()])
    with redirect_stdout(sys.stderr):  # its progress bars
        return nncf.quantize(
            model,
            dataset,
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(items),
        )
