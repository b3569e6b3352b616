"""Functions that are recorded and replayed give what they give when called, hold on to nothing, and are left alone where values decide."""

import gc

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import tilewise
from tilewise.ops._host import replay
from tilewise.ops._host.launching import Launch, run_all
from tilewise.ops._host.replay import replayed
from tilewise.verify.memory import peak_memory
from tilewise.verify.watch import Watch


@triton.jit
def add_kernel(x, y, o, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(o + offsets, tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask), mask=mask)


def add(x, y):
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run_all([Launch(add_kernel, -(-x.numel() // 32), {"x": x, "y": y, "o": o, "size": x.numel(), "BLOCK": 32})], x.device)
    return o


def alive(address):
    """How many tensors lie there."""
    return sum(type(x) is torch.Tensor and x.device.type != "meta" and x.data_ptr() == address for x in gc.get_objects())


@pytest.fixture
def replays(monkeypatch):
    """How often a plan has run."""
    run, count = replay.Plan.run, []

    def counted(plan, tensors):
        count.append(plan)
        return run(plan, tensors)

    monkeypatch.setattr(replay.Plan, "run", counted)
    return count


def packed(device):
    return torch.tensor([0, 9, 9, 36], device=device)


CALLS = {
    "flash": (((2, 33, 4, 16), (2, 33, 2, 16), (2, 33, 2, 16)), lambda q, k, v: tilewise.flash_attention(q, k, v, causal=True, backend="triton")),
    "hstu": (((36, 2, 16),) * 3, lambda q, k, v: tilewise.hstu_attention(q, k, v, packed(q.device), max_seq_len=27, backend="triton")),
    "bsa": (
        (*((36, 2, 16),) * 4, *((36, 2),) * 3),
        lambda *x: tilewise.block_sparse_attn(*x, 2, 16, 9, seq_offsets=packed(x[0].device), backend="triton")[0],
    ),
    "nsa": (
        ((1, 40, 2, 16), (1, 40, 1, 16), (1, 40, 1, 16), *((1, 40, 2),) * 3),
        lambda q, k, v, g_cmp, g_slc, g_swa: tilewise.native_sparse_attention(
            *(q, k, v), g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa, compress_size=8, compress_stride=4, block_size=16, block_count=3, window_size=20,
            backend="triton",
        ),
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_operators_give_the_same_bits_when_replayed(name, device, replays):
    shapes, function = CALLS[name]
    results = []
    for i in range(4):
        generator = torch.Generator().manual_seed(i % 2)
        tensors = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
        o = function(*tensors)
        results.append([o, *torch.autograd.grad(o, tensors, torch.full_like(o, 0.5))])
    assert len(replays) == 4
    for i in (2, 3):
        assert all(torch.equal(x, y) for x, y in zip(results[i], results[i % 2], strict=True))


@triton.jit
def copy_kernel(x, o, BLOCK: tl.constexpr):
    tl.store(o + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], x.load([0, 0]))


@pytest.mark.gpu
def test_descriptors_are_of_the_tensors_at_hand(replays, device):
    @replayed
    def function(x):
        o = torch.empty_like(x)
        run_all([Launch(copy_kernel, 1, {"x": TensorDescriptor.from_tensor(x, [16, 16]), "o": o, "BLOCK": 16})], x.device)
        return o

    memory = []
    for i in range(4):
        x = torch.full((16, 16), float(i), device=device)
        assert torch.equal(function(x), x)
        memory.append(x.data_ptr())
        assert alive(memory[-1]) == 1
        del x
        assert alive(memory[-1]) == 0
    assert len(replays) == 2


def test_one_tensor_given_twice_when_recorded(replays, device):
    function = replayed(add)
    x, y = torch.ones(40, device=device), torch.full((40,), 2.0, device=device)
    for _ in range(2):
        assert torch.equal(function(x, x), x + x)
    assert torch.equal(function(x, y), x + y)
    assert len(replays) == 1


def test_other_shapes_types_and_alignments_have_plans_of_their_own(replays, device):
    function = replayed(add)
    x = torch.arange(64.0, device=device)
    for y in (x, x[:40], x[1:41], x.to(torch.float64), x.to(torch.float16)) * 3:
        assert torch.equal(function(y, y), y + y)
    assert len(replays) == 5


def test_a_new_shape_every_time_records_nothing(replays, device):
    function = replayed(add)
    for size in range(3, 12):
        function(torch.ones(size, device=device), torch.ones(size, device=device))
    assert replays == []


def test_where_a_value_decides_nothing_is_replayed(replays, device):
    @replayed
    def function(x):
        return add(x, x) if x.sum() > 0 else torch.zeros_like(x)

    x = torch.ones(8, device=device)
    for y in (x, x, x, -x, x):
        assert torch.equal(function(y), 2 * y if y[0] > 0 else torch.zeros_like(y))
    assert replays == []


def test_a_tensor_from_elsewhere_is_never_kept(replays, device):
    elsewhere = [torch.ones(8, device=device)]
    function = replayed(lambda x: add(x, elsewhere[0]))
    x = torch.ones(8, device=device)
    for _ in range(3):
        function(x)
    elsewhere[0] = torch.full((8,), 5.0, device=device)
    assert torch.equal(function(x), torch.full((8,), 6.0, device=device))
    assert replays == []


def test_a_tensor_with_the_number_of_one_that_died_is_unknown(replays, device):
    @replayed
    def function(x):
        total = add(x, x)
        for _ in range(20):
            add(x, x)
        return total * torch.tensor(5.0)

    x = torch.ones(8, device=device)
    for i in range(1, 5):
        assert torch.equal(function(i * x), 10.0 * i * x)
    assert replays == []


def test_operations_in_place_views_and_several_results(replays, device):
    @replayed
    def function(x, y):
        z = add(x, y)
        z += x
        rows, columns = z.view(2, -1).unbind(0)
        (alone,) = z.view(1, -1).unbind(0)
        return add(rows, columns.contiguous()), None, z, alone

    for i in range(4):
        x, y = torch.full((64,), float(i), device=device), torch.arange(64.0, device=device)
        first, nothing, second, third = function(x, y)
        expected = 2 * x + y
        assert nothing is None
        assert torch.equal(second, expected)
        assert torch.equal(third, expected)
        assert torch.equal(first, expected[:32] + expected[32:])
    assert len(replays) == 2


@pytest.mark.gpu
def test_views_for_a_launch_and_what_nobody_reads_are_not_made_again(replays, device):
    @replayed
    def function(x):
        torch.ones_like(x)
        return add(x[None].view(-1), x[None].view(-1))

    @replayed
    def shifted(x):
        return add(x[:-8], x[8:])

    for i in range(4):
        x = torch.arange(40.0, device=device) * i
        assert torch.equal(function(x), x + x)
        assert torch.equal(shifted(x), x[:-8] + x[8:])
    # An allocation and a launch; where the second argument lies elsewhere than the first, a view besides.
    assert [len(plan._steps) for plan in replays] == [2, 3] * 2


def test_nothing_stays_alive(device):
    function = replayed(add)
    for _ in range(4):
        x = torch.ones(40, device=device)
        o = function(x, x)
        memory = x.data_ptr(), o.data_ptr()
        assert [alive(address) for address in memory] == [1, 1]
        del x, o
        assert [alive(address) for address in memory] == [0, 0]


def test_memory_is_free_as_soon_as_nobody_reads_it(replays, device):
    def chain(x):
        for _ in range(6):
            x = add(x, x)
        return x

    x, function = torch.ones(1 << 12, device=device), replayed(chain)
    direct = peak_memory(lambda: chain(x), x.device)
    peaks = [peak_memory(lambda: function(x), x.device) for _ in range(3)]
    assert len(replays) == 1
    assert max(peaks) <= direct


def test_fresh_memory_of_a_plan_is_watched(replays, device):
    @replayed
    def function(x):
        torch.empty_like(x)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device), add(x, x)

    x = torch.ones(40, device=device)
    for _ in range(3):
        with Watch(7.0) as watch:
            unwritten, total = function(x)
        assert watch.overrun() == ""
        assert torch.equal(unwritten, torch.full_like(x, 7.0))
        assert torch.equal(total, 2 * x)
    # The second call was recorded, and its result made by a replay.
    assert len(replays) == 2
