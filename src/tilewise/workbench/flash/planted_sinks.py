"""Bugs planted where flash attention's kernels take sinks: in what both families share, in the portable kernels, and in
those for Hopper alone.
"""

from functools import partial

from tilewise.verify.suite import Mutant

_SCORES, _FWD = "_device.scores", "flash.hopper.fwd"
_LOAD = "b_sink = b_sink.to(tl.float32) m = m * 0.6931471805599453"
_LOADED = "b_sink = b_sink.to(tl.float32)"
_MAXIMUM = "m = m * 0.6931471805599453"

SINKS = (
    Mutant("sink-scaled", "a sink is scaled as a score is", _SCORES, _LOAD, f"{_LOADED} * 0.25\n    {_MAXIMUM}"),
    Mutant(
        "sink-capped",
        "a sink is capped",
        _SCORES,
        _LOAD,
        f"{_LOADED}\n    b_sink = 2.0 * tanh(b_sink * 0.5)\n    {_MAXIMUM}",
    ),
    Mutant(
        "sink-in-base-2",
        "a sink joins a maximum to base 2",
        _SCORES,
        _LOAD,
        _LOADED,
    ),
    Mutant(
        "sink-sum-alone",
        "a sink is in the sum, and the output keeps the old maximum",
        "flash.kernels.fwd",
        "tl.load(sinks + i_h)) acc = acc * rescale[:, None]",
        "tl.load(sinks + i_h))",
    ),
    Mutant(
        "sink-not-in-lse",
        "the LSE has no sink",
        "flash.kernels.fwd",
        "softmax_finish(acc, m, l, sinks is not None)",
        "softmax_finish(acc, m, l, sinks is not None)\n    if sinks is not None:\n        b_p = tl.exp(tl.load(sinks +"
        " i_h).to(tl.float32) - b_lse)\n        b_lse += tl.log(1.0 - b_p)",
    ),
    Mutant(
        "sink-wants-a-key",
        "a row that sees no key has no sink",
        _SCORES,
        "m_new = tl.maximum(m, b_sink)",
        'm_new = tl.where(m == float("-inf"), m, tl.maximum(m, b_sink))',
    ),
    Mutant(
        "sink-off-nan",
        "-inf minus -inf where a row sees no key and the sink is -inf",
        _SCORES,
        'sum stays 0. shift = tl.where(m_new == float("-inf"), 0.0, m_new)',
        "sum stays 0.\n    shift = m_new",
    ),
    Mutant(
        "sink-of-kv-head",
        "query heads take the sink of their KV head",
        "flash.kernels.fwd",
        "sinks + i_h",
        "sinks + i_h // group",
    ),
    Mutant(
        "sink-gradient-sign",
        "the gradient of sinks has the wrong sign",
        _SCORES,
        "return -tl.sum(b_p * b_delta, 0)",
        "return tl.sum(b_p * b_delta, 0)",
    ),
    Mutant(
        "sink-gradient-head",
        "the gradients of sinks are of other heads",
        "flash.sinks",
        ".sum(1).to(dtype)",
        ".sum(1).roll(1).to(dtype)",
    ),
    Mutant(
        "sink-gradient-of-first-rows",
        "the gradient of sinks is that of each head's first rows",
        "flash.sinks",
        ".flatten(1).sum(1)",
        ".flatten(1)[:, :1].sum(1)",
    ),
)

_planted = partial(Mutant, capability=(9, 0))
HOPPER_SINKS = (
    _planted(
        "hopper-sink-of-first-head",
        "all heads take the first sink",
        _FWD,
        "given.sinks + item.i_h",
        "given.sinks + item.i_h * 0",
    ),
    _planted(
        "hopper-sink-sum-alone",
        "a sink is in the sum, and the output keeps the old maximum",
        _FWD,
        "inverse = inverse * rescale",
        "inverse = inverse * 1.0",
    ),
    _planted(
        "hopper-sink-lse-in-log2",
        "with sinks the LSE is a natural maximum and a sum to base 2",
        _FWD,
        "m + gl.log2(l) * 0.6931471805599453",
        "m + gl.log2(l)",
    ),
    _planted(
        "hopper-sink-gradient-slot",
        "heads side by side in a slot add to each other's sinks",
        "flash.hopper.sum",
        "sinks.parts + i_slot",
        "sinks.parts + pid",
    ),
)
