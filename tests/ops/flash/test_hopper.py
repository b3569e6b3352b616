"""Flash attention on Hopper: results against fp64 by verify's rule, beside eager torch's error; which kernel runs; what
must not matter.
"""

import sys
from pathlib import Path

import pytest
import torch
from battery import check

from tilewise import flash_attention
from tilewise.ops._host.launching import capture
from tilewise.ops._host.program import run_all
from tilewise.ops.flash import launch
from tilewise.ops.flash.hopper import launch as hopper_launch
from tilewise.ops.flash.hopper.configs import choose_forward

sys.path.insert(0, str(Path(__file__).parent))
from hopper_cases import FORWARD, NAMED, forward_kernels, needs_hopper


@pytest.mark.parametrize("case", [*FORWARD, *NAMED])
def test_the_hopper_kernel_is_what_runs(case):
    assert forward_kernels(case) == ["flash_fwd_hopper_kernel"]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("T=300,D=64", torch.float32),
        ("T=256,D=64", torch.bfloat16),
        ("T=300,D=32", torch.bfloat16),
        ("T=300,D=36", torch.bfloat16),
        ("T=300,D=64,Dv=36", torch.bfloat16),
        ("B=2,T=300,D=64,layout=mixed", torch.bfloat16),
        ("lengths=100/156,D=64", torch.bfloat16),
    ],
    ids=str,
)
def test_what_it_does_not_serve_stays_portable(case, dtype):
    assert forward_kernels(case, dtype) == ["flash_fwd_kernel"]


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("case", FORWARD)
def test_against_fp64(case, dtype):
    check("flash", case, dtype, "triton", "cuda")


def tensors(*shapes, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to("cuda", dtype) for shape in shapes]


def forward(q, k, v, cu_q=None, cu_k=None, causal=True):
    """Output and LSE; never a template's."""
    inputs = launch.make_inputs(q, k, v, cu_q, cu_q if cu_k is None else cu_k, causal, -1, -1, q.shape[-1] ** -0.5, 0.0)
    with capture(90) as launches:
        launch.plan_forward(inputs)
    assert [one.kernel.__name__ for one in launches] == ["flash_fwd_hopper_kernel"]
    return launch.plan_forward(inputs)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 128, 192, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_neighbours_never_reach_a_sequence(channels, packed):
    """Packed neighbours may hold NaN or inf, and so may what lies around a tensor cut out of another: not a bit
    changes.
    """
    rows = slice(300, 611)
    if packed:
        q, k, v = tensors(*[(900, 2, channels)] * 3)
        offsets = torch.tensor([0, 300, 611, 611, 900], device="cuda")
        expected = [x.clone() for x in forward(q, k, v, offsets)]
        for x, value in ((q, torch.nan), (k, torch.nan), (v, torch.inf)):
            x[:300] = value
            x[611:] = value
        o, lse = forward(q, k, v, offsets)
        assert torch.equal(o[rows], expected[0][rows])
        assert torch.equal(lse[:, rows], expected[1][:, rows])
        assert o[rows].isfinite().all()
    else:
        plain = tensors(*[(2, 311, 2, channels)] * 3)
        around = [torch.full((2, 400, 3, channels + 16), torch.nan, dtype=x.dtype, device="cuda") for x in plain]
        cut = [big[:, :311, :2, 8 : 8 + channels].copy_(x) for big, x in zip(around, plain, strict=True)]
        for actual, right in zip(forward(*cut), forward(*plain), strict=True):
            assert torch.equal(actual, right)
            assert actual.isfinite().all()


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 128, 192, 256])
def test_rows_beside_an_output_stay_as_they_are(channels):
    """The kernel writes all rows of its output and its LSE, and none beside: packed sequences share one tensor."""
    q, k, v = tensors(*[(900, 2, channels)] * 3)
    offsets = torch.tensor([0, 1, 130, 130, 500, 900], device="cuda")
    o, lse = forward(q, k, v, offsets)
    assert o.isfinite().all()
    assert lse.isfinite().all()
    for first, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        if end - first > 256:
            alone = forward(*(x[first:end].unsqueeze(0) for x in (q, k, v)))
            assert torch.equal(o[first:end], alone[0][0])
            assert torch.equal(lse[:, first:end], alone[1][0])


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_repeatable(causal):
    """Bit for bit, whoever takes which item, and by a template too."""
    q, k, v = tensors(*[(4, 1500, 16, 128)] * 3)
    first = forward(q, k, v, causal=causal)
    for _ in range(20):
        again = flash_attention(q, k, v, causal=causal, return_lse=True)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("channels", "groups", "slots"), [(64, 2, 2), (64, 3, 1), (64, 3, 2), (128, 2, 1), (128, 2, 2), (256, 2, 1)]
)
def test_every_way_to_run_it(channels, groups, slots):
    """Two or three warpgroups, Q once or twice in memory, with every item of several a program: all give what the
    reference gives.
    """
    q, k, v = tensors(*[(2, 1000, 24, channels)] * 3)
    inputs = launch.make_inputs(q, k, v, None, None, True, 700, -1, channels**-0.5, 0.0)
    o, lse = torch.empty_like(q), torch.empty(2, 24, 1000, device="cuda")
    config = choose_forward(channels, channels, 1000, False, True, True)._replace(groups=groups, slots=slots)
    run_all([hopper_launch.forward_launch(inputs, o, lse, config)], q.device)
    truth, truth_lse = flash_attention(
        *(x.double() for x in (q, k, v)), causal=True, window_size=(700, -1), return_lse=True, backend="reference"
    )
    assert (o.double() - truth).norm() / truth.norm() < 1e-2
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-3, atol=1e-3)


@needs_hopper
@pytest.mark.gpu
def test_the_batch_order_does_not_matter():
    q, k, v = tensors(*[(3, 600, 16, 64)] * 3)
    order = [2, 0, 1]
    expected = forward(q, k, v)
    for actual, right in zip(forward(q[order], k[order], v[order]), expected, strict=True):
        assert torch.equal(actual, right[order])


@needs_hopper
@pytest.mark.gpu
def test_offsets_that_decrease_stay_in_bounds():
    """Values of offsets on a GPU are not checked: whatever they are, nothing outside is read or written."""
    q, k, v = tensors(*[(900, 2, 64)] * 3)
    for offsets in ([0, 700, 300, 900], [0, 5000, -7, 900], [900, 0, 0, 0]):
        forward(q, k, v, torch.tensor(offsets, device="cuda"))
    torch.cuda.synchronize()
