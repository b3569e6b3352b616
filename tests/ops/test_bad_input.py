"""Wrong calls that every operator refuses in the same words: before anything is launched, naming the argument, what was
expected and what came. What is particular to an operator is in its folder.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tilewise import (
    block_sparse_attn,
    flash_attention,
    hstu_attention,
    hstu_attention_with_bsa,
    native_sparse_attention,
)
from tilewise.ops._host import backend as backends

BACKENDS = ("cpu", "triton", "reference")
GATES = ("g_cmp", "g_slc", "g_swa")
TOKENS = 20
META = {"device": "meta"}


class Operator(NamedTuple):
    function: Callable[..., Any]
    # The argument for offsets of packed sequences.
    offsets: str
    options: dict[str, Any]
    tensors: str = "qkv"
    gates: tuple[str, ...] = ()
    # Heads and channels of a token.
    shape: tuple[int, ...] = (4, 16)
    # Whether it also takes a batch, without offsets.
    dense: bool = True


WINDOWS = {"compress_size": 8, "compress_stride": 4, "block_size": 8, "block_count": 4, "window_size": 9}
BLOCKS = {"block_counts": 2, "block_size": 16}
LAYER = {"num_heads": 4, "attention_dim": 16, "linear_dim": 16, "invalid_attn_mask": torch.ones(2, 32, 32)}
LAYER |= {"gate_model": lambda padded: [torch.ones(padded.shape[:3], dtype=padded.dtype)] * 3}
OPERATORS = {
    "flash": Operator(flash_attention, "cu_seqlens_q", {}),
    "nsa": Operator(native_sparse_attention, "cu_seqlens", WINDOWS, gates=GATES),
    "hstu": Operator(hstu_attention, "seq_offsets", {"max_seq_len": 16}, dense=False),
    "bsa": Operator(block_sparse_attn, "seq_offsets", BLOCKS, "qkvu", GATES),
    "hstu-bsa": Operator(hstu_attention_with_bsa, "x_offsets", LAYER | BLOCKS, "qkvu", shape=(64,), dense=False),
}
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def call(name: str, dtype: torch.dtype = torch.float32, *, packed: bool = False) -> dict[str, Any]:
    """Good arguments: of a batch where there may be one."""
    operator = OPERATORS[name]
    packed = packed or not operator.dense
    rows = (TOKENS,) if packed else (2, TOKENS)
    tensors = {x: torch.randn(*rows, *operator.shape, dtype=dtype) for x in operator.tensors}
    tensors |= {x: torch.rand(*rows, operator.shape[0]) for x in operator.gates}
    return tensors | operator.options | ({operator.offsets: torch.tensor([0, 9, TOKENS])} if packed else {})


def refuse(name: str, arguments: dict[str, Any], backend: str, error: type[Exception], message: str) -> None:
    if backend == "triton" and not backends.interpreting():
        pytest.skip("CPU tensors are interpreted only where there is no GPU")
    with pytest.raises(error, match=message):
        OPERATORS[name].function(**{"backend": backend} | arguments)


# By name: which argument becomes what; the error; what it says.
TENSORS = {
    "not-a-tensor": ("k", lambda k: [[1.0]], TypeError, "k is a list: expected a torch.Tensor"),
    "dtype-mix": ("k", torch.Tensor.half, TypeError, "k is torch.float16 and q is torch.float32"),
    "values-dtype-mix": ("v", torch.Tensor.half, TypeError, "v is torch.float16 and q is torch.float32"),
    "integers": ("q", torch.Tensor.int, TypeError, "q is torch.int32: expected float16"),
    "last-axis": ("q", lambda q: q.mT.contiguous().mT, ValueError, r"q's last axis has stride \d+.*q\.contiguous\(\)"),
    "devices-differ": ("k", lambda k: k.to("meta"), ValueError, "k is on meta and q is on cpu"),
    "values-devices-differ": ("v", lambda v: v.to("meta"), ValueError, "v is on meta and q is on cpu"),
    "backend": ("backend", lambda _: "cuda", ValueError, "backend is 'cuda': expected one of triton, cpu, reference"),
}


@each_backend
@pytest.mark.parametrize("case", TENSORS)
@pytest.mark.parametrize("name", OPERATORS)
def test_bad_tensors(name, case, backend):
    which, change, error, message = TENSORS[case]
    arguments = call(name)
    refuse(name, arguments | {which: change(arguments.get(which))}, backend, error, message)


BY_HEAD = [name for name, operator in OPERATORS.items() if len(operator.shape) == 2]


@each_backend
@pytest.mark.parametrize("name", BY_HEAD)
def test_values_too_wide(name, backend):
    arguments = call(name)
    wide = arguments | {"v": torch.randn(*arguments["v"].shape[:-1], 257)}
    refuse(name, wide, backend, ValueError, "v has 257 channels: expected 1 to 256")


@each_backend
@pytest.mark.parametrize("which", ["q", "v"])
@pytest.mark.parametrize("name", BY_HEAD)
def test_packed_tensors_of_four_axes(name, which, backend):
    arguments = call(name, packed=True)
    message = rf"{which} has 4 dimensions: expected \[N, H, D\].*{OPERATORS[name].offsets} is given"
    refuse(name, arguments | {which: arguments[which][None]}, backend, ValueError, message)


@each_backend
@pytest.mark.parametrize("name", [name for name in BY_HEAD if OPERATORS[name].dense])
def test_a_batch_of_three_axes(name, backend):
    message = rf"q has 3 dimensions: expected \[B, T, H, D\].*give {OPERATORS[name].offsets} for packed"
    refuse(name, call(name) | {"q": torch.randn(20, 4, 16)}, backend, ValueError, message)


OFFSETS = {
    "start": (torch.tensor([1, 20]), ValueError, "starts at 1: the first offset must be 0"),
    "negative": (torch.tensor([0, -1, 20]), ValueError, "decreases from 0 to -1 at position 1"),
    "unsorted": (torch.tensor([0, 9, 3, 20]), ValueError, "decreases from 9 to 3 at position 2"),
    "end": (torch.tensor([0, 5]), ValueError, "ends at 5: the last offset must be the number of tokens, 20"),
    "past": (torch.tensor([0, 21]), ValueError, "ends at 21: the last offset must be the number of tokens, 20"),
    "none": (torch.tensor([0]), ValueError, "holds no sequence and there are 20 tokens"),
    "float": (torch.tensor([0.0, 20.0]), TypeError, "is torch.float32: expected int32 or int64"),
    "list": ([0, 20], TypeError, "is a list"),
    "rank": (torch.tensor([[0, 20]]), ValueError, r"has shape \[1, 2\]: expected \[B \+ 1\]"),
    "device": (torch.empty(2, dtype=torch.int32, **META), ValueError, "is on meta"),
}


@each_backend
@pytest.mark.parametrize("case", OFFSETS)
@pytest.mark.parametrize("name", OPERATORS)
def test_bad_offsets(name, case, backend):
    offsets, error, message = OFFSETS[case]
    which = OPERATORS[name].offsets
    refuse(name, call(name, packed=True) | {which: offsets}, backend, error, f"{which} {message}")


@pytest.mark.gpu
@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="values of CUDA tensors")
@pytest.mark.parametrize("case", ["start", "unsorted", "end"])
@pytest.mark.parametrize("name", OPERATORS)
def test_cuda_offsets_are_checked_on_request(name, case, monkeypatch):
    offsets, error, message = OFFSETS[case]
    which = OPERATORS[name].offsets
    arguments = call(name, packed=True) | {which: offsets}
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(error, match=f"{which} {message}"):
        OPERATORS[name].function(**{k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in arguments.items()})


def dtype_of(outputs: Any) -> torch.dtype:
    """The attention's, which comes first."""
    return (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).dtype


@pytest.mark.parametrize("name", OPERATORS)
def test_fp64_is_for_the_reference_alone(name):
    function, arguments = OPERATORS[name].function, call(name, torch.float64)
    assert dtype_of(function(**arguments, backend="reference")) == torch.float64
    with pytest.raises(TypeError, match="q is torch.float64.*backend='reference' also takes float64"):
        function(**arguments)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_environment_chooses_and_is_named(name, monkeypatch):
    function = OPERATORS[name].function
    monkeypatch.setenv("TILEWISE_BACKEND", "reference")
    assert dtype_of(function(**call(name, torch.float64))) == torch.float64
    monkeypatch.setenv("TILEWISE_BACKEND", "tritn")
    with pytest.raises(ValueError, match="TILEWISE_BACKEND is 'tritn'"):
        function(**call(name))
    assert dtype_of(function(**call(name), backend="cpu")) == torch.float32


@pytest.mark.parametrize("name", OPERATORS)
def test_triton_on_cpu_tensors_wants_interpretation(name, monkeypatch):
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    with pytest.raises(ValueError, match="backend is 'triton' and the tensors are on the CPU: .*TRITON_INTERPRET=1"):
        OPERATORS[name].function(**call(name), backend="triton")
