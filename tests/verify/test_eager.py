"""Products through fp32 leave eager torch's error, the yardstick, as it is."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import workbench
from tilewise.verify.eager import ProductsThroughFp32
from tilewise.verify.implementation import evaluate, pinned
from tilewise.verify.suite import make_fill, place


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_rounded_once_forward_and_backward(dtype):
    """Against fp64, where fp32 sums of few terms are exact: small integers."""
    torch.manual_seed(0)
    a, b = (torch.randint(-8, 9, (2, 5, 7)).to(dtype) * 0.125 for _ in range(2))
    for product in (
        lambda a, b: torch.einsum("bij,bkj->bik", a, b),
        lambda a, b: a @ b.mT,
        lambda a, b: a.matmul(b.mT),
    ):
        results = []
        for convert in (lambda x: x, torch.Tensor.double):
            leaves = [convert(x).requires_grad_() for x in (a, b)]
            with ProductsThroughFp32():
                c = product(*leaves)
            results.append((c, *torch.autograd.grad(c.sum(), leaves)))
        for narrow, wide in zip(*results, strict=True):
            assert narrow.dtype == dtype
            assert torch.equal(narrow, wide.to(dtype))


class Seen(TorchDispatchMode):
    """Dtypes of the operands of matrix products, however they came about."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.addmm):
            self.dtypes.update(x.dtype for x in args if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", workbench.names("suite"))
def test_no_16_bit_product_is_left_to_torch(name):
    """What is slow, and warns, on some CPUs; gradients included."""
    operator = workbench.find(name)
    with Seen() as seen:
        run(operator, operator.load("suite").find("small").problem, torch.bfloat16, through_fp32=True)
    assert seen.dtypes == {torch.float32}


def run(operator, problem, dtype, through_fp32=False, wide=False):
    """The reference's outputs and gradients on inputs of `dtype`, computed in it, or in fp64 for `wide`."""
    with pinned(), ProductsThroughFp32() if through_fp32 else contextlib.nullcontext():
        values = problem.tensors(make_fill("random", 42))
        inputs = {name: place(x.contiguous(), dtype, torch.device("cpu"), 0.0) for name, x in values.items()}
        if wide:
            inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        further = {} if wide else {"compute_dtype": dtype}

        def incoming(name, shape):
            return make_fill("random", 43)(f"d{name}", shape, 1.0)

        arriving = incoming if problem.differentiable else None
        return evaluate(problem, operator.load("reference"), inputs, dtype, arriving, **further)


def error(x, truth):
    return (x.double() - truth).square().mean().sqrt().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", workbench.names("suite"))
def test_the_yardstick_is_the_same_over_the_battery(name):
    """Root mean square errors of outputs and gradients, with torch's own 16-bit products and through fp32.

    Bits differ where torch adds up in another order, by a rounding: in 1 of 1,000 elements at most on a CPU with
    instructions for 16-bit products, in 4 on one without. Where a sum has one term, torch multiplies without a product,
    and rounds what it sums over a batch in the backward.
    """
    operator = workbench.find(name)
    count = different = 0
    for case in operator.load("suite").cases:
        problem = case.problem
        if max(problem.tokens(), default=0) > 300 or case.name == "large-logits":
            continue
        slack = 0.05 if min(problem.tokens(), default=1) > 1 and problem.width > 1 else 0.5
        for dtype in (torch.float16, torch.bfloat16):
            truth = run(operator, problem, dtype, wide=True)
            own, ours = (run(operator, problem, dtype, through_fp32) for through_fp32 in (False, True))
            for key, x in own.items():
                if x is None or key in problem.choices or not x.numel() or not x.isfinite().all():
                    continue
                count += x.numel()
                different += int((x != ours[key]).sum())
                before, after = error(x, truth[key]), error(ours[key], truth[key])
                assert abs(after - before) <= slack * before + 1e-7, (case.name, dtype, key, before, after)
    assert different <= 5e-3 * count
