"""What changed since the last call, in the words of a warning: names and lines are the user's."""

import functools
import re
import time
import warnings

import pytest
import shorthaul
import torch
from shorthaul._changes import what_changed
from shorthaul._settings_changed import which_settings
from torch import nn

#: What only PyTorch's tracer understands, and files that are not the user's.
LEAKS = re.compile(
    r"___|\b[LG]\[|__import|_modules\[|_parameters\[|\.size\(\)|please file|HINT|DispatchKey|"
    r"\d{9,}|shorthaul/_|module\.py|nn/modules|  "
)

#: Where Dynamo saw a guard, as it writes this behind the guard.
BEHIND = "  # y = self.fc(x)  # some/model.py:7 in forward"

#: Reasons as Dynamo 2.6 to 2.15 gives them, and what a warning says.
REASONS = [
    (
        "tensor 'x' stride mismatch at index 0. expected 4, actual 1",
        (
            "stride 0 of `x` is 1 instead of 4: its elements lie in memory in another order, or "
            "with other gaps"
        ),
    ),
    (
        "x.stride()[0] == 4*x.stride()[1]  # (unknown source x.stride()[0], please file a bug)",
        "`x` has another stride: its elements lie elsewhere in memory",
    ),
    (
        "___as_tensor(x).stride()[0] == 1",
        "a tensor has another stride: its elements lie elsewhere in memory",
    ),
    (
        "y.size()[0] == x.size()[0]  # (unknown var s17, please file a bug)",
        "`y.shape[0]` and `x.shape[0]` are no longer equal",
    ),
    (
        (
            "2 <= x.size()[0]  # return linear(x)  # nn/modules/linear.py:134 in forward (user "
            "code shown)"
        ),
        "`x.shape[0]` is less than 2 now",
    ),
    (
        "(((-4)*s.start) + 4*s.stop) != 12  # (devb/shorthaul/_partition.py:486 in step_outside)",
        "`(((-4)*s.start) + 4*s.stop) != 12` does not hold any more",
    ),
    (
        "x.size()[0] <= 6" + BEHIND,
        "`x.shape[0]` is more than 6 now (some/model.py:7 in forward)",
    ),
    ("L['n'] != 4", "`n` is 4 now"),
    (
        (
            "tensor 'L['self']._modules['a']._parameters['weight']' rank mismatch. expected 2, "
            "actual 1"
        ),
        "`self.a.weight` has 1 dimension instead of 2",
    ),
    (
        f"___check_obj_id(L['self']._modules['layers']._modules['2'].training, {id(True)})",
        "`self.layers[2].training` is no longer True",
    ),
    (
        "___check_obj_id(G['act'].__code__, 140152416615088), type=<class 'code'>" + BEHIND,
        "`act` is another function (some/model.py:7 in forward)",
    ),
    (
        "___check_obj_id(k, 140152416615088), type=<class 'model.Color'>",
        "`k` is another object",
    ),
    ("___check_type_id(L['x'], 94306544371328)", "`x` is of another class"),
    (
        "___dict_contains('b', L['d'])" + BEHIND + " (HINT: Dictionary d)",
        "`d` no longer has the key 'b' (some/model.py:7 in forward)",
    ),
    ("not ___dict_contains('help', self.__dict__)", "`self.help` was set on the object itself"),
    ("list(dict.keys(d))[0] == 'a'", "the keys of `d` changed, or their order did"),
    (
        "len(self._modules['layers']._modules) != 2",
        "the number of modules in `self.layers` changed",
    ),
    (
        "not G['__import_torch_dot_nn_dot_modules_dot_module']._global_forward_hooks",
        "the forward hooks of all modules changed",
    ),
    (
        "dict(type(self).__mro__[1].__dict__)['scale'] == 2.0",
        "`type(self).scale` is no longer 2.0",
    ),
    (
        (
            "G['helper'].__closure__[0].cell_contents == 2.0  # return y * k  # some/model.py:9 "
            'in helper (HINT: guard on "k")'
        ),
        "`k` is no longer 2.0 (some/model.py:9 in helper)",
    ),
    ("G['__import_my_dot_model'].SCALE == 2.0", "`my.model.SCALE` is no longer 2.0"),
    (
        "Duplicate tensors found: [\"L['x']\", \"self._modules['a']._parameters['weight']\"]",
        "`x` and `self.a.weight` are one tensor now",
    ),
    (
        (
            "expected type of '___from_numpy(o)' to be <class 'torch.Tensor'>, but found <class "
            "'int'>"
        ),
        "`o` is an `int` instead of a `Tensor`",
    ),
    (
        (
            "tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, BackendSelect, "
            "ADInplaceOrView, AutogradCPU), actual DispatchKeySet(CPU, BackendSelect)"
        ),
        "`x` was made in inference mode",
    ),
    (
        (
            "tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, AutogradCPU), "
            "actual DispatchKeySet(CUDA, AutogradCUDA)"
        ),
        "`x` is on another device, or of another layout (CUDA)",
    ),
    ("FuncDefaultsGuardAccessor: Not a function on G['f']", "`f` is another object"),
    ("KeyError on self.flag", "`self.flag` does not exist any more"),
    (
        "___check_metadata_140152416615088_c3(L['x'])",
        "a tensor's own class describes it in another way",
    ),
    ("___check_torch_function_mode_stack()", "another `TorchFunctionMode` is active"),
    (
        "torch._functorch.aot_autograd.utils.top_saved_tensors_hooks ids == None",
        "other hooks for saved tensors are active",
    ),
    ("not math.isnan(o)  # implicit guard for float input", "`o` is NaN now"),
    (
        "___check_of_tomorrow(L['self']._modules['a'].kind, 140152416615088)",
        "`self.a.kind` changed",
    ),
    ("___check_of_tomorrow()", "something that its compiled form depends on changed"),
    (
        "'NoneType' object has no attribute 'size'",
        (
            "something that its compiled form depends on changed (PyTorch says: 'NoneType' "
            "object has no attribute 'size')"
        ),
    ),
    ("", "something that its compiled form depends on changed"),
]


@pytest.mark.parametrize("reason, words", REASONS, ids=range(len(REASONS)))
def test_each_form_of_a_reason_has_words(reason, words):
    said = what_changed(f"3/1: {reason}")
    assert said == words
    assert not LEAKS.search(said)


def test_the_line_is_the_innermost_of_the_users_own():
    torchs = f"{torch.__path__[0]}/nn/modules/dropout.py"
    stack = (
        f"0/0: self.p == 0.1  # return  # nn/modules/dropout.py:73 in forward\nUser stack trace:\n"
        f'  File "/home/me/code/model.py", line 5, in torch_dynamo_resume_in_f_at_4\n    a()\n'
        f'  File "{torchs}", line 73, in forward\n    return'
    )
    assert what_changed(stack) == "`self.p` is no longer 0.1 (code/model.py:5 in f)"
    code = test_the_line_is_the_innermost_of_the_users_own.__code__
    place = f"tests/test_changes.py:{code.co_firstlineno} in {code.co_name}"
    assert what_changed("0/0: TYPE_MISMATCH(d)", code) == f"`d` is of another class ({place})"


def test_arguments_that_a_wrapper_passes_on_have_their_own_names():
    model = shorthaul.module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)))
    model(torch.randn(3, 4))
    with pytest.warns(shorthaul.RecompileWarning, match="size 0 of `input` is 5 instead of 3$"):
        model(torch.randn(5, 4))
    model[1].p = 0.2
    with pytest.warns(shorthaul.RecompileWarning, match=r"`self\[1\].p` is no longer 0.1$"):
        model(torch.randn(5, 4))


@pytest.mark.parametrize(
    "names, said",
    [
        ("grad_mode num_threads", "gradients are switched on and PyTorch's number of threads is "),
        ("default_dtype", "the default type is float32 now"),
        ("autocast(cpu)_enabled autocast(cpu)_dtype", "autocast is switched off"),
        ("deterministic_algorithms", "deterministic algorithms are switched off"),
        ("cuda_matmul_precision allow_tf32", "the precision of matrix products changed"),
        ("autocast(cpu)_dtype", "a setting of PyTorch changed"),
        ("of_tomorrow", "a setting of PyTorch changed (`of_tomorrow`)"),
    ],
)
def test_settings_are_said_as_they_are_now(names, said):
    assert which_settings(names.split()).startswith(said)


FACTOR = 2.0


class Model(nn.Module):
    """A layer with all kinds of arguments and attributes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Dropout(0.1)])
        self.act = functools.partial(nn.functional.leaky_relu, negative_slope=0.1)
        self.keys, self.kinds = {"a": 1.0}, [1.0, 2.0]

    def forward(self, x, n=1, other=None, **more):
        y = x
        for layer in self.layers:
            y = layer(y)
        y = self.act(y) * n * FACTOR
        for kind in self.kinds:
            y = y * kind * self.keys["a"]
        for value in more.values():
            y = y + value
        return y if other is None else y + 2 * other


def _with_hook(module, x):
    module.layers[0].register_forward_hook(lambda *_: None)
    return (x,), {}


def _with_other_keys(module, x):
    module.keys["a"] = 3.0
    return (x,), {}


def _without_bias(module, x):
    module.layers[0].bias = None
    return (x,), {}


def _with_other_slope(module, x):
    module.act = functools.partial(nn.functional.leaky_relu, negative_slope=0.2)
    return (x,), {}


def _with_a_layer_more(module, x):
    module.layers.append(nn.ReLU())
    return (x,), {}


@pytest.mark.parametrize(
    "change, clause",
    [
        (lambda m, x: ((x, 2), {}), "`n` is no longer 1"),
        (lambda m, x: ((x, 2.5), {}), "`n` is no longer an `int`"),
        (lambda m, x: ((x, 1, x), {}), "`other` is no longer None"),
        (lambda m, x: ((x,), {"a": x}), "the length of `more` is no longer 0"),
        (lambda m, x: ((x[:, :1].expand(3, 4),), {}), "stride 1 of `x` is 0 instead of 1"),
        (lambda m, x: (m.layers[1].eval() and (x,), {}), "`self.layers[1].training` is no longer"),
        (lambda m, x: (setattr(m, "kinds", [1.0]) or (x,), {}), "the length of `self.kinds`"),
        (_with_hook, "the forward hooks of `self.layers[0]` changed"),
        (_with_other_keys, "`self.keys['a']` is no longer 1.0"),
        (_without_bias, "`self.layers[0].bias` is None instead of a `Parameter`"),
        (_with_other_slope, "`self.act.keywords['negative_slope']` is no longer 0.1"),
        (_with_a_layer_more, "the number of modules in `self.layers` changed"),
    ],
)
def test_a_warning_names_what_changed_and_a_line(change, clause):
    module = Model()
    model, x = shorthaul.module(module), torch.randn(3, 4)
    model(x)
    arguments, named = change(module, x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(*arguments, **named)
    texts = [str(w.message) for w in said if w.category is shorthaul.RecompileWarning]
    assert clause in texts[0]
    assert re.search(r"\(tests/test_changes\.py:\d+ in forward\)$", texts[0])
    assert not any(LEAKS.search(text) for text in texts)


def test_a_compilation_is_explained_once():
    model = shorthaul.module(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for one in (x, x.double().float().t().contiguous().t(), x[None]):
            model(one)
    texts = [str(w.message) for w in said if w.category is shorthaul.RecompileWarning]
    assert len(texts) == 2
    assert texts[1].endswith("`input` has 3 dimensions instead of 2")


def test_a_call_is_compared_with_a_program_of_its_own_mode():
    model = shorthaul.module(nn.Linear(4, 4))
    model(torch.randn(3, 4))
    with torch.no_grad(), pytest.warns(shorthaul.RecompileWarning, match="are switched off"):
        model(torch.randn(3, 4))
    with pytest.warns(shorthaul.RecompileWarning, match="size 0 of `input` is 5 instead of 3$"):
        model(torch.randn(5, 4))


@pytest.mark.parametrize("behind", [" == True", " is not", " <= x", " ?= 3", "", " <"])
def test_long_names_take_no_time(behind):
    name = "self" + "._modules['parametrizations']" * 40 + ".training_of_a_module_with_a_long_name"
    began = time.thread_time()
    for form in (f"{name}{behind}", f"not {name}{behind}", f"tensor '{name}'{behind}"):
        assert what_changed(form)
    # Without backtracking, far below a millisecond; with it, for ever.
    assert time.thread_time() - began < 5
