"""Taps: named values of one program, written out for `tilewise trace`.

A kernel declares what a step has to show as a NamedTuple: a field is a slot, and `tilewise trace` takes the slots'
names from it. `taps` is None (off: nothing of this is compiled) or a `Taps`.
"""

import triton
import triton.language as tl


@triton.jit
def write_slot(taps, i_step, i_slot, b_x):
    """Write tile or row vector `b_x` to a slot of step `i_step`, if this is the tapped program."""
    if tl.program_id(0) == taps.i_program:
        p_slot = taps.buffer + (i_step * taps.n_slots + i_slot) * taps.n_elements
        if len(b_x.shape) == 1:
            o_x = tl.arange(0, b_x.shape[0])
        else:
            o_x = tl.arange(0, b_x.shape[0])[:, None] * b_x.shape[1] + tl.arange(0, b_x.shape[1])[None, :]
        tl.store(p_slot + o_x, b_x.to(tl.float32), mask=o_x < taps.n_elements)


@triton.jit
def tap_once(taps, b_x):
    """What does not change from step to step, in slot 0 of step 0; the steps' own slots follow it."""
    if taps is not None:
        write_slot(taps, 0, 0, b_x)


@triton.jit
def tap_step(taps, i_step, step, FIRST: tl.constexpr = 0):
    """All that one step has to show: field i in slot FIRST + i."""
    if taps is not None:
        for SLOT in tl.static_range(len(step)):
            write_slot(taps, i_step, FIRST + SLOT, step[SLOT])
