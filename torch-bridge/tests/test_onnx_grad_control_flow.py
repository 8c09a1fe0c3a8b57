"""Gradients through Loop, Scan and If in training graphs are those of PyTorch in float64.

A training graph has the bodies written out as plain operators; ONNX Runtime runs all of them.
"""

import numpy as np
import pytest
import shorthaul.onnx
import torch
from file_gradients import assert_gradients, parsed, stored, uniform, with_inputs, with_total


def check(nodes, function, constants=None, opset=20, **shapes):
    """Compares for three seeds; arguments that are shapes are random numbers."""
    for seed in (0, 10, 20):
        model = parsed(nodes, opset)
        stored(model, constants or {})
        given = {name: uniform(shape, seed + n) for n, (name, shape) in enumerate(shapes.items())}
        assert_gradients(model, function, given, seed=seed)


def int64(*values):
    return np.array(values, np.int64)


TRUE, FALSE = np.array(True), np.array(False)

#: A body with a weight from outside, a carried state, and a scan output.
STEP = """
    step (int64 i, bool on, double[3,5] c) => (bool goes, double[3,5] next, double[3,5] shown) {
        product = MatMul (c, w)
        next = Tanh (product)
        shown = Mul (next, c)
        goes = Identity (on)
    }
"""


def steps(n, c, w):
    shown = []
    for _ in range(n):
        c, before = torch.tanh(c @ w), c
        shown.append(c * before)
    return c, torch.stack(shown)


@pytest.mark.parametrize("condition", ['""', "on"], ids=["no condition", "true"])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_loop(n, condition):
    def function(c, w):
        end, shown = steps(n, c, w)
        return {"end": end, "shown_all": shown}

    nodes = f"end, shown_all = Loop <body = {STEP}> (n, {condition}, c)"
    check(nodes, function, {"n": np.array(n), "on": TRUE}, c=(3, 5), w=(5, 5))


@pytest.mark.parametrize("outputs", ["end", "shown_all"])
def test_one_output_of_a_loop(outputs):
    def function(c, w):
        end, shown = steps(4, c, w)
        return {"end": end} if outputs == "end" else {"shown_all": shown}

    names = 'end, ""' if outputs == "end" else '"", shown_all'
    check(
        f'{names} = Loop <body = {STEP}> (n, "", c)', function, {"n": int64(4)}, c=(3, 5), w=(5, 5)
    )


def test_loop_of_no_trips():
    nodes = f'end, "" = Loop <body = {STEP}> (n, "", c) y = Mul (end, w)'
    check(nodes, lambda c, w: {"y": c * w}, {"n": np.array(0)}, c=(3, 5), w=(3, 5))


def test_a_loop_as_long_as_a_dimension():
    nodes = f"""
        sizes = Shape (c)
        n = Gather (sizes, one)
        end, shown_all = Loop <body = {STEP}> (n, "", c)
    """

    def function(c, w):
        end, shown = steps(5, c, w)
        return {"end": end, "shown_all": shown}

    check(nodes, function, {"one": np.array(1)}, c=(3, 5), w=(5, 5))


def test_states_that_a_loop_swaps_and_its_count():
    """Two carried values and two scan outputs; the body's number of the trip is a factor."""
    nodes = """
        a_end, b_end, products, sums = Loop <body =
            swap (int64 i, bool on, double[3,5] a, double[3,5] b)
                => (bool goes, double[3,5] new, double[3,5] a_out, double[3,5] p, double[3] s) {
                number = Cast <to = 11> (i)
                scaled = Mul (b, number)
                sine = Sin (scaled)
                new = Add (sine, a)
                a_out = Identity (a)
                p = Mul (a, b)
                s = ReduceSum <keepdims = 0> (p, last)
                goes = Constant <value = bool {1}> ()
            }> (n, on, a, b)
    """

    def function(a, b):
        products = []
        for i in range(4):
            products.append(a * b)
            a, b = torch.sin(b * i) + a, a
        products = torch.stack(products)
        return {"a_end": a, "b_end": b, "products": products, "sums": products.sum(2)}

    constants = {"n": np.array(4), "on": TRUE, "last": int64(1)}
    check(nodes, function, constants, a=(3, 5), b=(3, 5))


def test_a_carried_value_may_grow():
    nodes = """
        end = Loop <body =
            grow (int64 i, bool on, double[m,5] a) => (bool goes, double[k,5] longer) {
                new = Tanh (w)
                scaled = Mul (a, w)
                longer = Concat <axis = 0> (scaled, new)
                goes = Identity (on)
            }> (n, "", a)
    """

    def function(a, w):
        for _ in range(3):
            a = torch.cat([a * w, w.tanh()])
        return {"end": a}

    check(nodes, function, {"n": np.array(3)}, a=(2, 5), w=(1, 5))


def test_what_a_body_passes_on():
    """Its own stored weight, an input that is two outputs, and a value from outside."""
    nodes = """
        c_end, d_end, kept, outside = Loop <body =
            step (int64 i, bool on, double[5] c, double[5] d)
                => (bool on, double[5] next, double[5] d, double[5] d, double[5] w)
                <double[1] factor = {2.0}> {
                scaled = Mul (c, factor)
                next = Add (scaled, d)
            }> (n, "", c, d)
    """

    def function(c, d, w):
        end = 8 * c + 7 * d
        return {"c_end": end, "d_end": d, "kept": d.expand(3, 5), "outside": w.expand(3, 5)}

    check(nodes, function, {"n": np.array(3)}, c=(5,), d=(5,), w=(5,))


def test_a_state_that_is_replaced_from_outside():
    nodes = """
        end, shown = Loop <body =
            step (int64 i, bool on, double[5] c) => (bool goes, double[5] next, double[5] sine) {
                next = Mul (w, w)
                sine = Sin (c)
                goes = Identity (on)
            }> (n, "", c)
    """

    def function(c, w):
        return {"end": w * w, "shown": torch.stack([c.sin(), (w * w).sin(), (w * w).sin()])}

    check(nodes, function, {"n": np.array(3)}, c=(5,), w=(5,))


def test_rows_that_the_number_of_the_trip_chooses():
    nodes = """
        end, shown = Loop <body =
            step (int64 i, bool on, double[5] c) => (bool goes, double[5] next, double[5] sine) {
                row = Gather (w, i)
                next = Mul (c, row)
                sine = Sin (next)
                goes = Identity (on)
            }> (n, "", c)
    """

    def function(c, w):
        products = c * w[:3].cumprod(0)
        return {"end": products[2], "shown": products.sin()}

    check(nodes, function, {"n": np.array(3)}, c=(5,), w=(4, 5))


def test_a_sequence_that_a_loop_carries():
    nodes = """
        first = SequenceConstruct (a)
        all = Loop <body =
            step (int64 i, bool on, seq(double[5]) s) => (bool goes, seq(double[5]) longer) {
                last = SequenceAt (s, i)
                sine = Sin (last)
                longer = SequenceInsert (s, sine)
                goes = Identity (on)
            }> (n, "", first)
        y = ConcatFromSequence <axis = 0> (all)
    """

    def function(a):
        return {"y": torch.cat([a, a.sin(), a.sin().sin()])}

    check(nodes, function, {"n": np.array(2)}, a=(5,))


SINES = "step (int64 i, bool on, double[5] c) => (bool on, double[5] s) { s = Sin (c) }"


@pytest.mark.parametrize("opset", [8, 11, 13, 16, 19, 21, 23])
def test_versions_of_loop(opset):
    """Two loops whose bodies use the same names."""
    nodes = f"""
        y = Loop <body = {SINES}> (n, "", a)
        z = Loop <body = {SINES}> (n, "", y)
    """

    def function(a):
        return {"y": a.sin().sin(), "z": a.sin().sin().sin().sin()}

    check(nodes, function, {"n": np.array(2)}, opset, a=(5,))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_number_of_trips_may_have_one_dimension(shape):
    nodes = f"y = Loop <body = {SINES}> (n, on, a)"
    constants = {"n": np.full(shape, 2), "on": np.full(shape, True)}
    check(nodes, lambda a: {"y": a.sin().sin()}, constants, a=(5,))


def test_a_loop_in_a_loop():
    nodes = """
        end, rows = Loop <body =
            outer (int64 i, bool on, double[5] a) => (bool goes, double[5] a_next, double[5] row) {
                a_next, squares = Loop <body =
                    inner (int64 j, bool on2, double[5] b)
                        => (bool goes2, double[5] b_next, double[5] square) {
                        both = Mul (b, w)
                        sum = Add (both, a)
                        b_next = Sin (sum)
                        square = Mul (b_next, b_next)
                        goes2 = Identity (on2)
                    }> (two, "", a)
                row = ReduceSum <keepdims = 0> (squares, first)
                goes = Identity (on)
            }> (n, "", a0)
    """

    def function(a0, w):
        a, rows = a0, []
        for _ in range(3):
            b, row = a, 0
            for _ in range(2):
                b = torch.sin(b * w + a)
                row = row + b * b
            a = b
            rows.append(row)
        return {"end": a, "rows": torch.stack(rows)}

    constants = {"n": np.array(3), "two": np.array(2), "first": int64(0)}
    check(nodes, function, constants, a0=(5,), w=(5,))


def test_a_branch_that_the_number_of_the_trip_chooses():
    nodes = """
        end = Loop <body =
            step (int64 i, bool on, double[5] a) => (bool goes, double[5] next) {
                early = Less (i, two)
                next = If (early) <
                    then_branch = first () => (double[5] x) { x = Mul (a, w) },
                    else_branch = later () => (double[5] y) { z = Sin (a) y = Add (z, v) }
                >
                goes = Identity (on)
            }> (n, "", a)
    """

    def function(a, w, v):
        for i in range(5):
            a = a * w if i < 2 else a.sin() + v
        return {"end": a}

    check(nodes, function, {"n": np.array(5), "two": np.array(2)}, a=(5,), w=(5,), v=(5,))


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("out_direction", [0, 1])
@pytest.mark.parametrize(("axis", "out_axis"), [(0, 0), (1, 2), (2, 1), (-1, -1), (-2, -3)])
def test_scan_along_an_axis(axis, out_axis, direction, out_direction):
    """A state, a scan input and a scan output, of which the last two have more dimensions."""
    shape = [3, 4]
    shape.insert(axis if axis >= 0 else axis + 3, 7)
    nodes = f"""
        end, all = Scan <num_scan_inputs = 1, scan_input_axes = [{axis}],
            scan_input_directions = [{direction}], scan_output_axes = [{out_axis}],
            scan_output_directions = [{out_direction}], body =
            step (double[3,4] s, double[3,4] x) => (double[3,4] next, double[3,4] shown) {{
                sum = Add (s, x)
                next = Sin (sum)
                shown = Mul (next, w)
            }}> (s0, x)
    """

    def function(s0, x, w):
        s, shown, places = s0, [], range(7)
        for t in reversed(places) if direction else places:
            s = torch.sin(s + x.select(axis, t))
            shown.append(s * w)
        if out_direction:
            shown.reverse()
        return {"end": s, "all": torch.stack(shown, out_axis)}

    check(nodes, function, s0=(3, 4), x=shape, w=(4,))


def test_scan_of_several_inputs_and_outputs():
    """Two states, three scan inputs with their own axes and directions, two scan outputs."""
    nodes = """
        a_end, b_end, sums, dots = Scan <num_scan_inputs = 3, scan_input_axes = [0, 1, -1],
            scan_input_directions = [0, 1, 1], scan_output_axes = [1, 0],
            scan_output_directions = [1, 0], body =
            step (double[3] a, double[3] b, double[3] x, double[3] y, double z)
                => (double[3] a_next, double[3] b_next, double[3] sum, double dot) {
                ax = Mul (a, x)
                a_next = Sin (ax)
                by = Mul (b, y)
                b_next = Add (by, z)
                sum = Add (a_next, b_next)
                product = Mul (a_next, b)
                dot = ReduceSum <keepdims = 0> (product)
            }> (a0, b0, x, y, z)
    """

    def function(a0, b0, x, y, z):
        a, b, sums, dots = a0, b0, [], []
        for t in range(7):
            a, before = torch.sin(a * x[t]), b
            b = b * y[:, 6 - t] + z[6 - t]
            sums.append(a + b)
            dots.append((a * before).sum())
        sums.reverse()
        return {"a_end": a, "b_end": b, "sums": torch.stack(sums, 1), "dots": torch.stack(dots)}

    check(nodes, function, a0=(3,), b0=(3,), x=(7, 3), y=(3, 7), z=(7,))


SCAN = """
    end, all = Scan <num_scan_inputs = 1, body =
        step (double[5] s, double[5] x) => (double[5] next, double[5] shown) {
            product = Mul (s, x)
            next = Sin (product)
            shown = Mul (next, w)
        }> (c, x)
"""


def scan(s, x, w):
    shown = []
    for row in x:
        s = torch.sin(s * row)
        shown.append(s * w)
    return s, torch.stack(shown)


@pytest.mark.parametrize("opset", [9, 11, 16, 19, 21, 23])
def test_versions_of_scan(opset):
    def function(c, x, w):
        return dict(zip(("end", "all"), scan(c, x, w), strict=True))

    check(SCAN, function, opset=opset, c=(5,), x=(7, 5), w=(5,))


def test_a_scan_in_a_loop():
    nodes = f"""
        y = Loop <body =
            outer (int64 i, bool on, double[5] c) => (bool on, double[5] after) {{
                {SCAN}
                sum = ReduceSum <keepdims = 0> (all, first)
                after = Add (sum, end)
            }}> (n, "", c0)
    """

    def function(c0, x, w):
        for _ in range(3):
            end, shown = scan(c0, x, w)
            c0 = shown.sum(0) + end
        return {"y": c0}

    check(nodes, function, {"n": np.array(3), "first": int64(0)}, c0=(5,), x=(4, 5), w=(5,))


def test_a_loop_in_a_scan():
    nodes = """
        end, all = Scan <num_scan_inputs = 1, body =
            outer (double[5] s, double[5] x) => (double[5] after, double[5] shown) {
                after = Loop <body =
                    inner (int64 i, bool on, double[5] c) => (bool on, double[5] sine) {
                        product = Mul (c, x)
                        sine = Sin (product)
                    }> (n, "", s)
                shown = Mul (after, w)
            }> (s0, rows)
    """

    def function(s0, rows, w):
        shown = []
        for row in rows:
            for _ in range(2):
                s0 = torch.sin(s0 * row)
            shown.append(s0 * w)
        return {"end": s0, "all": torch.stack(shown)}

    check(nodes, function, {"n": np.array(2)}, s0=(5,), rows=(4, 5), w=(5,))


def test_scan_without_a_state():
    nodes = """
        y = Scan <num_scan_inputs = 1, body =
            step (double[3] x) => (double[3] shown) { s = Sin (x) shown = Mul (s, w) }> (x)
    """
    check(nodes, lambda x, w: {"y": x.sin() * w}, x=(7, 3), w=(3,))


def test_scan_of_version_8_over_a_batch():
    nodes = """
        end, all = Scan <num_scan_inputs = 1, directions = [1], body =
            step (double[4] s, double[4] x) => (double[4] next, double[4] shown) {
                sum = Add (s, x)
                next = Tanh (sum)
                shown = Mul (next, x)
            }> ("", s0, x)
    """

    def function(s0, x):
        s, shown = s0, []
        for t in reversed(range(5)):
            s = torch.tanh(s + x[:, t])
            shown.append(s * x[:, t])
        return {"end": s, "all": torch.stack(shown, 1)}

    check(nodes, function, opset=8, s0=(3, 4), x=(3, 5, 4))


IF = """
    y = If (c) <
        then_branch = yes () => (double[3,5] p) { p = MatMul (x, w) },
        else_branch = no () => (double[3,5] q) { s = Sin (x) q = Mul (s, v) }
    >
"""


@pytest.mark.parametrize("taken", [True, False])
def test_if_of_a_known_condition(taken):
    """What only the other branch reads has a gradient of zero."""

    def function(x, w, v):
        return {"y": x @ w if taken else x.sin() * v, "z": w + v}

    nodes = f"{IF} z = Add (w, v)"
    check(nodes, function, {"c": np.array(taken)}, x=(3, 5), w=(5, 5), v=(1, 5))


@pytest.mark.parametrize("rows", [3, 4])
def test_if_of_a_condition_on_sizes(rows):
    nodes = """
        sizes = Shape (x)
        n = Gather (sizes, zero)
        c = Equal (n, three)
        y = If (c) <
            then_branch = yes () => (double[3,5] p) { p = Mul (x, w) },
            else_branch = no () => (double[4,5] q) { s = Sin (x) q = Add (s, w) }
        >
    """

    def function(x, w):
        return {"y": x * w if rows == 3 else x.sin() + w}

    check(nodes, function, {"zero": np.array(0), "three": np.array(3)}, x=(rows, 5), w=(5,))


@pytest.mark.parametrize("opset", [11, 13, 21])
def test_branches_of_two_outputs(opset):
    """Both branches use the same names; one gives a value from outside."""
    nodes = """
        y, z = If (c) <
            then_branch = yes () => (double[5] p, double[5] q) { k = Sin (x) p = Mul (k, w)
                q = Add (x, v) },
            else_branch = no () => (double[5] p, double[5] x) { k = Cos (x) p = Add (k, w) }
        >
        u = Add (w, v)
    """

    def branch(taken):
        def function(x, w, v):
            both = (x.sin() * w, x + v) if taken else (x.cos() + w, x)
            return dict(zip("yzu", (*both, w + v), strict=True))

        return function

    for taken in (True, False):
        check(nodes, branch(taken), {"c": np.array(taken)}, opset, x=(5,), w=(5,), v=(5,))


def test_a_branch_in_a_branch():
    nodes = """
        y = If (yes) <
            then_branch = a () => (double[5] p) {
                q = If (no) <
                    then_branch = b () => (double[5] r) { r = Sin (x) },
                    else_branch = c () => (double[5] t) { t = Mul (x, w) }
                >
                p = Exp (q)
            },
            else_branch = d () => (double[5] u) { u = Cos (x) }
        >
    """
    check(nodes, lambda x, w: {"y": (x * w).exp()}, {"yes": TRUE, "no": FALSE}, x=(5,), w=(5,))


def refused(nodes, operator, constants=None, inputs=None):
    model = parsed(nodes)
    stored(model, constants or {})
    c = uniform((3, 5))
    with_inputs(model, {"c": c, **(inputs or {})})
    stored(model, {"w": uniform((5, 5))})
    with_total(model, {"end": c}, torch.float64)
    node = next(node for node in model.graph.node if node.op_type == operator)
    node.name = "flow"
    with pytest.raises(shorthaul.onnx.OnnxError, match=f"not supported:\n +{operator}: flow$"):
        shorthaul.onnx.grad(model, loss="total", wrt=["w"])


def test_a_loop_of_unknown_length_is_refused_by_name():
    n = torch.tensor(4)
    refused(f'end, all = Loop <body = {STEP}> (n, "", c)', "Loop", inputs={"n": n})
    # A condition that the data decides, at the start or in the body.
    asked = {"on": torch.tensor(True)}
    refused(f"end, all = Loop <body = {STEP}> (n, on, c)", "Loop", {"n": int64(4)}, asked)
    step = STEP.replace(
        "goes = Identity (on)", "s = ReduceSum <keepdims = 0> (c) goes = Less (s, e)"
    )
    constants = {"n": np.array(4), "e": np.array(1.0)}
    refused(f'end, all = Loop <body = {step}> (n, "", c)', "Loop", constants)
    # Only a condition ends it.
    refused(f'end, all = Loop <body = {STEP}> ("", on, c)', "Loop", {"on": TRUE})


def test_a_loop_of_too_many_trips_is_refused_by_name():
    refused(f'end, all = Loop <body = {STEP}> (n, "", c)', "Loop", {"n": np.array(1025)})


def test_an_if_that_the_data_decides_is_refused_by_name():
    nodes = IF.replace("y =", "end =").replace("x", "c").replace("Mul (s, v)", "Identity (s)")
    refused(nodes.replace("If (c)", "If (k)"), "If", inputs={"k": torch.tensor(True)})


def test_a_scan_of_dynamic_length_gets_a_number():
    nodes = """
        end = Scan <num_scan_inputs = 1, body =
            step (double[3,5] s, double[3,5] x) => (double[3,5] next) { next = Add (s, x) }>
            (c, x)
    """
    model = parsed(nodes)
    c, x = uniform((3, 5)), uniform((7, 3, 5))
    with_inputs(model, {"c": c, "x": x})
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "steps"
    with_total(model, {"end": c}, torch.float64)
    with pytest.warns(UserWarning, match=r"the training graph is for steps=\d+"):
        shorthaul.onnx.grad(model, loss="total", wrt=["c"])
    assert shorthaul.onnx.grad(model, loss="total", wrt=["c"], sizes={"steps": 7})
