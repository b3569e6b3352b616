"""tilewise.explain: what a call would run, and why; TILEWISE_LOG."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from every_operator import every_operator

import tilewise
from tilewise.ops._host import backend, gluon, launching


def meta(*shape, dtype=torch.bfloat16, grad=True):
    return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_(grad)


def offsets(sequences):
    return torch.empty(sequences + 1, dtype=torch.int32, device="meta")


# By name, one call each.
EVERY = list(every_operator(meta, offsets(2)))


def flash(q=None, k=None, v=None, **options):
    q = meta(2, 1024, 8, 64) if q is None else q
    k = q if k is None else k
    return tilewise.explain(tilewise.flash_attention, q, k, k if v is None else v, **options)


def names(kernels):
    return [kernel.name for kernel in kernels]


def test_hopper_runs_its_own_kernels():
    found = flash(causal=True)
    assert (found.backend, found.architecture, found.reasons) == ("triton", 90, ())
    assert names(found.forward) == ["flash_fwd_hopper_kernel"]
    assert names(found.backward) == [f"flash_bwd_hopper{part}_kernel" for part in ("_prepare", "", "_finish")]
    (forward,) = found.forward
    assert (forward.tma, forward.gluon, forward.block_m, forward.warps) == (True, True, 192, None)
    assert found.backward_bytes > 0
    assert "flash_fwd_hopper_kernel: M 192" in str(found)


Q192 = meta(1, 512, 2, 192)
SHIFTED = torch.empty(1 + 512 * 2 * 64, dtype=torch.bfloat16)[1:].view(1, 512, 2, 64)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: flash(Q192, softcap=5.0), "backward of D 192 under softcap: portable kernels"),
        (lambda: flash(meta(1, 512, 2, 64), v=Q192), "backward of D 64 and Dv 192: portable kernels"),
        (lambda: flash(meta(1, 512, 2, 64, dtype=torch.float32)), "forward: fp32: portable kernels"),
        (lambda: flash(meta(1, 256, 2, 64)), "forward: at most 256 keys: portable kernels"),
        (lambda: flash(meta(1, 512, 2, 32)), "forward: D 32, below 33: portable kernels"),
        (lambda: flash(meta(1, 512, 2, 68)), "forward: D 68 or Dv 68 is not a multiple of 8: portable kernels"),
        (
            lambda: flash(meta(1, 512, 1, 64), meta(1, 512, 1, 68)[..., :64]),
            "forward: k's token stride of 136 bytes is not a multiple of 16: portable kernels",
        ),
        (
            lambda: flash(meta(1, 512, 1, 64), meta(1, 512, 1, 68)[..., :64]),
            "forward: k's token stride of 136 bytes is not a multiple of 16: pointers, not TMA",
        ),
        (
            lambda: flash(meta(1, 8192, 64, 128), meta(1, 512, 1, 128)),
            "backward: few KV blocks, so a GQA group is divided: portable kernels",
        ),
    ],
)
def test_reasons(call, reason):
    assert reason in call().reasons


def test_a_misaligned_tensor_is_told_by_its_address():
    with tilewise.explaining_on("sm_90"):
        found = flash(SHIFTED, torch.empty(1, 512, 2, 64, dtype=torch.bfloat16))
    assert "forward: q's data is not aligned to 16 bytes: portable kernels" in found.reasons
    assert found.backward is None


@pytest.mark.parametrize("architecture", [80, "sm_80"])
def test_as_if_on_another_architecture(architecture):
    with tilewise.explaining_on(architecture):
        found = flash()
    assert found.architecture == 80
    assert names(found.forward) == ["flash_fwd_kernel"]
    assert not found.forward[0].tma
    assert "forward: sm_80 is not sm_90: portable kernels" in found.reasons
    assert flash().architecture == 90


def test_without_gluon(monkeypatch):
    monkeypatch.setattr(gluon, "AVAILABLE", False)
    monkeypatch.setattr(gluon, "_reason", "Gluon cannot be imported")
    assert "forward: Gluon cannot be imported: portable kernels" in flash().reasons


@pytest.mark.parametrize("architecture", [70, "hopper", True])
def test_an_architecture_that_is_none(architecture):
    with pytest.raises(ValueError, match="architecture is"), tilewise.explaining_on(architecture):
        pass


@pytest.mark.parametrize("name", EVERY)
def test_every_operator_on_meta(name):
    args, kwargs = every_operator(meta, offsets(2))[name]
    found = tilewise.explain(getattr(tilewise, name), *args, **kwargs)
    assert found.function == name
    assert found.forward
    assert (found.backward is None) == (name == "select_blocks")
    assert len(str(found).splitlines()) <= 40


@pytest.mark.parametrize("place", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("name", EVERY)
def test_every_operator_on_the_cpu_reads_no_value(name, place):
    """Offsets that a call would refuse: nobody looks at them."""
    if place == "triton" and not backend.interpreting():
        pytest.skip("kernels are not interpreted")
    cu = torch.tensor([5, 3, -7], dtype=torch.int32)
    args, kwargs = every_operator(lambda *shape: torch.full(shape, torch.nan, requires_grad=True), cu)[name]
    found = tilewise.explain(getattr(tilewise, name), *args, **kwargs, backend=place)
    assert (found.backend, found.why) == (place, "the argument backend asks for it")
    assert found.interpreted == (place == "triton") == bool(found.forward)
    if place == "triton" and name == "flash_attention":
        assert "forward: fp32: portable kernels" in found.reasons


def test_by_device_and_by_the_variable(monkeypatch):
    q = torch.zeros(1, 8, 2, 16)
    assert flash(q).why == "the tensors are on cpu"
    assert "tile by tile in torch" in str(flash(q))
    monkeypatch.setenv("TILEWISE_BACKEND", "reference")
    assert (flash(q).backend, flash(q).why) == ("reference", "TILEWISE_BACKEND asks for it")


def test_the_same_kernels_as_the_call_launches():
    q, k = (torch.zeros(1, 512, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2))
    with tilewise.explaining_on(90):
        found = flash(q, k, causal=True)
    with launching.capture(90) as launches:
        from tilewise.ops.flash import launch

        launch.forward(launch.make_inputs(q, k, k, None, None, True, -1, -1, 0.125, 0.0))
    assert [(x.kernel.fn.__name__, x.grid) for x in launches] == [(x.name, x.grid) for x in found.forward]


def decode_step(make, **options):
    """Three new tokens over a cache of up to 4,096."""
    k, gate = make(2, 3, 4, 64, dtype=torch.bfloat16, grad=False), make(2, 3, 8, dtype=torch.bfloat16, grad=False)
    cache = tilewise.NSACache(2, 4096, 4, 64, 64, dtype=torch.bfloat16, device=k.device, **options)
    q = make(2, 3, 8, 64, dtype=torch.bfloat16, grad=False)
    return (q, k, k, cache), {"g_cmp": gate, "g_slc": gate, "g_swa": gate}


def learned(k, v):
    raise AssertionError("a compression is not called")


def in_pages():
    pool = meta(70, 128, 4, 64, grad=False)
    return {"page_table": torch.empty(2, 32, dtype=torch.int32, device="meta"), "k_pages": pool, "v_pages": pool}


@pytest.mark.parametrize("options", [{}, in_pages(), {"compress": learned}], ids=["", "pages", "learned"])
def test_a_decoding_step_over_a_sparse_cache(options):
    args, gates = decode_step(meta, **options)
    stored = args[3].stored
    found = tilewise.explain(tilewise.nsa_decode_step, *args, **gates)
    assert (found.function, found.backend, found.architecture) == ("nsa_decode_step", "triton", 90)
    assert found.backward is None
    assert found.forward_bytes > 0
    assert args[3].stored is stored
    assert args[3].compress is options.get("compress")
    if "compress" in options:
        assert names(found.forward)[1] == "nsa_cached_windows_kernel"
        return
    with launching.capture(90) as launches:
        tilewise.nsa_decode_step(*args, **gates)
    assert [(x.kernel.fn.__name__, x.grid) for x in launches] == [(x.name, x.grid) for x in found.forward]
    assert len(launches) == 7


def test_a_decoding_step_on_the_cpu_leaves_its_cache_alone():
    args, gates = decode_step(lambda *shape, dtype, grad: torch.zeros(*shape, dtype=dtype))
    assert tilewise.explain(tilewise.nsa_decode_step, *args, **gates).why == "the tensors are on cpu"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = [x.float() for x in args[:3]]
        assert tilewise.explain(tilewise.nsa_decode_step, *wide, args[3], **gates).backend == "cpu"
    with pytest.raises(ValueError, match="are all None"):
        tilewise.explain(tilewise.nsa_decode_step, *args, g_cmp=None, g_slc=None, g_swa=None)
    assert args[3].lengths.tolist() == [0, 0]
    assert args[3].device.type == "cpu"


@pytest.mark.skipif(not backend.interpreting(), reason="kernels are not interpreted")
def test_autocast_casts_before_kernels_are_chosen():
    q = torch.zeros(1, 512, 2, 64)
    assert "forward: fp32: portable kernels" in flash(q, backend="triton").reasons
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash(q, backend="triton").reasons == ("forward: kernels are interpreted: portable kernels",)


def test_errors_are_those_of_the_call():
    with pytest.raises(ValueError, match="q's heads must be a multiple"):
        flash(meta(1, 8, 4, 16), meta(1, 8, 3, 16))
    with pytest.raises(TypeError, match=r"function is sum: expected one of tilewise's block_sparse_attn"):
        tilewise.explain(sum, [1])


def test_no_other_thread_is_explained():
    """While one thread explains, another one's calls run."""
    inside, done = threading.Event(), threading.Event()
    results = []

    def call():
        inside.wait()
        q = torch.ones(1, 8, 2, 16)
        results.append(tilewise.flash_attention(q, q, q, backend="cpu"))
        done.set()

    thread = threading.Thread(target=call)
    thread.start()
    with backend.explaining(backend.Explained(torch.device("cpu"))):
        inside.set()
        done.wait(60)
    thread.join()
    assert torch.equal(results[0], torch.ones(1, 8, 2, 16))


LOGGED = """
import torch
import tilewise
q, k = torch.zeros(1, 20, 2, 16, requires_grad=True), torch.zeros(1, 20, 1, 16)
attend = lambda backend: tilewise.flash_attention(q, k, k, backend=backend).sum().backward()
for _ in range(3):
    attend("triton")
attend("cpu")
compiled = torch.compile(lambda x: tilewise.flash_attention(x, x, x, backend="triton"), backend="eager", fullgraph=True)
for _ in range(2):
    compiled(torch.zeros(1, 24, 2, 16))
"""


@pytest.mark.slow
@pytest.mark.parametrize("on", ["1", "0"])
def test_the_log_has_a_line_for_each_problem(on):
    environment = {**os.environ, "TILEWISE_LOG": on, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", LOGGED], env=environment, capture_output=True, text=True, check=True)
    lines = [line.removeprefix("tilewise: ") for line in done.stderr.splitlines() if line.startswith("tilewise: ")]
    if on == "0":
        assert lines == []
        return
    heads = [line.split(";")[0].split(" ")[0] for line in lines]
    assert heads == ["flash_forward", "flash_backward", "flash_forward", "flash_backward", "flash_forward"]
    assert lines[0].startswith(
        "flash_forward q fp32[1, 20, 2, 16] k fp32[1, 20, 1, 16] v fp32[1, 20, 1, 16]; backend triton on cpu;"
        " flash_fwd_kernel: M "
    )
    assert lines[0].endswith("fp32: portable kernels")
    assert lines[2].endswith("backend cpu on cpu")
    assert "q fp32[1, 24, 2, 16]" in lines[4]
