"""Programs with operators: elementwise, reductions, shapes, linear algebra, distributions."""

import functools
import itertools

import torch
from torch import nn

from .facts import observe, raises, randn, step, training
from .registry import program


@program
def elementwise_special_functions(wrap):
    def forward(x):
        p = x.sigmoid()
        return (
            p.erf(),
            p.erfc(),
            p.erfinv(),
            p.lgamma(),
            p.digamma(),
            p.log1p(),
            p.expm1(),
            p.logit(),
            p.atanh(),
            p.asin(),
            p.acos(),
            p.atan(),
            x.sinh(),
            x.cosh(),
            p.log2(),
            p.log10(),
            x.exp2(),
            p.rsqrt(),
            p.reciprocal(),
            torch.atan2(x, p),
            torch.hypot(x, p),
            torch.xlogy(p, p),
            x.sinc(),
        )

    return step(wrap(forward), randn(5))


@program(since=(2, 14))
def reductions(wrap):
    def forward(x):
        return (
            x.sum((0, 2)),
            x.mean(-1, keepdim=True),
            x.var(1),
            x.std(unbiased=False),
            x.prod(1),
            x.logsumexp(2),
            x.norm(dim=1),
            x.norm(1),
            x.amax((0, 1)),
            x.amin(2),
            x.nansum(),
            x.median(),
            torch.var_mean(x, 0),
            x.aminmax(dim=1),
            x.quantile(0.3),
            x.count_nonzero(1),
            x.argmin(0),
        )

    return step(wrap(forward), randn(2, 3, 4))


@program
def scans(wrap):
    def forward(x):
        return (
            x.cumsum(0),
            x.cumprod(1),
            x.logcumsumexp(1),
            x.cummax(1),
            x.diff(dim=1),
            x.flip(1).cumsum(1),
            torch.trapezoid(x, dim=1),
        )

    return step(wrap(forward), randn(3, 4))


@program
def shapes(wrap):
    def forward(x):
        return (
            x.movedim(0, -1),
            x.unsqueeze(1).squeeze(),
            x.repeat(2, 1, 1),
            x.tile(2),
            x.roll(1, 2),
            x.rot90(),
            x.flip(0, 2),
            x.swapaxes(0, 1),
            x.unflatten(2, (2, 2)),
            x.narrow(2, 1, 2),
            torch.stack([x, x * 2], 1),
            torch.cat([x, x.exp()], 1),
            x.split([1, 3], 2),
            x.chunk(2, 2),
            x.expand(2, -1, -1, -1),
            x.permute(2, 0, 1),
            x.ravel(),
            torch.broadcast_to(x, (2, 2, 3, 4)),
        )

    return step(wrap(forward), randn(2, 3, 4))


@program
def triangles_and_diagonals(wrap):
    def forward(x):
        return (
            x.tril(),
            x.triu(1),
            x.diag(),
            torch.diag_embed(x),
            x.trace(),
            torch.block_diag(x, x),
            x.diagonal(1),
            torch.outer(x[0], x[1]),
            torch.kron(x, x),
        )

    return step(wrap(forward), randn(3, 3))


@program
def products(wrap):
    def forward(a, b):
        return (
            a @ b,
            torch.mm(a, b),
            torch.addmm(b.sum(0), a, b, beta=0.5, alpha=2),
            a.matmul(b[:, 0]),
            torch.bmm(a[None], b[None]),
            torch.tensordot(a, b, 1),
            torch.linalg.multi_dot([a, b, a]),
            torch.einsum("ij,jk->ki", a, b),
            torch.einsum("ij,ij->", a, b.T),
            torch.einsum("ii->i", a @ b),
            torch.cdist(a, b.T),
            a.inner(b.T),
            torch.vdot(a[0], b[:, 0]),
        )

    return raises(step, wrap(forward), randn(3, 4), randn(4, 3))


@program
def einsum_with_ellipsis(wrap):
    m = wrap(lambda x, w: torch.einsum("...nd,hde->...hne", x, w))
    return [step(m, randn(*s, 3, 4), randn(2, 4, 5)) for s in ((), (2,), (2, 3))]


@program
def batched_products_that_broadcast(wrap):
    m = wrap(lambda a, b: a @ b)
    pairs = (
        ((2, 1, 3, 4), (5, 4, 2)),
        ((4,), (4, 2)),
        ((2, 3, 4), (4,)),
        ((1, 4), (4, 1)),
        ((0, 4), (4, 2)),
    )
    return [step(m, randn(*a), randn(*b)) for a, b in pairs]


@program(slack=20)
def linear_systems(wrap):
    def forward(a, b):
        spd = a @ a.mT + 3 * torch.eye(3)
        low = torch.linalg.cholesky(spd)
        return (
            torch.linalg.inv(spd),
            torch.linalg.solve(spd, b),
            torch.linalg.det(spd),
            spd.logdet(),
            low,
            torch.linalg.solve_triangular(low, b, upper=False),
            torch.cholesky_solve(b, low),
            torch.linalg.matrix_norm(a),
            torch.linalg.vector_norm(a, 3),
            torch.linalg.matrix_power(a, 3),
        )

    return raises(step, wrap(forward), randn(3, 3), randn(3, 2))


@program(slack=20)
def decompositions(wrap):
    def forward(a):
        values, vectors = torch.linalg.eigh(a + a.mT)
        q, r = torch.linalg.qr(a)
        return (
            values,
            vectors.abs(),
            (q @ r),
            torch.linalg.svdvals(a),
            torch.linalg.pinv(a),
            a.matrix_exp(),
        )

    return raises(step, wrap(forward), randn(3, 3))


@program
def singular_matrix_is_refused(wrap):
    m = wrap(lambda a: torch.linalg.inv(a) * 2)
    return [raises(m, torch.zeros(2, 2)), raises(m, torch.eye(2))]


@program
def fourier_transforms(wrap):
    def forward(x):
        return (
            torch.fft.rfft(x).abs(),
            torch.fft.irfft(torch.fft.rfft(x) * 2),
            torch.fft.fft2(x).real,
        )

    return raises(step, wrap(forward), randn(3, 8))


@program
def short_time_fourier_transform(wrap):
    def forward(x):
        spec = torch.stft(x, 8, hop_length=4, window=torch.hann_window(8), return_complex=True)
        return spec.abs().pow(2)

    return raises(step, wrap(forward), randn(2, 32))


@program
def sorting(wrap):
    def forward(x):
        values, index = x.sort(descending=True)
        top, places = x.topk(2, largest=False)
        return (
            values,
            index,
            top,
            places,
            x.argsort(stable=True),
            x.kthvalue(2),
            x.mode(1),
            x.msort(),
        )

    return raises(step, wrap(forward), randn(3, 5))


@program
def sorting_with_ties_is_stable(wrap):
    m = wrap(
        lambda x: (
            x.sort(stable=True),
            x.argsort(descending=True, stable=True),
            x.sort(stable=True)[1],
        )
    )
    return m(torch.tensor([2, 1, 2, 1, 1, 2]))


@program
def choices(wrap):
    def forward(x, y):
        return (
            torch.where(x > y, x, y),
            x.masked_fill(x < 0, 0),
            torch.lerp(x, y, 0.3),
            x.clamp(min=y),
            x.clip(max=0.5),
            torch.isclose(x, y),
            torch.addcmul(x, x, y, value=2),
            torch.addcdiv(x, x, y + 5),
            x.copysign(y),
            torch.nextafter(x, y),
            x.detach().heaviside(y.detach()),
            torch.logaddexp(x, y),
            torch.dist(x, y),
            torch.cross(x, y, dim=-1),
            nn.functional.cosine_similarity(x, y),
            torch.ldexp(x, y.int()),
        )

    return raises(step, wrap(forward), randn(2, 3), randn(2, 3))


@program
def meshes_and_products(wrap):
    m = wrap(
        lambda x, y: (
            torch.meshgrid(x, y, indexing="ij"),
            torch.cartesian_prod(x, y),
            torch.combinations(x),
        )
    )
    return raises(step, m, randn(3), randn(2))


@program
def windows_and_ranges(wrap):
    m = wrap(
        lambda x: (
            x.unfold(-1, 4, 2),
            x.as_strided((2, 3), (3, 1)),
            torch.hann_window(4),
            x.view_as(x),
        )
    )
    return raises(step, m, randn(10))


@program
def distances(wrap):
    def forward(x, y):
        return (
            torch.cdist(x, y),
            torch.cdist(x, y, p=1),
            torch.pdist(x),
            nn.functional.pairwise_distance(x, y),
        )

    return raises(step, wrap(forward), randn(3, 4), randn(3, 4))


@program
def normalizations(wrap):
    def forward(x):
        return (
            nn.functional.normalize(x),
            x.renorm(2, 0, 1.0),
            x.softmax(0),
            x.log_softmax(1),
            x / x.norm(),
            x - x.mean(1, keepdim=True),
        )

    return raises(step, wrap(forward), randn(3, 4))


@program
def cholesky_of_covariance(wrap):
    m = wrap(lambda x: (torch.cov(x), torch.corrcoef(x)))
    return raises(step, m, randn(3, 10))


@program
def covariances(wrap):
    m = wrap(
        lambda x: (
            x.cov(correction=0),
            x.t().cov(),
            torch.cov(x, correction=-1),
            x[0].cov(),
            x.corrcoef(),
            x[:1].corrcoef(),
            torch.corrcoef(x[:, :2].detach() * 0),
        )
    )
    return raises(step, m, randn(3, 5))


@program
def covariances_of_few_or_weighted_observations(wrap):
    counts, weights = torch.tensor([1, 0, 2, 1, 3]), torch.rand(5)
    functions = (
        lambda x: torch.cov(x[:, :1]),
        lambda x: torch.cov(x, correction=5),
        lambda x: torch.cov(x, fweights=counts),
        lambda x: x.cov(correction=0, aweights=weights),
        lambda x: torch.cov((x * 4).int()).float() * x,
    )
    return [raises(step, wrap(function), randn(3, 5)) for function in functions]


@program
def normal_distribution(wrap):
    def forward(mean, log_scale, x):
        d = torch.distributions.Normal(mean, log_scale.exp())
        other = torch.distributions.Normal(0.0, 1.0)
        return d.log_prob(x), d.entropy(), torch.distributions.kl_divergence(d, other)

    return raises(step, wrap(forward), randn(3), randn(3), randn(3))


@program
def categorical_distribution(wrap):
    def forward(logits, action):
        d = torch.distributions.Categorical(logits=logits)
        return d.log_prob(action), d.entropy(), d.probs

    return raises(step, wrap(forward), randn(3, 4), torch.tensor([0, 3, 1]))


@program
def reparametrized_samples(wrap):
    def forward(mean, scale):
        return torch.distributions.Normal(mean, scale.exp()).rsample((2000,))

    m, mean, scale = wrap(forward), randn(2), randn(2)
    out = m(mean, scale)
    out.mean(0).sum().backward()
    return [abs(out.mean(0) - mean) < 0.2 * scale.exp(), mean.grad, tuple(out.shape)]


@program
def bernoulli_and_multinomial(wrap):
    def forward(p):
        return (
            torch.bernoulli(p),
            torch.multinomial(p, 3),
            torch.randint(0, 5, (4,)),
            torch.randperm(6),
        )

    b, chosen, whole, order = wrap(forward)(torch.full((10,), 0.5))
    return [
        set(b.tolist()) <= {0.0, 1.0},
        len(set(chosen.tolist())),
        bool((whole < 5).all()),
        sorted(order.tolist()),
    ]


@program
def random_numbers_with_a_generator(wrap):
    def forward(x, generator):
        return x + torch.rand(3, generator=generator)

    m, seen = wrap(forward), []
    for seed in (1, 1, 2):
        seen.append(raises(m, torch.zeros(3), torch.Generator().manual_seed(seed)))
    return seen


@program
def policy_gradient(wrap):
    model = nn.Linear(3, 4)
    m, x = wrap(model), torch.randn(5, 3)
    d = torch.distributions.Categorical(logits=m(x))
    action = torch.tensor([0, 1, 2, 3, 0])
    (-d.log_prob(action) * torch.arange(5.0)).mean().backward()
    return [observe(model.weight.grad), d.entropy()]


@program
def custom_operator_of_the_user(wrap):
    @torch.library.custom_op("small_programs::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() * 3)

    triple.register_fake(lambda x: torch.empty_like(x))
    triple.register_autograd(lambda ctx, g: g * 30)
    m = wrap(lambda x: triple(x * 2) + 1)
    return step(m, randn(3))


@program
def custom_operator_that_writes(wrap):
    @torch.library.custom_op("small_programs::bump", mutates_args={"x"})
    def bump(x: torch.Tensor) -> None:
        x.add_(1)

    def forward(x):
        y = x * 2
        bump(y)
        return y * 3

    return wrap(forward)(torch.ones(3))


@program
def softmax_of_large_numbers(wrap):
    m = wrap(
        lambda x: ((x * 1000).softmax(-1), x.mul(1e4).logsumexp(-1), (x * 100).log_softmax(-1))
    )
    return step(m, randn(4, 5))


@program
def long_chain_of_small_steps(wrap):
    def forward(x):
        for k in range(30):
            x = (x * 1.01 + 0.1 * k).sin()
        return x

    return step(wrap(forward), randn(6))


@program
def sums_of_many_numbers(wrap):
    m = wrap(lambda x: (x.sum(), x.mean(), x.double().sum(), (x * x).sum(0), x.var()))
    return step(m, randn(3000, 7))


@program
def gradients_that_pytorch_lacks(wrap):
    functions = (
        lambda x: x // 2.5 * x,
        lambda x: x.floor_divide(2) + x,
        lambda x: 2 // x * x,
        lambda x: torch.heaviside(x, torch.ones_like(x)) * x,
        lambda x: torch.special.zeta(x.abs() + 1.5, x.abs() + 1),
    )
    seen = []
    for function in functions:
        y = wrap(function)(randn(4))
        seen += [y.detach(), raises(y.sum().backward)]
    return seen


@program
def interpolation_that_keeps_sizes(wrap):
    """Along a dimension that keeps its size, eager copies, whatever the factor."""
    resize = torch.nn.functional.interpolate
    kinds = [("linear", 1), ("bilinear", 2), ("trilinear", 3)]
    seen = []
    for (mode, n_dims), factor in itertools.product(kinds, (1.1, 1.3, 2.0)):
        m = wrap(functools.partial(resize, scale_factor=factor, mode=mode))
        seen.append(step(m, randn(1, 2, *[4, 6, 3][:n_dims])))
    return seen


@program
def operators_by_their_overload(wrap):
    """They mean the same as the functions and methods of the same name."""
    aten = torch.ops.aten

    def forward(x, y):
        z = x * 2
        aten.add_.Tensor(z, y)
        row = aten.select.int(z, 0, 1)
        aten.mul_.Scalar(row, 3)
        kept = aten.as_strided_scatter.default(y * 8, row[:3], (3,), (4,), 0)
        return z, kept, aten.gather.default(y, 1, torch.tensor([[0, 2]]), sparse_grad=False)

    return step(wrap(forward), randn(3, 4), randn(3, 4))


@program
def operators_that_write_to_a_given_tensor(wrap):
    aten = torch.ops.aten

    def forward(x):
        out = torch.zeros(3, 4)
        aten.add.out(x, 1, out=out)
        total = aten.sum(x, [1], out=torch.zeros(3))
        return out * 2, total

    return step(wrap(forward), torch.randn(3, 4))


@program
def histograms_have_no_gradient(wrap):
    def run(count):
        x = randn(4, 2)
        found = wrap(count)(x)
        return [found, raises(lambda: found.sum().backward())]

    return [
        run(lambda x: torch.histogram(x, 4)[0]),
        run(lambda x: torch.histogram(torch.arange(8.0), 4, weight=x.flatten())[0]),
        run(lambda x: torch.histogramdd(x, [3, 3])[0]),
    ]


@program
def parts_without_elements_that_need_a_gradient(wrap):
    """Rotary embeddings of whole heads have nothing left and right of what they turn."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.ones(4) * 2), nn.Linear(4, 4)

        def forward(self, x):
            turned = torch.cat((x[..., :0], x * self.scale, x[..., 4:] * self.scale[:0]), -1)
            rows = torch.cat([self.linear(x[:0]), self.linear(x)])
            return turned + rows * self.scale + (x[:, :0] * 2).prod(-1, keepdim=True)

    model = Model()
    return training(model, wrap(model), randn(3, 4))
