"""A prefill against a dense cache by Hopper's forward kernel: simulated without a GPU, real on one of Hopper's."""

import pytest
import torch
from decode_calls import clones, dense, paged

from tilewise import explain, explaining_on, flash_attention, flash_attention_with_kvcache, interpreter
from tilewise.ops._host import backend
from tilewise.ops._host.launching import capture
from tilewise.ops.flash.decode import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]
VARIANTS = {
    "": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 3)},
    "softcap": {"causal": True, "softcap": 5.0, "scale": -0.3},
    "leftpad": {"causal": True, "leftpad": [0, 3, 139]},
    "sinks": {"causal": True, "sinks": True},
}


@pytest.fixture
def on_hopper(device):
    """Where kernels are interpreted Hopper's are simulated, on two SMs."""
    if interpreter.interpreting():
        with backend.as_if_on(90), backend.few_sms(2):
            yield
    elif backend.architecture(torch.device(device)) == 90:
        yield
    else:
        pytest.skip("Hopper's own kernels need a GPU of compute capability 9.0")


def a_call(device, variant="", **sizes):
    """A call that is long enough, its options without the tensors that it gains."""
    sizes = {
        "lengths": (140, 131, 139),
        "room": 150,
        "queries": 70,
        "heads": 2,
        "kv_heads": 1,
        "D": 64,
        "Dv": 64,
    } | sizes
    call = {name: x.bfloat16() if x.is_floating_point() else x for name, x in dense(device, **sizes).items()}
    options = dict(VARIANTS[variant])
    if "leftpad" in options:
        call["leftpad_k"] = torch.tensor(options.pop("leftpad"), device=device)
    if options.pop("sinks", False):
        call["sinks"] = torch.tensor([0.7, -torch.inf], device=device)
    return call, options


def run(call, backend="triton", **options):
    return flash_attention_with_kvcache(**call, **options, return_lse=True, backend=backend)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def kernels(call, **options):
    with capture(90) as launches:
        run(call, **options)
    return [one.kernel.__name__ for one in launches]


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_gives_what_the_reference_gives(device, variant):
    call, options = a_call(device, variant)
    assert kernels(call, **options) == ["flash_prefill_offsets_kernel", "flash_fwd_hopper_kernel"]
    for name in ("k_cache", "v_cache"):
        # The reference multiplies what it masks.
        assert call[name].isnan().any()
    exact = {name: x.double() if x.is_floating_point() else x for name, x in call.items()}
    exact["k_cache"], exact["v_cache"] = exact["k_cache"].nan_to_num(), exact["v_cache"].nan_to_num()
    found, truth = run(call, **options), run(exact, "reference", **options)
    eager = run(
        {name: x.nan_to_num() if x.is_floating_point() else x for name, x in call.items()}, "reference", **options
    )
    assert all(x.dtype == y.dtype and x.shape == y.shape for x, y in zip(found, eager, strict=True))
    for x, y, z in zip(found, eager, truth, strict=True):
        sees = z.isfinite()
        assert torch.equal(x.isfinite(), sees)
        x, y, z = (i.double()[sees] for i in (x, y, z))
        assert (x - z).abs().max() <= 1.5 * (y - z).abs().max() + 1e-6
    assert same(run(call, **options), found)


def test_an_entry_depends_on_nothing_but_itself(device):
    call, options = a_call(device, "causal")
    o, lse = run(call, **options)
    for b in range(3):
        alone = {name: x[b : b + 1] for name, x in call.items()}
        assert len(kernels(alone, **options)) == 2
        assert same(run(alone, **options), (o[b : b + 1], lse[b : b + 1])), b
        roomy = {name: torch.nn.functional.pad(alone[name], (0, 0, 0, 0, 0, 200)) for name in ("k_cache", "v_cache")}
        assert same(run(alone | roomy, **options), (o[b : b + 1], lse[b : b + 1])), b


def test_a_whole_prompt_has_the_bits_of_the_forward_of_training(device):
    """By the same kernel, where both choose the same tiles: at 128 channels any."""
    call, options = a_call(device, "causal", lengths=(270,), room=270, queries=270, heads=1, D=128, Dv=128)
    assert kernels(call, **options)[-1] == "flash_fwd_hopper_kernel"
    q, k, v = (call[name] for name in ("q", "k_cache", "v_cache"))
    assert same(flash_attention(q, k, v, **options, return_lse=True, backend="triton"), run(call, **options))


def test_new_keys_are_attended_to(device):
    call, options = a_call(device, "causal", lengths=(70, 0, 41), new=70)
    appended = clones(call)
    found = run(appended, **options)
    assert kernels(call)[0] == "flash_decode_append_kernel"
    later = {name: x for name, x in appended.items() if name not in ("k", "v")}
    assert same(run(later | {"cache_seqlens": call["cache_seqlens"] + 70}, **options), found)


def test_empty_entries_and_rows_before_the_first_key(device):
    call, options = a_call(device, "causal", lengths=(0, 140, 3))
    o, lse = run(call, **options)
    assert not o[0].any()
    assert (lse[0] == -torch.inf).all()
    assert not o[2, :67].any()
    assert (lse[2, :, :67] == -torch.inf).all()
    assert o[2, 67:].isfinite().all()


def test_what_it_leaves_to_the_portable_kernels(device):
    call, _ = a_call(device)
    portable = ["flash_decode_kernel"]
    assert kernels(call | {"q": call["q"][:, :64]}) == portable
    assert kernels(call | {name: call[name][:, :145] for name in ("k_cache", "v_cache")}) == portable
    assert kernels(paged(call)) == portable
    assert kernels({name: x.float() if x.is_floating_point() else x for name, x in call.items()}) == portable
    assert kernels(call, num_splits=2)[-1] == "flash_decode_merge_kernel"
    assert len(kernels(call, num_splits=1)) == 2


def test_explain_says_why_not(device):
    call, _ = a_call(device)

    def reasons(call, **options):
        with explaining_on(90):
            return explain(flash_attention_with_kvcache, **call, **options, backend="triton").reasons

    assert reasons(call) == ()
    assert reasons(call | {"q": call["q"][:, :64]}) == ()
    apart = {name: call[name][:, :145] for name in ("k_cache", "v_cache")}
    assert reasons(call | apart) == ("forward: entries of the keys do not follow one another: portable kernels",)
    assert reasons(paged(call)) == ("forward: keys in pages: portable kernels",)


def test_lengths_out_of_range_read_nothing_outside(device):
    """Where nobody checks values: the same as the nearest length in range."""
    call, _ = a_call(device)
    found, expected = (
        launch.forward(
            launch.make_inputs(
                *(call[name] for name in ("q", "k_cache", "v_cache")), None,
                torch.tensor(lengths, device=device), None, None, None, 0, True, -1, -1, 0.25, 0.0, 0,
            )
        )
        for lengths in ((-5, 2**31 + 7, 139), (0, 150, 139))
    )  # fmt: skip
    assert same([x.nan_to_num(9.0) for x in found], [x.nan_to_num(9.0) for x in expected])
