"""Cases of unusual values: recurrent cells, signals, losses, attention, optimizers, trees."""

import numpy as np
from edges_made import INF, NAN, Edge, edge, f32, i64, ramp
from onnx import TensorProto, helper

STEPS, BATCH, SIZE, HIDDEN = 3, 2, 2, 2


def cell(name, op, gates, directions=1, more=(), **attrs):
    """A recurrent layer of small sizes."""
    inputs = [
        ramp(STEPS, BATCH, SIZE),
        ramp(directions, gates * HIDDEN, SIZE),
        ramp(directions, gates * HIDDEN, HIDDEN) / 2,
        *more,
    ]
    outputs = 3 if op == "LSTM" else 2
    return edge(name, op, *inputs, outputs=outputs, hidden_size=HIDDEN, opset=14, **attrs)


RECURRENT = [
    cell("reverse", "LSTM", 4, direction="reverse"),
    cell(
        "both ways, first state",
        "LSTM",
        4,
        2,
        [ramp(2, 16), None, ramp(2, 2, 2), ramp(2, 2, 2) / 3],
        direction="bidirectional",
    ),
    cell("cut", "LSTM", 4, clip=0.5),
    cell("peepholes", "LSTM", 4, 1, [None, None, None, None, ramp(1, 6)]),
    cell("reset before", "GRU", 3, 1, [ramp(1, 12)]),
    cell("reset after", "GRU", 3, 1, [ramp(1, 12)], linear_before_reset=1),
    cell(
        "rectified, both ways",
        "RNN",
        1,
        2,
        [],
        direction="bidirectional",
        activations=["Relu", "Tanh"],
    ),
    cell("reverse, first state", "RNN", 1, 1, [None, None, ramp(1, 2, 2)], direction="reverse"),
]

SIGNALS = [
    edge("one-sided", "DFT", ramp(1, 5, 1), onesided=1, opset=17),
    edge("longer", "DFT", ramp(1, 5, 1), np.int64(8), known=[1], opset=17),
    edge("shorter, back", "DFT", ramp(1, 5, 2), np.int64(4), known=[1], opset=17, inverse=1),
    edge("negative axis", "DFT", ramp(1, 3, 4, 1), None, np.int64(-3), known=[2], opset=20),
    edge(
        "all sides",
        "STFT",
        ramp(1, 9, 1),
        i64(2)[0],
        f32(0.5, 1, 1, 0.5),
        known=[1],
        opset=17,
        onesided=0,
    ),
    edge("no window", "STFT", ramp(1, 9, 1), i64(3)[0], None, i64(4)[0], known=[1, 3], opset=17),
    edge("symmetric", "HannWindow", i64(5)[0], known=[0], opset=17, periodic=0),
    edge("doubles", "BlackmanWindow", i64(6)[0], known=[0], opset=17, output_datatype=11),
    edge(
        "few bins",
        "MelWeightMatrix",
        i64(4)[0],
        i64(16)[0],
        i64(8000)[0],
        np.float32(100.0),
        np.float32(3500.0),
        known=[0, 1, 2, 3, 4],
        opset=17,
    ),
]

TARGETS = i64(0, -1, 2)
LOSSES = [
    edge(
        "negative index ignored",
        "NegativeLogLikelihoodLoss",
        ramp(3, 3),
        TARGETS,
        ignore_index=-1,
        opset=13,
    ),
    edge(
        "weights, sums",
        "NegativeLogLikelihoodLoss",
        ramp(3, 3),
        i64(0, 1, 2),
        ramp(3) + 2,
        reduction="sum",
        opset=13,
    ),
    edge(
        "one by one, ignored",
        "SoftmaxCrossEntropyLoss",
        ramp(3, 3) * 500,
        TARGETS,
        ignore_index=-1,
        reduction="none",
        opset=13,
    ),
    edge(
        "mean of weights",
        "SoftmaxCrossEntropyLoss",
        ramp(3, 3),
        TARGETS,
        ramp(3) + 2,
        ignore_index=-1,
        opset=13,
    ),
]

HEADS = [ramp(1, 2, 2, 3), ramp(1, 2, 3, 3) / 2, ramp(1, 2, 3, 2)]
SEEN = np.array([[True, False, True], [False, True, False]])
ATTENDED = [
    edge("some keys hidden", "Attention", *HEADS, SEEN, opset=23),
    edge(
        "minus infinity", "Attention", *HEADS, np.where(SEEN, 0, -INF).astype(np.float32), opset=23
    ),
    edge("causal", "Attention", *HEADS, opset=23, is_causal=1, scale=0.5),
    edge("softcap", "Attention", *HEADS, opset=23, softcap=0.5),
    edge(
        "fewer keys",
        "Attention",
        ramp(1, 2, 4),
        ramp(1, 3, 2),
        ramp(1, 3, 2),
        opset=23,
        q_num_heads=2,
        kv_num_heads=1,
    ),
]

TRAINING = "ai.onnx.preview.training"
STATE = [f32(1.0, -2.0), f32(0.5, INF), f32(0.1, 0.2)]
OPTIMIZED = [
    edge(
        "first step",
        "Momentum",
        np.float32(0.1),
        np.int64(0),
        *STATE,
        domain=TRAINING,
        outputs=2,
        alpha=0.9,
        beta=0.5,
        mode="standard",
        norm_coefficient=0.01,
    ),
    edge(
        "later step",
        "Momentum",
        np.float32(0.1),
        np.int64(3),
        *STATE,
        domain=TRAINING,
        outputs=2,
        alpha=0.9,
        beta=0.5,
        mode="nesterov",
        norm_coefficient=0.01,
    ),
    edge(
        "first step",
        "Adam",
        np.float32(0.1),
        np.int64(0),
        *STATE,
        f32(0.3, 0.4),
        domain=TRAINING,
        outputs=3,
        epsilon=1e-3,
    ),
    edge(
        "later step",
        "Adam",
        np.float32(0.1),
        np.int64(3),
        *STATE,
        f32(0.3, 0.4),
        domain=TRAINING,
        outputs=3,
        epsilon=1e-3,
        norm_coefficient_post=0.1,
    ),
    edge(
        "decay",
        "Adagrad",
        np.float32(0.1),
        np.int64(3),
        *STATE,
        domain=TRAINING,
        outputs=2,
        decay_factor=0.1,
        epsilon=1e-3,
    ),
]

NGRAMS = np.array([[2, 5, 7, 2, 5], [5, 5, 9, 9, 7]], np.int32)
POOL = {"pool_int64s": [5, 2, 5, 5, 7, 9, 9], "ngram_counts": [0, 1], "ngram_indexes": [1, 0, 3, 2]}
COUNTED = [
    edge(
        "gaps",
        "TfIdfVectorizer",
        NGRAMS,
        mode="TF",
        min_gram_length=1,
        max_gram_length=2,
        max_skip_count=2,
        **POOL,
    ),
    edge(
        "weights",
        "TfIdfVectorizer",
        NGRAMS,
        mode="TFIDF",
        min_gram_length=2,
        max_gram_length=2,
        max_skip_count=0,
        weights=[0.5, 2.0, 3.0, 4.0],
        **POOL,
    ),
    edge(
        "there or not",
        "TfIdfVectorizer",
        NGRAMS[0],
        mode="IDF",
        min_gram_length=1,
        max_gram_length=2,
        max_skip_count=0,
        weights=[0.5, 2.0, 3.0, 4.0],
        **POOL,
    ),
    edge(
        "too short",
        "TfIdfVectorizer",
        NGRAMS[0, :1],
        mode="TF",
        min_gram_length=2,
        max_gram_length=2,
        max_skip_count=0,
        **POOL,
    ),
]

LEARNING = "ai.onnx.ml"
TREES = {
    "nodes_treeids": [0, 0, 0, 0, 0, 1, 1, 1],
    "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
    "nodes_featureids": [0, 1, 0, 0, 0, 1, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "BRANCH_GT", "LEAF", "LEAF", "LEAF", "BRANCH_LT", "LEAF", "LEAF"],
    "nodes_values": [0.5, -1.0, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0],
    "nodes_truenodeids": [1, 3, 0, 0, 0, 1, 0, 0],
    "nodes_falsenodeids": [2, 4, 0, 0, 0, 2, 0, 0],
    "nodes_missing_value_tracks_true": [1, 0, 0, 0, 0, 0, 0, 0],
    "target_treeids": [0, 0, 0, 1, 1],
    "target_nodeids": [2, 3, 4, 1, 2],
    "target_ids": [0, 0, 1, 0, 1],
    "target_weights": [1.0, 2.5, -3.0, 10.0, 20.0],
    "n_targets": 2,
}
FEATURES = f32(0.5, 0.25, 0.6, -1.0, NAN, -2.0, -INF, NAN, 0.4, INF).reshape(5, 2)
NODES = {name: values for name, values in TREES.items() if name.startswith("nodes")}


def classes(name, ids, weights, labels, **more):
    """The same trees for classes."""
    leaves = {"class_treeids": [0, 0, 0, 1, 1], "class_nodeids": [2, 3, 4, 1, 2]}
    return edge(
        name,
        "TreeEnsembleClassifier",
        FEATURES,
        outputs=2,
        domain=LEARNING,
        class_ids=ids,
        class_weights=weights,
        classlabels_int64s=labels,
        **leaves,
        **NODES,
        **more,
    )


SPLIT = [
    classes("one of two", [0] * 5, [0.25, 0.5, 0.125, 0.0, 0.25], [3, 7]),
    classes("one of two, signs", [0] * 5, [0.25, -0.5, 0.125, -1.0, 0.25], [3, 7]),
    classes(
        "logistic", [0] * 5, [0.25, -0.5, 0.125, -1.0, 0.25], [0, 1], post_transform="LOGISTIC"
    ),
    classes(
        "three", [0, 1, 2, 1, 2], [0.25, 0.5, 0.125, 1.0, 0.5], [5, 6, -1], post_transform="SOFTMAX"
    ),
    *(
        edge(
            f"of several, {f}",
            "TreeEnsembleRegressor",
            FEATURES,
            domain=LEARNING,
            by="reference",
            aggregate_function=f,
            base_values=[0.5, -0.5],
            **TREES,
        )
        for f in ("SUM", "AVERAGE")
    ),
    edge("no base", "TreeEnsembleRegressor", FEATURES, domain=LEARNING, **TREES),
    *(
        edge(
            f"a target without a leaf, {f}",
            "TreeEnsembleRegressor",
            FEATURES,
            domain=LEARNING,
            aggregate_function=f,
            **TREES,
        )
        for f in ("MIN", "MAX")
    ),
    edge(
        "sets and comparisons",
        "TreeEnsemble",
        f32(1.2, 3.4, -0.12, NAN, 12, 7).reshape(-1, 1),
        domain=LEARNING,
        n_targets=4,
        aggregate_function=1,
        post_transform=0,
        tree_roots=[0],
        membership_values=helper.make_tensor(
            "m", TensorProto.FLOAT, (8,), [1.2, 3.7, 8, 9, NAN, 12, 7, NAN]
        ),
        nodes_modes=helper.make_tensor("n", TensorProto.UINT8, (3,), [0, 6, 6]),
        nodes_featureids=[0, 0, 0],
        nodes_splits=helper.make_tensor("s", TensorProto.FLOAT, (3,), [11, 232344.0, NAN]),
        nodes_trueleafs=[0, 1, 1],
        nodes_truenodeids=[1, 0, 1],
        nodes_falseleafs=[1, 0, 1],
        nodes_falsenodeids=[2, 2, 3],
        leaf_targetids=[0, 1, 2, 3],
        leaf_weights=helper.make_tensor("w", TensorProto.FLOAT, (4,), [1, 10, 1000, 100]),
    ),
]

MATRICES = [
    edge(f"{n} rows", "Det", ramp(2, n, n) + np.eye(n, dtype=np.float32), opset=18)
    for n in (1, 2, 3, 5)
]

EDGES: list[Edge] = [
    *RECURRENT,
    *SIGNALS,
    *LOSSES,
    *ATTENDED,
    *OPTIMIZED,
    *COUNTED,
    *SPLIT,
    *MATRICES,
]
