"""Programs with PyTorch's layers: convolutions, norms, pooling, dropout, interpolation."""

import torch
from torch import nn
from torch.nn import functional

from .facts import gradients, observe, raises, randn, step, training
from .registry import program


def _layer(name, make, *shapes, slack=1.0, calls=2):
    """Registers a program that trains a layer, then evaluates it, and looks at its buffers."""

    @program(name=name, slack=slack)
    def layer(wrap):
        model = make()
        m, seen = wrap(model), []
        for k in range(calls):
            seen.append(training(model, m, *(randn(*shapes[k % len(shapes)]),)))
        model.eval()
        seen.append(training(model, m, randn(*shapes[0])))
        return [seen, list(model.buffers())]


_IMAGE, _LINE = (2, 4, 5, 5), (2, 4, 6)
_layer("batch_norm_2d", lambda: nn.BatchNorm2d(4), _IMAGE, slack=3)
_layer("batch_norm_3d", lambda: nn.BatchNorm3d(2), (2, 2, 3, 3, 2), slack=3)
_layer("batch_norm_cumulative", lambda: nn.BatchNorm1d(4, momentum=None), (5, 4), slack=3)
_layer(
    "batch_norm_untracked", lambda: nn.BatchNorm1d(4, track_running_stats=False), (5, 4), slack=3
)
_layer("batch_norm_without_weights", lambda: nn.BatchNorm2d(4, affine=False), _IMAGE, slack=3)
_layer("group_norm", lambda: nn.GroupNorm(2, 4), _IMAGE, slack=3)
_layer("instance_norm", lambda: nn.InstanceNorm2d(4), _IMAGE, slack=3)
_layer("instance_norm_tracked", lambda: nn.InstanceNorm1d(4, True, True, True), _LINE, slack=3)
_layer("instance_norm_lazy", lambda: nn.LazyInstanceNorm2d(affine=True), _IMAGE, slack=3)
_layer("layer_norm", lambda: nn.LayerNorm(4), (3, 4), (2, 3, 4))
_layer("layer_norm_of_two_dimensions", lambda: nn.LayerNorm((3, 4), bias=False), (2, 3, 4))
_layer("rms_norm", lambda: nn.RMSNorm(4), (3, 4))
_layer("local_response_norm", lambda: nn.LocalResponseNorm(3), _IMAGE)
_layer("convolution_1d", lambda: nn.Conv1d(4, 2, 3, stride=2), _LINE)
_layer("convolution_3d", lambda: nn.Conv3d(1, 2, 2), (1, 1, 3, 3, 3))
_layer("convolution_dilated", lambda: nn.Conv2d(4, 2, 3, dilation=2, padding=2), _IMAGE)
_layer("convolution_grouped", lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"), _IMAGE)
_layer("convolution_depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4), _IMAGE)
_layer(
    "convolution_circular", lambda: nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"), _IMAGE
)
_layer(
    "convolution_reflected", lambda: nn.Conv1d(4, 2, 3, padding=2, padding_mode="reflect"), _LINE
)
_layer(
    "convolution_transposed", lambda: nn.ConvTranspose2d(4, 2, 3, 2, 1, output_padding=1), _IMAGE
)
_layer("convolution_transposed_grouped", lambda: nn.ConvTranspose1d(4, 2, 3, 2, groups=2), _LINE)
_layer("convolution_without_batch", lambda: nn.Conv2d(4, 2, 3), (4, 5, 5))
_layer("bilinear", lambda: nn.Sequential(nn.Linear(4, 3), nn.Softplus(), nn.Linear(3, 2)), (3, 4))
_layer("max_pool", lambda: nn.MaxPool2d(2), _IMAGE)
_layer("max_pool_overlapping", lambda: nn.MaxPool2d(3, 1, 1), _IMAGE)
_layer("max_pool_rounded_up", lambda: nn.MaxPool2d(2, ceil_mode=True), _IMAGE)
_layer("max_pool_dilated", lambda: nn.MaxPool1d(2, 1, dilation=2), _LINE)
_layer("average_pool", lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), _IMAGE)
_layer("average_pool_rounded_up", lambda: nn.AvgPool2d(2, ceil_mode=True), _IMAGE)
_layer("adaptive_average_pool", lambda: nn.AdaptiveAvgPool2d((2, 3)), _IMAGE, (2, 4, 7, 4))
_layer("adaptive_max_pool", lambda: nn.AdaptiveMaxPool2d(2), _IMAGE)
_layer("lp_pool", lambda: nn.LPPool2d(2, 2), _IMAGE)
_layer("pixel_shuffle", lambda: nn.PixelShuffle(2), _IMAGE)
_layer("pixel_unshuffle", lambda: nn.PixelUnshuffle(2), (1, 2, 4, 4))
_layer("channel_shuffle", lambda: nn.ChannelShuffle(2), _IMAGE)
_layer("unfold", lambda: nn.Unfold(2, stride=2), (2, 4, 4, 4))
_layer("fold", lambda: nn.Fold((4, 4), 2, stride=2), (2, 4, 4))
_layer("zero_pad", lambda: nn.ZeroPad2d((1, 2, 0, -1)), _IMAGE)
_layer("reflection_pad", lambda: nn.ReflectionPad2d(2), _IMAGE)
_layer("replication_pad", lambda: nn.ReplicationPad2d((1, 0, 2, 1)), _IMAGE)
_layer("circular_pad", lambda: nn.CircularPad2d(1), _IMAGE)
_layer("constant_pad", lambda: nn.ConstantPad1d((2, 1), 3.5), _LINE)
_layer("maxout_by_view", lambda: nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2))), (3, 4))


def _interpolation(mode, **kwargs):
    @program(name=f"interpolate_{mode}_{'_'.join(map(str, kwargs.values())).replace('.', '_')}")
    def interpolate(wrap):
        m = wrap(lambda x: functional.interpolate(x, mode=mode, **kwargs))
        shape = {"linear": (1, 2, 5), "trilinear": (1, 1, 3, 3, 3)}.get(mode, (1, 2, 4, 5))
        return raises(step, m, randn(*shape))


_interpolation("nearest", scale_factor=2)
_interpolation("nearest", scale_factor=0.6)
_interpolation("nearest-exact", size=7)
_interpolation("bilinear", scale_factor=2, align_corners=True)
_interpolation("bilinear", size=(3, 7), align_corners=False)
_interpolation("bilinear", size=(2, 2), antialias=True)
_interpolation("bicubic", scale_factor=1.5)
_interpolation("linear", scale_factor=2)
_interpolation("trilinear", scale_factor=2)
_interpolation("area", size=3)

_ACTIVATIONS = (
    nn.ReLU6(),
    nn.LeakyReLU(0.2),
    nn.PReLU(),
    nn.ELU(),
    nn.CELU(0.5),
    nn.SELU(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.Mish(),
    nn.Hardswish(),
    nn.Hardtanh(),
    nn.Hardsigmoid(),
    nn.Softplus(2, 1),
    nn.Softsign(),
    nn.Softshrink(),
    nn.Hardshrink(),
    nn.Tanhshrink(),
    nn.Threshold(0.1, 20),
    nn.LogSigmoid(),
    nn.Softmin(1),
    nn.LogSoftmax(1),
    nn.GLU(1),
)


@program
def activations(wrap):
    m = wrap(lambda x: [f(x) for f in _ACTIVATIONS])
    return step(m, randn(3, 4))


@program
def activations_in_place(wrap):
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.LeakyReLU(inplace=True),
        nn.Linear(4, 4),
        nn.SiLU(inplace=True),
        nn.Linear(4, 4),
        nn.Hardtanh(inplace=True),
    )
    return training(model, wrap(model), randn(3, 4))


def _dropout(name, make, shape, per_channel=False):
    @program(name=name)
    def dropout(wrap):
        """Output and gradient are zero at the same places, about as many as asked."""
        model = make()
        m = wrap(model)
        x = (torch.rand(*shape) + 1).requires_grad_()
        out = m(x)
        out.sum().backward()
        kept = out != 0
        second = m(x.detach())
        rate = kept.float().mean().item()
        whole = kept.flatten(2).all(2) == kept.flatten(2).any(2) if per_channel else kept[:0]
        scaled = torch.allclose(out[kept], x[kept] / (1 - model.p))
        model.eval()
        return [
            torch.equal(kept, x.grad != 0),
            bool(whole.all()),
            scaled,
            abs(rate + model.p - 1) < 0.12,
            torch.equal(kept, second != 0),
            torch.equal(m(x), x),
        ]


_dropout("dropout", lambda: nn.Dropout(0.3), (30, 40))
_dropout("dropout_1d", lambda: nn.Dropout1d(0.5), (20, 30, 4), True)
_dropout("dropout_2d", lambda: nn.Dropout2d(0.5), (20, 30, 2, 2), True)


@program
def alpha_dropout(wrap):
    model = nn.AlphaDropout(0.3)
    m, x = wrap(model), torch.zeros(3000)
    out = m(x)
    return [len(out.unique()), abs(out.mean().item()) < 0.15, torch.equal(model.eval()(x), x)]


@program
def dropout_of_everything_and_nothing(wrap):
    m = wrap(lambda x, p: functional.dropout(x, p))
    return [step(m, randn(5), p) for p in (0.0, 1.0)] + [raises(m, torch.ones(2), 1.5)]


@program
def dropout_differs_between_calls_and_follows_the_seed(wrap):
    m, x, seen = wrap(nn.Dropout(0.5)), torch.ones(200), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen += [m(x), m(x)]
    a, b, c, d, e, _ = seen
    same = [torch.equal(*pair) for pair in ((a, b), (a, c), (b, d), (a, e))]
    return same


@program
def random_relu(wrap):
    m, x = wrap(nn.RReLU(0.1, 0.3)), torch.full((300,), -1.0)
    out = m(x)
    return [bool((out <= -0.1).all() and (out >= -0.3).all()), len(out.unique()) > 100]


@program
def gumbel_softmax(wrap):
    m, x = wrap(lambda x: functional.gumbel_softmax(x, hard=True)), randn(50, 4)
    out = m(x)
    (out * torch.arange(4.0)).sum().backward()
    return [
        out.sum(-1),
        bool(x.grad.abs().sum() > 0),
        sorted(out.detach().round().unique().tolist()),
    ]


@program
def max_pool_with_indices(wrap):
    m = wrap(lambda x: functional.max_pool2d(x, 2, return_indices=True))
    return step(m, randn(1, 2, 4, 4))


@program
def max_unpool(wrap):
    def forward(x):
        y, index = functional.max_pool2d(x, 2, return_indices=True)
        return functional.max_unpool2d(y, index, 2)

    return raises(step, wrap(forward), randn(1, 2, 4, 4))


@program
def adaptive_max_pool_with_indices(wrap):
    m = wrap(nn.AdaptiveMaxPool1d(3, return_indices=True))
    return step(m, randn(1, 2, 7))


@program
def fractional_max_pool(wrap):
    m = wrap(nn.FractionalMaxPool2d(2, output_size=3))
    x = torch.randn(1, 2, 7, 7)

    def run():
        out = m(x)
        return [tuple(out.shape), bool(torch.isin(out, x).all())]

    return raises(run)


@program
def bilinear_layer(wrap):
    model = nn.Bilinear(3, 4, 2)
    return [step(wrap(model), randn(5, 3), randn(5, 4)), gradients(model)]


@program
def grid_sample(wrap):
    def forward(x, theta):
        grid = functional.affine_grid(theta, (1, 2, 4, 4), align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False)

    return raises(step, wrap(forward), randn(1, 2, 4, 4), randn(1, 2, 3))


@program
def batch_norm_of_one_value_is_refused(wrap):
    m = wrap(nn.BatchNorm1d(3))
    return [raises(m, torch.randn(1, 3)), raises(m, torch.randn(2, 3))]


@program
def batch_norm_with_running_statistics_reset(wrap):
    model = nn.BatchNorm1d(3)
    m = wrap(model)
    first = training(model, m, randn(4, 3))
    model.reset_running_stats()
    return [first, training(model, m, randn(4, 3)), list(model.buffers())]


@program
def batch_norm_statistics_of_a_never_used_branch(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x, which):
            return (self.a if which else self.b)(x)

    model = Model()
    m = wrap(model)
    return [[step(m, randn(4, 3), w) for w in (True, True, False)], list(model.buffers())]


@program
def functional_batch_norm_writes_given_statistics(wrap):
    mean, var = torch.zeros(3), torch.ones(3)
    m = wrap(lambda x, mean, var: functional.batch_norm(x, mean, var, training=True))
    return [[step(m, randn(4, 3), mean, var) for _ in range(2)], mean, var]


@program
def weight_standardized_convolution(wrap):
    class Conv(nn.Conv2d):
        def forward(self, x):
            w = self.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
            return self._conv_forward(x, w, self.bias)

    model = Conv(2, 3, 3)
    return training(model, wrap(model), randn(1, 2, 5, 5))


@program
def upsample_of_odd_sizes_then_added(wrap):
    def forward(x):
        small = functional.avg_pool2d(x, 2)
        return x + functional.interpolate(small, size=x.shape[-2:], mode="bilinear")

    m = wrap(forward)
    return [step(m, randn(1, 1, *s)) for s in ((5, 5), (6, 7), (4, 9))]


@program
def layer_scale_and_stochastic_depth(wrap):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.gamma = nn.Linear(3, 3), nn.Parameter(torch.full((3,), 0.1))

        def forward(self, x):
            keep = (torch.rand(x.shape[0], 1) < 0.5).float() if self.training else 1.0
            return x + self.fc(x) * self.gamma * keep

    model = Block()
    m = wrap(model)
    x = torch.randn(100, 3)
    changed = (m(x) != x).any(1).float().mean().item()
    model.eval()
    return [0.3 < changed < 0.7, observe(m(x))]


@program(slack=10)
def groups_for_each_sample(wrap):
    class Modulated(nn.Module):
        """As StyleGAN 2: one group of a convolution for each sample."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(randn(4, 2, 3, 3).detach())
            self.style = nn.Linear(3, 2)

        def forward(self, x, z):
            n, channels, height, width = x.shape
            weight = self.weight * self.style(z)[:, None, :, None, None]
            weight = weight * weight.pow(2).sum((2, 3, 4), keepdim=True).add(1e-8).rsqrt()
            weight = weight.view(n * 4, channels, 3, 3)
            y = x.reshape(1, n * channels, height, width)
            y = nn.functional.conv2d(y, weight, padding=1, groups=n)
            return y.view(n, 4, height, width)

    model = Modulated()
    m = wrap(model)
    return [training(model, m, randn(n, 2, 5, 5), randn(n, 3)) for n in (3, 2, 4)]


@program(slack=10)
def layers_over_windows_and_grids(wrap):
    """Blocks of MaxViT: what one layer gives in one order, the next one reads in another."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return x + self.second(nn.functional.gelu(self.first(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.windows, self.grid, self.mix = Block(), Block(), nn.Conv2d(16, 16, 1)

        def forward(self, x):
            n = x.shape[0]
            x = self.windows(x.view(n, 16, 4, 4, 4, 4).permute(0, 2, 4, 3, 5, 1))
            x = x.permute(0, 5, 1, 3, 2, 4).reshape(n, 16, 16, 16)
            x = self.grid(x.view(n, 16, 4, 4, 4, 4).permute(0, 3, 5, 2, 4, 1))
            return self.mix(x.permute(0, 5, 3, 1, 4, 2).reshape(n, 16, 16, 16))

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 16, 16, 16)) for n in (24, 3)]
