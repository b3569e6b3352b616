"""Every operator inside torch: torch.compile, autocast, default dtypes, transforms, double backward, no_grad."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from battery import first_quick

from tilewise import (
    block_sparse_attn,
    flash_attention,
    hstu_attention,
    native_sparse_attend,
    native_sparse_attention,
)

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
GATES = ("g_cmp", "g_slc", "g_swa")
NATIVE = {"compress_size": 8, "compress_stride": 4, "block_size": 8, "block_count": 3, "window_size": 9}
NATIVE |= {"init_blocks": 1, "local_blocks": 1, "return_indices": True}
# Few tokens, for kernels may be interpreted.
TOKENS = 21


class Problem(NamedTuple):
    """A function, which gives one output or several; what it is differentiated by, and its other tensors."""

    function: Callable[..., Any]
    leaves: Tensors
    others: Tensors

    def run(self, backend: str | None, leaves: Tensors | None = None) -> list[torch.Tensor]:
        """All outputs, the attention's first."""
        return flat(self.function(**leaves or self.leaves, **self.others, backend=backend))

    def first(self) -> str:
        """The name of the queries."""
        return next(iter(self.leaves))


def flat(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else [x for output in outputs for x in flat(output)]


def randoms(device: torch.device, dtype: torch.dtype, **shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def offsets(device: torch.device, tokens: int) -> torch.Tensor:
    """Of three sequences, one of them empty."""
    return torch.tensor([0, 9, 9, tokens], device=device)


def flash(device, dtype, tokens, *, packed=False, sinks=False, **options):
    shape = (tokens, 2, 16) if packed else (2, tokens, 2, 16)
    others = {"cu_seqlens_q": offsets(device, tokens)} if packed else {}
    function = partial(flash_attention, **options, return_lse=True)
    shapes = dict.fromkeys("qkv", shape) | ({"sinks": (2,)} if sinks else {})
    return Problem(function, randoms(device, dtype, **shapes), others)


def nsa(device, dtype, tokens, *, packed=False, learned=False):
    rows = (tokens,) if packed else (1, tokens)
    # Sequences of 9, 0 and 12 tokens have 1, 0 and 2 windows.
    windows = (3,) if packed else (1, (tokens - 8) // 4 + 1)
    shapes = {"q": (*rows, 2, 16), "k": (*rows, 1, 16), "v": (*rows, 1, 16)} | dict.fromkeys(GATES, (*rows, 2))
    shapes |= dict.fromkeys(("k_cmp", "v_cmp"), (*windows, 1, 16)) if learned else {}
    others = {"cu_seqlens": offsets(device, tokens)} if packed else {}
    return Problem(partial(native_sparse_attention, **NATIVE), randoms(device, dtype, **shapes), others)


def attend(device, dtype, tokens, **options):
    chosen = torch.randint(0, 3, (1, 1, tokens, 3), generator=torch.Generator().manual_seed(1)).to(device)
    shapes = {"fq": (1, 2, tokens, 16), "fk": (1, 1, tokens, 16), "fv": (1, 1, tokens, 16), "sel_scale": chosen.shape}
    function = partial(native_sparse_attend, block_size=8, **options)
    others = {"selected_block_indices": chosen, "fmask": chosen != 1}
    return Problem(function, randoms(device, dtype, **shapes), others)


def hstu(device, dtype, tokens, *, targets=False, **options):
    leaves = randoms(device, dtype, q=(tokens, 2, 16), k=(tokens, 2, 16), v=(tokens, 2, 8))
    others = {"seq_offsets": offsets(device, tokens)}
    others |= {"num_targets": torch.tensor([2, 0, 3], device=device)} if targets else {}
    return Problem(partial(hstu_attention, max_seq_len=40, **options), leaves, others)


def bsa(device, dtype, tokens, *, packed=False):
    rows = (tokens,) if packed else (1, tokens)
    shapes = dict.fromkeys(("q", "k", "v", "u"), (*rows, 2, 16)) | dict.fromkeys(GATES, (*rows, 2))
    function = partial(block_sparse_attn, block_counts=2, block_size=8, window_size=6)
    others = {"seq_offsets": offsets(device, tokens)} if packed else {}
    return Problem(function, randoms(device, dtype, **shapes), others)


KINDS = {
    "flash": flash,
    "flash-window": partial(flash, causal=True, window_size=(9, 0), sinks=True),
    "flash-packed": partial(flash, packed=True, causal=True, max_seqlen_q=13, sinks=True),
    "nsa": nsa,
    "nsa-learned": partial(nsa, learned=True),
    "nsa-packed": partial(nsa, packed=True),
    "nsa-packed-learned": partial(nsa, packed=True, learned=True),
    "nsa-attend": attend,
    "nsa-attend-window": partial(attend, return_lse=True, return_sliding_window_out=True),
    "hstu": hstu,
    "hstu-targets": partial(hstu, targets=True, max_attn_len=9, contextual_seq_len=2),
    "bsa": bsa,
    "bsa-packed": partial(bsa, packed=True),
}
PLAIN = ("flash", "nsa", "hstu", "bsa")


def of(*names: str, slow: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    marked = [pytest.param(name, marks=() if torch.cuda.is_available() else pytest.mark.slow) for name in slow]
    return pytest.mark.parametrize("kind", [*names, *marked])


def make(kind: str, device: torch.device, dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> Problem:
    return KINDS[kind](device, dtype, tokens)


def gradients(problem: Problem, outputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Of the sum of all outputs that have any."""
    total = sum(x.sum() for x in outputs if x.requires_grad)
    return list(torch.autograd.grad(total, list(problem.leaves.values()), **options))


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), i


@pytest.mark.parametrize("dynamic", first_quick([False, True]), ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", first_quick(["flash-window", "nsa", "hstu-targets", "bsa"]))
def test_compile_fullgraph(place, kind, dynamic):
    backend, device = place
    function = make(kind, device).function

    def loss(q, **tensors):
        o, *others = flat(function(q=q * 2, **tensors, backend=backend))
        return o.sin().sum() + sum(x.sum() for x in others)

    # All operators have one code object, of which dynamo compiles a few variants only.
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (21, 33):
        plain, traced = (make(kind, device, tokens=tokens) for _ in range(2))
        expected, actual = loss(**plain.leaves, **plain.others), compiled(**traced.leaves, **traced.others)
        torch.testing.assert_close(actual, expected)
        expected.backward()
        actual.backward()
        for name, x in plain.leaves.items():
            assert torch.equal(traced.leaves[name].grad, x.grad), name


def assert_compiled_is_the_same(problem: Problem, backend: str | None) -> None:
    def run(**tensors):
        return problem.function(**tensors, backend=backend)

    torch._dynamo.reset()
    made = torch.compile(run, fullgraph=True, backend="aot_eager")(**problem.leaves, **problem.others)
    assert_same(flat(made), problem.run(backend))


@of("flash-packed", slow=("nsa-packed-learned", "nsa-attend-window", "bsa-packed"))
def test_compile_more(place, kind):
    backend, device = place
    assert_compiled_is_the_same(make(kind, device), backend)


@of(*PLAIN)
def test_compile_with_the_default_backend(kind, device):
    assert_compiled_is_the_same(make(kind, device), None)


@of("flash-window", "nsa", "nsa-attend", "hstu", "bsa")
def test_autocast(place, kind):
    backend, device = place
    problem = make(kind, device)
    low = {name: x.detach().bfloat16() for name, x in problem.leaves.items()}
    expected = problem.run(backend, low)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        outputs = problem.run(backend)
    assert outputs[0].dtype == torch.bfloat16
    assert_same(outputs, expected)
    outputs[0].float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in problem.leaves.values())


@of("flash-window", "nsa-learned", "nsa-attend", "hstu", "bsa")
def test_autocast_does_not_reach_into_the_backward(place, kind):
    backend, device = place
    problem = make(kind, device, torch.bfloat16)
    q = problem.first()
    outputs = problem.run(backend, problem.leaves | {q: problem.leaves[q] * 10})
    expected = gradients(problem, outputs[:1], retain_graph=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_same(gradients(problem, outputs[:1]), expected)


@of(*PLAIN)
def test_autocast_leaves_fp64_alone(kind):
    problem = make(kind, CPU, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = problem.run("reference")
    assert_same(outputs, problem.run("reference"))


@of(*PLAIN)
def test_mixed_dtypes_are_one_under_autocast(kind):
    problem = make(kind, CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = problem.leaves | {"k": problem.leaves["k"].bfloat16()}
        assert problem.run("cpu", mixed)[0].dtype == torch.bfloat16


@of("flash", "nsa", "bsa")
def test_meta_tensors_run_through_the_reference(kind):
    problem = make(kind, torch.device("meta"))
    assert problem.run("reference")[0].shape == problem.leaves["q"].shape
    with pytest.raises(ValueError, match="the tensors are on meta: .*backend='reference'"):
        problem.run(None)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@of("flash", "hstu", slow=("flash-window", "flash-packed", "nsa", "nsa-packed", "bsa", "bsa-packed"))
def test_torch_s_default_dtype_changes_nothing(place, kind, default):
    backend, device = place
    problem = make(kind, device)

    def run():
        outputs = problem.run(backend)
        return [*outputs, *gradients(problem, outputs)]

    expected = run()
    torch.set_default_dtype(default)
    try:
        with_default = run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(with_default, expected)


@of(*PLAIN)
def test_transforms_and_forward_mode_are_refused(place, kind):
    backend, device = place
    problem = make(kind, device)
    tensors = {name: x.detach() for name, x in problem.leaves.items()}
    q = tensors.pop("q")

    def run(q):
        return problem.run(backend, {"q": q, **tensors})[0]

    for transform in (
        lambda: torch.func.vmap(run)(q[None]),
        lambda: torch.func.jvp(run, (q,), (q,)),
        lambda: torch.func.grad(lambda q: run(q).sum())(q),
    ):
        with pytest.raises(NotImplementedError, match="torch.func.*backend='reference'"):
            transform()
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward-mode.*backend='reference'"),
    ):
        run(torch.autograd.forward_ad.make_dual(q, q))


@of(*PLAIN)
def test_double_backward_says_what_to_do(place, kind):
    backend, device = place
    problem = make(kind, device)
    (dq,) = torch.autograd.grad(problem.run(backend)[0].square().sum(), problem.leaves["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward.*backend='reference'"):
        dq.sum().backward()


# Interpreted kernels take long for all of them.
SOME = {"nsa-learned": ("k", "g_slc", "v_cmp"), "bsa": ("k", "u", "g_slc")}


@of("flash-window", "nsa-learned", "hstu", "bsa")
def test_only_the_inputs_that_want_a_gradient_get_one(place, kind):
    backend, device = place
    problem = make(kind, device)
    expected = dict(zip(problem.leaves, gradients(problem, problem.run(backend)[:1]), strict=True))
    for which in SOME.get(kind, problem.leaves) if backend == "triton" else problem.leaves:
        alone = {name: x.detach().requires_grad_(name == which) for name, x in problem.leaves.items()}
        problem.run(backend, alone)[0].sum().backward()
        assert torch.equal(alone[which].grad, expected[which]), which
        assert all(x.grad is None for name, x in alone.items() if name != which)


@of(*PLAIN)
def test_stride_zero_gradients(place, kind):
    """As `o.sum().backward()` gives them."""
    backend, device = place
    problem = make(kind, device)
    o = problem.run(backend)[0]
    leaves = list(problem.leaves.values())
    expanded = torch.autograd.grad(o, leaves, torch.ones((), device=device).expand(o.shape), retain_graph=True)
    assert_same(expanded, torch.autograd.grad(o, leaves, torch.ones_like(o)))


@of(*PLAIN)
def test_no_grad_and_inference_mode(place, kind):
    backend, device = place
    problem = make(kind, device)
    expected = problem.run(backend)
    # Which blocks were chosen has no gradient.
    assert all(x.requires_grad == x.is_floating_point() for x in expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = problem.run(backend)
        assert not any(x.requires_grad for x in outputs)
        assert_same(outputs, expected)
