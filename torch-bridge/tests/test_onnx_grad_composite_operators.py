"""Gradients of operators that stand for several others are those of PyTorch in float64.

These are layers of language models, quantization, sequences, steps of optimizers, operators of
classical machine learning, and those of ONNX Runtime.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from file_gradients import TOLERANCE, assert_gradients, ints, named, only, parsed, stored, uniform

#: What is computed in single precision.
SINGLE = 2e-6

DOMAINS = {
    "com_microsoft": 1,
    "ai_onnx_ml": 5,
    "ai_onnx_preview": 1,
    "ai_onnx_preview_training": 1,
}


def case(nodes, function, constants=None, name="", opset=22, dtype=torch.float64, **given):
    """Nodes whose outputs are those of a function with the same inputs, by name.

    A shape stands for random numbers from -1 to 1. Constants are stored and not differentiated.
    """
    operator = nodes.split(" = ", 1)[1].split()[0].rsplit(".")[-1]
    row = (nodes, function, constants or {}, opset, dtype, given)
    return pytest.param(*row, id=f"{operator} {name}".strip())


def causal(x, w, b=None, past=None, activation=lambda y: y):
    k = w.shape[2] - 1
    whole = F.pad(x, (k, 0)) if past is None else torch.cat([past, x], 2)
    return activation(F.conv1d(whole, w, b, groups=x.shape[1])), whole[:, :, -k:]


def linear_attention(q, k, v, decay=None, beta=None, state=None, heads=(4, 2)):
    """Of `[batch, length, heads·size]`: the state of each head is changed by every step."""
    q_heads, kv_heads = heads

    def split(x, n):
        return x.unflatten(2, (n, -1)).transpose(1, 2)

    q, k, v = split(q, q_heads), split(k, kv_heads), split(v, kv_heads)
    if state is None:
        state = q.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    rows = []
    for t in range(q.shape[2]):
        key, value = k[:, :, t, :, None], v[:, :, t, None, :]
        if decay is not None:
            state = state * split(decay, kv_heads)[:, :, t, :, None].exp()
        if beta is not None:
            known = (state * key).sum(2, keepdim=True)
            value = split(beta, beta.shape[2])[:, :, t, :, None] * (value - known)
        state = state + key * value
        read = state.repeat_interleave(q_heads // kv_heads, 1)
        rows.append((q[:, :, t, None] @ read)[:, :, 0] / k.shape[3] ** 0.5)
    return torch.stack(rows, 1).flatten(2), state


def rotated(x, cos, sin, interleaved=False, size=None):
    """Of `[batch, heads, length, size]`, with angles `[batch, length, half]`."""
    size = size or x.shape[3]
    cos, sin, x, rest = cos[:, None], sin[:, None], x[..., :size], x[..., size:]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, 3)
    pair = (cos * a - sin * b, sin * a + cos * b)
    x = torch.stack(pair, 4).flatten(3) if interleaved else torch.cat(pair, 3)
    return torch.cat([x, rest], 3)


PLACES = ints(0, 2, 3, 1, 5, 5).reshape(2, 3)


def attended(q, k, v, mask=None, is_causal=False, scale=None, cap=0.0):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask
    if is_causal:
        later = torch.ones(q.shape[2], k.shape[2]).triu(1) > 0
        scores = scores.masked_fill(later, -torch.inf)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    return scores.softmax(3) @ v


HEADS = {"q": (2, 4, 3, 5), "k": (2, 2, 7, 5), "v": (2, 2, 7, 6)}
LANGUAGE = [
    case(
        "y, z = CausalConvWithState (x, w, b, past)",
        named(causal),
        opset=27,
        x=(2, 3, 7),
        w=(3, 1, 4),
        b=(3,),
        past=(2, 3, 3),
    ),
    case(
        'y = CausalConvWithState <activation = "silu"> (x, w)',
        only(lambda x, w: causal(x, w, activation=F.silu)[0]),
        name="silu",
        opset=27,
        x=(2, 3, 7),
        w=(3, 1, 4),
    ),
    *(
        case(
            f'y, z = LinearAttention <update_rule = "{rule}", q_num_heads = 4, kv_num_heads = 2>'
            f" (q, k, v, {past}, {decay}, {beta})",
            lambda names=("y", "z"), **given: dict(
                zip(names, linear_attention(**given), strict=True)
            ),
            name=rule,
            opset=27,
            q=(2, 5, 12),
            k=(2, 5, 6),
            v=(2, 5, 8),
            **more,
        )
        for rule, past, decay, beta, more in (
            ("linear", '""', '""', '""', {}),
            ("gated", "state", "decay", '""', {"state": (2, 2, 3, 4), "decay": (2, 5, 2)}),
            ("delta", '""', '""', "beta", {"beta": (2, 5, 2)}),
            ("gated_delta", '""', "decay", "beta", {"decay": (2, 5, 6), "beta": (2, 5, 1)}),
        )
    ),
    case(
        "y = RotaryEmbedding (x, cos, sin)",
        only(rotated),
        opset=23,
        x=(2, 4, 3, 6),
        cos=(2, 3, 3),
        sin=(2, 3, 3),
    ),
    case(
        "y = RotaryEmbedding <interleaved = 1, rotary_embedding_dim = 4> (x, cos, sin, places)",
        only(lambda x, cos, sin: rotated(x, cos[PLACES], sin[PLACES], True, 4)),
        {"places": PLACES},
        name="of pairs",
        opset=23,
        x=(2, 4, 3, 6),
        cos=(6, 2),
        sin=(6, 2),
    ),
    case("y = Attention (q, k, v)", only(attended), name="of groups", opset=23, **HEADS),
    case(
        "y = Attention <is_causal = 1> (q, k, v)",
        only(lambda q, k, v: attended(q, k, v, is_causal=True)),
        name="causal",
        opset=23,
        **HEADS,
    ),
    case(
        "y = Attention <scale = 0.5> (q, k, v, mask)",
        only(lambda q, k, v, mask: attended(q, k, v, mask, scale=0.5)),
        name="with a mask",
        opset=23,
        **HEADS,
        mask=(3, 7),
    ),
    case(
        "y = Attention <softcap = 0.5> (q, k, v)",
        only(lambda q, k, v: attended(q, k, v, cap=0.5)),
        name="with a cap",
        opset=23,
        **HEADS,
    ),
    case(
        "y, z, u = Attention (q, k, v, mask, k_past, v_past)",
        named(
            lambda q, k, v, mask, k_past, v_past: (
                attended(q, k := torch.cat([k_past, k], 2), v := torch.cat([v_past, v], 2), mask),
                k,
                v,
            )
        ),
        name="with a past",
        opset=23,
        **HEADS,
        mask=(3, 9),
        k_past=(2, 2, 2, 5),
        v_past=(2, 2, 2, 6),
    ),
    case(
        "y = ai.onnx.preview.FlexAttention (q, k, v)",
        only(attended),
        opset=26,
        **HEADS,
    ),
    case(
        "y = ai.onnx.preview.FlexAttention <score_mod = squared (double[2,4,3,7] s)"
        " => (double[2,4,3,7] t) { t = Mul (s, s) }> (q, k, v)",
        only(lambda q, k, v: torch.softmax(scores_of(q, k) ** 2, 3) @ v.repeat_interleave(2, 1)),
        name="with a graph",
        opset=26,
        **HEADS,
    ),
]


def scores_of(q, k):
    return q @ k.repeat_interleave(2, 1).transpose(2, 3) / q.shape[3] ** 0.5


CODES = np.arange(-7, 8, dtype=np.int8).reshape(3, 5)
DECODED = torch.from_numpy(CODES)

QUANTIZED = [
    case(
        "y = DequantizeLinear (x, scale)",
        only(lambda scale: DECODED * scale),
        {"x": CODES},
        dtype=torch.float32,
        scale=(),
    ),
    case(
        "y = DequantizeLinear <axis = 1> (x, scale, zero)",
        only(lambda scale: (DECODED - torch.arange(5)) * scale),
        {"x": CODES, "zero": np.arange(5, dtype=np.int8)},
        name="of columns",
        dtype=torch.float32,
        scale=(5,),
    ),
    case(
        'q, y, "" = DynamicQuantizeLinear (x)',
        only(lambda x: (x.max().clamp(min=0) - x.min().clamp(max=0)) / 255),
        dtype=torch.float32,
        x=(3, 5),
    ),
]

SEQUENCES = [
    case(
        "s = SequenceConstruct (a, b) first = SequenceAt (s, zero)"
        " all = ConcatFromSequence <axis = 1> (s) y = Mul (all, w) z = Sin (first)",
        named(lambda a, b, w: (torch.cat([a, b], 1) * w, a.sin())),
        {"zero": np.array(0)},
        a=(3, 2),
        b=(3, 4),
        w=(3, 6),
    ),
    case(
        "s = SequenceConstruct (a, b) y = ConcatFromSequence <new_axis = 1, axis = -1> (s)",
        only(lambda a, b: torch.stack([a, b], -1)),
        name="stacked",
        a=(3, 5),
        b=(3, 5),
    ),
    case(
        "s = SplitToSequence <axis = 1> (x, sizes) y = SequenceAt (s, last)",
        only(lambda x: x[:, 2:]),
        {"sizes": ints(2, 3), "last": np.array(-1)},
        x=(3, 5),
    ),
    case(
        "e = SequenceEmpty <dtype = 11> () s = SequenceInsert (e, a)"
        " t = SequenceInsert (s, b, zero) u = SequenceInsert (t, a)"
        " v = SequenceErase (u, one) n = SequenceLength (v)"
        " k = Cast <to = 11> (n) c = ConcatFromSequence <axis = 0> (v) y = Mul (c, k)",
        only(lambda a, b: 2 * torch.cat([b, a])),
        {"zero": np.array(0), "one": np.array(1)},
        a=(3, 5),
        b=(3, 5),
    ),
    case("s = OptionalGetElement (x) y = Sin (s)", only(torch.sin), x=(3, 5)),
]

STATES = {"x": (3, 5), "g": (3, 5), "v": (3, 5), "h": 1.5 + uniform((3, 5), 9)}


def adam(x, g, v, h, t=4, a=0.875, b=0.75, epsilon=0.125, rate=0.5, norm=0.25, after=0.0625):
    g = g + norm * x
    v, h = a * v + (1 - a) * g, b * h + (1 - b) * g * g
    rate = rate * (1 - b**t) ** 0.5 / (1 - a**t) if t else rate
    return (1 - after) * (x - rate * v / (h.sqrt() + epsilon)), v, h


def adagrad(x, g, h):
    g = g + 0.25 * x
    h = h + g * g
    return x - 0.5 / (1 + 4 * 0.125) * g / (h.sqrt() + 0.125), h


def momentum(x, g, v, nesterov, first):
    g = g + 0.25 * x
    v = 0.875 * v + (1 if first else 0.5) * g
    return x - 0.5 * (g + 0.875 * v if nesterov else v), v


OPTIMIZERS = [
    *(
        case(
            "y, z, u = ai.onnx.preview.training.Adam <alpha = 0.875, beta = 0.75,"
            " epsilon = 0.125, norm_coefficient = 0.25, norm_coefficient_post = 0.0625>"
            " (r, t, x, g, v, h)",
            named(lambda x, g, v, h, t=t: adam(x, g, v, h, t)),
            {"r": np.array(0.5), "t": np.array(t)},
            name=f"step {t}",
            **STATES,
        )
        for t in (0, 4)
    ),
    case(
        "y, z = ai.onnx.preview.training.Adagrad <decay_factor = 0.125, epsilon = 0.125,"
        " norm_coefficient = 0.25> (r, t, x, g, h)",
        named(adagrad),
        {"r": np.array(0.5), "t": np.array(4)},
        x=STATES["x"],
        g=STATES["g"],
        h=STATES["h"],
    ),
    *(
        case(
            f'y, z = ai.onnx.preview.training.Momentum <alpha = 0.875, beta = 0.5, mode = "{mode}",'
            " norm_coefficient = 0.25> (r, t, x, g, v)",
            named(lambda x, g, v, m=mode, t=t: momentum(x, g, v, m == "nesterov", t == 0)),
            {"r": np.array(0.5), "t": np.array(t)},
            name=f"{mode} {t}",
            x=(3, 5),
            g=(3, 5),
            v=(3, 5),
        )
        for mode in ("standard", "nesterov")
        for t in (0, 4)
    ),
]

LEAVES = torch.tensor([[2.0, 0, 0, 0, 0], [0, 0, 0, 0, 3]], dtype=torch.float64)

CLASSICAL = [
    case(
        "y = ai.onnx.ml.ArrayFeatureExtractor (x, i)",
        only(lambda x: x[:, [0, 4, 4]]),
        {"i": ints(0, 4, 4)},
        x=(3, 5),
    ),
    case(
        "s = ai.onnx.ml.Binarizer <threshold = 0.25> (x) y = Mul (s, x)",
        only(lambda x: (x > 0.25) * x),
        x=(3, 5),
    ),
    case(
        "y = ai.onnx.ml.Scaler <offset = [0.5, 0.25, 1.0], scale = [2.0, -1.0, 0.5]> (x)",
        only(lambda x: (x - torch.tensor([0.5, 0.25, 1])) * torch.tensor([2, -1, 0.5])),
        dtype=torch.float32,
        x=(5, 3),
    ),
    case(
        "s = ai.onnx.ml.TreeEnsemble <n_targets = 5, tree_roots = [0], nodes_featureids = [1],"
        " nodes_splits = double[1] {0.25}, nodes_modes = uint8[1] {0},"
        " nodes_truenodeids = [0], nodes_trueleafs = [1],"
        " nodes_falsenodeids = [1], nodes_falseleafs = [1],"
        " leaf_targetids = [0, 4], leaf_weights = double[2] {2.0, 3.0}> (x) y = Mul (s, x)",
        only(lambda x: x * LEAVES[(x[:, 1] > 0.25).long()]),
        x=(4, 5),
    ),
]


def root_mean(x, scale, epsilon=2.0**-10):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * scale


def layer_norm(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:], scale, shift, 2.0**-10)


def in_heads(x, n):
    return x.unflatten(2, (n, -1)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


EPSILON = "epsilon = 0.0009765625"
IDS = np.array([[0, 6, 3], [3, 3, 1]], np.int32)
SEGMENTS = np.array([[0, 1, 1], [0, 0, 1]], np.int32)
RUNTIME = [
    case("y = com.microsoft.Gelu (x)", only(F.gelu), x=(3, 5)),
    case("y = com.microsoft.BiasGelu (x, b)", only(lambda x, b: F.gelu(x + b)), x=(3, 5), b=(5,)),
    case(
        "y = com.microsoft.FastGelu (x, b)",
        only(lambda x, b: F.gelu(x + b, approximate="tanh")),
        x=(3, 5),
        b=(5,),
    ),
    case(
        "y = com.microsoft.QuickGelu <alpha = 1.5> (x)",
        only(lambda x: x * torch.sigmoid(1.5 * x)),
        x=(3, 5),
    ),
    *(
        case(
            f"y = {domain}SimplifiedLayerNormalization <axis = -1, {EPSILON}> (x, s)",
            only(root_mean),
            name=domain,
            x=(2, 3, 5),
            s=(5,),
        )
        for domain in ("", "com.microsoft.")
    ),
    case(
        f'y, "", "", z = com.microsoft.SkipLayerNormalization <{EPSILON}> (x, more, s, b, bias)',
        named(lambda x, m, s, b, bias: (layer_norm(x + m + bias, s, b), x + m + bias)),
        x=(2, 3, 5),
        more=(2, 3, 5),
        s=(5,),
        b=(5,),
        bias=(5,),
    ),
    case(
        f'y, "", "", z = com.microsoft.SkipSimplifiedLayerNormalization <{EPSILON}>'
        " (x, more, s, b)",
        named(lambda x, m, s, b: (root_mean(x + m + b, s), x + m + b)),
        x=(2, 3, 5),
        more=(2, 3, 5),
        s=(5,),
        b=(5,),
    ),
    case(
        f'y, "" = com.microsoft.EmbedLayerNormalization <{EPSILON}>'
        " (ids, segments, words, places, kinds, s, b)",
        only(lambda w, p, k, s, b: layer_norm(w[IDS] + p[:3] + k[SEGMENTS], s, b)),
        {"ids": IDS, "segments": SEGMENTS},
        words=(7, 5),
        places=(4, 5),
        kinds=(2, 5),
        s=(5,),
        b=(5,),
    ),
    *(
        case(
            f"y = com.microsoft.{operator} <alpha = 0.5, transA = 1, transB = 1> (a, b)",
            only(lambda a, b: 0.5 * a.mT @ b.mT),
            a=(2, 4, 3),
            b=(2, 5, 4),
        )
        for operator in ("FusedMatMul", "TransposeMatMul")
    ),
    case(
        'y = com.microsoft.FusedGemm <activation = "Tanh", alpha = 0.5, transA = 1> (a, b, c)',
        only(lambda a, b, c: torch.tanh(0.5 * a.T @ b + c)),
        a=(4, 3),
        b=(4, 5),
        c=(5,),
    ),
    case(
        'y = com.microsoft.FusedConv <activation = "LeakyRelu", activation_params = [0.125],'
        " pads = [1, 1, 1, 1], strides = [2, 1]> (x, w, b, z)",
        only(lambda x, w, b, z: F.leaky_relu(F.conv2d(x, w, b, (2, 1), 1) + z, 0.125)),
        x=(2, 3, 5, 4),
        w=(4, 3, 3, 3),
        b=(4,),
        z=(2, 4, 3, 4),
    ),
    case(
        "y = com.microsoft.Attention <num_heads = 2> (x, w, b)",
        only(lambda x, w, b: joined(attended(*(in_heads(p, 2) for p in (x @ w + b).chunk(3, 2))))),
        x=(2, 3, 5),
        w=(5, 18),
        b=(18,),
    ),
    case(
        "y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, b)",
        only(
            lambda q, k, v, b: joined(
                attended(*(in_heads(x + p, 2) for x, p in zip((q, k, v), b.chunk(3), strict=True)))
            )
        ),
        q=(2, 3, 6),
        k=(2, 7, 6),
        v=(2, 7, 6),
        b=(18,),
    ),
]

CASES = [*LANGUAGE, *QUANTIZED, *SEQUENCES, *OPTIMIZERS, *CLASSICAL, *RUNTIME]


@pytest.mark.parametrize(("nodes", "function", "constants", "opset", "dtype", "given"), CASES)
def test_gradients_of_nodes(nodes, function, constants, opset, dtype, given):
    model = parsed(
        nodes, opset, **{d: n for d, n in DOMAINS.items() if d.replace("_", ".") in nodes}
    )
    stored(model, constants)
    given = {
        name: uniform(value, n, dtype) if isinstance(value, tuple) else value
        for n, (name, value) in enumerate(given.items())
    }
    tolerance = TOLERANCE if dtype == torch.float64 else SINGLE
    assert_gradients(model, function, given, dtype, tolerance)
