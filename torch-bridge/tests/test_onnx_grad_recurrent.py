"""Gradients of LSTM, GRU and RNN in training graphs are those of PyTorch in float64.

The reference is written from the formulas of the standard, in plain tensor operations. A training
graph has plain operators only, and ONNX Runtime runs all of them in both precisions.
"""

import itertools

import numpy as np
import onnx
import pytest
import shorthaul.onnx
import torch
import torch.nn.functional as F
from file_gradients import TOLERANCE, assert_gradients, stored, uniform, with_inputs, with_total
from onnx import helper
from torch import nn
from training_graphs import exported, run

#: float32 rounds every value of 7 steps.
SINGLE = 2e-5

N_STEPS, N_ROWS, N_FEATURES, N_HIDDEN = 7, 3, 4, 5
N_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
N_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
INPUTS = ("X", "W", "R", "B", "lengths", "h0", "c0", "P")
OPTIONAL = {"LSTM": ("B", "h0", "c0", "P"), "GRU": ("B", "h0"), "RNN": ("B", "h0")}
OUTPUTS = {"LSTM": ("Y", "Y_h", "Y_c"), "GRU": ("Y", "Y_h"), "RNN": ("Y", "Y_h")}

OPERATORS = pytest.mark.parametrize("operator", list(N_GATES))
DIRECTIONS = pytest.mark.parametrize("direction", list(N_DIRECTIONS))


def rnn_step(x, h, c, w, r, wb, rb, p, linear_before_reset):
    return torch.tanh(x @ w.T + h @ r.T + wb + rb), c


def gru_step(x, h, c, w, r, wb, rb, p, linear_before_reset):
    (w_z, w_r, w_h), (r_z, r_r, r_h) = w.chunk(3), r.chunk(3)
    (wb_z, wb_r, wb_h), (rb_z, rb_r, rb_h) = wb.chunk(3), rb.chunk(3)
    z = torch.sigmoid(x @ w_z.T + h @ r_z.T + wb_z + rb_z)
    reset = torch.sigmoid(x @ w_r.T + h @ r_r.T + wb_r + rb_r)
    inner = reset * (h @ r_h.T + rb_h) if linear_before_reset else (reset * h) @ r_h.T + rb_h
    return (1 - z) * torch.tanh(x @ w_h.T + inner + wb_h) + z * h, c


def lstm_step(x, h, c, w, r, wb, rb, p, linear_before_reset):
    i, o, f, g = (x @ w.T + h @ r.T + wb + rb).chunk(4, 1)
    p_i, p_o, p_f = p.chunk(3)
    new = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * torch.tanh(g)
    return torch.sigmoid(o + p_o * new) * torch.tanh(new), new


STEPS = {"LSTM": lstm_step, "GRU": gru_step, "RNN": rnn_step}


def shapes(operator, direction="forward", layout=0, steps=N_STEPS):
    """The shapes of all that the operator may read."""
    n, gates = N_DIRECTIONS[direction], N_GATES[operator] * N_HIDDEN
    state = (N_ROWS, n, N_HIDDEN) if layout else (n, N_ROWS, N_HIDDEN)
    return {
        "X": (N_ROWS, steps, N_FEATURES) if layout else (steps, N_ROWS, N_FEATURES),
        "W": (n, gates, N_FEATURES),
        "R": (n, gates, N_HIDDEN),
        "B": (n, 2 * gates),
        "h0": state,
        "c0": state,
        "P": (n, 3 * N_HIDDEN),
    }


def reference(operator, given, direction="forward", layout=0, linear_before_reset=0, **_):
    """The outputs of the operator by name; what is not given is zero."""
    whole = shapes(operator, direction, layout, given["X"].shape[layout])
    whole = {name: given.get(name, given["X"].new_zeros(s)) for name, s in whole.items()}
    if layout:
        whole |= {name: whole[name].transpose(0, 1) for name in ("X", "h0", "c0")}
    ys, hs, cs = [], [], []
    for d in range(N_DIRECTIONS[direction]):
        h, c, places = whole["h0"][d], whole["c0"][d], range(len(whole["X"]))
        w, r, b, p = (whole[name][d] for name in ("W", "R", "B", "P"))
        states = {}
        for t in reversed(places) if direction == "reverse" or d == 1 else places:
            x = whole["X"][t]
            h, c = STEPS[operator](x, h, c, w, r, *b.chunk(2), p, linear_before_reset)
            states[t] = h
        ys.append(torch.stack([states[t] for t in places]))
        hs.append(h)
        cs.append(c)
    y = torch.stack(ys, 1)
    made = {
        "Y": y.permute(2, 0, 1, 3) if layout else y,
        "Y_h": torch.stack(hs, layout),
        "Y_c": torch.stack(cs, layout),
    }
    return {name: made[name] for name in OUTPUTS[operator]}


def model_of(operator, given, outputs, lengths=None, opset=20, **attributes):
    """The node as a model that has no inputs and outputs yet; it stores what a layer would."""
    names = [name if name in given else "" for name in INPUTS]
    made = [name if name in outputs else "" for name in OUTPUTS[operator]]
    if lengths is not None:
        names[4] = "lengths"
    node = helper.make_node(operator, names, made, "cell", hidden_size=N_HIDDEN, **attributes)
    graph = helper.make_graph([node], "cell", [], [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    stored(model, {name: given[name] for name in ("W", "R", "B", "P") if name in given})
    if lengths is not None:
        stored(model, {"lengths": np.array(lengths, np.int32)})
    return model


def values(operator, reads, seed=0, dtype=torch.float64, **form):
    sizes = shapes(operator, **form)
    names = [name for name in sizes if name in ("X", "W", "R", *reads)]
    return {name: uniform(sizes[name], 10 * seed + n, dtype) for n, name in enumerate(names)}


def assert_gradients_of(
    operator, reads, outputs, seed=0, dtype=torch.float64, steps=N_STEPS, **attributes
):
    """Compares the gradients of all that the node reads."""
    form = {name: attributes[name] for name in ("direction", "layout") if name in attributes}
    given = values(operator, reads, seed, dtype, steps=steps, **form)

    def function(**given):
        made = reference(operator, given, **attributes)
        return {name: made[name] for name in outputs}

    model = model_of(operator, given, outputs, **attributes)
    tolerance = {} if dtype == torch.float64 else {"tolerance": SINGLE}
    assert_gradients(model, function, given, dtype, seed=seed + 1, **tolerance)


@OPERATORS
@DIRECTIONS
@pytest.mark.parametrize("layout", [0, 1])
def test_all_inputs_and_outputs(operator, direction, layout):
    for seed in (0, 1, 2):
        form = {"direction": direction, "layout": layout}
        assert_gradients_of(operator, OPTIONAL[operator], OUTPUTS[operator], seed=seed, **form)


def subsets(names):
    chosen = (itertools.combinations(names, n) for n in range(len(names) + 1))
    return list(itertools.chain.from_iterable(chosen))


def label(value):
    return value if isinstance(value, str) else "+".join(value) or "none"


@pytest.mark.parametrize(
    ("operator", "reads"),
    [(operator, reads) for operator in N_GATES for reads in subsets(OPTIONAL[operator])],
    ids=label,
)
def test_optional_inputs(operator, reads):
    assert_gradients_of(operator, reads, OUTPUTS[operator], direction="bidirectional")


@pytest.mark.parametrize(
    ("operator", "outputs"),
    [(operator, some) for operator in N_GATES for some in subsets(OUTPUTS[operator]) if some],
    ids=label,
)
def test_each_output_in_the_loss(operator, outputs):
    assert_gradients_of(operator, OPTIONAL[operator], outputs, direction="bidirectional")


@pytest.mark.parametrize("reads", subsets(OPTIONAL["GRU"]), ids=label)
@DIRECTIONS
def test_linear_before_reset(reads, direction):
    for seed in (0, 1):
        form = {"direction": direction, "linear_before_reset": 1}
        assert_gradients_of("GRU", reads, OUTPUTS["GRU"], seed=seed, **form)


@OPERATORS
def test_one_step(operator):
    assert_gradients_of(
        operator, ("B", "h0"), OUTPUTS[operator], steps=1, direction="bidirectional"
    )


@OPERATORS
@pytest.mark.parametrize("layout", [0, 1])
def test_lengths_that_are_all_the_full_length(operator, layout):
    lengths = [N_STEPS] * N_ROWS
    reads = OPTIONAL[operator]
    assert_gradients_of(operator, reads, OUTPUTS[operator], lengths=lengths, layout=layout)


USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


@OPERATORS
def test_usual_activations_may_be_named(operator):
    form = {"direction": "bidirectional", "activations": 2 * USUAL[operator]}
    assert_gradients_of(operator, ("B",), OUTPUTS[operator], **form)


@OPERATORS
@pytest.mark.parametrize("opset", [7, 13, 14, 22])
def test_versions_of_the_operators(operator, opset):
    assert_gradients_of(operator, OPTIONAL[operator], OUTPUTS[operator], opset=opset)


@OPERATORS
@DIRECTIONS
def test_single_precision(operator, direction):
    form = {"dtype": torch.float32, "direction": direction}
    assert_gradients_of(operator, OPTIONAL[operator], OUTPUTS[operator], **form)


@pytest.mark.parametrize(
    ("operator", "layer", "order"),
    [
        ("LSTM", nn.LSTM, (0, 3, 1, 2)),
        ("GRU", nn.GRU, (1, 0, 2)),
        ("RNN", nn.RNN, (0,)),
    ],
    ids=["LSTM", "GRU", "RNN"],
)
def test_the_reference_is_the_layer_of_pytorch(operator, layer, order):
    """The layers order gates i f g o (LSTM) and r z n (GRU); their GRU is linear before reset."""
    layer = layer(N_FEATURES, N_HIDDEN, bidirectional=True).double()

    def gates(name):
        both = [getattr(layer, f"{name}_l0{suffix}") for suffix in ("", "_reverse")]
        return torch.stack([torch.cat([b.chunk(len(order))[n] for n in order]) for b in both])

    given = values(operator, ("h0", "c0"), direction="bidirectional")
    given |= {"W": gates("weight_ih"), "R": gates("weight_hh")}
    given["B"] = torch.cat([gates("bias_ih"), gates("bias_hh")], 1)
    y, last = layer(given["X"], (given["h0"], given["c0"]) if operator == "LSTM" else given["h0"])
    found = reference(operator, given, direction="bidirectional", linear_before_reset=1)
    torch.testing.assert_close(found["Y"].transpose(1, 2).flatten(2), y)
    for name, value in zip(
        OUTPUTS[operator][1:], last if operator == "LSTM" else [last], strict=True
    ):
        torch.testing.assert_close(found[name], value)


class Words(nn.Module):
    """Rows of a table, two layers in both directions, and scores of their mean."""

    def __init__(self, layer):
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.layers = layer(4, N_HIDDEN, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * N_HIDDEN, 3)

    def forward(self, ids):
        return self.head(self.layers(self.table(ids))[0].mean(1))


@pytest.mark.parametrize(("operator", "layer"), [("LSTM", nn.LSTM), ("GRU", nn.GRU)])
def test_layers_that_pytorch_exports(operator, layer):
    model, ids = Words(layer).double(), torch.randint(9, (N_ROWS, N_STEPS))
    data, labels = exported(model, ids), torch.tensor([0, 2, 1])
    assert [n.op_type for n in onnx.load_from_string(data).graph.node].count(operator) == 2
    found = run(shorthaul.onnx.grad(data, loss="cross-entropy"), {"x0": ids, "labels": labels})
    F.cross_entropy(model(ids), labels).backward()
    wanted = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() == {"loss", *wanted}
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= TOLERANCE * gradient.abs().max(), name


def whole_model(operator, **attributes):
    """A model with its inputs and its loss `total`."""
    given = values(operator, ("B", "h0"))
    model = model_of(operator, given, ("Y",), **attributes)
    with_inputs(model, {name: given[name] for name in ("X", "h0")})
    with_total(model, {"Y": torch.empty(N_STEPS, 1, N_ROWS, N_HIDDEN)}, torch.float64)
    return model


@OPERATORS
def test_gradients_are_verified(operator, recwarn):
    shorthaul.onnx.grad(whole_model(operator), loss="total", wrt=["W", "R", "B", "X", "h0"])
    assert not recwarn.list


UNUSUAL = [
    *((operator, {"clip": 0.5}) for operator in N_GATES),
    *((operator, {"lengths": [7, 3, 5]}) for operator in N_GATES),
    ("LSTM", {"input_forget": 1}),
    ("LSTM", {"activations": ["HardSigmoid", "Tanh", "Tanh"]}),
    ("LSTM", {"activations": ["Sigmoid", "Tanh", "Relu"]}),
    ("GRU", {"activations": ["Sigmoid", "Softsign"]}),
    ("RNN", {"activations": ["Relu"]}),
    ("RNN", {"activations": ["Affine"], "activation_alpha": [0.5], "activation_beta": [0.1]}),
]


@pytest.mark.parametrize(("operator", "attributes"), UNUSUAL, ids=str)
def test_other_forms_are_refused_by_name(operator, attributes):
    with pytest.raises(shorthaul.onnx.OnnxError, match=f"not supported:\n +{operator}: cell$"):
        shorthaul.onnx.grad(whole_model(operator, **attributes), loss="total", wrt=["W"])


@OPERATORS
def test_a_dynamic_number_of_steps_gets_a_number(operator):
    model = whole_model(operator)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "steps"
    with pytest.warns(UserWarning, match=r"the training graph is for steps=\d+"):
        shorthaul.onnx.grad(model, loss="total", wrt=["W"])
    bound = shorthaul.onnx.grad(model, loss="total", wrt=["W"], sizes={"steps": N_STEPS})
    assert bound == shorthaul.onnx.grad(whole_model(operator), loss="total", wrt=["W"])


@OPERATORS
def test_what_is_not_read_is_named(operator):
    """Without an initial state, a single step does not use R."""
    given = values(operator, (), steps=1)
    model = model_of(operator, given, ("Y_h",))
    with_inputs(model, {"X": given["X"]})
    with_total(model, {"Y_h": torch.empty(1, N_ROWS, N_HIDDEN)}, torch.float64)
    with pytest.raises(shorthaul.onnx.OnnxError, match="`R` does not influence the loss"):
        shorthaul.onnx.grad(model, loss="total", wrt=["W", "R"])
