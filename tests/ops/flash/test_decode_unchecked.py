"""Lengths, padding, pages and offsets that nobody has checked: nothing outside of a tensor is read or written, and the
result is what the reference gives, for which keys out of range do not exist.
"""

import random

import pytest
import torch

from tilewise.ops.flash.decode import launch, reference
from tilewise.verify.watch import Watch

AROUND = 512
PAGES, PAGE = 6, 16


class Guarded:
    """Tensors in the midst of NaN, or of the largest whole number."""

    def __init__(self, device):
        self.device, self.held = device, []

    def __call__(self, x):
        most = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
        memory = torch.full((x.numel() + 2 * AROUND,), most, dtype=x.dtype, device=self.device)
        self.held.append((memory, memory.clone(), x.numel()))
        return memory[AROUND:-AROUND].view(x.shape).copy_(x)

    def untouched(self):
        return all(
            torch.equal(memory[at].nan_to_num(9.0), before[at].nan_to_num(9.0))
            for memory, before, size in self.held
            for at in (slice(AROUND), slice(AROUND + size, None))
        )


def numbers(draw, most, *shape, wild=0.5):
    """Whole numbers from 0 to `most`, and some far from it."""
    dtype, far = draw.choice([(torch.int32, 2**31 - 1), (torch.int64, 2**62)])
    odd = [-1, -most, most + 1, far, -far, far - 1, far // 2 + 3]
    values = [
        draw.choice(odd) if draw.random() < wild else draw.randint(0, most) for _ in range(torch.Size(shape).numel())
    ]
    return torch.tensor(values, dtype=dtype).view(shape)


def meets_itself(lengths, table, added, new):
    """Whether two new rows go to one row of a page: any of them may stay."""
    positions = [(b, n + added + i) for b, n in enumerate(lengths.tolist()) for i in range(new)]
    rows = [(int(table[b, n // PAGE]), n % PAGE) for b, n in positions if 0 <= n < table.shape[1] * PAGE]
    return len(rows) > len(set(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["dense", "paged", "packed"])
def test_numbers_out_of_range(device, kind, seed):
    compared = 0
    for again in range(6):
        draw, generator = random.Random(6 * seed + again), torch.Generator().manual_seed(6 * seed + again)
        hold = Guarded(device)
        batch, queries, heads, kv_heads = draw.choice([1, 3]), draw.choice([1, 2, 20]), draw.choice([2, 6]), 2
        room, new, added = draw.choice([0, 16, 48, 80]), draw.choice([0, 3, 17]), draw.choice([0, 2])
        new = 0 if kind == "packed" else new
        shapes = {"q": (batch * queries,) if kind == "packed" else (batch, queries)}
        shapes |= dict.fromkeys(("k", "v"), (PAGES, PAGE) if kind == "paged" else (batch, room))
        shapes |= dict.fromkeys(("k_new", "v_new"), (batch, new)) if new else {}
        each = {"q": heads}
        made = {
            name: hold(torch.randn(*shape, each.get(name, kv_heads), 24 if name[0] == "v" else 16, generator=generator))
            for name, shape in shapes.items()
        }
        lengths, leftpad, table, offsets = hold(numbers(draw, room, batch)), None, None, None
        if kind == "paged":
            table = hold(numbers(draw, PAGES - 1, batch, room // PAGE, wild=0.2))
        elif kind == "dense":
            leftpad = hold(numbers(draw, room, batch))
        else:
            offsets = hold(numbers(draw, batch * queries, batch + 1))
        k, v = made["k"].clone(), made["v"].clone()
        entries, causal, left = (offsets, lengths, leftpad, table), draw.random() < 0.5, draw.choice([-1, 7])
        inputs = launch.make_inputs(
            made["q"], made["k"], made["v"], *entries, None, added, causal, left, -1, 0.25, 0.0, draw.choice([0, 3, 50])
        )
        with Watch() as watch:
            o, lse = launch.append_forward(inputs, made["k_new"], made["v_new"]) if new else launch.forward(inputs)
        assert watch.overrun() == ""
        assert hold.untouched()
        # Offsets that lead nowhere promise no more.
        if offsets is not None or (table is not None and meets_itself(lengths, table, added, new)):
            continue
        if new:
            reference.append(k, made["k_new"], lengths, added, table)
            reference.append(v, made["v_new"], lengths, added, table)
        assert torch.equal(k, made["k"])
        assert torch.equal(v, made["v"])
        options = {"causal": causal, "window_size": (left, -1), "scale": 0.25, "added": added + new}
        expected = reference.attend_cached(
            made["q"], k, v, **options, seqused_k=lengths, leftpad_k=leftpad, page_table=table
        )
        for x, y in zip((o, lse), expected, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
        compared += 1
    assert compared or kind == "packed"
