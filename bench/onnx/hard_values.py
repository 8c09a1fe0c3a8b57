"""Small graphs in which a plausible rewrite changes numbers, names or types.

Owns texts like those of ``hard_graphs``: arithmetic traps, initializers, types, interfaces, and the
patterns that an optimizer should find.
"""

from __future__ import annotations

from hard_graphs import HardGraph

TRAPS = (
    HardGraph(
        "nan_traps",
        "x*0, x-x, x/x and pow(x, 0) are not constants where x is NaN or infinite",
        """
agraph (float[N, 4] x) => (float[N, 4] a, float[N, 4] b, float[N, 4] c, float[N, 4] d)
<float[1] zero = {0}, float[1] one = {1}, float big = {3e38}, float tiny = {-3e38}>
{
  a = Mul(x, zero)  b = Sub(x, x)  c = Div(x, x)
  m = Min(x, big)  n = Max(m, tiny)  r = Relu(n)  s = Relu(r)  d = Pow(s, one)
}""",
    ),
    HardGraph(
        "negative_zero",
        "x+0 turns -0 into +0, x-0 does not, and 1/x tells them apart",
        """
agraph (float[N, 4] x) => (float[N, 4] a, float[N, 4] b, float[N, 4] c)
<float[1] zero = {0}, float[1] one = {1}>
{
  r = Relu(x)  n = Neg(r)
  p = Add(n, zero)  a = Reciprocal(p)
  q = Sub(n, zero)  b = Reciprocal(q)
  s = Mul(n, one)   c = Reciprocal(s)
}""",
    ),
    HardGraph(
        "cast_traps",
        "casts there and back that lose digits, and integer arithmetic that wraps",
        """
agraph (float[N, 4] x, int32[N, 4] i)
  => (float[N, 4] a, float[N, 4] b, int32[N, 4] c, int32[N, 4] d)
<int32 two = {2}, int32 huge = {1073741824}>
{
  h = Cast<to = 10>(x)  a = Cast<to = 1>(h)
  k = Cast<to = 11>(x)  l = Cast<to = 1>(k)  b = Identity(l)
  v = Div(i, two)  c = Mul(v, two)
  o = Mul(i, huge)  e = Mul(o, two)  d = Add(e, i)
}""",
        ranges={"i": [-5, 6]},
    ),
    HardGraph(
        "random_twins",
        "two equal random operators draw different numbers and are not common work",
        """
agraph (float[N, 4] x) => (bool differ, float[N, 4] y)
<float zero = {0}>
{
  a = RandomUniformLike(x)  b = RandomUniformLike(x)
  s = Sub(a, b)  t = Abs(s)  m = ReduceMax<keepdims = 0>(t)  differ = Greater(m, zero)
  y = Identity(x)
}""",
    ),
    HardGraph(
        "near_duplicates",
        "initializers with equal bytes of other types, and -0 beside +0",
        """
agraph (float[N, 4] x, int32[N, 4] i) => (float[N, 4] y, float[N, 4] z, int32[N, 4] j)
<float[4] p = {0, 1, 2, 3}, float[4] q = {-0.0, 1, 2, 3}, float[4] p2 = {0, 1, 2, 3},
 float[4, 4] w, float[1] k = {1}, int32[1] k2 = {1065353216}, float[1, 1] k3 = {1}>
{
  r = Relu(x)  a = Mul(r, p)  b = Mul(r, q)  c = Mul(r, p2)
  ra = Reciprocal(a)  rb = Reciprocal(b)  rc = Reciprocal(c)
  s = Add(ra, rc)  y = MatMul(s, w)  z0 = Mul(rb, k)  z = Mul(z0, k3)  j = Add(i, k2)
}""",
    ),
    HardGraph(
        "overridable_initializer",
        "initializers that are inputs too: a caller may replace them, so they are not constants",
        """
agraph (float[N, 4] x, float[4] scale = {1, 1, 1, 1}, float[4] shift = {0, 0, 0, 0})
  => (float[N, 4] y)
<float[4] w>
{ k = Mul(scale, w)  a = Mul(x, scale)  b = Add(a, shift)  y = Mul(b, k) }""",
        overrides=("scale", "shift"),
    ),
    HardGraph(
        "odd_interface",
        "an unused input, an output that is an input, one that is a weight, and one given twice",
        """
agraph (float[N, 4] x, float[N] unused)
  => (float[N, 4] same, float[4] w, float[N, 4] y, float[N, 4] y2)
<float[4] w>
{ same = Identity(x)  y = Mul(x, w)  y2 = Identity(y) }""",
    ),
    HardGraph(
        "shared_weight",
        "one weight in two convolutions, each followed by another scale",
        """
agraph (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y, float[N, 4, 6, 6] z)
<float[4, 3, 3, 3] w, float[4] g1, float[4] b1, float[4] m1, float[4] var1,
 float[4] g2, float[4] b2, float[4] m2, float[4] var2>
{
  c = Conv(x, w)  y = BatchNormalization(c, g1, b1, m1, var1)
  r = Relu(x)  d = Conv(r, w)  z = BatchNormalization(d, g2, b2, m2, var2)
}""",
        convolutional=True,
    ),
    HardGraph(
        "growing_constants",
        "constants made from a few bytes, which folded make a file of many megabytes",
        """
agraph (float[N, 1] x) => (float[N] y)
<int64[2] shape = {2048, 2048}, float[1] v = {0.5}, int64 n = {4194304}, int64 zero = {0},
 int64 one = {1}, int64[2] square = {2048, 2048}, int64[1] ax = {0}>
{
  a = ConstantOfShape<value = float[1] {0.25}>(shape)
  b = Expand(v, shape)
  r = Range(zero, n, one)  f = Cast<to = 1>(r)  c = Reshape(f, square)
  ab = Add(a, b)  d = Mul(ab, c)
  s = ReduceSum<keepdims = 0>(d, ax)  m = ReduceMean<keepdims = 0>(s)
  p = Mul(x, m)  l = Constant<value = int64[1] {1}>()  y = Squeeze(p, l)
}""",
    ),
    HardGraph(
        "training_normalization",
        "batch normalization in training form, which no convolution may absorb, and Dropout",
        """
agraph (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y, float[4] mean, float[4] spread)
<float[4, 3, 3, 3] w, float[4] g, float[4] b, float[4] m, float[4] var, float ratio = {0.5}>
{
  c = Conv(x, w)
  n, mean, spread = BatchNormalization<training_mode = 1, momentum = 0.9>(c, g, b, m, var)
  y = Dropout(n, ratio)
}""",
        sizes=({"N": 2}, {"N": 4}),
        convolutional=True,
    ),
)

TYPES = (
    HardGraph(
        "strings",
        "strings, their concatenation and comparison",
        """
agraph (string[N] x) => (string[N] y, bool[N] same, string[2, N] z)
<string[1] tail = {"!"}, string[1] a = {"a"}, string[1] b = {"b"}, int64[1] ax = {0}>
{
  ab = StringConcat(a, b)  i = Identity(x)  t = StringConcat(i, tail)  y = StringConcat(t, ab)
  same = Equal(x, a)
  u = Unsqueeze(x, ax)  v = Unsqueeze(y, ax)  z = Concat<axis = 0>(u, v)
}""",
        opset=20,
    ),
    HardGraph(
        "float16_convolution",
        "half precision (k is 0.5), where folding in another type rounds otherwise",
        """
agraph (float16[N, 3, 8, 8] x) => (float16[N, 4, 1, 1] y)
<float16[4, 3, 3, 3] w, float16[4] g, float16[4] b, float16[4] m, float16[4] var,
 float16[1] k = {14336}>
{
  c = Conv<pads = [1, 1, 1, 1]>(x, w)  n = BatchNormalization(c, g, b, m, var)
  s = Mul(n, k)  r = Relu(s)  y = GlobalAveragePool(r)
}""",
        convolutional=True,
    ),
    HardGraph(
        "double_and_bfloat16",
        "double precision, and bfloat16 weights that are cast",
        """
agraph (double[N, 4] x, float[N, 4] f) => (double[N, 4] y, float[N, 4] z)
<double[4, 4] w, double[4] b, bfloat16[4] h = {16256, 16384, 16448, 16512}, double one = {1}>
{
  m = MatMul(x, w)  a = Add(m, b)  y = Mul(a, one)
  c = Cast<to = 1>(h)  z = Mul(f, c)
}""",
    ),
    HardGraph(
        "complex_types_opset21",
        "opset 21 with types that few kernels have",
        """
agraph (float[N, 4] x, uint8[N, 4] u) => (float[N, 4] y, uint16[N, 4] v)
<float8e4m3fn[4] e = {56, 64, 68, 72}, float s = {0.5}, float one = {1}>
{
  w = DequantizeLinear(e, s)  a = Mul(x, w)  y = Mul(a, one)
  c = Cast<to = 4>(u)  d = Identity(c)  v = Identity(d)
}""",
        opset=21,
    ),
    HardGraph(
        "opset8_inputs",
        "an old file: every initializer is an input, old forms of Upsample and Reshape",
        """
agraph (float[N, 3, 4, 4] x, float[4, 3, 3, 3] w,
        float[4] g = {1, 2, 3, 4}, float[4] b = {1, 1, 1, 1},
        float[4] m = {0, 0.1, 0.2, 0.3}, float[4] var = {1, 2, 3, 4}) => (float[N, 4, 4, 4] y)
{
  c = Conv<pads = [1, 1, 1, 1]>(x, w)  n = BatchNormalization(c, g, b, m, var)
  u = Upsample<mode = "nearest", scales = [1.0, 1.0, 2.0, 2.0]>(n)
  p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(u)  d = Dropout(p)  y = Identity(d)
}""",
        opset=8,
        ir=3,
        convolutional=True,
    ),
    HardGraph(
        "opset23_attention",
        "operators of a current opset: Attention and RMSNormalization",
        """
agraph (float[N, S, 16] x) => (float[N, S, 16] y)
<float[16] g, float[16, 16] wq, float[16, 16] wk, float[16, 16] wv>
{
  n = RMSNormalization<axis = -1>(x, g)
  q = MatMul(n, wq)  k = MatMul(n, wk)  v = MatMul(n, wv)
  a = Attention<q_num_heads = 4, kv_num_heads = 4>(q, k, v)
  i = Identity(a)  y = Add(i, x)
}""",
        opset=23,
        ir=11,
        sizes=({"N": 2, "S": 3}, {"N": 1, "S": 7}),
    ),
    HardGraph(
        "recurrent",
        "recurrent operators with optional inputs left out",
        """
agraph (float[T, N, 4] x) => (float[T, 1, N, 8] y, float[1, N, 8] h, float[1, N, 8] c)
<float[1, 32, 4] w, float[1, 32, 8] r, float[1, 64] b>
{
  t = Transpose<perm = [1, 0, 2]>(x)  u = Transpose<perm = [1, 0, 2]>(t)
  y, h, c = LSTM<hidden_size = 8>(u, w, r, b)
}""",
        sizes=({"T": 3, "N": 2}, {"T": 5, "N": 1}),
    ),
)

PATTERNS = (
    HardGraph(
        "convolution_chain",
        "padding, convolution, normalization, scale and shift that one convolution can do",
        """
agraph (float[N, 3, H, W] x) => (float[N, 8, A, B] y)
<float[8, 3, 3, 3] w, float[8] g, float[8] b, float[8] m, float[8] var, float[8, 1, 1] scale,
 float[8, 1, 1] shift, int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}, float zero = {0},
 float[8, 8, 1, 1] w2, float[1, 8, 1, 1] bias, int64[8] edge = {0, 0, 1, 0, 0, 0, 0, 1}>
{
  p = Pad(x, pads, zero)  c = Conv(p, w)  n = BatchNormalization(c, g, b, m, var)
  s = Mul(n, scale)  t = Add(s, shift)  r = Relu(t)
  d = Conv(r, w2)  e = Add(d, bias)  f = Pad<mode = "reflect">(e, edge)
  h = Sub(f, bias)  y = Div(h, scale)
}""",
        sizes=({"N": 1, "H": 8, "W": 8}, {"N": 2, "H": 5, "W": 7}),
        convolutional=True,
    ),
    HardGraph(
        "transposed_blocks",
        "layouts switched back and forth around element-wise work, reductions and concatenation",
        """
agraph (float[N, 4, H, W] x) => (float[N, 8, H, W] y, float[N, 4] z)
<float[4] b, float[4, 1, 1] k>
{
  t = Transpose<perm = [0, 2, 3, 1]>(x)  a = Add(t, b)  r = Relu(a)
  u = Transpose<perm = [0, 3, 1, 2]>(r)  m = Mul(u, k)
  v = Transpose<perm = [0, 2, 3, 1]>(m)  s = Sigmoid(v)  c = Concat<axis = 3>(s, t)
  y = Transpose<perm = [0, 3, 1, 2]>(c)
  z = ReduceMean<axes = [1, 2], keepdims = 0>(s)
}""",
        sizes=({"N": 1, "H": 4, "W": 4}, {"N": 2, "H": 3, "W": 5}),
    ),
    HardGraph(
        "decomposed_operators",
        "LayerNormalization, Gelu in both forms, and a softmax, written out",
        """
agraph (float[N, 8] x) => (float[N, 8] y)
<float[8] g, float[8] b, int64[1] last = {-1}, float two = {2}, float eps = {1e-5},
 float root = {1.4142135},
 float one = {1}, float half = {0.5}, float cube = {3},
 float c1 = {0.044715}, float c2 = {0.7978845608}>
{
  m = ReduceMean<axes = [-1]>(x)  d = Sub(x, m)  p = Pow(d, two)  v = ReduceMean<axes = [-1]>(p)
  ve = Add(v, eps)  sd = Sqrt(ve)  n = Div(d, sd)  ng = Mul(n, g)  ln = Add(ng, b)
  e1 = Div(ln, root)  e2 = Erf(e1)  e3 = Add(e2, one)  e4 = Mul(ln, e3)  ge = Mul(e4, half)
  t1 = Pow(ge, cube)  t2 = Mul(t1, c1)  t3 = Add(ge, t2)  t4 = Mul(t3, c2)  t5 = Tanh(t4)
  t6 = Add(t5, one)  t7 = Mul(ge, t6)  gt = Mul(t7, half)
  mx = ReduceMax<axes = [-1]>(gt)  sx = Sub(gt, mx)  ex = Exp(sx)  su = ReduceSum(ex, last)
  y = Div(ex, su)
}""",
    ),
    HardGraph(
        "stacked_products",
        "three products that share an input, with biases, scales and transposes around them",
        """
agraph (float[N, 8] x) => (float[N, 4] y, float[4, N] z)
<float[8, 4] w1, float[8, 4] w2, float[8, 4] w3, float[4] b1, float[4] b2, float[4] b3,
 float k = {0.5}, float[4] s>
{
  m1 = MatMul(x, w1)  a1 = Add(m1, b1)  m2 = MatMul(x, w2)  a2 = Add(b2, m2)
  m3 = MatMul(x, w3)  a3 = Add(m3, b3)  q = Mul(a1, k)  r = Mul(a2, s)
  t = Add(q, r)  y = Add(t, a3)
  u = Transpose<perm = [1, 0]>(w1)  v = Transpose<perm = [1, 0]>(x)  z = MatMul(u, v)
}""",
    ),
    HardGraph(
        "moved_pieces",
        "consecutive slices, concatenations, splits, reshapes, squeezes and pads",
        """
agraph (float[N, 8, 6] x) => (float[N, 8, 6] y, float[N, 48] z, float[N, 5, 3] w)
<int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] a2 = {2}, int64[1] e7 = {7}, int64[1] e6 = {6},
 int64[1] e4 = {4}, int64[2] halves = {4, 4}, int64[3] r1 = {0, 48, 1}, int64[2] r2 = {0, -1},
 int64[6] nopad = {0, 0, 0, 0, 0, 0}, int64[1] s1 = {1}>
{
  h1, h2 = Split<axis = 1>(x, halves)  c = Concat<axis = 1>(h1, h2)
  p = Pad(c, nopad)  u = Unsqueeze(p, a1)  y = Squeeze(u, a1)
  f = Reshape(x, r1)  g = Squeeze(f, a2)  z = Reshape(g, r2)
  l1 = Slice(x, a1, e7, a1)  l2 = Slice(l1, a1, e6, a1)  l3 = Slice(l2, a1, e4, a2)
  w = Slice(l3, a0, e6, a1, s1)
}""",
    ),
    HardGraph(
        "common_work",
        "the same work written several times, commuted, and behind identities",
        """
agraph (float[N, 4] x) => (float[N, 4] y)
<float[4, 4] w, float[4, 4] w2, float[4] b>
{
  m1 = MatMul(x, w)  i = Identity(x)  m2 = MatMul(i, w)  a1 = Add(m1, b)  a2 = Add(b, m2)
  e1 = Exp(a1)  e2 = Exp(a2)  s = Add(e1, e2)
  t1 = Softmax<axis = -1>(s)  t2 = Softmax<axis = 1>(s)  y = Mul(t1, t2)
}""",
    ),
)
