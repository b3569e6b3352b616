"""The same batch in reverse order."""

import itertools
from collections.abc import Mapping

import torch

from tilewise.verify.problem import Problem, Tensors


def sequences(problem: Problem, inputs: Tensors) -> int:
    """How many sequences the batch has."""
    for offsets in problem.offsets().values():
        return inputs[offsets].numel() - 1
    axes = problem.axes()
    return next((x.shape[axes[name].index("B")] for name, x in inputs.items() if "B" in axes.get(name, "")), 1)


def reverse(problem: Problem, tensors: Tensors, offsets: Mapping[str, torch.Tensor]) -> Tensors:
    """`tensors` (inputs, outputs or gradients by name) with the sequences in reverse order; `offsets` are those that
    `tensors` are packed by.
    """
    axes, packed = problem.axes(), problem.offsets()
    result = {}
    for name, x in tensors.items():
        base = name if name in axes else name.removeprefix("d")
        if name in packed.values():
            lengths = x.diff().flip(0)
            result[name] = torch.cat([x[:1], x[:1] + lengths.cumsum(0).to(x.dtype)])
        elif base in packed:
            ends = offsets[packed[base]].tolist()
            pieces = [x.narrow(axes[base].index("T"), start, end - start) for start, end in itertools.pairwise(ends)]
            result[name] = torch.cat(pieces[::-1], axes[base].index("T")) if pieces else x
        else:
            result[name] = x.flip(axes[base].index("B")) if "B" in axes.get(base, "") else x
    return result
