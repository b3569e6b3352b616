"""Calls of attention over a cache that several test files make: some entries, dense or in pages."""

import torch

PAGE = 16


def dense(device, *, lengths=(40, 0, 17, 70), room=80, queries=2, new=0, heads=4, kv_heads=2, D=16, Dv=24, seed=0):
    """Tensors of a call; rows behind an entry's length, and those that new keys take, hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape):
        return torch.randn(*shape, generator=generator)

    batch = len(lengths)
    call = {"q": made(batch, queries, heads, D)}
    call |= {"k_cache": made(batch, room, kv_heads, D), "v_cache": made(batch, room, kv_heads, Dv)}
    for b, length in enumerate(lengths):
        call["k_cache"][b, length:] = torch.nan
        call["v_cache"][b, length:] = torch.nan
    if new:
        call |= {"k": made(batch, new, kv_heads, D), "v": made(batch, new, kv_heads, Dv)}
    call["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int64)
    return {name: x.to(device) for name, x in call.items()}


def paged(call, new=0, page_size=PAGE, spare=3, seed=1):
    """The same call with its caches in pages, in an order of their own; unused entries of the table are -1."""
    k, v, lengths = call["k_cache"], call["v_cache"], call["cache_seqlens"].tolist()
    width = -(-k.shape[1] // page_size)
    used = [-(-(length + new) // page_size) for length in lengths]
    order = torch.randperm(sum(used) + spare, generator=torch.Generator().manual_seed(seed)).tolist()
    pools = [x.new_full((len(order), page_size, *x.shape[2:]), torch.nan) for x in (k, v)]
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for b, count in enumerate(used):
        for i in range(count):
            table[b, i] = page = order.pop()
            for pool, x in zip(pools, (k, v), strict=True):
                rows = x[b, i * page_size : (i + 1) * page_size]
                pool[page, : len(rows)] = rows
    return call | {"k_cache": pools[0], "v_cache": pools[1], "page_table": table.to(k.device)}


def clones(call):
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
