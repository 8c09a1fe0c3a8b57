"""Programs that change gradient mode, inference mode, autocast, default type, device or threads."""

import torch
from torch import nn

from .facts import gradients, observe, raises, randn, step, training, weighted
from .registry import HALF, program


def _mlp():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@program
def no_grad_outside(wrap):
    model = _mlp()
    m, x = wrap(model), randn(3, 4)
    first = step(m, randn(3, 4))
    with torch.no_grad():
        second = observe(m(x))
    return [first, second, training(model, m, randn(3, 4))]


@program
def no_grad_first(wrap):
    model = _mlp()
    m = wrap(model)
    with torch.no_grad():
        first = observe(m(torch.randn(3, 4)))
    return [first, training(model, m, randn(3, 4))]


@program
def inference_mode_outside(wrap):
    model = _mlp()
    m = wrap(model)
    with torch.inference_mode():
        first = observe(m(torch.randn(3, 4)))
    return [first, training(model, m, randn(3, 4))]


@program
def inference_tensor_as_input(wrap):
    model = _mlp()
    m = wrap(model)
    with torch.inference_mode():
        x = torch.randn(3, 4)
    with torch.no_grad():
        first = observe(m(x))
    return [first, raises(training, model, m, x)]


@program
def inference_mode_switched(wrap):
    model = _mlp()
    m, seen = wrap(model), []
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            seen.append(observe(m(torch.randn(3, 4))))
    return seen


@program
def no_grad_inside(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            with torch.no_grad():
                y = self.a(x)
            return self.b(y) + x

    model = Model()
    return training(model, wrap(model), randn(2, 3))


@program
def no_grad_decorator(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        @torch.no_grad()
        def frozen(self, x):
            return self.fc(x)

        def forward(self, x):
            return self.frozen(x), self.fc(x)

    model = Model()
    return training(model, wrap(model), randn(2, 3))


@program
def forward_decorated_with_no_grad(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        @torch.no_grad()
        def forward(self, x):
            return self.fc(x)

    model = Model()
    m = wrap(model)
    return [m(randn(2, 3)), torch.is_grad_enabled()]


@program
def enable_grad_inside_no_grad(wrap):
    def forward(x):
        with torch.enable_grad():
            y = x * x
        return y, y * 2

    m, x = wrap(forward), randn(3)
    with torch.no_grad():
        a, b = m(x)
    weighted(a).backward()
    return [a, b, x.grad]


@program
def set_grad_enabled_by_flag(wrap):
    def forward(x, learn):
        with torch.set_grad_enabled(learn):
            y = x * x
        return y + 1

    m = wrap(forward)
    return [step(m, randn(3), learn) for learn in (True, False, True)]


@program
def set_grad_enabled_left_behind(wrap):
    def forward(x):
        torch.set_grad_enabled(False)
        return x * 2

    m = wrap(forward)
    out = m(randn(3))
    left = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    return [out, left]


@program
def inference_mode_inside(wrap):
    def forward(x):
        with torch.inference_mode():
            y = x * 2
        return y

    return raises(lambda: observe(wrap(forward)(randn(3))))


@program
def inference_mode_around_forward(wrap):
    """As in Meta's LLaMA, whose cache is written in that mode too."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.cache = torch.zeros(6, 4)

        @torch.inference_mode()
        def forward(self, x, start: int):
            y = self.layer(x).relu()
            self.cache[start : start + len(x)] = y
            return self.cache[: start + len(x)].sum(0), y

    model = Model()
    m, seen = wrap(model), []
    for start in range(3):
        found = m(torch.randn(1, 4), start)
        seen.append([observe(found), [y.is_inference() for y in found]])
    return [seen, model.cache]


@program
def inference_mode_and_gradients(wrap):
    model = nn.Linear(3, 3)

    def forward(x):
        with torch.inference_mode():
            scale = model(x).abs().mean()
        with torch.inference_mode(False):
            y = model(x) * 2
        return y * float(2), scale

    return step(wrap(forward), randn(2, 3))


@program
def branch_on_grad_mode(wrap):
    m, seen = wrap(lambda x: x * 2 if torch.is_grad_enabled() else x * 3), []
    for mode in (True, False, True):
        with torch.set_grad_enabled(mode):
            seen.append(observe(m(torch.ones(3))))
    return seen


@program
def output_without_history_among_others(wrap):
    def forward(x):
        return x * 2, (x > 0).float(), x.argmax(), x.detach() * 3

    return step(wrap(forward), randn(4))


@program
def gradient_of_part_detached(wrap):
    def forward(x):
        y = x * 2
        return y * y.detach() + (x - x.detach()) * 5

    return step(wrap(forward), randn(4))


@program(slack=HALF)
def autocast_outside(wrap):
    model = _mlp()
    m, x = wrap(model), randn(3, 4)
    first = training(model, m, randn(3, 4))
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = m(x)
    weighted(out).backward()
    return [first, out, x.grad, training(model, m, randn(3, 4))]


@program
def autocast_first(wrap):
    model = _mlp()
    m = wrap(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = observe(m(torch.randn(3, 4)))
    return [first, training(model, m, randn(3, 4))]


@program(slack=HALF)
def autocast_inside(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.a(x)
            return self.b(y.float()), y

    model = Model()
    return training(model, wrap(model), randn(3, 4))


@program(slack=HALF)
def autocast_disabled_inside(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            with torch.autocast("cpu", enabled=False):
                return self.b(y.float()), y

    model = Model()
    m, x = wrap(model), randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = m(x)
    weighted(out).backward()
    return [out, model.a.weight.grad, model.b.weight.grad]


@program(slack=HALF)
def autocast_disabled_inside_where_it_is_off_and_on(wrap):
    class Model(nn.Module):
        def __init__(self, around):
            super().__init__()
            self.a, self.b, self.around = nn.Linear(4, 4), nn.Linear(4, 4), around

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.around):
                y = self.a(x)
                with torch.autocast("cpu", enabled=False):
                    z = self.b(y.float())
                    with torch.autocast("cuda", enabled=False):
                        z = self.b(z)
                return z, self.a(z)

    seen = []
    for around in (False, True):
        model = Model(around)
        m = wrap(model)
        for mode in (False, True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode):
                out = m(randn(3, 4))
            weighted(out).backward()
            seen += [out, model.a.weight.grad.clone(), model.b.weight.grad.clone()]
    return seen


@program
def autocast_keeps_sensitive_operators_wide(wrap):
    def forward(x, w):
        y = x @ w
        return y, y.softmax(-1), nn.functional.layer_norm(y, (4,)), y.exp().sum(), y + x[:, :4]

    m = wrap(forward)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m(torch.randn(3, 4), torch.randn(4, 4))


@program(slack=HALF)
def autocast_loss_outside(wrap):
    model = _mlp()
    m, target = wrap(model), torch.tensor([0, 1, 1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = m(torch.randn(3, 4))
        loss = nn.functional.cross_entropy(out, target)
    loss.backward()
    return [loss, model[0].weight.grad]


@program
def branch_on_autocast(wrap):
    m, seen = wrap(lambda x: x * 2 if torch.is_autocast_enabled("cpu") else x * 3), []
    for mode in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode):
            seen.append(m(torch.ones(3)))
    return seen


@program
def autocast_type_changes(wrap):
    m, seen, x = wrap(lambda x: x @ x), [], torch.randn(4, 4)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            seen.append(m(x))
    return seen


@program
def default_type_changes(wrap):
    m, seen = wrap(lambda n: torch.ones(n) / 3), []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        seen.append(m(3))
    return seen


@program
def default_type_of_scalars(wrap):
    m, seen = wrap(lambda x: torch.tensor(0.1) * x + torch.arange(3) / 7), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        seen.append(m(torch.ones(3, dtype=torch.int64)))
    return seen


@program
def default_device_changes(wrap):
    m = wrap(lambda x: x + torch.ones(3))
    first = observe(m(torch.zeros(3)))
    with torch.device("meta"):
        return [first, raises(m, torch.zeros(3, device="cpu"))]


@program
def model_on_meta_device(wrap):
    with torch.device("meta"):
        model = nn.Linear(3, 2)
        x = torch.randn(4, 3)
    m = wrap(model)
    first = raises(lambda: tuple(m(x).shape))
    model.to_empty(device="cpu").load_state_dict(nn.Linear(3, 2).state_dict())
    return [first, training(model, m, randn(4, 3))]


@program
def number_of_threads_changes(wrap):
    m, seen = wrap(_mlp()), []
    for n in (1, 2):
        torch.set_num_threads(n)
        seen.append([step(m, randn(3, 4)), torch.get_num_threads()])
    return seen


@program
def branch_on_number_of_threads(wrap):
    m, seen = wrap(lambda x: x * torch.get_num_threads()), []
    for n in (1, 2):
        torch.set_num_threads(n)
        seen.append(m(torch.ones(3)))
    return seen


@program
def deterministic_algorithms(wrap):
    model = nn.Embedding(5, 3)
    m = wrap(model)
    torch.use_deterministic_algorithms(True)
    try:
        return training(model, m, torch.tensor([1, 1, 2]))
    finally:
        torch.use_deterministic_algorithms(False)


@program
def anomaly_detection(wrap):
    model = _mlp()
    m = wrap(model)
    with torch.autograd.detect_anomaly(check_nan=False):
        return training(model, m, randn(3, 4))


@program
def anomaly_detection_finds_nan(wrap):
    m = wrap(lambda x: (x * 0).sqrt() * 0)

    def run():
        with torch.autograd.detect_anomaly():
            m(randn(3)).sum().backward()

    return [raises(run), step(m, torch.zeros(3))]


@program
def printing_options_do_not_matter(wrap):
    m, seen = wrap(lambda x: x * 2), []
    torch.set_printoptions(precision=2)
    seen.append(str(m(torch.ones(2) / 3)))
    torch.set_printoptions(precision=4)
    return [*seen, str(m(torch.ones(2) / 3))]


@program
def disabled_part(wrap):
    @torch.compiler.disable
    def outside(x):
        return x + len(str(x.shape))

    def forward(x):
        return outside(x * 2).relu()

    m = wrap(forward)
    return [step(m, randn(3)), step(m, randn(2, 2))]


@program
def is_compiling_is_not_asked_by_numbers(wrap):
    def forward(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    m = wrap(forward)
    return [raises(m, torch.ones(3)), raises(m, -torch.ones(3))]


@program
def function_mode_around_call(wrap):
    from torch.overrides import TorchFunctionMode

    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.sin else out

    m, x = wrap(lambda x: torch.sin(x) + 1), torch.ones(3)
    first = observe(m(x))
    with Doubled():
        second = observe(m(x))
    return [first, second, m(x)]


@program
def dispatch_mode_around_call(wrap):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Doubled(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.ops.aten.sin.default else out

    m, x = wrap(lambda x: torch.sin(x) + 1), torch.ones(3)
    first = observe(m(x))
    with Doubled():
        second = observe(m(x))
    return [first, second, m(x)]


@program
def call_under_another_default_device(wrap):
    model, seen = _mlp(), []
    m = wrap(model)
    for x in (randn(3, 4), randn(3, 4)):
        model.zero_grad()
        with torch.device("meta"):
            out = m(x)
            out.sum().backward()
        seen.append([out, gradients(model)])
        # Traced once under it, and once before.
        m = wrap(model)
        seen.append(training(model, m, randn(3, 4)))
    return seen


@program
def gradients_on_in_inference_mode(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            with torch.enable_grad():
                h = self.fc(x).exp()
            return h

    m = wrap(Model())
    with torch.inference_mode():
        seen = [m(randn(n, 4)) for n in (3, 5)]
    return [seen, step(m, randn(3, 4))]


@program
def attention_of_a_chosen_kind(wrap):
    kinds = torch.nn.attention.SDPBackend

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 12)

        def forward(self, x, shape):
            q, k, v = self.fc(x).chunk(3, -1)
            with torch.nn.attention.sdpa_kernel([kinds.MATH]):
                y = nn.functional.scaled_dot_product_attention(q, k, v)
            return y.expand(torch.broadcast_shapes(y.shape, shape)).tanh()

    model = Model()
    m = wrap(model)
    seen = [training(model, m, randn(n, 5, 4), (n, 1, 1)) for n in (2, 3)]
    return [seen, [kind.name for kind in torch.nn.attention._cur_sdpa_kernel_backends()]]
