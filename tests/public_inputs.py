"""Small inputs that public_calls.py calls public functions with."""

import torch

T, H, D = 8, 2, 4


def tensors(*shape: int, count: int = 3, **options) -> list[torch.Tensor]:
    return list(torch.randn(count, *shape, generator=torch.Generator().manual_seed(0), **options))


def whole() -> list[torch.Tensor]:
    return tensors(1, T, H, D)


def gates(*shape: int) -> dict[str, torch.Tensor]:
    return dict(zip(("g_cmp", "g_slc", "g_swa"), tensors(*shape), strict=True))


def finite(*results) -> None:
    for result in results:
        assert isinstance(result, torch.Tensor)
        assert bool(result.isfinite().all())


def compressed() -> list[torch.Tensor]:
    q, _, _ = whole()
    return [q, *tensors(1, (T - 4) // 2 + 1, H, D, count=2)]
