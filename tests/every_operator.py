"""One small call of every operator for training."""

import torch


def every_operator(make, cu):
    """By name, positional and named arguments; `make` gives tensors, `cu` offsets of two sequences of 64
    tokens in all.
    """
    q, k = make(1, 64, 4, 16), make(1, 64, 2, 16)
    k_cmp, gate = make(1, 7, 2, 16), make(1, 64, 4)
    indices = torch.zeros(1, 64, 2, 4, dtype=torch.int32, device=q.device)
    windows = {"compress_size": 16, "compress_stride": 8}
    packed, rows = make(64, 4, 16), make(64, 64)
    turned = [x.transpose(1, 2) for x in (q, k, k)]
    chosen = indices.transpose(1, 2)
    mask = torch.ones(64, 64, dtype=torch.bool, device=q.device)
    return {
        "flash_attention": ((q, k, k), {"causal": True}),
        "native_sparse_attention": (
            (q, k, k),
            {"g_cmp": gate, "g_slc": gate, "g_swa": gate, "block_size": 16, "block_count": 3, **windows},
        ),
        "compressed_attention": ((q, k_cmp, k_cmp), windows),
        "select_blocks": ((q, k_cmp), {"block_size": 16, "block_count": 3, **windows}),
        "selected_attention": ((q, k, k, indices), {"block_size": 16}),
        "native_sparse_attend": ((*turned, 16, chosen, chosen == 0), {"return_sliding_window_out": True}),
        "hstu_attention": ((packed, packed, packed, cu), {"max_seq_len": 64}),
        "block_sparse_attn": ((packed, packed, packed, packed, None, None, None, 2, 16, 8), {"seq_offsets": cu}),
        "hstu_attention_with_bsa": ((4, 16, 16, rows, rows, rows, rows, cu, mask, None, 2, 16), {}),
    }
