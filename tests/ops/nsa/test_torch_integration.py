"""Native sparse attention inside torch, beyond what every operator is tested for: its custom operators, its steps."""

import pytest
import torch
from battery import first_quick
from torch import library

from tilewise import (
    compressed_attention,
    native_sparse_attend,
    native_sparse_attention,
    select_blocks,
    selected_attention,
)
from tilewise.ops.nsa import api, attend, steps

WINDOWS = {"compress_size": 8, "compress_stride": 4}
SIZES = WINDOWS | {"block_size": 8, "block_count": 3, "init_blocks": 1, "local_blocks": 1}
SMALL = SIZES | {"window_size": 9}
GATES = ("g_cmp", "g_slc", "g_swa")


def leaves(device, *, packed=False, learned=False):
    """By name: q, k, v, the gates, and, where learned, k_cmp and v_cmp, of dense or packed sequences; few, for kernels
    may be interpreted.
    """
    generator = torch.Generator().manual_seed(0)
    rows = (21,) if packed else (1, 21)
    windows = (3,) if packed else (1, 4)
    shapes = {"q": (*rows, 2, 16), "k": (*rows, 1, 16), "v": (*rows, 1, 16)} | dict.fromkeys(GATES, (*rows, 2))
    shapes |= {"k_cmp": (*windows, 1, 16), "v_cmp": (*windows, 1, 16)} if learned else {}
    return {
        name: torch.randn(*shape, generator=generator).to(device).requires_grad_() for name, shape in shapes.items()
    }


def offsets(device):
    """Sequences of 9, 0 and 12 tokens, which have 1, 0 and 2 windows."""
    return torch.tensor([0, 9, 9, 21], device=device)


def detached(arguments):
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]


def native_arguments(backend, device, packed, learned, gates):
    given = leaves(device, packed=packed, learned=learned)
    tensors = [
        given.get(name) if name not in GATES or name in gates else None
        for name in ("q", "k", "v", *GATES, "k_cmp", "v_cmp")
    ]
    return [*tensors, None, offsets(device) if packed else None, *SIZES.values(), 9, 0.25, backend]


NATIVE = {
    "all": (False, False, GATES),
    "learned": (False, True, GATES),
    "packed": (True, False, GATES),
    "packed-learned": (True, True, ("g_cmp",)),
    "slc": (False, False, ("g_slc",)),
    "swa": (False, False, ("g_swa",)),
}


def skip_if_interpreted(place):
    """What is the same for every backend is not checked with interpreted kernels, which take a minute for it."""
    if place[0] == "triton" and place[1].type == "cpu":
        pytest.skip("interpreted kernels are slow: checked with the CPU backend")


@pytest.mark.parametrize("name", first_quick(NATIVE))
def test_opcheck_of_the_whole(place, name):
    if name not in ("packed", "learned"):
        skip_if_interpreted(place)
    arguments = native_arguments(*place, *NATIVE[name])
    library.opcheck(api.nsa_forward.overload, tuple(arguments))
    q, k, v, *gates, k_cmp, v_cmp, _, cu = detached(arguments)[:10]
    o, chosen, made_k, made_v, *each = api.nsa_forward(*detached(arguments))
    learned = k_cmp is not None
    compressed = (k_cmp, v_cmp) if learned else (made_k, made_v)
    saved = (q, k, v, *gates, *compressed, chosen, *each, cu, learned, *arguments[10:])
    library.opcheck(api.nsa_backward.overload, (torch.randn_like(o), *saved))


@pytest.mark.parametrize("layout", first_quick(["dense", "packed", "part"]))
def test_opcheck_of_the_steps(place, layout):
    if layout != "packed":
        skip_if_interpreted(place)
    backend, device = place
    given = leaves(device, packed=layout != "dense", learned=True)
    q, k, v, k_cmp, v_cmp = (given[name] for name in ("q", "k", "v", "k_cmp", "v_cmp"))
    where = None if layout == "dense" else offsets(device), None, None
    if layout == "part":
        # The last 4 tokens of the first sequence, and 8 of the last one's.
        q = q.detach()[:12].requires_grad_()
        cu, first = torch.tensor([[0, 4, 4, 12], [5, 0, 3, 0]], dtype=torch.int32, device=device)
        where = cu, offsets(device).int(), first[:3]
    compressed = (q, k_cmp, v_cmp, *where, 8, 4, 0.25, backend)
    library.opcheck(steps.compressed_forward.overload, compressed)
    q_, k_, v_, *rest = detached(compressed)
    o, lse = steps.compressed_forward(q_, k_, v_, *rest)
    library.opcheck(
        steps.compressed_backward.overload, (torch.randn_like(o), torch.randn_like(lse), q_, k_, v_, o, lse, *rest)
    )
    choice = (q.detach(), k_cmp.detach(), *where, *SIZES.values(), 0.25, backend)
    library.opcheck(steps.select.overload, choice)
    selected = (q, k, v, steps.select(*choice), *where, 8, 0.25, backend)
    library.opcheck(steps.selected_forward.overload, selected)
    q_, k_, v_, chosen, *rest = detached(selected)
    o, lse = steps.selected_forward(q_, k_, v_, chosen, *rest)
    library.opcheck(steps.selected_backward.overload, (torch.randn_like(o), None, q_, k_, v_, chosen, o, lse, *rest))


def attended(device, *, scaled=True):
    """fq, fk, fv and sel_scale by name, and what is not differentiated."""
    given = leaves(device)
    tensors = {f"f{name}": given[name].detach().transpose(1, 2).requires_grad_() for name in "qkv"}
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(0, 3, (1, 1, 21, 3), generator=generator)
    named = {"block_size": 8, "selected_block_indices": chosen.to(device), "fmask": (chosen != 1).to(device)}
    if scaled:
        tensors["sel_scale"] = torch.rand(chosen.shape, generator=generator).to(device).requires_grad_()
    return tensors, named


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
def test_opcheck_of_attend(place, scaled):
    if not scaled:
        skip_if_interpreted(place)
    backend, device = place
    tensors, named = attended(device, scaled=scaled)
    by_token = [
        tensors[name].detach().transpose(1, 2).requires_grad_() if name in tensors else None
        for name in ("fq", "fk", "fv", "sel_scale")
    ]
    q, k, v, sel_scale = by_token
    indices, mask = (named[name].transpose(1, 2) for name in ("selected_block_indices", "fmask"))
    options = (True, 8, 0.25, backend)
    library.opcheck(attend.attend_forward.overload, (q, k, v, indices, mask, sel_scale, *options))
    q, k, v, sel_scale = detached(by_token)
    o, lse, read = attend.attend_forward(q, k, v, indices, mask, sel_scale, *options)
    library.opcheck(
        attend.attend_backward.overload,
        (torch.randn_like(o), torch.randn_like(lse), q, k, v, read, sel_scale, o, lse, *options),
    )


def test_compile_the_steps(place):
    backend, device = place

    def run(q, k, v, k_cmp, v_cmp):
        o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, **WINDOWS, return_lse=True, backend=backend)
        chosen = select_blocks(q, k_cmp, **SIZES, backend=backend)
        o_slc = selected_attention(q, k, v, chosen, block_size=8, backend=backend)
        return o_cmp + o_slc, lse

    given = leaves(device, learned=True)
    tensors = [given[name] for name in ("q", "k", "v", "k_cmp", "v_cmp")]
    for actual, expected in zip(
        torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors), run(*tensors), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.slow
def test_reference_differentiates_twice():
    tensors = {name: x.detach().double()[:, :6].clone() for name, x in leaves("cpu").items()}
    small = [(x[..., :2] if name in "qkv" else x).requires_grad_() for name, x in tensors.items()]
    sizes = SMALL | {"compress_size": 2, "compress_stride": 2, "block_size": 2}

    def run(*given):
        return native_sparse_attention(**dict(zip(tensors, given, strict=True)), **sizes, backend="reference")

    assert torch.autograd.gradgradcheck(run, small)


@pytest.mark.parametrize("which", ["compressed", "selected", "attend"])
def test_a_gradient_of_the_lse_alone(place, which):
    backend, device = place
    given = leaves(device, learned=True)
    chosen = select_blocks(given["q"], given["k_cmp"], **SIZES, backend=backend)
    names = {"compressed": ("q", "k_cmp", "v_cmp"), "selected": ("q", "k", "v")}.get(which)
    tensors, named = attended(device) if names is None else ({name: given[name] for name in names}, {})
    function, options = {
        "compressed": (compressed_attention, WINDOWS),
        "selected": (selected_attention, {"block_indices": chosen, "block_size": 8}),
        "attend": (native_sparse_attend, named),
    }[which]

    def gradients(tensors, backend):
        _, lse = function(**tensors, **options, return_lse=True, backend=backend)
        # A row that sees nothing has -inf, which no input changes.
        return torch.autograd.grad(
            lse.masked_fill(lse == -torch.inf, 0.0).sum(), list(tensors.values()), materialize_grads=True
        )

    wide = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    for actual, truth in zip(gradients(tensors, backend), gradients(wide, "reference"), strict=True):
        torch.testing.assert_close(actual.double(), truth, rtol=1e-4, atol=1e-5)


def test_only_what_is_asked_for(place):
    backend, device = place
    tensors = leaves(device)
    o = native_sparse_attention(**tensors, **SMALL, backend=backend)
    assert isinstance(o, torch.Tensor)
    with torch.no_grad():
        assert not native_sparse_attention(**tensors, **SMALL, backend=backend).requires_grad
    _, chosen = native_sparse_attention(**tensors, **SMALL, return_indices=True, backend=backend)
    assert chosen.dtype == torch.int32
    assert not chosen.requires_grad
    given, same = native_sparse_attention(
        **tensors, **SMALL, block_indices=chosen.long(), return_indices=True, backend=backend
    )
    assert torch.equal(given, o)
    assert torch.equal(same, chosen)
    assert same.dtype == torch.int32


def test_a_graph_can_be_kept_and_run_again(place):
    backend, device = place
    tensors = leaves(device)
    o = native_sparse_attention(**tensors, **SMALL, backend=backend)
    first = torch.autograd.grad(o.sum(), tensors["k"], retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(o.sum(), tensors["k"])[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o.sum(), tensors["k"])


def test_the_reference_is_the_same_function():
    """Every function through backend='reference', in fp64, is what the reference module gives."""
    tensors = {name: x.detach().double() for name, x in leaves("cpu", learned=True).items()}
    o, chosen = native_sparse_attention(**tensors, **SMALL, return_indices=True, backend="reference")
    assert o.dtype == torch.float64
    assert torch.equal(chosen, select_blocks(tensors["q"], tensors["k_cmp"], **SIZES, backend="reference"))
    parts = [
        compressed_attention(tensors["q"], tensors["k_cmp"], tensors["v_cmp"], **WINDOWS, backend="reference"),
        selected_attention(tensors["q"], tensors["k"], tensors["v"], chosen, block_size=8, backend="reference"),
    ]
    none = native_sparse_attention(**tensors | {"g_cmp": None, "g_slc": None}, **SMALL, backend="reference")
    total = sum(tensors[gate][..., None] * part for gate, part in zip(("g_cmp", "g_slc"), parts, strict=True)) + none
    torch.testing.assert_close(o, total)
