"""Training graphs run in plain ONNX Runtime and train as PyTorch does."""

import copy
import functools
import warnings

import numpy as np
import onnx
import pytest
import shorthaul.onnx
import torch
import torch.nn.functional as F
from shorthaul.models import DigitsConvNet, DigitsTransformer
from torch import nn
from training_graphs import exported, run, session


def assert_gradients(model, x, target, loss, function):
    model = model.eval()
    found = run(
        shorthaul.onnx.grad(exported(model.eval(), x), loss=loss),
        {"x0": x, "labels" if loss == "cross-entropy" else "target": target},
    )
    exact = copy.deepcopy(model).double()
    wanted = function(
        exact(x.double() if x.is_floating_point() else x),
        target.double() if target.is_floating_point() else target,
    )
    wanted.backward()
    torch.testing.assert_close(found["loss"].double(), wanted, rtol=1e-5, atol=1e-6)
    gradients = {n: p.grad for n, p in exact.named_parameters()}
    assert {n.removesuffix(".grad") for n in found if n.endswith(".grad")} == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        error = (found[f"{name}.grad"].double() - gradient).abs().max().item()
        assert error <= 2e-5 * scale + 1e-7, (name, error, scale)


class Convolutions(nn.Module):
    """Strides, groups, dilation, pooling, normalization."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
        self.c = nn.Conv2d(8, 12, 3, dilation=2, padding=2)
        self.d = nn.Conv2d(12, 12, 5, stride=3, padding=1, groups=12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.a(x)))
        x = F.max_pool2d(F.relu6(self.b(x)), 3, stride=2, padding=1)
        x = F.silu(self.d(F.gelu(self.c(x))))
        return self.head(x.mean((2, 3)))


class Tokens(nn.Module):
    """Embedding, LayerNorm, softmax attention; weights sum to one along `axis`."""

    def __init__(self, axis=-1):
        super().__init__()
        self.axis = axis
        self.embedding = nn.Embedding(11, 16)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, ids):
        x = self.embedding(ids)
        qkv = self.qkv(self.norm(x))
        q, k, v = qkv[..., :16], qkv[..., 16:32], qkv[..., 32:]
        weights = torch.softmax(q @ k.transpose(1, 2) / 4, self.axis)
        return self.head((x + weights @ v).mean(1))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), torch.randn(3, 6)),
        (Convolutions(), torch.randn(2, 3, 17, 15)),
        (Tokens(), torch.randint(11, (3, 7))),
        # More tokens than a head is wide.
        (Tokens(), torch.randint(11, (3, 20))),
        (Tokens(axis=1), torch.randint(11, (3, 20))),
    ],
    ids=["dense", "convolutions", "tokens", "many tokens", "many tokens, other axis"],
)
def test_gradients_are_those_of_pytorch_in_float64(model, x):
    torch.manual_seed(0)
    labels = torch.randint(4, (len(x),))
    assert_gradients(model, x, labels, "cross-entropy", F.cross_entropy)
    assert_gradients(model, x, torch.randn_like(model(x)), "mse", F.mse_loss)


def test_only_what_is_asked_for_is_differentiated():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(5, 4)
    data = shorthaul.onnx.grad(exported(model, x), loss="mse", wrt=["1.bias", "x0"])
    found = run(data, {"x0": x, "target": torch.zeros(5, 2)})
    assert found.keys() == {"loss", "1.bias.grad", "x0.grad"}


class Two(nn.Module):
    """Scores and what follows from them, a label first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        y = self.linear(x)
        return y.argmax(1), y, y.tanh()


def test_a_loss_may_be_of_one_of_several_outputs():
    model, x = Two(), torch.randn(5, 4)
    data = exported(model, x)
    last = onnx.load_model_from_string(data).graph.output[2].name
    target = torch.randn(5, 3)
    found = run(shorthaul.onnx.grad(data, loss="mse", output=last), {"x0": x, "target": target})
    (expected,) = torch.autograd.grad(F.mse_loss(model(x)[2], target), [model.linear.weight])
    np.testing.assert_allclose(found["linear.weight.grad"], expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(shorthaul.onnx.OnnxError, match="2 outputs of real numbers"):
        shorthaul.onnx.grad(data, loss="mse")


def test_weights_that_are_constants_are_trained_and_said():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    stored = onnx.load_model_from_string(exported(model, x))
    for tensor in stored.graph.initializer:
        node = onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
        stored.graph.node.insert(0, node)
    del stored.graph.initializer[:]
    target = torch.randn(5, 3)
    with pytest.warns(UserWarning, match="`Constant` nodes are trained; wrt chooses"):
        data = shorthaul.onnx.grad(stored, loss="mse")
    found = run(data, {"x0": x, "target": target})
    loss = F.mse_loss(model(x), target)
    for name, expected in zip(
        ("weight", "bias"), torch.autograd.grad(loss, [model.weight, model.bias]), strict=True
    ):
        np.testing.assert_allclose(found[f"{name}.grad"], expected, rtol=1e-4, atol=1e-6)


def digits():
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(found.target)


def batches(images, labels, steps):
    for step in range(steps):
        rows = slice(50 * step, 50 * step + 50)
        yield images[rows], labels[rows]


def trained(data, rate, steps=30):
    """Losses of a training graph in ONNX Runtime, and what it left: parameters and statistics."""
    opened, losses, state = session(data), [], {}
    names = [output.name for output in opened.get_outputs()]
    for step, (images, labels) in enumerate(batches(*digits(), steps)):
        feeds = {
            "x0": images.numpy(),
            "labels": labels.numpy(),
            "lr": np.float32(rate),
            "step": np.float32(step + 1),
            **state,
        }
        for wanted in opened.get_inputs():
            if wanted.name not in feeds:
                feeds[wanted.name] = np.zeros(wanted.shape, np.float32)
        feeds = {i.name: np.asarray(feeds[i.name]) for i in opened.get_inputs()}
        result = dict(zip(names, opened.run(None, feeds | state), strict=True))
        state = {n.removesuffix(".next"): v for n, v in result.items() if n.endswith(".next")}
        losses.append(result["loss"].item())
    return losses, state


def trained_by_pytorch(model, stepper, steps=30):
    losses = []
    for images, labels in batches(*digits(), steps):
        loss = F.cross_entropy(model(images), labels)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


@functools.cache
def untrained(network):
    """The network as it is first, and its file; batch normalization keeps its statistics."""
    torch.manual_seed(0)
    model = network().eval()
    return model, exported(model, digits()[0][:50])


@pytest.mark.parametrize("network", [DigitsConvNet, DigitsTransformer])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_training_in_onnx_runtime_follows_pytorch(network, optimizer):
    model, file = copy.deepcopy(untrained(network))
    data = shorthaul.onnx.grad(file, loss="cross-entropy", optimizer=optimizer)
    rate = {"sgd": 0.5, "momentum": 0.1}.get(optimizer, 1e-3)
    ours, _ = trained(data, rate)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, rate),
        "momentum": lambda p: torch.optim.SGD(p, rate, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, rate),
        "adamw": lambda p: torch.optim.AdamW(p, rate),
    }[optimizer]
    theirs = trained_by_pytorch(model, make(model.parameters()))
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)


class Normalized(nn.Module):
    """Batch normalization of images and of rows, one of them used twice in a step."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.head = nn.Linear(8 * 16, 32)
        self.rows = nn.BatchNorm1d(32, momentum=0.3)
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        x = F.silu(self.norm(self.a(x)))
        x = F.avg_pool2d(F.silu(self.norm(self.b(x))), 2)
        return self.out(F.silu(self.rows(self.head(x.flatten(1)))))


def test_batch_normalization_trains_as_in_pytorch():
    """The loss curve, and parameters and running statistics afterwards."""
    torch.manual_seed(0)
    model = Normalized().train()
    # The exporter writes the inference form even of a model in training mode.
    data = shorthaul.onnx.grad(
        exported(model, digits()[0][:50]), loss="cross-entropy", optimizer="sgd", mode="train"
    )
    ours, left = trained(data, 0.05)
    theirs = trained_by_pytorch(model, torch.optim.SGD(model.parameters(), 0.05))
    assert theirs[-1] < 0.5 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    wanted = {n: t for n, t in model.state_dict().items() if not n.endswith("num_batches_tracked")}
    assert left.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(left[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_the_mode_decides_the_form_of_batch_normalization():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.randn(8, 4)
    data, target = exported(model, x), torch.zeros(8, 3)
    for mode, trains in [("file", False), ("eval", False), ("train", True)]:
        found = run(shorthaul.onnx.grad(data, loss="mse", mode=mode), {"x0": x, "target": target})
        assert ("1.running_var.next" in found) == trains
        wanted = F.mse_loss(copy.deepcopy(model).train(trains)(x), target)
        torch.testing.assert_close(found["loss"], wanted)
    with pytest.raises(ValueError, match="choose file, train or eval"):
        shorthaul.onnx.grad(data, loss="mse", mode="fast")


class Dropping(nn.Module):
    """Dropout in training form; its mask must be the same in both passes."""

    def forward(self, x, w):
        return F.dropout(x * w, 0.5, True).sum()


def test_dropout_has_one_mask():
    model = exported(
        Dropping(),
        torch.ones(64),
        torch.ones(64),
        dynamic=False,
        names=["x", "w"],
        outputs=["total"],
    )
    # Verified with a mask that stays: a warning would say that it is not.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = shorthaul.onnx.grad(model, loss="total", wrt=["w"])
    found = run(data, {"x": torch.ones(64), "w": torch.ones(64)})
    gradient = found["w.grad"]
    assert set(gradient.tolist()) == {0.0, 2.0}
    assert found["loss"].item() == gradient.sum().item()


def test_layer_norm_of_everything():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.norm = nn.LayerNorm((3, 4))

        def forward(self, ids):
            return self.norm(self.embedding(ids)).flatten(1)

    torch.manual_seed(0)
    model, ids = Whole(), torch.tensor([[0, 3, 3], [5, 0, 8]])
    assert_gradients(model, ids, torch.randn(2, 12), "mse", F.mse_loss)


def test_convolutions_over_a_symbolic_number_of_positions():
    """Strides that leave a rest for some sizes and none for others, in one file for all sizes."""

    class Open(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(3, 8, 3, stride=2, padding=1)
            self.b = nn.Conv2d(8, 8, 3, padding=1)
            self.c = nn.Conv2d(8, 4, 1, stride=2)

        def forward(self, x):
            return self.c(F.avg_pool2d(F.silu(self.b(F.silu(self.a(x)))), 2)).mean((2, 3))

    torch.manual_seed(0)
    model, sizes = Open().double(), [torch.export.Dim(n, min=12, max=64) for n in ("h", "w")]
    x = torch.randn(2, 3, 17, 20, dtype=torch.float64)
    file = exported(model, x, dynamic={2: sizes[0], 3: sizes[1]})
    data = shorthaul.onnx.grad(file, loss="mse", wrt=["a.weight", "b.weight", "c.weight", "x0"])
    for shape in [(2, 3, 17, 20), (2, 3, 23, 15), (2, 3, 16, 30)]:
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        target = torch.randn(2, 4, dtype=torch.float64)
        found = run(data, {"x0": x, "target": target})
        model.zero_grad()
        F.mse_loss(model(x), target).backward()
        for name, wanted in {
            "x0": x.grad,
            **{n: p.grad for n, p in model.named_parameters()},
        }.items():
            if f"{name}.grad" in found:
                torch.testing.assert_close(found[f"{name}.grad"], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_labels_are_smoothed_as_in_pytorch(smoothing):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 5).double(), torch.randn(6, 4, dtype=torch.float64)
    labels = torch.tensor([0, 1, -100, 4, 4, 2])
    data = shorthaul.onnx.grad(exported(model, x), loss="cross-entropy", label_smoothing=smoothing)
    found = run(data, {"x0": x, "labels": labels})
    wanted = F.cross_entropy(model(x), labels, label_smoothing=smoothing)
    wanted.backward()
    torch.testing.assert_close(found["loss"], wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(found["weight.grad"], model.weight.grad, rtol=1e-9, atol=1e-12)


def test_the_same_model_gives_the_same_bytes():
    data = exported(nn.Linear(3, 2), torch.randn(2, 3))
    assert shorthaul.onnx.grad(data, loss="mse") == shorthaul.onnx.grad(data, loss="mse")


def test_a_step_without_its_gradients(recwarn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.GELU(), nn.Linear(4, 2)).eval()
    x, target = torch.randn(2, 3), torch.randn(2, 2)
    data = exported(model, x)
    whole = shorthaul.onnx.grad(data, loss="mse", optimizer="adam")
    without = shorthaul.onnx.grad(data, loss="mse", optimizer="adam", gradients=False)
    assert not [w for w in recwarn if "verified" in str(w.message)]
    state = {
        f"{name}.{part}": torch.zeros_like(value)
        for name, value in model.named_parameters()
        for part in ("mean", "square")
    }
    given = {"x0": x, "target": target, "lr": torch.tensor(0.1), "step": torch.tensor(1.0), **state}
    found, wanted = run(without, given), run(whole, given)
    assert found.keys() == {name for name in wanted if not name.endswith(".grad")}
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-7)
    with pytest.raises(shorthaul.onnx.OnnxError, match="would only give the loss"):
        shorthaul.onnx.grad(data, loss="mse", gradients=False)


class Rotated(nn.Module):
    """Frequencies of positions, which are a buffer, and a parameter without a dimension."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 10 ** -torch.arange(4.0))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        angles = torch.arange(x.shape[1])[:, None].float() * self.frequencies
        return self.layer(x * angles.cos()) * self.scale


def test_buffers_are_left_out_and_numbers_are_trained(recwarn):
    torch.manual_seed(0)
    model, x, target = Rotated(), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert_gradients(model, x, target, "mse", F.mse_loss)
    assert not [w for w in recwarn if "not trained" in str(w.message)]
    plain = onnx.load_model_from_string(exported(model.eval(), x))
    for value in [*plain.graph.value_info, *plain.graph.initializer]:
        del value.metadata_props[:]
    with pytest.warns(UserWarning, match="`frequencies`: frequencies of a position embedding"):
        data = shorthaul.onnx.grad(plain, loss="mse")
    names = {output.name for output in onnx.load_model_from_string(data).graph.output}
    assert names == {"loss", "layer.weight.grad", "layer.bias.grad"}
    data = shorthaul.onnx.grad(plain, loss="mse", wrt=["scale", "frequencies"])
    names = {output.name for output in onnx.load_model_from_string(data).graph.output}
    assert names == {"loss", "scale.grad", "frequencies.grad"}


def test_a_parameter_that_stands_for_two_is_said():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    merged = onnx.load_model_from_string(exported(model, x))
    for node in merged.graph.node:
        node.input[:] = ["0.weight" if name == "1.weight" else name for name in node.input]
    with pytest.warns(UserWarning, match="`0.weight` is one array that 2 nodes read"):
        data = shorthaul.onnx.grad(merged, loss="mse")
    names = {output.name for output in onnx.load_model_from_string(data).graph.output}
    assert names == {"loss", "0.weight.grad", "0.bias.grad", "1.bias.grad"}


def test_the_first_step_needs_no_state_if_the_file_holds_it():
    model, x, target = nn.Linear(3, 2), torch.randn(2, 3), torch.randn(2, 2)
    data = exported(model, x)
    given = {"x0": x, "target": target, "lr": torch.tensor(0.1)}
    state = {
        f"{name}.{part}": torch.zeros_like(value)
        for name, value in model.named_parameters()
        for part in ("mean", "square")
    }
    outside = shorthaul.onnx.grad(data, loss="mse", optimizer="adam")
    wanted = run(outside, {**given, "step": torch.tensor(1.0), **state})
    inside = shorthaul.onnx.grad(data, loss="mse", optimizer="adam", optimizer_state="inside")
    found = run(inside, given)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0)
    with pytest.raises(ValueError, match="optimizer_state needs an optimizer"):
        shorthaul.onnx.grad(data, loss="mse", optimizer_state="inside")


class Table(nn.Module):
    """A table of more rows than are looked up, and two matrices of one shape."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(200, 16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, ids):
        x = F.gelu(self.a(self.table(ids)))
        return self.head((x + self.b(x)).mean(1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_updated_together_is_updated_as_by_pytorch(dynamic):
    torch.manual_seed(0)
    model, ids, rate = Table(), torch.randint(200, (3, 5)), 0.1
    labels = torch.randint(4, (3,))
    data = shorthaul.onnx.grad(
        exported(model, ids, dynamic=dynamic),
        loss="cross-entropy",
        optimizer="adam",
        gradients=False,
    )
    nodes = onnx.load_from_string(data).graph.node
    joined = [set(node.input) for node in nodes if node.op_type == "Concat"]
    assert {"a.weight.mean", "b.weight.mean"} in joined
    exact = copy.deepcopy(model).double()
    parameters = dict(exact.named_parameters())
    # A state as other steps leave it, so that every part of the update shows.
    given = dict(model.named_parameters())
    given |= {f"{n}.mean": torch.randn_like(p) for n, p in model.named_parameters()}
    given |= {f"{n}.square": torch.rand_like(p) for n, p in model.named_parameters()}
    stepper = torch.optim.Adam(parameters.values(), lr=rate)
    for name, parameter in parameters.items():
        stepper.state[parameter] = {
            "step": torch.tensor(4.0),
            "exp_avg": given[f"{name}.mean"].double(),
            "exp_avg_sq": given[f"{name}.square"].double(),
        }
    F.cross_entropy(exact(ids), labels).backward()
    stepper.step()
    given |= {"x0": ids, "labels": labels, "lr": torch.tensor(rate), "step": torch.tensor(5.0)}
    found = run(data, given)
    for name, parameter in parameters.items():
        state = stepper.state[parameter]
        for part, wanted in (
            ("", parameter.detach()),
            (".mean", state["exp_avg"]),
            (".square", state["exp_avg_sq"]),
        ):
            value = found[f"{name}{part}.next"].double()
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)


def test_every_form_of_a_model(tmp_path):
    data = exported(nn.Linear(3, 2), torch.randn(2, 3))
    path, out = tmp_path / "m.onnx", tmp_path / "t.onnx"
    path.write_bytes(data)
    forms = (path, str(path), data, onnx.load_from_string(data))
    made = {shorthaul.onnx.grad(model, loss="mse") for model in forms}
    assert len(made) == 1
    assert shorthaul.onnx.grad(path, loss="mse", out=out) is None
    assert out.read_bytes() == made.pop()
    fixed = onnx.load_from_string(shorthaul.onnx.grad(path, loss="mse", sizes={"batch": 7}))
    assert [d.dim_value for d in fixed.graph.input[0].type.tensor_type.shape.dim] == [7, 3]
    with pytest.raises(
        shorthaul.onnx.OnnxError, match="no dynamic size of that name; it has batch"
    ):
        shorthaul.onnx.grad(path, loss="mse", sizes={"rows": 7})
    for size in (0, -3):
        with pytest.raises(ValueError, match=f"batch the size {size}, but a size is at least 1"):
            shorthaul.onnx.grad(path, loss="mse", sizes={"batch": size})
    with pytest.raises(shorthaul.onnx.OnnxError, match="is read from and would be replaced"):
        shorthaul.onnx.grad(path, loss="mse", out=path)
    assert path.read_bytes() == data


def test_what_is_tried_gives_no_warning(recwarn):
    data = exported(nn.Linear(3, 2), torch.randn(2, 3))
    verified = shorthaul.onnx.grad(data, loss="mse")
    shorthaul.onnx.grad(data, loss="mse", sizes={"batch": 7})
    assert verified == shorthaul.onnx.grad(data, loss="mse", verify=False)
    assert not [w for w in recwarn if "verified" in str(w.message)]


def test_what_does_not_fit_is_said():
    data = exported(nn.Linear(3, 2), torch.randn(2, 3))
    with pytest.raises(shorthaul.onnx.OnnxError, match="loss is cross-entropy, mse or an output"):
        shorthaul.onnx.grad(data, loss="hinge")
    with pytest.raises(shorthaul.onnx.OnnxError, match="no initializer or input `bais`"):
        shorthaul.onnx.grad(data, loss="mse", wrt=["bais"])
    taken = exported(nn.Linear(3, 2), torch.randn(2, 3)).replace(b"x0", b"lr")
    with pytest.raises(shorthaul.onnx.OnnxError, match="already has a value called `lr`"):
        shorthaul.onnx.grad(taken, loss="mse", optimizer="sgd")
    with pytest.raises(shorthaul.onnx.OnnxError, match="label smoothing"):
        shorthaul.onnx.grad(data, loss="mse", label_smoothing=0.1)
    with pytest.raises(ValueError, match="sgd, momentum, adam, adamw"):
        shorthaul.onnx.grad(data, loss="mse", optimizer="lion")
    with pytest.raises(shorthaul.onnx.OnnxError, match="damaged"):
        shorthaul.onnx.grad(data[:-20], loss="mse")


def test_an_array_that_is_a_statistic_and_something_else_is_named_as_not_trained():
    helper = onnx.helper
    value = functools.partial(helper.make_tensor_value_info, elem_type=1, shape=[2, 3])
    norm = helper.make_node("BatchNormalization", ["x", "s", "m", "m", "v"], ["y"])
    stored = [
        onnx.numpy_helper.from_array(np.ones(3, np.float32), name) for name in ("s", "m", "v")
    ]
    graph = helper.make_graph([norm], "norm", [value("x")], [value("y")], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.warns(UserWarning, match="`m`: read as running statistics"):
        shorthaul.onnx.grad(model, loss="mse")
