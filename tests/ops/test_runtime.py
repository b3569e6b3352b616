"""Every operator under what a runtime does to it: graphs, streams, threads, compilers, checkpoints, odd addresses.

On a GPU kernels run compiled; elsewhere the cpu backend runs what needs no GPU: interpreted kernels would take minutes.
"""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from runtime_problems import KINDS, ON_GPU, ON_HOPPER, REPEATS, TOKENS, Problem, expected, make, operators

from tilewise.ops._host import launching

pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def assert_same(actual: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(actual, truth, strict=True)):
        assert torch.equal(a, b), i


def assert_close(actual: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    """To what each dtype gives, by norm: shifted or strided tensors may be computed in other tiles."""
    for i, (a, b) in enumerate(zip(actual, truth, strict=True)):
        assert a.shape == b.shape
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)
        assert error < (2e-2 if a.dtype == torch.bfloat16 else 1e-3), (i, error)


@pytest.fixture(params=KINDS)
def name(request):
    """An operator none of whose problems are remembered: the first call is eager, the second makes the template."""
    for operator in operators(request.param):
        operator.forget()
    return request.param


def test_a_call_repeated_gives_the_same_bits(name):
    first, second = make(name), make(name, seed=1)
    by_plan, *by_template = first.step(), second.step(), first.step(), second.step()
    assert_same(by_template[1], by_plan)
    assert_same(by_template[2], by_template[0])
    for operator in operators(name):
        operator.forget()
    assert_same(second.step(), by_template[0])
    assert_close(by_plan, expected(name, first))


def test_one_tensor_given_twice_is_not_remembered_as_one(name):
    apart = make(name, seed=1)
    first = {x.shape: x for x in reversed(apart.leaves)}
    for _ in range(REPEATS):
        # One tensor stands for all of its shape.
        given = [first[x.shape] for x in apart.leaves]
        o = apart.run(*given)
        do = first.get(o.shape, apart.do)
        gradients = torch.autograd.grad(o, list(first.values()), do)
        copies = [x.detach().clone().requires_grad_() for x in given]
        other = apart.run(*copies)
        assert torch.equal(o, other)
        each = torch.autograd.grad(other, copies, do.detach().clone())
        sums = [sum(y for x, y in zip(copies, each, strict=True) if x.shape == shape) for shape in first]
        assert_close(list(gradients), sums)
    after = apart.step()
    for operator in operators(name):
        operator.forget()
    assert_same(apart.step(), after)


@pytest.mark.parametrize("shift", [1, 2, 4, 8] if ON_GPU else [1])
def test_tensors_at_any_address(name, shift):
    plain = make(name)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        # What lies around is not part of the problem.
        around = torch.full((x.numel() + 16,), torch.nan, dtype=x.dtype, device=x.device)
        return around[shift : shift + x.numel()].view(x.shape).copy_(x.detach())

    moved = plain.on([shifted(x).requires_grad_() for x in plain.leaves], shifted(plain.do))
    first = moved.step()
    for _ in range(REPEATS):
        assert_same(moved.step(), first)
    assert_close(first, plain.step())
    assert_close(first, expected(name, plain))
    # Half of them moved: aligned and unaligned tensors in one call.
    assert_close(plain.on([*moved.leaves[:1], *plain.leaves[1:]]).step(), first)


def test_gradients_with_any_strides(name):
    problem = make(name)
    do = problem.do
    expanded = do.flatten()[0].expand(do.shape)
    last_apart = do.transpose(-1, -2).contiguous().transpose(-1, -2)
    first_apart = do.transpose(0, 1).contiguous().transpose(0, 1)
    gapped = do.repeat_interleave(2, dim=-2)[..., ::2, :]
    for given in (expanded, last_apart, first_apart, gapped):
        truth = problem.on(problem.leaves, given.contiguous()).step()
        for _ in range(REPEATS):
            assert_close(problem.on(problem.leaves, given).step(), truth)
    o = problem.run(*problem.leaves)
    truth = problem.on(problem.leaves, torch.ones_like(do)).step()[1:]
    assert_close(list(torch.autograd.grad(o.sum(), problem.leaves)), truth)


def test_checkpoint(name):
    problem = make(name)

    def recomputed(*x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(problem.run, *x, use_reentrant=False)

    truth = problem.step()
    for _ in range(REPEATS):
        assert_same(Problem(problem.leaves, problem.do, recomputed).step(), truth)


def test_saved_tensors_come_back_with_other_strides(name):
    plain = make(name)
    truth = plain.step()
    # Tokens and heads in the other order in memory, which what is saved and comes back is not.
    strided = [x.detach().transpose(-3, -2).contiguous().transpose(-3, -2) if x.dim() > 2 else x for x in plain.leaves]
    problem = plain.on([x.detach().requires_grad_() for x in strided])

    def pack(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    for _ in range(REPEATS):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            assert_close(problem.step(), truth)
    for pinned in (False, True) if ON_GPU else (False,):
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            assert_close(problem.step(), truth)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_eight_threads(name, shared):
    count, rounds = 8, 2 * REPEATS
    # Sizes that no other test has: threads meet at the first call, and at the template.
    problems = [make(name, TOKENS + 2, seed=0 if shared else i) for i in range(count)]
    problems = [problems[0]] * count if shared else problems
    meet = threading.Barrier(count)

    def work(problem: Problem) -> list[list[torch.Tensor]]:
        meet.wait()
        made = [problem.step() for _ in range(rounds)]
        if ON_GPU:
            torch.cuda.synchronize()
        return made

    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(work, problems))
    for problem, made in zip(problems, results, strict=True):
        truth = problem.step()
        for one in made:
            assert_same(one, truth)


def loss(problem: Problem) -> Callable[..., torch.Tensor]:
    """An operator between others, which a compiler fuses with one another."""
    return lambda first, *others: problem.run(first * 1.5, *others).sin()


def compare_compiled(name: str, fullgraph: bool = True, rounds: int = 2, **options: Any) -> None:
    # Problems of all operators have one code object, of which dynamo compiles a few variants only.
    torch._dynamo.reset()
    compiled = None
    for seed in range(rounds):
        problem = make(name, seed=seed)
        compiled = compiled or torch.compile(loss(problem), fullgraph=fullgraph, **options)
        if options.get("mode"):
            torch.compiler.cudagraph_mark_step_begin()
        actual = [x.clone() for x in Problem(problem.leaves, problem.do, compiled).step()]
        assert_close(actual, Problem(problem.leaves, problem.do, loss(problem)).step())


@pytest.mark.skipif(ON_GPU, reason="inductor is tested instead")
def test_compiled_by_aot_autograd(name):
    compare_compiled(name, backend="aot_eager", rounds=1)


@pytest.mark.parametrize("name", KINDS if ON_GPU else [pytest.param(name, marks=pytest.mark.slow) for name in KINDS])
def test_compiled_by_inductor(name):
    compare_compiled(name)


@needs_gpu
def test_compiled_to_cuda_graphs(name):
    """mode="reduce-overhead" warms up, then records, then replays."""
    compare_compiled(name, rounds=5, mode="reduce-overhead")


def warm_up(work: Callable[[], Any]) -> None:
    """As torch asks for before a capture: on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", [name for name in KINDS if "hopper" in name])
def test_hopper_s_kernels_take_these(name):
    """Otherwise this file would not test them. The backward, in autograd's thread, is collected too."""
    with launching.capture(90) as launches:
        make(name).step()
    names = {launch.kernel.fn.__name__ for launch in launches}
    assert {"flash_fwd_hopper_kernel", "flash_bwd_hopper_kernel"} <= names


@needs_gpu
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_a_cuda_graph_replayed_with_other_values(name, direction):
    problem, other = make(name), make(name, seed=1)

    def work(problem: Problem) -> list[torch.Tensor]:
        if direction == "both":
            return problem.step()
        with torch.no_grad():
            return [problem.run(*problem.leaves)]

    warm_up(lambda: work(problem))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work(problem)
    graph.replay()
    assert_same(made, work(problem))
    with torch.no_grad():
        for x, y in zip((*problem.leaves, problem.do), (*other.leaves, other.do), strict=True):
            x.copy_(y)
    for _ in range(2):
        graph.replay()
        assert_same(made, work(other))


class Attend(torch.nn.Module):
    """An operator with a parameter before it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(1.25, dtype=problem.do.dtype, device=problem.do.device))
        self.run = problem.run

    def forward(self, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.run(first * self.gain, *others)


@needs_gpu
def test_graphed_callables(name):
    problem, other = make(name), make(name, seed=1)
    plain = Attend(problem)
    graphed = torch.cuda.make_graphed_callables(Attend(problem), tuple(problem.leaves))
    for given in (problem, other, problem):
        results = []
        for module in (graphed, plain):
            o = module(*given.leaves)
            gradients = torch.autograd.grad(o, [module.gain, *given.leaves], given.do)
            results.append([x.detach().clone() for x in (o, *gradients)])
        assert_same(*results)


@needs_gpu
def test_six_streams_at_a_time(name):
    problems = [make(name, seed=i) for i in range(6)]
    serial = [problem.step() for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(4):
        made = []
        for problem, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                made.append(problem.step())
        torch.cuda.synchronize()
        for actual, truth in zip(made, serial, strict=True):
            assert_same(actual, truth)


@needs_two_gpus
def test_a_second_gpu(name):
    """Tensors on a GPU that is not the current one, after the same problem on the current one."""
    here, there = make(name), make(name, device=torch.device("cuda", 1))
    here.step()
    with torch.cuda.device(1):
        truth = there.step()
    for _ in range(3):
        made = there.step()
        assert {x.device for x in made} == {torch.device("cuda", 1)}
        assert_same(made, truth)
    assert torch.cuda.current_device() == 0


def test_many_shapes_leave_nothing_behind(name):
    count = 300 if ON_GPU else 8
    make(name).step()
    before = held()
    for tokens in range(TOKENS, TOKENS + count):
        problem = make(name, tokens)
        for _ in range(2 if ON_GPU else 1):
            problem.step()
        del problem
    assert held() == before
    kinds = [planned._kinds for operator in operators(name) for planned in operator._planned.values()]
    assert all(len(programs) < count / 4 for kind in kinds for programs in kind._values.values())


def held() -> int:
    """Bytes on the GPU."""
    if not ON_GPU:
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
