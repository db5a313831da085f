"""Cuts the hidden layer of each MLP into slices whose weights stay in a core's own cache.

With AMX a core multiplies faster than weights reach it, and OpenVINO's product goes over all weights once for each
block of rows. A slice of the hidden layer takes its part of both weights and gives a summand of the result. Measured on
ViT-B/32 in bfloat16, two cores with AMX: batch 16 takes 89 ms where it took 108, batch 32 takes 158 where it took 195.
But batch 8 takes 61 where it took 54, and batch 1 15 where it took 13, so that both forms are worth their memory. Of
int8, whose weights are half as large, slices gain 5 % at the most.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Every processor with AMX has 2 MiB of L2 a core; what a slice leaves of it is for the rows.
SLICE_BYTES = 1_310_720
# bfloat16's: all that is cut is computed in it.
NUMBER_BYTES = 2
# Narrower or odd slices cost more than they bring: measured on hidden layers of 2048 to 4304.
MULTIPLE = 256
# Operations that treat every number by itself, whatever its place in the hidden layer.
ELEMENT_WISE = {
    "Add", "Divide", "Erf", "Gelu", "Multiply", "Relu", "Sigmoid", "Subtract", "Swish", "Tanh",
}  # fmt: skip


@dataclass
class Mlp:
    """`down` takes what `between`, in order, makes of the products `ups`; all of these work for it alone."""

    down: Any
    hidden: int
    ups: list[Any] = field(default_factory=list)
    between: list[Any] = field(default_factory=list)


def tokens_to_slice(model: Any) -> int | None:
    """Tokens of an item at the MLPs of an OpenVINO model that `slice_mlps` would cut: -1 where that is open.

    None where it would cut none.
    """
    for mlp in _mlps(model):
        if _count(mlp) > 1:
            shape = mlp.down.input_value(0).get_partial_shape()
            tokens = shape[len(shape) - 2]
            return tokens.get_length() if tokens.is_static else -1
    return None


def slice_mlps(model: Any) -> None:
    """Changes an OpenVINO model with float32 weights that is computed in bfloat16.

    It gives the same but for rounding: each slice's summand is rounded too.
    """
    for mlp in list(_mlps(model)):
        if (count := _count(mlp)) > 1:
            _cut(mlp, count)
    model.validate_nodes_and_infer_types()


def slices(hidden: int, row_bytes: int) -> int:
    """Into how many a hidden layer is cut, each of whose units has a row of so many bytes; 1 where it stays whole."""
    for count in range(1, hidden // MULTIPLE + 1):
        if hidden % (count * MULTIPLE) == 0 and hidden // count * row_bytes <= SLICE_BYTES:
            return count
    return 1


def _count(mlp: Mlp) -> int:
    widest = max(_weights(product).size // mlp.hidden for product in (mlp.down, *mlp.ups))
    return slices(mlp.hidden, widest * NUMBER_BYTES)


def _mlps(model: Any) -> Iterator[Mlp]:
    for node in model.get_ordered_ops():
        if _is_product(node):
            mlp = Mlp(node, _weights(node).shape[1])
            if _gather(node.input_value(0), mlp) and mlp.ups and _works_for_it_alone(mlp):
                yield mlp


def _is_product(node: Any) -> bool:
    """Of rows and constant weights, float32 [outputs, inputs] as `_weights` gives them."""
    return (
        node.get_type_name() == "MatMul"
        and not node.get_attributes()["transpose_a"]
        and node.input_value(1).get_node().get_type_name() == "Constant"
        and len(node.input_value(1).get_shape()) == 2
        and len(node.input_value(0).get_partial_shape()) > 1
    )


def _weights(product: Any) -> Any:
    data = np.asarray(product.input_value(1).get_node().data)
    return data if product.get_attributes()["transpose_b"] else data.T


def _gather(value: Any, mlp: Mlp) -> bool:
    """Adds what makes the hidden layer, inputs first; False when that takes more than products and single numbers."""
    node = value.get_node()
    if any(node == known for known in (*mlp.ups, *mlp.between)):
        return True
    shape = value.get_partial_shape()
    if not shape[len(shape) - 1].is_static or shape[len(shape) - 1].get_length() != mlp.hidden:
        return False
    if _is_product(node):
        mlp.ups.append(node)
        return True
    if node.get_type_name() not in ELEMENT_WISE:
        return False
    for taken in node.input_values():
        if taken.get_node().get_type_name() == "Constant":
            if list(taken.get_shape())[-1:] not in ([], [1], [mlp.hidden]):
                return False
        elif not _gather(taken, mlp):
            return False
    mlp.between.append(node)
    return True


def _works_for_it_alone(mlp: Mlp) -> bool:
    own = (mlp.down, *mlp.between)
    return all(
        any(target.get_node() == node for node in own)
        for made in (*mlp.ups, *mlp.between)
        for target in made.output(0).get_target_inputs()
    )


def _cut(mlp: Mlp, count: int) -> None:
    import openvino.opset13 as ops

    width = mlp.hidden // count
    total = None
    for begin in range(0, mlp.hidden, width):
        summand = _slice(mlp, slice(begin, begin + width))
        total = summand if total is None else ops.add(total, summand)
    assert total is not None
    for target in list(mlp.down.output(0).get_target_inputs()):
        target.replace_source_output(total.output(0))


def _slice(mlp: Mlp, units: slice) -> Any:
    """What these units of the hidden layer add to the result."""
    import openvino.opset13 as ops
    from openvino.utils.node_factory import NodeFactory

    made: dict[str, Any] = {
        up.get_name(): ops.matmul(up.input_value(0), _constant(_weights(up)[units]), False, True) for up in mlp.ups
    }
    factory = NodeFactory("opset13")
    for node in mlp.between:
        taken = [_part(value, units, mlp.hidden, made) for value in node.input_values()]
        made[node.get_name()] = factory.create(node.get_type_name(), taken, node.get_attributes())
    hidden = made[mlp.down.input_value(0).get_node().get_name()]
    return ops.matmul(hidden, _constant(_weights(mlp.down)[:, units]), False, True)


def _part(value: Any, units: slice, hidden: int, made: dict[str, Any]) -> Any:
    node = value.get_node()
    if node.get_type_name() != "Constant":
        return made[node.get_name()].output(0)
    data = np.asarray(node.data)
    return _constant(data[..., units]).output(0) if data.shape[-1:] == (hidden,) else value


def _constant(values: Any) -> Any:
    import openvino.opset13 as ops

    return ops.constant(np.ascontiguousarray(values))
