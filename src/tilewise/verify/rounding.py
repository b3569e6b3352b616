"""What fp32 and stored outputs cost any implementation, in words of a problem's inputs: for `Problem.floor` and
`Problem.storage_cost`.
"""

import torch

EPS = torch.finfo(torch.float32).eps


def score_rounding(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> float:
    """A score is a sum that fp32 rounds by up to eps · scale · |q| |k|, however small it comes out; the scale is D^-0.5
    by default.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    return EPS * scale * _longest(q) * _longest(k)


def _longest(x: torch.Tensor) -> float:
    return x.norm(dim=-1).max().item() if x.numel() else 0.0


def softmax_floor(name: str, score: float, lse: torch.Tensor, gradient: bool) -> float:
    """What fp32 itself costs a result over scores that are off by `score`, relative to it: exp turns that into a
    relative error.

    Gradients also start from an LSE in fp32: exp(s - lse) is off by eps · |lse|, an error that eager torch, which keeps
    probabilities, does not have.
    """
    finite = lse[lse.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    if name.startswith("lse"):
        return score / largest if largest else 0.0
    return score + EPS * largest if gradient else score


def delta_cost(o: torch.Tensor, incoming: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """delta = rowsum(o · do) is computed from the rounded o and summed in fp32, and enters like a gradient of the LSE,
    with the other sign.

    Eager torch, which keeps probabilities, does not have this error; it shows where keys are alike and gradients
    cancel.
    """
    return ((o.to(dtype).double() - o) * incoming).sum(-1) + EPS * (o * incoming).abs().sum(-1)
