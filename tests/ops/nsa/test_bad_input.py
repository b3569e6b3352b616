"""Wrong calls that native sparse attention alone can get: they raise before anything is launched, as all do."""

import pytest
import torch

from tilewise import (
    compressed_attention,
    native_sparse_attend,
    native_sparse_attention,
    select_blocks,
    selected_attention,
)
from tilewise.ops._host import backend as backends

BACKENDS = ("cpu", "triton", "reference")
GATES = ("g_cmp", "g_slc", "g_swa")
SMALL = {"compress_size": 8, "compress_stride": 4, "block_size": 8, "block_count": 4, "window_size": 9}


def native(**more):
    tensors = {"q": torch.randn(2, 20, 4, 16), "k": torch.randn(2, 20, 2, 16), "v": torch.randn(2, 20, 2, 16)}
    return tensors | {name: torch.rand(2, 20, 4) for name in GATES} | SMALL | more


def packed(offsets=(0, 9, 20), dtype=torch.int32, **more):
    tensors = {"q": torch.randn(20, 4, 16), "k": torch.randn(20, 2, 16), "v": torch.randn(20, 2, 16)}
    tensors |= {name: torch.rand(20, 4) for name in GATES}
    return tensors | SMALL | {"cu_seqlens": torch.tensor(offsets, dtype=dtype)} | more


def learned(windows=4, rows=(2,), heads=2, channels=16, values=16):
    return {"k_cmp": torch.randn(*rows, windows, heads, channels), "v_cmp": torch.randn(*rows, windows, heads, values)}


def blocks(fill=0, shape=(2, 20, 2, 4), dtype=torch.int32):
    return {"block_indices": torch.full(shape, fill, dtype=dtype)}


NATIVE = {
    "head-ratio": (
        native(k=torch.randn(2, 20, 3, 16), v=torch.randn(2, 20, 3, 16)),
        ValueError,
        "k has 3 heads and q has 4",
    ),
    "channels-differ": (native(k=torch.randn(2, 20, 2, 8)), ValueError, "k has 8 channels and q has 16"),
    "kv-lengths-differ": (native(v=torch.randn(2, 19, 2, 16)), ValueError, "v and k must agree"),
    "lengths-differ": (
        native(k=torch.randn(2, 19, 2, 16), v=torch.randn(2, 19, 2, 16)),
        ValueError,
        "k has 19 tokens and q has 20",
    ),
    "packed-lengths-differ": (
        packed(k=torch.randn(19, 2, 16), v=torch.randn(19, 2, 16)),
        ValueError,
        "k has 19 tokens and q has 20",
    ),
    "scale-infinite": (native(scale=float("inf")), ValueError, "scale is inf: expected a finite number"),
    "size-of-strides": (
        native(compress_size=10),
        ValueError,
        "compress_size is 10 and compress_stride is 4: compress_size must be a multiple",
    ),
    "block-of-strides": (
        native(block_size=10),
        ValueError,
        "block_size is 10 and compress_stride is 4: block_size must be a multiple",
    ),
    "size-0": (native(compress_size=0), ValueError, "compress_size is 0: expected a whole number of at least 1"),
    "stride-0": (native(compress_stride=0), ValueError, "compress_stride is 0: expected a whole number of at least 1"),
    "stride-fraction": (native(compress_stride=4.0), TypeError, r"compress_stride is 4\.0: expected a whole number"),
    "block-0": (native(block_size=0), ValueError, "block_size is 0"),
    "block-bool": (native(block_size=True), TypeError, "block_size is True: expected a whole number"),
    "count-0": (native(block_count=0), ValueError, "block_count is 0"),
    "window-0": (native(window_size=0), ValueError, "window_size is 0: expected a whole number of at least 1"),
    "init-negative": (native(init_blocks=-1), ValueError, "init_blocks is -1: expected a whole number of at least 0"),
    "local-negative": (native(local_blocks=-1), ValueError, "local_blocks is -1"),
    "too-many-forced": (
        native(init_blocks=3),
        ValueError,
        "init_blocks is 3, local_blocks is 2 and block_count is 4: .*must not be more",
    ),
    "no-gate": (
        native(g_cmp=None, g_slc=None, g_swa=None),
        ValueError,
        "g_cmp, g_slc and g_swa are None: give at least one gate",
    ),
    "gate-list": (native(g_cmp=[1.0]), TypeError, r"g_cmp is a list: expected a torch.Tensor \[B, T, Hq\]"),
    "gate-shape": (
        native(g_slc=torch.rand(2, 20, 2)),
        ValueError,
        r"g_slc has shape \[2, 20, 2\]: expected \[B, T, Hq\], here \[2, 20, 4\]",
    ),
    "gate-packed": (
        packed(g_swa=torch.rand(1, 20, 4)),
        ValueError,
        r"g_swa has shape \[1, 20, 4\]: expected \[N, Hq\], here \[20, 4\]",
    ),
    "gate-dtype": (
        native(g_cmp=torch.rand(2, 20, 4).half()),
        TypeError,
        "g_cmp is torch.float16 and q is torch.float32: expected q's dtype or float32",
    ),
    "gate-device": (native(g_swa=torch.empty(2, 20, 4, device="meta")), ValueError, "g_swa is on meta and q is on cpu"),
    "indices-of-nothing": (
        native(g_slc=None, return_indices=True),
        ValueError,
        "return_indices is True and g_slc is None",
    ),
    "k-cmp-alone": (
        native(k_cmp=learned()["k_cmp"]),
        ValueError,
        "k_cmp is given without v_cmp: give both, or neither",
    ),
    "v-cmp-alone": (native(v_cmp=learned()["v_cmp"]), ValueError, "v_cmp is given without k_cmp"),
    "windows-wrong": (
        native(**learned(5)),
        ValueError,
        r"k_cmp has 5 windows: expected 4, \(T - compress_size\) // compress_stride \+ 1 of 20 tokens",
    ),
    "windows-differ": (native(**learned() | {"v_cmp": learned(3)["v_cmp"]}), ValueError, "v_cmp and k_cmp must agree"),
    "windows-dtype": (
        native(**{name: x.half() for name, x in learned().items()}),
        TypeError,
        "k_cmp is torch.float16 and q is torch.float32",
    ),
    "windows-heads": (native(**learned(heads=1)), ValueError, "k_cmp and v_cmp must have k's heads"),
    "windows-values": (
        native(**learned(values=8)),
        ValueError,
        r"v_cmp v's channels \(got shapes .*v_cmp \[2, 4, 2, 8\]",
    ),
    "windows-packed-many": (packed(**learned(6, rows=())), ValueError, "k_cmp has 6 windows: 20 tokens have at most 5"),
    "windows-packed-wrong": (packed(**learned(3, rows=())), ValueError, "k_cmp has 3 windows: expected 2, the sum of"),
    "blocks-list": (
        native(block_indices=[[0]]),
        TypeError,
        r"block_indices is a list: expected an int32 or int64 torch.Tensor \[B, T, Hk, block_count\]",
    ),
    "blocks-dtype": (
        native(**blocks(dtype=torch.int16)),
        TypeError,
        "block_indices is torch.int16: expected int32 or int64",
    ),
    "blocks-count": (
        native(**blocks(shape=(2, 20, 2, 3))),
        ValueError,
        r"block_indices has shape \[2, 20, 2, 3\]: .*here \[2, 20, 2, 4\]",
    ),
    "blocks-heads": (native(**blocks(shape=(2, 20, 4, 4))), ValueError, r"block_indices has shape \[2, 20, 4, 4\]"),
    "blocks-device": (
        native(block_indices=torch.empty(2, 20, 2, 4, dtype=torch.int32, device="meta")),
        ValueError,
        "block_indices is on meta",
    ),
    "blocks-past-the-end": (
        native(**blocks(3)),
        ValueError,
        r"block_indices holds 3 at \[0, 0, 0, 0\]: expected -1 \(no block\) or 0 to 2, for there are 3",
    ),
    "blocks-below": (native(**blocks(-2)), ValueError, "block_indices holds -2"),
    "blocks-of-another": (
        packed(**blocks(2, (20, 2, 4))),
        ValueError,
        r"block_indices holds 2 at \[0, 0, 0\]: expected -1 \(no block\) or 0 to 1",
    ),
}

WINDOWS = {"compress_size": 8, "compress_stride": 4}
CHOICE = WINDOWS | {"block_size": 8, "block_count": 4}


def steps(**more):
    return {"q": torch.randn(2, 20, 4, 16)} | learned() | more


def choosing(**more):
    return {name: x for name, x in steps().items() if name != "v_cmp"} | CHOICE | more


def selecting(**more):
    return {name: native()[name] for name in "qkv"} | blocks() | {"block_size": 8} | more


STEPS = {
    "cmp-windows": (
        compressed_attention,
        steps(**learned(5), **WINDOWS),
        ValueError,
        "k_cmp has 5 windows: expected 4",
    ),
    "cmp-sizes": (
        compressed_attention,
        steps(compress_size=6, compress_stride=4),
        ValueError,
        "compress_size is 6 and compress_stride is 4",
    ),
    "cmp-heads": (
        compressed_attention,
        steps(**learned(heads=3), **WINDOWS),
        ValueError,
        "k_cmp has 3 heads and q has 4: q's heads must be .* k_cmp's",
    ),
    "cmp-channels": (
        compressed_attention,
        steps(**learned(channels=8), **WINDOWS),
        ValueError,
        "k_cmp has 8 channels and q has 16",
    ),
    "cmp-list": (compressed_attention, steps(**WINDOWS, v_cmp=[1.0]), TypeError, "v_cmp is a list"),
    "cmp-offsets": (
        compressed_attention,
        {"q": torch.randn(20, 4, 16), **learned(2, rows=()), **WINDOWS, "cu_seqlens": torch.tensor([0, 5])},
        ValueError,
        "cu_seqlens ends at 5",
    ),
    "cmp-packed-windows": (
        compressed_attention,
        {"q": torch.randn(20, 4, 16), **learned(4, rows=()), **WINDOWS, "cu_seqlens": torch.tensor([0, 9, 20])},
        ValueError,
        "k_cmp has 4 windows: expected 2",
    ),
    "select-windows": (
        select_blocks,
        choosing(k_cmp=learned(3)["k_cmp"]),
        ValueError,
        "k_cmp has 3 windows: expected 4",
    ),
    "select-forced": (
        select_blocks,
        choosing(block_count=2),
        ValueError,
        "init_blocks is 1, local_blocks is 2 and block_count is 2",
    ),
    "select-scale": (select_blocks, choosing(scale="1"), TypeError, "scale is a str"),
    "slc-lengths": (
        selected_attention,
        selecting(q=torch.randn(2, 21, 4, 16)),
        ValueError,
        "k has 20 tokens and q has 21",
    ),
    "slc-block": (selected_attention, selecting(block_size=0), ValueError, "block_size is 0"),
    "slc-rank": (
        selected_attention,
        selecting(**blocks(shape=(20, 2, 4))),
        ValueError,
        r"block_indices has shape \[20, 2, 4\]: expected \[B, T, Hk, S\]",
    ),
    "slc-dtype": (
        selected_attention,
        selecting(block_indices=torch.rand(2, 20, 2, 4)),
        TypeError,
        "block_indices is torch.float32: expected int32",
    ),
    "slc-values": (selected_attention, selecting(**blocks(3)), ValueError, "block_indices holds 3"),
}


def attending(shape=(2, 2, 20, 3), **more):
    tensors = {
        "fq": torch.randn(2, 4, 20, 16),
        "fk": torch.randn(2, 2, 20, 16),
        "fv": torch.randn(2, 2, 20, 16),
        "block_size": 8,
    }
    return (
        tensors
        | {
            "selected_block_indices": torch.zeros(shape, dtype=torch.int64),
            "fmask": torch.ones(shape, dtype=torch.bool),
        }
        | more
    )


ATTEND = {
    "rank": (attending(fq=torch.randn(2, 20, 16)), ValueError, r"fq has 3 dimensions: expected \[B, H, T, D\] \(got"),
    "heads": (
        attending(fq=torch.randn(2, 5, 20, 16)),
        ValueError,
        "fk has 2 heads and fq has 5: fq's heads must be a multiple of fk's",
    ),
    "lengths": (attending(fq=torch.randn(2, 4, 21, 16)), ValueError, "fk has 20 tokens and fq has 21"),
    "last-axis": (attending(fv=torch.randn(2, 2, 16, 20).transpose(2, 3)), ValueError, "fv's last axis has stride 20"),
    "block": (attending(block_size=0), ValueError, "block_size is 0"),
    "indices-heads": (
        attending((2, 3, 20, 3)),
        ValueError,
        r"selected_block_indices has shape \[2, 3, 20, 3\]: expected \[B, Hk or Hq, T, S\]",
    ),
    "indices-rank": (attending((2, 20, 3)), ValueError, r"selected_block_indices has shape \[2, 20, 3\]"),
    "indices-dtype": (
        attending(selected_block_indices=torch.zeros(2, 2, 20, 3)),
        TypeError,
        "selected_block_indices is torch.float32",
    ),
    "indices-values": (
        attending(selected_block_indices=torch.full((2, 2, 20, 3), 3)),
        ValueError,
        r"selected_block_indices holds 3 at \[0, 0, 0, 0\]: expected -1 \(no block\) or 0 to 2",
    ),
    "mask-dtype": (
        attending(fmask=torch.ones(2, 2, 20, 3)),
        TypeError,
        "fmask is torch.float32: expected a torch.Tensor of bool",
    ),
    "mask-none": (attending(fmask=None), TypeError, "fmask is a NoneType"),
    "mask-shape": (
        attending(fmask=torch.ones(2, 4, 20, 3, dtype=torch.bool)),
        ValueError,
        r"fmask has shape \[2, 4, 20, 3\]: expected the indices' shape",
    ),
    "factor-shape": (
        attending(sel_scale=torch.ones(2, 2, 20)),
        ValueError,
        r"sel_scale has shape \[2, 2, 20\]: expected the indices' shape",
    ),
    "factor-dtype": (
        attending(sel_scale=torch.ones(2, 2, 20, 3).half()),
        TypeError,
        "sel_scale is torch.float16 and fq is torch.float32",
    ),
}

BAD = (
    {f"native-{name}": (native_sparse_attention, *case) for name, case in NATIVE.items()}
    | STEPS
    | {f"attend-{name}": (native_sparse_attend, *case) for name, case in ATTEND.items()}
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("function", "arguments", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(function, arguments, error, message, backend):
    if backend == "triton" and not backends.interpreting():
        pytest.skip("CPU tensors are interpreted only where there is no GPU")
    with pytest.raises(error, match=message):
        function(**{"backend": backend} | arguments)


def test_fp64_is_for_the_reference_alone():
    with pytest.raises(TypeError, match="fq is torch.float64.*backend='reference' also takes float64"):
        native_sparse_attend(**attending() | {name: attending()[name].double() for name in ("fq", "fk", "fv")})


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_kernels_blocks_are_limited(backend):
    """`triton` says so; the others take any."""
    if backend == "triton" and not backends.interpreting():
        pytest.skip("CPU tensors are interpreted only where there is no GPU")
    none = torch.zeros(2, 20, 2, 4, dtype=torch.int32)
    calls = {
        "native": lambda: native_sparse_attention(**native(block_size=132), backend=backend),
        "selected": lambda: selected_attention(**selecting(block_size=132, block_indices=none), backend=backend),
        "attend": lambda: native_sparse_attend(**attending(block_size=132), backend=backend),
    }
    for name, call in calls.items():
        if backend == "triton":
            with pytest.raises(
                ValueError,
                match="block_size is 132: backend 'triton' takes blocks of at most 128; backend='reference' takes any",
            ):
                call()
        else:
            assert call().isfinite().all(), name


def test_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "tritn")
    with pytest.raises(ValueError, match="TILEWISE_BACKEND is 'tritn'"):
        native_sparse_attend(**attending())


needs_gpu = pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="values of CUDA tensors")


def on_gpu(arguments):
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["windows-packed-wrong", "blocks-past-the-end", "blocks-of-another"])
def test_cuda_values_are_checked_on_request(name, monkeypatch):
    arguments, error, message = NATIVE[name]
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(error, match=message):
        native_sparse_attention(**on_gpu(arguments))


WILD = {
    "unsorted": packed([0, 9, 3, 20], dtype=torch.int64),
    "huge": packed([-(2**31), 2**40, -5], dtype=torch.int64),
    "falling": packed([17, 2, 0], dtype=torch.int64),
    "learned-few": packed(**learned(1, rows=())),
    "learned-many": packed(**learned(5, rows=())),
    "learned-huge": packed([0, 2**40, 20], dtype=torch.int64, **learned(3, rows=())),
    "blocks-high": native(**blocks(2**31 - 1)),
    "blocks-low": native(**blocks(-(2**31))),
    "blocks-wide": native(**blocks(2**40, dtype=torch.int64)),
    "blocks-packed": packed(**blocks(2, (20, 2, 4))),
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("arguments", WILD.values(), ids=WILD)
def test_unchecked_bad_values_stay_in_bounds(arguments):
    """Under compute-sanitizer this shows that nothing is read or written out of bounds; alone, that nothing crashes."""
    arguments = on_gpu(arguments)
    leaves = [x.requires_grad_() for x in arguments.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    o = native_sparse_attention(**arguments)
    torch.autograd.grad(o, leaves, torch.ones_like(o))
    torch.cuda.synchronize()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fill", [3, 2**31 - 1, 2**40, 2**32, -7])
def test_unchecked_bad_blocks_take_no_part(fill):
    arguments = on_gpu(attending(selected_block_indices=torch.full((2, 2, 20, 3), fill)))
    none = arguments | {"fmask": torch.zeros_like(arguments["fmask"])}
    assert torch.equal(native_sparse_attend(**arguments), native_sparse_attend(**none))
