"""The rules of `iblr.torch.rules` for many tensors at once, in Triton.

A program works on CHUNK entries of one tensor, BLOCK at a time. Which tensor and where is in
`chunks`, two numbers a program; a row of `table` has all there is to know of a tensor: addresses,
size, streams of noise and, as the bits of float64, the numbers of the step.
"""

import triton
import triton.language as tl

from iblr.torch.noise import DENOMINATOR, LOGARITHM, NUMERATOR, SQRT_HALF

# Columns of the table.
FIELDS = (
    ("weights", "grad", "mean", "momentum", "precision", "prior_mean", "prior_precision", "curved")
    + ("steps", "size", "key", "offset", "next_key", "next_offset")
    + ("root_ess", "per_ess", "gain1", "gain2", "decay", "centre", "rate", "rate_decay", "radius")
)
_WIDTH = tl.constexpr(len(FIELDS))
_WEIGHTS = tl.constexpr(FIELDS.index("weights"))
_GRAD = tl.constexpr(FIELDS.index("grad"))
_MEAN = tl.constexpr(FIELDS.index("mean"))
_MOMENTUM = tl.constexpr(FIELDS.index("momentum"))
_PRECISION = tl.constexpr(FIELDS.index("precision"))
_PRIOR_MEAN = tl.constexpr(FIELDS.index("prior_mean"))
_PRIOR_PRECISION = tl.constexpr(FIELDS.index("prior_precision"))
_CURVED = tl.constexpr(FIELDS.index("curved"))
_STEPS = tl.constexpr(FIELDS.index("steps"))
_SIZE = tl.constexpr(FIELDS.index("size"))
_KEY = tl.constexpr(FIELDS.index("key"))
_OFFSET = tl.constexpr(FIELDS.index("offset"))
_NEXT_KEY = tl.constexpr(FIELDS.index("next_key"))
_NEXT_OFFSET = tl.constexpr(FIELDS.index("next_offset"))
_ROOT_ESS = tl.constexpr(FIELDS.index("root_ess"))
_PER_ESS = tl.constexpr(FIELDS.index("per_ess"))
_GAIN1 = tl.constexpr(FIELDS.index("gain1"))
_GAIN2 = tl.constexpr(FIELDS.index("gain2"))
_DECAY = tl.constexpr(FIELDS.index("decay"))
_CENTRE = tl.constexpr(FIELDS.index("centre"))
_RATE = tl.constexpr(FIELDS.index("rate"))
_RATE_DECAY = tl.constexpr(FIELDS.index("rate_decay"))
_RADIUS = tl.constexpr(FIELDS.index("radius"))

_N0, _N1, _N2, _N3, _N4 = (tl.constexpr(c) for c in NUMERATOR)
_D0, _D1, _D2, _D3 = (tl.constexpr(c) for c in DENOMINATOR)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7 = (tl.constexpr(c) for c in LOGARITHM)
_SQRT_HALF = tl.constexpr(SQRT_HALF)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _swapped(x):
    return (x >> 32) | (x << 32)


@triton.jit
def normal(first, key):
    """`iblr.torch.noise.normal` where i key + offset is `first`."""
    other = first + key
    x = _swapped(first * first + first)
    x = _swapped(x * x + other)
    x = _swapped(x * x + first)
    bits = ((x * x + other) >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    p = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # log p
    word = p.to(tl.int32, bitcast=True)
    exponent = (word - _SQRT_HALF) >> 23
    f = (word - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    series = (((_L0 * f + _L1) * f + _L2) * f + _L3) * f + _L4
    series = ((series * f + _L5) * f + _L6) * f + _L7
    logarithm = (series * f + 1.0) * f + exponent.to(tl.float32) * 0.6931471805599453
    t = tl.sqrt(-2.0 * logarithm)
    numerator = (((_N0 * t + _N1) * t + _N2) * t + _N3) * t + _N4
    denominator = ((_D0 * t + _D1) * t + _D2) * t + _D3
    size = (numerator / denominator).to(tl.int32, bitcast=True)
    return (size ^ (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _key(row, FIELD: tl.constexpr):
    return tl.load(row + FIELD).to(tl.uint64, bitcast=True)


@triton.jit
def _load(pointer, index, size, FULL: tl.constexpr, OTHER: tl.constexpr):
    if FULL:
        return tl.load(pointer + index).to(tl.float32)
    return tl.load(pointer + index, index < size, other=OTHER).to(tl.float32)


@triton.jit
def _store(pointer, index, value, size, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + index, value)
    else:
        tl.store(pointer + index, value, index < size)


@triton.jit
def _pointer(row, FIELD: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(row + FIELD)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(DTYPE))  # pyright: ignore[reportArgumentType]


@triton.jit
def _number(row, FIELD: tl.constexpr):
    return tl.load(row + FIELD).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def draw(
    table,
    chunks,
    WEIGHTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """weights <- mu + eps/sqrt(ess s)."""
    program = tl.program_id(0)
    row = table + tl.load(chunks + 2 * program) * _WIDTH
    begin = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    if begin + CHUNK <= tl.load(row + _SIZE):
        _draw(row, begin, WEIGHTS, ALIGNED, CHUNK, BLOCK, True)
    else:
        _draw(row, begin, WEIGHTS, ALIGNED, CHUNK, BLOCK, False)


@triton.jit
def _draw(
    row,
    begin,
    WEIGHTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    size = tl.load(row + _SIZE)
    weights = _pointer(row, _WEIGHTS, WEIGHTS, ALIGNED)
    means = _pointer(row, _MEAN, tl.float32, ALIGNED)
    precisions = _pointer(row, _PRECISION, tl.float32, ALIGNED)
    per_root = 1.0 / _number(row, _ROOT_ESS)
    lanes = tl.arange(0, BLOCK)
    key, offset = _key(row, _KEY), _key(row, _OFFSET)
    places = lanes.to(tl.uint64) * key + offset
    for start in range(0, CHUNK, BLOCK):
        index = begin + start + lanes
        mu = _load(means, index, size, FULL, 0.0)
        s = _load(precisions, index, size, FULL, 1.0)
        noise = normal(places + (begin + start).to(tl.uint64) * key, key)
        z = mu + noise * (per_root * tl.rsqrt(s))
        _store(weights, index, z.to(WEIGHTS), size, FULL)


@triton.jit
def advance(
    table,
    chunks,
    refused,
    WEIGHTS: tl.constexpr,
    GRAD: tl.constexpr,
    ICML2020: tl.constexpr,
    HAS_CURVED: tl.constexpr,
    HAS_PRIOR_MEAN: tl.constexpr,
    HAS_PRIOR_PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A step, and the mean or the next sample into the weights; if refused, only the latter."""
    program = tl.program_id(0)
    row = table + tl.load(chunks + 2 * program) * _WIDTH
    begin = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    accepted = tl.load(refused) == 0.0
    # Whole pieces need no masks, and then read and write 16 bytes at once.
    if begin + CHUNK <= tl.load(row + _SIZE):
        _advance(
            row, begin, accepted, WEIGHTS, GRAD, ICML2020, HAS_CURVED, HAS_PRIOR_MEAN,
            HAS_PRIOR_PRECISION, PREFETCH, ALIGNED, CHUNK, BLOCK, True,
        )  # fmt: skip
    else:
        _advance(
            row, begin, accepted, WEIGHTS, GRAD, ICML2020, HAS_CURVED, HAS_PRIOR_MEAN,
            HAS_PRIOR_PRECISION, PREFETCH, ALIGNED, CHUNK, BLOCK, False,
        )  # fmt: skip


@triton.jit
def _advance(
    row,
    begin,
    accepted,
    WEIGHTS: tl.constexpr,
    GRAD: tl.constexpr,
    ICML2020: tl.constexpr,
    HAS_CURVED: tl.constexpr,
    HAS_PRIOR_MEAN: tl.constexpr,
    HAS_PRIOR_PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    size = tl.load(row + _SIZE)
    weights = _pointer(row, _WEIGHTS, WEIGHTS, ALIGNED)
    grads = _pointer(row, _GRAD, GRAD, ALIGNED)
    means = _pointer(row, _MEAN, tl.float32, ALIGNED)
    momenta = _pointer(row, _MOMENTUM, tl.float32, ALIGNED)
    precisions = _pointer(row, _PRECISION, tl.float32, ALIGNED)
    root_ess, per_ess = _number(row, _ROOT_ESS), _number(row, _PER_ESS)
    per_root = 1.0 / root_ess
    gain1, gain2 = _number(row, _GAIN1), _number(row, _GAIN2)
    rate, rate_decay = _number(row, _RATE), _number(row, _RATE_DECAY)
    radius = _number(row, _RADIUS)
    one_delta, one_centre = _number(row, _DECAY), _number(row, _CENTRE)
    # 1 - b^k in double: for b near 1 it is far below float32's resolution of 1.
    k = tl.load(_pointer(row, _STEPS, tl.float32, False)).to(tl.float64) + 1.0
    exact1 = tl.load(row + _GAIN1).to(tl.float64, bitcast=True)
    unbias = 1.0 / (1.0 - tl.exp(k * tl.log(1.0 - exact1)))
    if ICML2020:
        exact2 = tl.load(row + _GAIN2).to(tl.float64, bitcast=True)
        unbias *= 1.0 - tl.exp(k * tl.log(1.0 - exact2))
    unbias = unbias.to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    key, offset = _key(row, _KEY), _key(row, _OFFSET)
    next_key, next_offset = _key(row, _NEXT_KEY), _key(row, _NEXT_OFFSET)
    places = lanes.to(tl.uint64) * key + offset
    next_places = lanes.to(tl.uint64) * next_key + next_offset
    for start in range(0, CHUNK, BLOCK):
        index = begin + start + lanes
        first = (begin + start).to(tl.uint64)
        g = _load(grads, index, size, FULL, 0.0)
        mu = _load(means, index, size, FULL, 0.0)
        m = _load(momenta, index, size, FULL, 0.0)
        s = _load(precisions, index, size, FULL, 1.0)
        # A name of the outside given another shape in a loop would not compile.
        if HAS_PRIOR_PRECISION:
            prior_precisions = _pointer(row, _PRIOR_PRECISION, tl.float32, ALIGNED)
            delta = _load(prior_precisions, index, size, FULL, 1.0) * per_ess
        else:
            delta = one_delta
        if HAS_PRIOR_MEAN:
            prior_means = _pointer(row, _PRIOR_MEAN, tl.float32, ALIGNED)
            centre = _load(prior_means, index, size, FULL, 0.0)
        else:
            centre = one_centre
        if HAS_CURVED:
            curved = _load(_pointer(row, _CURVED, tl.float32, ALIGNED), index, size, FULL, 0.0)
        else:
            curved = normal(places + first * key, key) * g
        per_s = tl.rsqrt(s)
        factor = s * per_s + gain2 * (root_ess * curved + (delta - s) * per_s)
        s_new = tl.minimum(0.5 * (s + factor * factor), _LARGEST)
        pull = delta * (mu - centre)
        if ICML2020:
            m_new = m + gain1 * (g + pull - m)
            direction = m_new * unbias / s
        else:
            m_new = m + gain1 * (g - m)
            direction = (m_new * unbias + pull) / s_new
        direction = tl.minimum(tl.maximum(direction, -radius), radius)
        mu_new = mu - (rate + rate_decay * delta) * direction
        s_new = tl.where(accepted, s_new, s)
        mu_new = tl.where(accepted, mu_new, mu)
        m_new = tl.where(accepted, m_new, m)
        _store(means, index, mu_new, size, FULL)
        _store(momenta, index, m_new, size, FULL)
        _store(precisions, index, s_new, size, FULL)
        z = mu_new
        if PREFETCH:
            noise = normal(next_places + first * next_key, next_key)
            z = mu_new + noise * (per_root * tl.rsqrt(s_new))
        _store(weights, index, z.to(WEIGHTS), size, FULL)


@triton.jit
def find_nonfinite(
    table,
    chunks,
    found,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """found <- 1 if a gradient is not finite."""
    program = tl.program_id(0)
    row = table + tl.load(chunks + 2 * program) * _WIDTH
    begin = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    if begin + CHUNK <= tl.load(row + _SIZE):
        wrong = _nonfinite(row, begin, GRAD, ALIGNED, CHUNK, BLOCK, True)
    else:
        wrong = _nonfinite(row, begin, GRAD, ALIGNED, CHUNK, BLOCK, False)
    if wrong != 0:
        tl.store(found, 1.0)


@triton.jit
def _nonfinite(
    row,
    begin,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    size = tl.load(row + _SIZE)
    grads = _pointer(row, _GRAD, GRAD, ALIGNED)
    wrong = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, CHUNK, BLOCK):
        g = _load(grads, begin + start + tl.arange(0, BLOCK), size, FULL, 0.0)
        wrong |= (g - g != 0.0).to(tl.int32)
    return tl.max(wrong, 0)
