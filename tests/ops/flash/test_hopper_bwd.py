"""Flash attention's backward on Hopper: which kernels run, gradients against fp64 in every order of sums, the same bits
again and again, and what must not matter. `test_hopper.py` checks the gradients of all its problems too, in the fixed
order.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tilewise import flash_attention, workbench
from tilewise.ops._host.launching import capture
from tilewise.ops.flash import launch
from tilewise.ops.flash.api import flash_backward
from tilewise.ops.flash.hopper import launch as hopper_launch
from tilewise.verify.result import BATCH_ORDER, UNREPEATABLE, Check, Implementation
from tilewise.verify.run import Runner
from tilewise.verify.text import result_lines

sys.path.insert(0, str(Path(__file__).parent))
from hopper_cases import FORWARD, NAMED, needs_hopper

NAMES = ["flash_bwd_hopper_prepare_kernel", "flash_bwd_hopper_kernel", "flash_bwd_hopper_finish_kernel"]


def problem_of(case):
    return workbench.find("flash").load("suite").find(case).problem


# Softcap of wide problems, and values wider than 128 with fewer channels, are for the portable kernels.
BACKWARD = [
    case for case in FORWARD if (problem := problem_of(case)).width <= 128 or (problem.D > 64 and not problem.softcap)
]
# Long chains of blocks that wait for each other, with groups and windows besides.
LONG = (
    "T=5000,H=2,D=128,causal=true",
    "T=5000,H=2,D=64",
    "B=2,T=1100,H=64,Hk=32,D=64,causal=true",
    "B=2,T=1100,H=32,D=128,window=300/0",
    "B=3,T=3000,H=8,Hk=2,D=128,causal=true",
    "B=2,T=1100,H=64,Hk=16,D=128",
    "B=2,T=1100,H=64,Hk=16,D=64,window=300/0",
    "T=3000,H=6,Hk=2,D=64,window=700/0",
    "T=2000,Tk=5000,H=2,D=128,window=-1/300",
    "T=5000,Tk=2000,H=2,D=128,window=500/-1",
    "lengths=2500/0/700/1/1900,H=4,Hk=1,D=128,causal=true",
    "T=5000,H=2,D=192,causal=true",
    "B=2,T=1100,H=16,Hk=8,D=192,Dv=128",
    "B=2,T=1100,H=16,Hk=4,D=256,window=300/0",
    "lengths=2500/0/700/1/1900,H=4,Hk=2,D=256,causal=true",
)


def inputs_of(case, dtype=torch.bfloat16):
    problem = problem_of(case)
    tensors = problem.tensors(lambda _name, shape, _size: torch.zeros(shape, dtype=dtype))
    options = problem.options()
    return launch.make_inputs(
        *(tensors.get(name) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
        options.get("causal", False),
        *options.get("window_size", (-1, -1)),
        options.get("scale", problem.D**-0.5),
        options.get("softcap", 0.0),
    )


def backward_kernels(inputs, **options):
    o = torch.zeros(*inputs.q.shape[:-1], inputs.v.shape[-1], dtype=inputs.q.dtype)
    lse = torch.zeros(*inputs.q.shape[:-3], inputs.q.shape[-2], inputs.q.shape[-3])
    with capture(90) as launches:
        launch.backward(inputs, o, lse, o, None, **options)
    return [one.kernel.__name__ for one in launches]


@pytest.mark.parametrize("case", [*BACKWARD, *LONG, *NAMED])
def test_the_hopper_kernels_are_what_runs(case):
    assert backward_kernels(inputs_of(case)) == NAMES


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("T=300,D=64", torch.float32),
        ("T=256,D=64", torch.bfloat16),
        ("T=300,D=32", torch.bfloat16),
        ("T=300,D=192,softcap=5.0", torch.bfloat16),
        ("T=300,D=64,Dv=136", torch.bfloat16),
        ("B=2,T=300,D=64,layout=mixed", torch.bfloat16),
    ],
    ids=str,
)
def test_what_they_do_not_serve_stays_portable(case, dtype):
    assert NAMES[1] not in backward_kernels(inputs_of(case, dtype))


def test_few_key_heads_with_much_to_do_are_divided_by_the_portable_kernels():
    assert NAMES[1] not in backward_kernels(inputs_of("T=4096,H=16,Hk=1,D=64"))
    assert backward_kernels(inputs_of("T=4096,H=16,Hk=4,D=64")) == NAMES


def test_given_tiles_are_for_the_portable_kernels():
    config = launch.Config(64, 64, 4, 2)
    assert NAMES[1] not in backward_kernels(inputs_of("T=300,D=64"), config_dkdv=config)
    assert NAMES[1] not in backward_kernels(inputs_of("T=300,D=64"), config_dq=config)


@pytest.mark.parametrize(
    ("case", "order"),
    [
        ("T=300,D=64", "fixed"),
        ("T=300,D=64,causal=true", "opened"),
        ("T=300,D=128", "fixed"),
        ("T=300,D=128,causal=true", "fixed"),
        ("T=300,D=64,Hk=1", "fixed"),
        ("T=300,D=64,Hk=1,causal=true", "fixed"),
        ("T=300,D=64,window=90/0", "fixed"),
        ("T=8192,H=2,D=64", "opened"),
        ("T=8191,H=2,D=72", "fixed"),
        ("T=8192,H=2,D=72", "opened"),
        ("T=8192,H=2,D=64,causal=true", "opened"),
        ("T=8191,H=2,D=72,causal=true", "fixed"),
        ("T=8192,H=2,D=72,causal=true", "cleared"),
        ("T=8192,H=4,Hk=2,D=64,causal=true", "cleared"),
        ("T=8192,H=8,Hk=2,D=128,causal=true", "cleared"),
        ("T=8192,H=8,Hk=2,D=128", "fixed"),
        ("T=8192,H=2,D=192,causal=true", "fixed"),
        ("T=8192,H=2,D=128,Dv=136", "fixed"),
        ("T=8192,H=2,D=64,window=4000/0", "fixed"),
        ("lengths=8192/4096/4096,H=2,D=128,causal=true", "fixed"),
        ("lengths=9000/8000,H=4,Hk=2,D=64,causal=true", "cleared"),
    ],
)
def test_deterministic_reaches_the_kernel(case, order):
    """The order is fixed where asked for and where the free one is slower; else accumulators are zeroed up front, or
    lazily.
    """
    inputs = inputs_of(case)
    lse = torch.zeros(*inputs.q.shape[:-3], inputs.q.shape[-2], inputs.q.shape[-3])
    for deterministic, expected in ((True, "fixed"), (False, order)):
        with capture(90) as launches:
            launch.backward(inputs, inputs.q, lse, inputs.q, None, deterministic=deterministic)
        prepare, main, _ = (one.arguments["TILE"] for one in launches)
        found = main.ORDERED, main.ZEROES_LAZILY, prepare.ZEROES
        assert found == (expected == "fixed", expected == "opened", expected == "cleared")


@pytest.mark.parametrize(
    ("case", "sweeps"),
    [
        ("B=4,T=600,H=16,D=64", False),
        ("B=4,T=600,H=16,Hk=8,D=64", True),
        ("B=4,T=600,H=16,Hk=8,D=64,causal=true", False),
        ("B=4,T=600,H=16,Hk=8,D=64,window=150/0", True),
        ("B=4,T=600,H=16,Hk=8,D=64,window=151/0", False),
        ("B=4,T=600,H=16,Hk=8,D=64,window=500/-1", True),
        ("lengths=600/600/600/600,H=16,Hk=8,D=64,window=151/0", False),
    ],
)
def test_groups_are_swept_over_where_blocks_are_about_equally_long(case, sweeps):
    inputs = inputs_of(case)
    o, lse = torch.zeros_like(inputs.q), torch.zeros(*inputs.q.shape[:-3], 16, inputs.q.shape[-3])
    with capture(90) as launches:
        launch.backward(inputs, o, lse, o, None)
    prepare, main, finish = (one.arguments for one in launches)
    assert sweeps == main["TILE"].SWEEPS
    assert prepare["inside"] == finish["inside"] == (1 if sweeps else inputs.group)


def is_free(case):
    """Whether the order may be free of a long sequence."""
    problem = problem_of(case)
    left, right = problem.window or (-1, -1)
    limited_or_alone = problem.causal or right >= 0 or problem.Hk in (None, problem.H)
    return left < 0 and problem.width <= 128 and limited_or_alone


@pytest.fixture
def as_if_long(monkeypatch):
    """All sequences count as long for the choice of an order; templates of calls before would run in the order that
    they had.
    """
    monkeypatch.setattr(hopper_launch, "FREE_KEYS", 0)
    for kept in (launch.backward, flash_backward):
        kept.forget()
    yield
    for kept in (launch.backward, flash_backward):
        kept.forget()


# More channels have the fixed order alone.
EITHER_ORDER = [(64, True), (64, False), (128, True), (128, False), (192, True)]


def check(case, dtype, deterministic):
    """As `battery.check`; freely, dq may differ from run to run, by the order of its sums, and nothing else."""
    found = workbench.find("flash")
    function = partial(found.load("function"), backend="triton", deterministic=deterministic)
    result = Runner(found, function).run(
        Check("flash", Implementation("triton", "cuda", interpreted=False), case, dtype)
    )
    by_order = set() if deterministic else {BATCH_ORDER, UNREPEATABLE}
    seen = "\n".join(result_lines(result))
    assert set(result.statuses) <= by_order, seen
    differing = [
        words for finding in result.findings for words in finding.message.split("; ") if finding.status in by_order
    ]
    assert all(words.startswith("dq in ") for words in differing), seen


@needs_hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("as_if_long", "free_order")
@pytest.mark.parametrize("case", list(filter(is_free, (*BACKWARD, *LONG))))
def test_free_order_against_fp64(case):
    assert hopper_launch.choose_order(inputs_of(case), False) != "fixed"
    check(case, "bf16", False)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG)
def test_long_chains_against_fp64(case):
    check(case, "bf16", True)


def tensors(*shapes, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to("cuda", dtype) for shape in shapes]


def gradients(q, k, v, do, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(flash_attention(*leaves, **options), leaves, do)


def same(actual, expected):
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 128, 192, 256])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (200, 0)], ids=["full", "causal", "windowed"])
def test_the_same_bits_a_thousand_times(channels, window):
    """Whichever blocks meet: several for each processor, in groups, and other work in between to shift them."""
    q, k, v, do = tensors(
        (2, 1100, 64, channels), (2, 1100, 32, channels), (2, 1100, 32, channels), (2, 1100, 64, channels)
    )
    first = gradients(q, k, v, do, window_size=window)
    noise = torch.randn(1024, 1024, device="cuda")
    for i in range(1000):
        if i % 7 == 0:
            noise = noise @ noise.T / 1024
        assert same(gradients(q, k, v, do, window_size=window), first), i


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        "B=3,T=700,H=8,Hk=4,D=128,causal=true",
        "B=2,T=700,H=8,Hk=4,D=64,window=100/0",
        "lengths=300/0/500,H=8,Hk=4,D=128",
    ],
)
def test_chunks_have_the_same_bits(case, monkeypatch):
    """Whether all is processed at once or, to save memory, in chunks of batch entries or KV heads."""
    inputs = inputs_of(case)
    head = 4 * hopper_launch.tile_slots(inputs.q.shape[-3], 64, inputs.cu_q) * 64 * inputs.group * inputs.q.shape[-1]
    monkeypatch.setattr(hopper_launch, "sm_count", lambda _device: 1)
    q, k, v, do = tensors(*(x.shape for x in (inputs.q, inputs.k, inputs.v, inputs.q)))
    offsets = None if inputs.cu_q is None else inputs.cu_q.cuda()
    inputs = inputs._replace(q=q, k=k, v=v, cu_q=offsets, cu_k=offsets)
    o, lse = launch.forward(inputs)
    (dlse,) = tensors(lse.shape, dtype=torch.float32, seed=1)
    whole = hopper_launch.plan_backward(inputs, o, lse, do, dlse)
    for heads_k in (8, 4, 2, 1):
        monkeypatch.setattr(hopper_launch, "MOST_BYTES", heads_k * head)
        assert same(hopper_launch.plan_backward(inputs, o, lse, do, dlse), whole)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("as_if_long", "free_order")
@pytest.mark.parametrize("channels", [64, 128])
def test_free_order_is_close_to_the_fixed_one(channels):
    q, k, v, do = tensors(*[(2, 2000, 8, channels)] * 4)
    fixed = gradients(q, k, v, do, causal=True)
    # The third call and those after it run a template.
    for _ in range(4):
        for a, b in zip(gradients(q, k, v, do, causal=True, deterministic=False), fixed, strict=True):
            assert (a.double() - b.double()).norm() / b.double().norm() < 1e-3


@needs_hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("as_if_long", "free_order")
@pytest.mark.parametrize(("channels", "deterministic"), EITHER_ORDER)
def test_neighbours_never_reach_a_sequence(channels, deterministic):
    """Packed neighbours may hold NaN or inf: in the fixed order not a bit changes."""
    q, k, v, do = tensors(*[(900, 2, channels)] * 4)
    offsets = torch.tensor([0, 300, 611, 611, 900], device="cuda")
    rows = slice(300, 611)
    options = {"causal": True, "cu_seqlens_q": offsets, "deterministic": deterministic}
    expected = [x[rows] for x in gradients(q, k, v, do, **options)]
    for x, value in ((q, torch.nan), (k, torch.nan), (v, torch.inf), (do, torch.nan)):
        x[:300] = value
        x[611:] = value
    actual = [x[rows] for x in gradients(q, k, v, do, **options)]
    assert all(x.isfinite().all() for x in actual)
    if deterministic:
        assert same(actual, expected)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("channels", [72, 136])
def test_memory_around_strided_tensors_never_reaches_them(channels):
    plain = tensors(*[(2, 311, 2, channels)] * 4)

    def cut(around):
        big = (torch.full((2, 400, 3, channels + 24), around, dtype=x.dtype, device="cuda") for x in plain)
        return [x[:, :311, :2, 8 : 8 + channels].copy_(values) for x, values in zip(big, plain, strict=True)]

    actual = gradients(*cut(torch.nan), causal=True)
    assert same(actual, gradients(*cut(0.0), causal=True))
    assert all(x.isfinite().all() for x in actual)


@needs_hopper
@pytest.mark.gpu
def test_gradients_of_any_strides():
    """`o.sum()` gives one element, expanded; a transposed gradient is read as it lies; a shifted one is copied."""
    q, k, v = tensors(*[(2, 300, 4, 64)] * 3)
    ones = torch.ones(1, device="cuda", dtype=q.dtype)
    assert same(gradients(q, k, v, ones.expand(q.shape)), gradients(q, k, v, ones.expand(q.shape).contiguous()))
    (do,) = tensors(q.shape, seed=1)
    expected = gradients(q, k, v, do)
    assert same(gradients(q, k, v, do.transpose(1, 2).contiguous().transpose(1, 2)), expected)
    shifted = torch.empty(do.numel() + 1, device="cuda", dtype=do.dtype)[1:].view(do.shape).copy_(do)
    assert same(gradients(q, k, v, shifted), expected)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("as_if_long", "free_order")
@pytest.mark.parametrize(("channels", "deterministic"), EITHER_ORDER)
def test_rows_that_see_nothing_and_keys_that_nobody_sees(channels, deterministic):
    q, k, v, do = tensors((1, 900, 2, channels), (1, 300, 2, channels), (1, 300, 2, channels), (1, 900, 2, channels))
    dq, dk, dv = gradients(q, k, v, do, causal=True, deterministic=deterministic)
    assert not dq[:, :600].any()
    # Row 600 sees one key: its probability is 1, and nothing changes it.
    assert dq[:, 601:].any(-1).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    q, do = q[:, :100], do[:, :100]
    dq, dk, dv = gradients(q, k, v, do, window_size=(20, 0), deterministic=deterministic)
    assert not dk[:, :180].any()
    assert not dv[:, :180].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_keys_past_the_end_take_no_part_however_low_the_scores(packed):
    """A key past the end scores 0: beside scores of -3000 its probability would be infinite."""
    q, k, v, do = tensors(*[(300, 2, 64)] * 4)
    q, k = q * 0.01 + 20, k * 0.01 - 20
    if packed:
        options = {"cu_seqlens_q": torch.tensor([0, 290, 300], device="cuda")}
    else:
        options, (q, k, v, do) = {}, (x[None, :290].contiguous() for x in (q, k, v, do))
    assert all(x.isfinite().all() for x in gradients(q, k, v, do, **options))


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sequence_agrees_with_the_portable_kernels(causal):
    """Chains of 128 blocks."""
    q, k, v, do = tensors(*[(1, 16384, 4, 128)] * 4)
    inputs = launch.make_inputs(q, k, v, None, None, causal, -1, -1, 128**-0.5, 0.0)
    o, lse = launch.forward(inputs)
    config = launch.Config(64, 64, 4, 2, tma=True)
    expected = launch.backward(inputs, o, lse, do, None, config, config)
    for deterministic in (True, False):
        for actual, right in zip(
            launch.backward(inputs, o, lse, do, None, deterministic=deterministic), expected, strict=True
        ):
            assert ((actual - right).double().norm() / right.double().norm()) < 1e-2


@needs_hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("as_if_long", "free_order")
@pytest.mark.parametrize(
    ("heads_k", "window", "deterministic"),
    [
        (64, -1, True),
        (64, -1, False),
        (64, 200, True),
        (32, -1, True),
        (32, -1, False),
        (32, 50, True),
        (32, 200, True),
    ],
)
def test_offsets_that_decrease_stay_in_bounds_and_end(heads_k, window, deterministic):
    """Values of offsets on a GPU are not checked: whatever they are, nothing outside is read or written, and nobody
    waits forever.
    """
    q, k, v, do = tensors((900, 64, 64), (900, heads_k, 64), (900, heads_k, 64), (900, 64, 64))
    options = {"causal": True, "window_size": (window, -1), "deterministic": deterministic}
    for offsets in ([0, 700, 300, 900], [0, 500, 100, 700], [0, 5000, -7, 900], [900, 0, 0, 0]):
        gradients(q, k, v, do, cu_seqlens_q=torch.tensor(offsets, device="cuda"), **options)
    torch.cuda.synchronize()
