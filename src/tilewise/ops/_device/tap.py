"""Taps: named values of one program, written out for `tilewise trace`."""

import triton
import triton.language as tl


@triton.jit
def tap(taps, i_step, SLOT: tl.constexpr, b_x):
    """Write tile or row vector `b_x` to slot SLOT of step `i_step`, where taps are on and this is the tapped program.

    `taps` is None (off: nothing of this is compiled) or a tuple (fp32 buffer, program, slots a step, elements a slot).
    """
    if taps is not None:
        p_buffer, i_program, n_slots, n_elements = taps
        if tl.program_id(0) == i_program:
            p_slot = p_buffer + (i_step * n_slots + SLOT) * n_elements
            if len(b_x.shape) == 1:
                o_x = tl.arange(0, b_x.shape[0])
            else:
                o_x = tl.arange(0, b_x.shape[0])[:, None] * b_x.shape[1] + tl.arange(0, b_x.shape[1])[None, :]
            tl.store(p_slot + o_x, b_x.to(tl.float32), mask=o_x < n_elements)
