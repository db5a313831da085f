"""Computes the end of a tower only for the token that becomes the vector, and the patch features apart from it.

A tower that pools at one token runs some layers over all tokens after its last attention, and then looks at one. What
is done there to each token by itself comes out the same when the token is taken first; on ViT-B/32 that saves 6 % of
all operations. Features need all tokens: they become a model of their own, which takes up where the token was taken.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

# Operations that treat each row of the last axis by itself. What they take beside it are constants, the same for all
# rows: see `_row_wise`.
ROW_WISE = {
    "Add", "Convert", "Divide", "FakeQuantize", "Gelu", "MVN", "MatMul", "Multiply", "Relu", "Sigmoid", "Subtract",
    "Swish", "Tanh",
}  # fmt: skip
TOKENS, CHANNELS = 1, 2


@dataclass(frozen=True)
class Choice:
    """A Gather that takes one of the `tokens` [n, t, k] an item, or out of all items' in a row, if `flat`."""

    node: Any
    tokens: Any
    flat: bool


@dataclass(frozen=True)
class Split:
    """Two OpenVINO models: `vectors` gives the vectors and then what `features` takes.

    Without `features`, `vectors` gives all that the tower does.
    """

    vectors: Any
    features: Any | None = None


def split_at_pooled_token(model: Any, handed_on: str = "f32") -> Split:
    """Moves the choice of the token ahead; `model` gives vectors [n, D] and perhaps features, and is changed.

    handed_on: OpenVINO's name of the type in which `vectors` gives what `features` takes. It should be the one that is
    computed in: the CPU plugin keeps whatever leads to a float32 output in float32, and for these that would be the
    residual stream of all layers, a tenth of the time.
    """
    choice = next(filter(None, map(_choice, _above(model.outputs[0].get_node()))), None)
    if choice is None:
        return Split(model)
    varying = _varying(model)
    followers = _followers(model, choice, varying)
    sources = _sources(followers, varying)
    if not sources or not all(map(_has_width, sources)):
        return Split(model)
    has_features = len(model.outputs) > 1
    if has_features and not _made_of(model.outputs[1].get_node(), sources):
        return Split(model)
    for place, source in enumerate(sources):
        source.get_node().set_friendly_name(_name(place))
    features = _features(model.clone(), len(sources), handed_on) if has_features else None
    _choose_early(choice, followers, sources)
    if has_features:
        import openvino.opset13 as ops

        model.remove_result(model.outputs[1].get_node())
        model.add_results([ops.result(ops.convert(source, handed_on)) for source in sources])
    model.validate_nodes_and_infer_types()
    return Split(model, features)


def _choice(node: Any) -> Choice | None:
    if node.get_type_name() != "Gather" or node.input_value(2).get_node().get_type_name() != "Constant":
        return None
    axis = int(np.asarray(node.input_value(2).get_node().data).item())
    data, index = node.input_value(0), node.input_value(1)
    if axis == TOKENS and _rank(data) == 3 and _rank(index) == 0:
        return Choice(node, data, flat=False)
    if axis == 0 and _rank(data) == 2 and _rank(index) == 1 and data.get_node().get_type_name() == "Reshape":
        laid_out = data.get_node().input_value(0)
        return Choice(node, laid_out, flat=True) if _rank(laid_out) == 3 else None
    return None


def _varying(model: Any) -> set[str]:
    """Names of the nodes that are computed from inputs; all others are constants."""
    found: set[str] = set()
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Parameter" or any(
            value.get_node().get_name() in found for value in node.input_values()
        ):
            found.add(node.get_name())
    return found


def _followers(model: Any, choice: Choice, varying: Collection[str]) -> dict[str, Any]:
    """The nodes, by name, that work row by row and for nothing but the choice, as far as vectors go."""
    used = {node.get_name() for node in _above(model.outputs[0].get_node())}
    behind = {choice.node.get_name()}
    if choice.flat:
        behind.add(choice.node.input_value(0).get_node().get_name())
    followers: dict[str, Any] = {}
    for node in reversed(model.get_ordered_ops()):
        readers = {target.get_node().get_name() for target in node.output(0).get_target_inputs()} & used
        wanted = readers and readers <= followers.keys() | behind
        if node.get_name() in used and node.get_name() not in behind and wanted and _row_wise(node, varying):
            followers[node.get_name()] = node
    return followers


def _row_wise(node: Any, varying: Collection[str]) -> bool:
    """Whether each row of its result depends on that row of tokens [n, t, k] alone, in the same way for all rows."""
    if node.get_type_name() not in ROW_WISE or node.get_output_size() != 1 or _rank(node.output(0)) != 3:
        return False
    data: list[Any] = []
    constants: list[Any] = []
    for value in node.input_values():
        (data if value.get_node().get_name() in varying else constants).append(value)
    if any(_rank(value) != 3 or _rows(value) != _rows(node.output(0)) for value in data):
        return False
    if node.get_type_name() == "MatMul":
        plain = len(constants) == 1 and node.input_value(1) == constants[0] and _rank(constants[0]) == 2
        return plain and not node.get_attributes()["transpose_a"]
    if node.get_type_name() == "MVN":
        axes = np.asarray(node.input_value(1).get_node().data).ravel().tolist()
        return axes in ([-1], [CHANNELS])
    return all(_same_for_all_rows(value) for value in constants)


def _rows(value: Any) -> list[Any]:
    """Sizes of the axes before the last: what is broadcast along them is not the rows' own."""
    return list(value.get_partial_shape())[:CHANNELS]


def _same_for_all_rows(constant: Any) -> bool:
    shape = list(constant.get_partial_shape())
    return all(size.is_static and size.get_length() == 1 for size in shape[:-1])


def _sources(followers: dict[str, Any], varying: Collection[str]) -> list[Any]:
    """What the followers take from elsewhere that is no constant, each once."""
    found: dict[tuple[str, int], Any] = {}
    for node in followers.values():
        for value in node.input_values():
            name = value.get_node().get_name()
            if name in varying and name not in followers:
                found[name, value.get_index()] = value
    return [found[key] for key in sorted(found)]


def _has_width(source: Any) -> bool:
    return _rank(source) == 3 and bool(source.get_partial_shape()[CHANNELS].is_static)


def _made_of(result: Any, sources: list[Any]) -> bool:
    """Whether it is computed from these and constants alone."""
    stop = {(source.get_node().get_name(), source.get_index()) for source in sources}
    return all(node.get_type_name() != "Parameter" for node in _above(result, stop))


def _choose_early(choice: Choice, followers: dict[str, Any], sources: list[Any]) -> None:
    """The followers get one token [n, 1, k] of each source, and what takes the choice gets their last one's."""
    import openvino.opset13 as ops

    index = choice.node.input_value(1)
    for source in sources:
        width = source.get_partial_shape()[CHANNELS].get_length()
        if choice.flat:
            rows = ops.reshape(source, ops.constant(np.array([-1, width])), False)
            taken = ops.gather(rows, index, ops.constant(np.int64(0)))
        else:
            taken = ops.gather(source, index, ops.constant(np.int64(TOKENS)))
        one = ops.reshape(taken, ops.constant(np.array([-1, 1, width])), False)
        for target in list(source.get_target_inputs()):
            if target.get_node().get_name() in followers:
                target.replace_source_output(one.output(0))
    width = choice.tokens.get_partial_shape()[CHANNELS].get_length()
    vector = ops.reshape(choice.tokens, ops.constant(np.array([-1, width])), False)
    for target in list(choice.node.output(0).get_target_inputs()):
        target.replace_source_output(vector.output(0))


def _features(model: Any, count: int, handed_on: str) -> Any:
    """Of a copy of the whole model: its second output, from what stands in place of the sources."""
    import openvino
    import openvino.opset13 as ops

    by_name = {node.get_friendly_name(): node for node in model.get_ordered_ops()}
    parameters = []
    for place in range(count):
        source = by_name[_name(place)].output(0)
        targets = list(source.get_target_inputs())
        handed_type = ops.convert(source, handed_on).get_output_element_type(0)
        parameters.append(ops.parameter(source.get_partial_shape(), handed_type))
        taken = ops.convert(parameters[-1], source.get_element_type())
        for target in targets:
            target.replace_source_output(taken.output(0))
    return openvino.Model([model.outputs[1].get_node()], parameters)


def _above(result: Any, stop: Collection[tuple[str, int]] = ()) -> Iterator[Any]:
    """The node and all that it is computed from, the nearest first; not what the outputs in `stop` come from."""
    seen, waiting = {result.get_name()}, [result]
    while waiting:
        node = waiting.pop(0)
        yield node
        for value in node.input_values():
            name = value.get_node().get_name()
            if name not in seen and (name, value.get_index()) not in stop:
                seen.add(name)
                waiting.append(value.get_node())


def _rank(value: Any) -> int | None:
    rank = value.get_partial_shape().rank
    return rank.get_length() if rank.is_static else None


def _name(place: int) -> str:
    return f"pooled_token/source_{place}"
