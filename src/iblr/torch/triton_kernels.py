"""The rules of `iblr.torch.rules` for many tensors at once, in Triton.

A program works on CHUNK entries of one tensor, BLOCK at a time. Which tensor and where is in
`chunks`, two numbers a program; a row of `table` has all there is to know of a tensor: addresses,
size, streams of noise and, as the bits of float64, the numbers of the step. A step takes two
launches: `look` for gradients that are not finite, then `advance`.
"""

import os

import triton
import triton.language as tl

from iblr import counter_noise

# Columns of the table.
FIELDS = (
    ("weights", "grad", "mean", "momentum", "precision", "prior_mean", "prior_precision", "curved")
    + ("steps", "steps_before", "size", "first", "stream", "added", "next_stream", "next_added")
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
_STEPS_BEFORE = tl.constexpr(FIELDS.index("steps_before"))
_SIZE = tl.constexpr(FIELDS.index("size"))
_FIRST = tl.constexpr(FIELDS.index("first"))
_STREAM = tl.constexpr(FIELDS.index("stream"))
_ADDED = tl.constexpr(FIELDS.index("added"))
_NEXT_STREAM = tl.constexpr(FIELDS.index("next_stream"))
_NEXT_ADDED = tl.constexpr(FIELDS.index("next_added"))
_ROOT_ESS = tl.constexpr(FIELDS.index("root_ess"))
_PER_ESS = tl.constexpr(FIELDS.index("per_ess"))
_GAIN1 = tl.constexpr(FIELDS.index("gain1"))
_GAIN2 = tl.constexpr(FIELDS.index("gain2"))
_DECAY = tl.constexpr(FIELDS.index("decay"))
_CENTRE = tl.constexpr(FIELDS.index("centre"))
_RATE = tl.constexpr(FIELDS.index("rate"))
_RATE_DECAY = tl.constexpr(FIELDS.index("rate_decay"))
_RADIUS = tl.constexpr(FIELDS.index("radius"))

_HIGHER = tl.constexpr(counter_noise.HIGHER)
_LARGEST = tl.constexpr(1e35)


def _shared(function):
    """Without a decorator in the interpreter, which runs Python as it is."""
    return function if os.environ.get("TRITON_INTERPRET") == "1" else triton.jit(function)


_scrambled = _shared(counter_noise.scrambled)
_binary_exponent = _shared(counter_noise.binary_exponent)
_logarithm = _shared(counter_noise.logarithm)
_quantile_numerator = _shared(counter_noise.quantile_numerator)
_quantile_denominator = _shared(counter_noise.quantile_denominator)


@triton.jit
def normal(stream, added, index):
    """`iblr.torch.noise.normal` at some indices of a stream, whose words come two by two."""
    x = index.to(tl.int32) * stream.to(tl.int32) + (stream >> 32).to(tl.int32)
    m = added.to(tl.int32) + (index >> 32).to(tl.int32) * _HIGHER
    bits = _scrambled(x, m, (added >> 32).to(tl.int32))
    p = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    word = p.to(tl.int32, bitcast=True)
    exponent = _binary_exponent(word)
    f = (word - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    t = tl.sqrt(-2.0 * (_logarithm(f) + exponent.to(tl.float32) * 0.6931471805599453))
    size = (_quantile_numerator(t) / _quantile_denominator(t)).to(tl.int32, bitcast=True)
    return (size ^ (bits & -0x80000000)).to(tl.float32, bitcast=True)


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
def _double(row, FIELD: tl.constexpr):
    return tl.load(row + FIELD).to(tl.float64, bitcast=True)


@triton.jit
def _number(row, FIELD: tl.constexpr):
    return _double(row, FIELD).to(tl.float32)


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
    stream, added = tl.load(row + _STREAM), tl.load(row + _ADDED)
    first = tl.load(row + _FIRST)
    for start in range(0, CHUNK, BLOCK):
        index = begin + start + lanes
        mu = _load(means, index, size, FULL, 0.0)
        s = _load(precisions, index, size, FULL, 1.0)
        z = mu + normal(stream, added, first + index) * (per_root * tl.rsqrt(s))
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
    accepted = tl.load(refused) == 0
    if begin == 0:
        steps = _double(row, _STEPS_BEFORE) + tl.where(accepted, 1.0, 0.0)
        tl.store(_pointer(row, _STEPS, tl.float32, False), steps.to(tl.float32))
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
    k = _double(row, _STEPS_BEFORE) + 1.0
    unbias = 1.0 / (1.0 - tl.exp(k * tl.log(1.0 - _double(row, _GAIN1))))
    if ICML2020:
        unbias *= 1.0 - tl.exp(k * tl.log(1.0 - _double(row, _GAIN2)))
    unbias = unbias.to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    stream, added = tl.load(row + _STREAM), tl.load(row + _ADDED)
    next_stream, next_added = tl.load(row + _NEXT_STREAM), tl.load(row + _NEXT_ADDED)
    first = tl.load(row + _FIRST)
    for start in range(0, CHUNK, BLOCK):
        index = begin + start + lanes
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
            curved = normal(stream, added, first + index) * g
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
            z = mu_new + normal(next_stream, next_added, first + index) * (
                per_root * tl.rsqrt(s_new)
            )
        _store(weights, index, z.to(WEIGHTS), size, FULL)


@triton.jit
def look(
    table,
    chunks,
    refused,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """refused <- 1 if a gradient is not finite; and the counts of steps before this one."""
    program = tl.program_id(0)
    row = table + tl.load(chunks + 2 * program) * _WIDTH
    begin = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    if begin + CHUNK <= tl.load(row + _SIZE):
        wrong = _nonfinite(row, begin, GRAD, ALIGNED, CHUNK, BLOCK, True)
    else:
        wrong = _nonfinite(row, begin, GRAD, ALIGNED, CHUNK, BLOCK, False)
    if wrong != 0:
        tl.store(refused, 1)
    if begin == 0:
        steps = tl.load(_pointer(row, _STEPS, tl.float32, False)).to(tl.float64)
        tl.store(row + _STEPS_BEFORE, steps.to(tl.int64, bitcast=True))


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
