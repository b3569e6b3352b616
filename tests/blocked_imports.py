"""Calls every operator, forward and backward, in a process that cannot import a module: `MODULE WHO BACKEND...`.

WHO is `anybody`, or `tilewise`: Triton's own compiler and launcher import Gluon, whatever kernels they run.
"""

import builtins
import importlib
import sys
from functools import partial

blocked, who, *backends = sys.argv[1:]
plain_import, plain_import_module = builtins.__import__, importlib.import_module


def refuse(name, importer):
    if (name == blocked or name.startswith(f"{blocked}.")) and (who == "anybody" or importer.startswith("tilewise")):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def guarded_import(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    whole = importlib.util.resolve_name("." * level + name, globals["__package__"]) if level else name
    for full in (whole, *(f"{whole}.{part}" for part in fromlist or ())):
        refuse(full, importer)
    return plain_import(name, globals, locals, fromlist, level)


def guarded_import_module(name, package=None):
    refuse(name, sys._getframe(1).f_globals["__name__"])
    return plain_import_module(name, package)


importlib.util = plain_import_module("importlib.util")
builtins.__import__, importlib.import_module = guarded_import, guarded_import_module

import torch  # noqa: E402
from every_operator import every_operator  # noqa: E402

import tilewise  # noqa: E402


def flat(outputs):
    return [outputs] if isinstance(outputs, torch.Tensor) else [x for output in outputs for x in flat(output)]


def results(place):
    """Outputs and gradients of every operator, by name."""
    generator = torch.Generator().manual_seed(0)
    cu = torch.tensor([0, 40, 64], dtype=torch.int32)
    found = {}
    for name, (args, kwargs) in every_operator(
        lambda *shape: torch.randn(*shape, generator=generator).requires_grad_(), cu
    ).items():
        args = [gates if name == "hstu_attention_with_bsa" and x is None else x for x in args]
        outputs = flat(getattr(tilewise, name)(*args, **kwargs, backend=place))
        sums = [x.sin().sum() for x in outputs if x.requires_grad]
        leaves = list(
            {id(x): x for x in args if isinstance(x, torch.Tensor) and x.is_leaf and x.requires_grad}.values()
        )
        found[name] = outputs + (list(torch.autograd.grad(sum(sums), leaves)) if sums and leaves else [])
    return found


def said_of(name, place, words):
    return f"{name} {place}: {words}"


def gates(padded_q):
    return [padded_q.mean(-1)] * 3


expected = results("reference")
for place in backends:
    for name, actual in results(place).items():
        for x, y in zip(actual, expected[name], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3, msg=partial(said_of, name, place))

# Decoding, the layers, and what the command line imports to begin with.
cache = tilewise.NSACache(1, 32, 2, 16, 16, compress_size=16, compress_stride=8, block_size=16, block_count=3)
gate, q, k = torch.ones(1, 20, 4), torch.randn(1, 20, 4, 16), torch.randn(1, 20, 2, 16)
tilewise.nsa_decode_step(q, k, k, cache, g_cmp=gate, g_slc=gate, g_swa=gate, backend="cpu")

import tilewise.cli  # noqa: E402
import tilewise.doctor  # noqa: E402
import tilewise.nn  # noqa: E402
import tilewise.verify  # noqa: E402

layer = tilewise.nn.NativeSparseAttention(
    32, 4, 2, compress_size=16, compress_stride=8, block_size=16, block_count=3, window_size=8
)
layer(torch.randn(1, 40, 32)).sum().backward()
try:
    tilewise.flash_attention(q, k, k, backend="triton")
    print("triton runs")
except (ImportError, ValueError) as error:
    print(f"{type(error).__name__}: {error}")
with tilewise.explaining_on("sm_90"):
    try:
        x = torch.zeros(1, 512, 2, 64, dtype=torch.bfloat16)
        print(*tilewise.explain(tilewise.flash_attention, x, x, x).reasons, sep="\n")
    except ImportError as error:
        print(f"explain: {error}")

if who == "tilewise" and "triton" not in backends:
    # Kernels that are compiled, not interpreted.
    from tilewise.workbench.flash import inspect as inspected

    found = inspected.defaults(90, torch.bfloat16)
    print("inspected:", sorted({one.name for one in found}))
