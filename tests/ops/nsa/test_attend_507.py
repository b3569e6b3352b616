"""The check that native-sparse-attention-pytorch makes of its own kernel, with its sizes and tolerances: B 4, T 507,
six blocks drawn from {0, 1}.
"""

import pytest
import torch

from tilewise import native_sparse_attend

LIMITS = {"o": 1e-2, "lse": 1e-2, "o_win": 1e-2, "lse_win": 1e-2, "sel_scale": 2e-2, "k": 2e-2, "q": 1e-2, "v": 1e-2}


def results(backend, tensors, indices, mask, window, incoming):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    q, k, v, sel_scale = leaves.values()
    outputs, lses = native_sparse_attend(
        q, k, v, 32, indices, mask, sel_scale, return_lse=True, return_sliding_window_out=window, backend=backend
    )
    found = (
        {"o": outputs[0], "o_win": outputs[1], "lse": lses[0], "lse_win": lses[1]}
        if window
        else {"o": outputs, "lse": lses}
    )
    gradients = torch.autograd.grad([found[name] for name in incoming], list(leaves.values()), list(incoming.values()))
    return found | dict(zip(leaves, gradients, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [False, True])
def test_the_other_project_s_check(window, device):
    generator = torch.Generator().manual_seed(507)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    tensors = {
        "q": normal(4, 4, 507, 64),
        "k": normal(4, 2, 507, 64),
        "v": normal(4, 2, 507, 64),
        "sel_scale": normal(4, 2, 507, 6),
    }
    indices = torch.randint(0, 2, (4, 2, 507, 6), generator=generator).to(device)
    mask = (torch.randint(0, 2, (4, 2, 507, 6), generator=generator) > 0).to(device)
    incoming = {"o": normal(4, 4, 507, 64)} | ({"o_win": normal(4, 4, 507, 64)} if window else {})
    # Interpreted, so many tokens would take minutes.
    ours = results("triton" if device.type == "cuda" else "cpu", tensors, indices, mask, window, incoming)
    wanted = results("reference", tensors, indices, mask, window, incoming)
    assert ours.keys() == wanted.keys()
    for name, x in wanted.items():
        assert (ours[name] - x).abs().max().item() <= LIMITS[name], name
