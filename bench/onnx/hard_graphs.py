"""Small graphs that are hard to optimize rightly, in the text form of ``onnx.parser``.

Owns the texts, each with what is hard about it. A value that is declared in ``<...>`` without
numbers, and that nothing computes, becomes an initializer with random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HardGraph:
    """A graph as text; ``opset`` of the default domain, ``imports`` of others."""

    name: str
    why: str
    text: str
    opset: int = 17
    ir: int = 10
    imports: str = ""
    sizes: tuple[dict[str, int], ...] = ({"N": 2}, {"N": 5})
    ranges: dict[str, list[int]] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    convolutional: bool = False
    runtime: str = "onnxruntime"

    def model_text(self) -> str:
        """The whole model for ``onnx.parser.parse_model``."""
        imports = f'"" : {self.opset}' + (f", {self.imports}" if self.imports else "")
        header = f'ir_version: {self.ir}, opset_import: [{imports}], producer_name: "zoo",'
        header += f' doc_string: "{self.why}", metadata_props: ["task": "{self.name}"]'
        return f"<{header}>\n{self.text}"


CONTROL_FLOW = (
    HardGraph(
        "if_branches",
        "foldable work, dead work and captured values in the branches of If",
        """
agraph (float[N, 4] x, bool c) => (float[N, 4] y, float[N, 4] z)
<float[4] w, float[4] b, bool t = {1}>
{
  y = If (c) <
    then_branch = then_g () => (float[N, 4] a) <float[4] two = {2, 2, 2, 2}> {
      s = Add(w, two)  p = Mul(x, s)  dead = Exp(p)  i = Identity(p)  a = Identity(i)
    },
    else_branch = else_g () => (float[N, 4] e) {
      q = Transpose<perm = [1, 0]>(x)  r = Transpose<perm = [1, 0]>(q)  f = Add(r, b)
      f2 = Add(x, b)  e = Mul(f, f2)
    }>
  z = If (t) <
    then_branch = then_h () => (float[N, 4] a) { a = Relu(x) },
    else_branch = else_h () => (float[N, 4] e) { e = Neg(x) }>
}""",
    ),
    HardGraph(
        "loop_body",
        "a Loop whose body has invariant work and transposes that cancel",
        """
agraph (float[N, 4] x, int64 trips) => (float[N, 4] y, float[T, N, 4] steps)
<float[4, 4] w, float[4] b, bool go = {1}>
{
  y, steps = Loop (trips, go, x) <body = body_g
    (int64 i, bool cond, float[N, 4] h) => (bool keep, float[N, 4] next, float[N, 4] step)
    <float[1] half = {0.5}, float[1] two = {2}> {
      scale = Mul(half, two)
      inv = MatMul(x, w)
      t1 = Transpose<perm = [1, 0]>(h)  t2 = Tanh(t1)  t3 = Transpose<perm = [1, 0]>(t2)
      sum = Add(t3, inv)  biased = Add(sum, b)  scaled = Mul(biased, scale)
      next = Tanh(scaled)
      step = Identity(next)  keep = Identity(cond)
    }>
}""",
        ranges={"trips": [3, 4]},
    ),
    HardGraph(
        "loop_data_dependent",
        "a Loop that stops on data, with no trip count",
        """
agraph (float[N, 4] x) => (float[N, 4] y, int64 count)
<bool go = {1}, float limit = {30}, int64 zero = {0}>
{
  y, count = Loop (, go, x, zero) <body = body_g
    (int64 i, bool cond, float[N, 4] h, int64 c) => (bool keep, float[N, 4] next, int64 d)
    <float one = {1}, int64 step = {1}> {
      a = Abs(h)  next = Add(a, one)  s = ReduceMax<keepdims = 0>(next)
      k = Add(one, one)  l = Add(limit, k)  keep = Less(s, l)  d = Add(c, step)
    }>
}""",
    ),
    HardGraph(
        "scan_body",
        "a Scan over rows with a foldable body",
        """
agraph (float[T, 4] x, float[4] h0) => (float[4] h, float[T, 4] ys)
<float[4, 4] w, float[4] b>
{
  h, ys = Scan (h0, x) <num_scan_inputs = 1, body = body_g
    (float[4] s, float[4] r) => (float[4] next, float[4] out) {
      k = Constant<value = float[4] {1, 1, 1, 1}>()
      k2 = Add(k, k)
      m = MatMul(s, w)  a = Add(m, b)  c = Add(a, r)  d = Mul(c, k2)
      next = Tanh(d)  out = Identity(next)
    }>
}""",
        sizes=({"T": 3}, {"T": 6}),
    ),
    HardGraph(
        "shadowed_names",
        "bodies that use names again which other bodies use for other values",
        """
agraph (float[N, 4] x, bool c) => (float[N, 4] y, float[N, 4] z)
<float[4] w>
{
  y = If (c) <
    then_branch = g1 () => (float[N, 4] r) <float[1] k = {2}> { t = Mul(x, k)  r = Add(t, w) },
    else_branch = g2 () => (float[N, 4] r) <float[1] k = {3}> { t = Mul(x, k)  r = Sub(t, w) }>
  u = Not(c)
  z = If (u) <
    then_branch = g3 () => (float[N, 4] r) <float[1] k = {2}> { t = Mul(x, k)  r = Add(t, w) },
    else_branch = g4 () => (float[N, 4] r) <float[1] k = {5}> { t = Mul(x, k)  r = Sub(t, w) }>
}""",
    ),
    HardGraph(
        "sequences",
        "sequences and optionals between arrays",
        """
agraph (float[N, 6] x) => (float[N, 6] y, float[N, 2] last)
<int64[3] parts = {2, 2, 2}, int64 two = {2}>
{
  s = SplitToSequence<axis = 1>(x, parts)
  y = ConcatFromSequence<axis = 1>(s)
  t = SequenceAt(s, two)
  o = Optional(t)
  last = OptionalGetElement(o)
}""",
        opset=18,
    ),
)

FUNCTIONS = (
    HardGraph(
        "local_functions",
        "functions with attributes, called twice, one inside another",
        """
agraph (float[N, 4] x) => (float[N, 4] y)
<float[4, 4] w1, float[4, 4] w2, float[4] b>
{
  h = local.Dense <slope = 0.2> (x, w1, b)
  g = local.Dense (h, w2, b)
  y = local.Shifted (g)
}
<domain: "local", opset_import: ["" : 17]>
Leaky <slope: float = 0.01> (a) => (r) { i = Identity(a)  r = LeakyRelu<alpha: float = @slope>(i) }
<domain: "local", opset_import: ["" : 17, "local" : 1]>
Dense <slope: float = 0.1> (a, w, b) => (r) {
  m = MatMul(a, w)  s = Add(m, b)  r = local.Leaky<slope: float = @slope>(s)
}
<domain: "local", opset_import: ["" : 17]>
Shifted (a) => (r) {
  one = Constant<value = float {1}>()
  two = Constant<value = float {2}>()
  three = Add(one, two)
  t = Transpose<perm = [1, 0]>(a)
  u = Transpose<perm = [1, 0]>(t)
  r = Add(u, three)
}""",
        imports='"local" : 1',
    ),
    HardGraph(
        "custom_domain",
        "an operator nobody knows, which may be random, between operators that can be improved",
        """
agraph (float[N, 4] x) => (float[N, 4] y)
<float[4] w, float[4] b, float[1] one = {1}>
{
  k = Add(w, b)  a = Mul(x, k)  i = Identity(a)
  m = acme.Mystery <depth = 3> (i, w)
  t = Transpose<perm = [1, 0]>(m)  u = Transpose<perm = [1, 0]>(t)
  n = acme.Mystery <depth = 3> (u, w)
  o = acme.Mystery <depth = 3> (u, w)
  p = Add(n, o)  y = Identity(p)
}""",
        imports='"acme" : 1',
        runtime="reference",
    ),
    HardGraph(
        "contrib_domain",
        "an operator of ONNX Runtime's own domain between standard ones",
        """
agraph (float[N, 4] x) => (float[N, 4] y)
<float[4] w, float[4] b>
{
  k = Add(w, b)  a = Mul(x, k)  g = com.microsoft.Gelu(a)  i = Identity(g)
  t = Transpose<perm = [1, 0]>(i)  u = Transpose<perm = [1, 0]>(t)
  y = com.microsoft.BiasGelu(u, b)
}""",
        imports='"com.microsoft" : 1',
    ),
)

QUANTIZED = (
    HardGraph(
        "qdq_convolution",
        "quantize and dequantize pairs, which carry rounding that must stay",
        """
agraph (float[N, 3, 8, 8] x) => (float[N, 4, 8, 8] y)
<int8[4, 3, 3, 3] w, float[4] ws = {0.02, 0.01, 0.03, 0.02}, int8[4] wz = {0, 0, 0, 0},
 float xs = {0.05}, uint8 xz = {128}, float as = {0.04}, uint8 az = {3},
 int32[4] bq = {10, -20, 30, 5}, float[4] bs = {0.001, 0.0005, 0.0015, 0.001},
 int32[4] bz = {0, 0, 0, 0}>
{
  q = QuantizeLinear(x, xs, xz)  d = DequantizeLinear(q, xs, xz)
  wd = DequantizeLinear<axis = 0>(w, ws, wz)  bd = DequantizeLinear<axis = 0>(bq, bs, bz)
  c = Conv<pads = [1, 1, 1, 1]>(d, wd, bd)
  r = Relu(c)
  q2 = QuantizeLinear(r, as, az)  d2 = DequantizeLinear(q2, as, az)
  i = Identity(d2)
  q3 = QuantizeLinear(i, as, az)  y = DequantizeLinear(q3, as, az)
}""",
        convolutional=True,
    ),
    HardGraph(
        "qdq_product",
        "a quantized product whose pairs have different scales on both sides",
        """
agraph (float[N, 8] x) => (float[N, 4] y)
<int8[8, 4] w, float[4] ws = {0.02, 0.01, 0.03, 0.02}, int8[4] wz = {0, 0, 0, 0},
 float s1 = {0.05}, float s2 = {0.1}, int8 z1 = {0}, int8 z2 = {1}>
{
  q = QuantizeLinear(x, s1, z1)  d = DequantizeLinear(q, s1, z1)
  q2 = QuantizeLinear(d, s2, z2)  d2 = DequantizeLinear(q2, s2, z2)
  wd = DequantizeLinear<axis = 1>(w, ws, wz)
  m = MatMul(d2, wd)
  t = Transpose<perm = [1, 0]>(m)  qt = QuantizeLinear(t, s1, z1)
  dt = DequantizeLinear(qt, s1, z1)  y = Transpose<perm = [1, 0]>(dt)
}""",
    ),
    HardGraph(
        "blocked_int4",
        "weights of four bits with a scale for each block",
        """
agraph (float[N, 8] x) => (float[N, 4] y)
<int4[8, 4] w,
 float[2, 4] s = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}>
{
  wd = DequantizeLinear<axis = 0, block_size = 4>(w, s)
  i = Identity(x)  y = MatMul(i, wd)
}""",
        opset=21,
    ),
)

SHAPES = (
    HardGraph(
        "dynamic_heads",
        "shape arithmetic around reshapes, as exporters write attention heads",
        """
agraph (float[N, S, 16] x) => (float[N, S, 16] y)
<float[16, 16] wq, float[16, 16] wk, float[16, 16] wv, float[16] b,
 int64 zero = {0}, int64 one = {1}, int64[1] ax = {0}, int64[1] heads = {4}, int64[1] width = {4},
 int64[1] all = {16}, float scale = {0.5}>
{
  q = MatMul(x, wq)  qb = Add(q, b)  k = MatMul(x, wk)  kb = Add(k, b)  v = MatMul(x, wv)
  s1 = Shape(x)  n1 = Gather(s1, zero)  l1 = Gather(s1, one)
  n1u = Unsqueeze(n1, ax)  l1u = Unsqueeze(l1, ax)
  sh1 = Concat<axis = 0>(n1u, l1u, heads, width)
  s2 = Shape(qb)  n2 = Gather(s2, zero)  l2 = Gather(s2, one)
  n2u = Unsqueeze(n2, ax)  l2u = Unsqueeze(l2, ax)
  sh2 = Concat<axis = 0>(n2u, l2u, heads, width)
  qr = Reshape(qb, sh1)  kr = Reshape(kb, sh2)  vr = Reshape(v, sh1)
  qt = Transpose<perm = [0, 2, 1, 3]>(qr)  kt = Transpose<perm = [0, 2, 1, 3]>(kr)
  kt2 = Transpose<perm = [0, 1, 3, 2]>(kt)  vt = Transpose<perm = [0, 2, 1, 3]>(vr)
  a = MatMul(qt, kt2)  as = Mul(a, scale)  p = Softmax<axis = -1>(as)
  o = MatMul(p, vt)  ot = Transpose<perm = [0, 2, 1, 3]>(o)
  s3 = Shape(ot)  n3 = Gather(s3, zero)  l3 = Gather(s3, one)
  n3u = Unsqueeze(n3, ax)  l3u = Unsqueeze(l3, ax)
  sh3 = Concat<axis = 0>(n3u, l3u, all)
  y = Reshape(ot, sh3)
}""",
        sizes=({"N": 2, "S": 3}, {"N": 1, "S": 7}),
    ),
    HardGraph(
        "dynamic_flatten",
        "a flattening by shape arithmetic before a product",
        """
agraph (float[N, 3, 4, 4] x) => (float[N, 5] y)
<float[48, 5] w, float[5] b, int64 zero = {0}, int64[1] ax = {0}, int64[1] rest = {-1}>
{
  s = Shape(x)  n = Gather(s, zero)  u = Unsqueeze(n, ax)  c = Concat<axis = 0>(u, rest)
  c2 = Cast<to = 7>(c)
  f = Reshape(x, c2)  m = MatMul(f, w)  y = Add(m, b)
}""",
        opset=13,
    ),
    HardGraph(
        "dynamic_resize",
        "sizes computed from shapes feed Resize, Slice, Expand, Range and Tile",
        """
agraph (float[N, 2, H, W] x) => (float[N, 2, A, B] y, float[N, 2, C, W] z, int64[R] r)
<int64[1] two = {2}, int64[1] i0 = {0}, int64[1] i2 = {2}, int64[1] i4 = {4}, int64[1] one = {1},
 int64 zs = {0}, int64 os = {1}, int64 n2 = {2}>
{
  s = Shape(x)  head = Slice(s, i0, i2)  tail = Slice(s, i2, i4)
  big = Mul(tail, two)  sizes = Concat<axis = 0>(head, big)
  y = Resize<mode = "nearest", nearest_mode = "floor",
             coordinate_transformation_mode = "asymmetric">(x, , , sizes)
  h = Gather(s, n2)  hm = Sub(h, os)  hu = Unsqueeze(hm, i0)
  z = Slice(x, i0, hu, i2, one)
  q = Range(zs, h, os)  e = Expand(q, hu)  k = Shape(q)  f = Tile(q, one)
  r = Add(f, q)
}""",
        sizes=({"N": 1, "H": 4, "W": 3}, {"N": 2, "H": 5, "W": 2}),
        ranges={},
    ),
    HardGraph(
        "data_dependent_shapes",
        "shapes that depend on values: NonZero, Unique, Compress",
        """
agraph (float[N, 4] x) => (float[K] y, float[U] u, int64[2, M] at)
<float zero = {0}>
{
  p = Greater(x, zero)  c = Cast<to = 7>(p)  c2 = Cast<to = 7>(p)
  at = NonZero(c)  at2 = NonZero(c2)
  t = Transpose<perm = [1, 0]>(at2)  g = GatherND(x, t)
  y = Identity(g)
  s = Sign(x)  u = Unique<sorted = 1>(s)
}""",
    ),
    HardGraph(
        "empty_batch",
        "a batch of nothing, which must stay legal",
        """
agraph (float[N, 4] x) => (float[M, 4] y, float[4] s)
<float[4, 4] w, int64[2] m = {-1, 4}>
{
  a = MatMul(x, w)  b = Concat<axis = 0>(a, x)  y = Reshape(b, m)
  ax = Constant<value = int64[1] {0}>()
  s = ReduceSum<keepdims = 0>(a, ax)
}""",
        sizes=({"N": 3}, {"N": 0}),
    ),
)
