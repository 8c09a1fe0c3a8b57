"""Special functions at tiny and huge numbers and far below zero, beside eager in float64."""

import math

import pytest
import shorthaul
import torch
from torch import nn

TINY = [5e-324, 1e-310, 1e-300, 1e-30, 1e-20, 1e-5]
NEGATIVE = [-0.5, -2.5, -3.9999, -15.5, -16.25, -20.5, -20.25, -100.25]
PLACES = [*TINY, *(-x for x in TINY), 0.5, 7.9, 8.1, 1e5, 1e10, 1e40, math.inf, *NEGATIVE]
PROBABILITIES = [*TINY, 0.1353, 0.1354, 0.3, 0.5, 0.9, 1 - 1e-10, 1.0, 0.0, -1e-20, 1.5, math.nan]


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def zeta(order):
    return lambda x: torch.special.zeta(torch.full_like(x, order), x)


FUNCTIONS = {
    "lgamma": (torch.lgamma, PLACES),
    "digamma": (torch.digamma, PLACES),
    "polygamma 1": (lambda x: torch.polygamma(1, x), PLACES),
    "polygamma 2": (lambda x: torch.polygamma(2, x), PLACES),
    "zeta 3": (zeta(3.0), [*PLACES, 0.0, -1.0, -100.0]),
    "zeta 4": (zeta(4.0), [*PLACES, 0.0, -1.0, -100.0]),
    "zeta 2.5": (zeta(2.5), [*PLACES, 0.0, -1.0, -100.0]),
    "ndtri": (torch.special.ndtri, PROBABILITIES),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes(name, dtype):
    function, places = FUNCTIONS[name]
    x = torch.tensor(places, dtype=dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    found, expected = shorthaul.module(Function(function), fallback="error")(x), function(exact)
    found.sum().backward()
    expected.sum().backward()
    # Eager's first derivative of digamma has ten digits.
    tolerance = 4e-7 if dtype == torch.float32 else 2e-9
    for one, other in ((found, expected), (x.grad, exact.grad)):
        torch.testing.assert_close(one, other.to(dtype), rtol=tolerance, atol=1e-14, equal_nan=True)


#: Pairs with the lower function: a series of positive terms in 30 digits.
GAMMA = [
    (0.1, 0.05, 0.77553863545103057),
    (10.0, 12.0, 0.75760783832948765),
    (1e4, 9.8e3, 0.022207543813969694),
    (1e6, 1e6, 0.50013298076087259),
    (1e6, 992000.0, 5.2401228154308307e-16),
    (1e8, 99920000.0, 6.1156998321927899e-16),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_incomplete_gamma_functions_of_large_numbers(dtype):
    a, x, exact = torch.tensor(GAMMA, dtype=torch.float64).unbind(1)

    def both(a, x):
        return torch.igamma(a, x), torch.igammac(a, x)

    lower, upper = shorthaul.module(Function(both), fallback="error")(a.to(dtype), x.to(dtype))
    tolerance = 2e-7 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(lower, exact.to(dtype), rtol=tolerance, atol=0)
    torch.testing.assert_close(upper, (1 - exact).to(dtype), rtol=tolerance, atol=0)
