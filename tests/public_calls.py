"""How test_public_names.py calls each public name of tilewise and mytorch, as cheaply as makes sense."""

import contextlib
import importlib

import numpy as np
import public_names
import pytest
import torch
from public_inputs import D, H, T, compressed, finite, gates, tensors, whole

SIZES = {"compress_size": 4, "compress_stride": 2}
BLOCKS = {"block_size": 4, "block_count": 2, "init_blocks": 1, "local_blocks": 1}


def public(name: str):
    """As `from module import name` finds it; a module's own name is the module."""
    module, _, attribute = name.rpartition(".")
    found = importlib.import_module(module)
    return getattr(found, attribute) if hasattr(found, attribute) else importlib.import_module(name)


# A function for each name, which is given what the name stands for.
CALLS = {}


def call(*names: str):
    def keep(function):
        CALLS.update(dict.fromkeys(names, function))
        return function

    return keep


@call("tilewise.flash_attention")
def call_flash(flash_attention):
    o, lse = flash_attention(*whole(), causal=True, window_size=(3, 0), softcap=5.0, return_lse=True, backend="cpu")
    expected = flash_attention(*whole(), causal=True, window_size=(3, 0), softcap=5.0, backend="reference")
    assert lse.shape == (1, H, T)
    assert torch.allclose(o, expected, atol=1e-5)


@call("tilewise.flash_attention_with_kvcache")
def call_with_kvcache(flash_attention_with_kvcache):
    q, k, v = whole()
    caches = [torch.zeros(1, 2 * T, H, D) for _ in range(2)]
    o = flash_attention_with_kvcache(q, *caches, k, v, cache_seqlens=0, backend="cpu")
    assert torch.equal(caches[0][:, :T], k)
    finite(o)


@call("tilewise.native_sparse_attention")
def call_nsa(native_sparse_attention):
    o, indices = native_sparse_attention(
        *whole(), **gates(1, T, H), **SIZES, **BLOCKS, window_size=3, return_indices=True, backend="reference"
    )
    finite(o)
    assert indices.shape == (1, T, H, BLOCKS["block_count"])


@call("tilewise.compressed_attention")
def call_compressed(compressed_attention):
    finite(compressed_attention(*compressed(), **SIZES, backend="reference"))


@call("tilewise.select_blocks")
def call_select(select_blocks):
    assert select_blocks(*compressed()[:2], **SIZES, **BLOCKS, backend="reference").dtype == torch.int32


@call("tilewise.selected_attention")
def call_selected(selected_attention):
    indices = torch.zeros(1, T, H, 1, dtype=torch.int32)
    finite(selected_attention(*whole(), indices, block_size=4, backend="reference"))


@call("tilewise.native_sparse_attend")
def call_attend(native_sparse_attend):
    q, k, v = tensors(1, H, T, D)
    indices = torch.zeros(1, H, T, 1, dtype=torch.int64)
    finite(native_sparse_attend(q, k, v, 4, indices, indices == 1, return_lse=True, backend="reference")[0])


@call("tilewise.NSACache", "tilewise.nsa_decode_step")
def call_decode(_):
    import tilewise

    cache = tilewise.NSACache(1, T, H, D, D, **SIZES, **BLOCKS, window_size=3)
    q, k, v = whole()
    cache.append(k[:, :5], v[:, :5], counts=torch.tensor([5]))
    finite(tilewise.nsa_decode_step(q[:, 5:6], k[:, 5:6], v[:, 5:6], cache, **gates(1, 1, H)))


@call("tilewise.hstu_attention")
def call_hstu(hstu_attention):
    finite(hstu_attention(*tensors(T, H, D), torch.tensor([0, 3, T]), max_seq_len=T, backend="reference"))


@call("tilewise.block_sparse_attn")
def call_bsa(block_sparse_attn):
    o, indices = block_sparse_attn(
        *whole(), whole()[0], *gates(1, T, H).values(), 2, 4, window_size=3, backend="reference"
    )
    finite(o)
    assert not indices.is_floating_point()


@call("tilewise.hstu_attention_with_bsa", "tilewise.nn.GateModel")
def call_hstu_bsa(_):
    import tilewise
    from tilewise.nn import GateModel

    rows, mask = tensors(T, H * D, count=4), torch.zeros(1, T, T)
    results = tilewise.hstu_attention_with_bsa(
        H, D, D, *rows, torch.tensor([0, T]), mask, GateModel(D), block_counts=2, block_size=4, backend="reference"
    )
    finite(*results)


@call("tilewise.explain", "tilewise.explaining_on", "tilewise.Explanation")
def call_explain(_):
    import tilewise

    with tilewise.explaining_on("sm_80"):
        found = tilewise.explain(tilewise.flash_attention, *(x.to("meta", torch.bfloat16) for x in whole()))
    assert isinstance(found, tilewise.Explanation)
    assert found.architecture == 80
    assert found.forward[0].name in str(found)


@call("tilewise.parallel.balanced")
def call_balanced(balanced):
    assert balanced(torch.tensor([0, 3, 6]), 2).tolist() == [0, 0, 0, 1, 1, 1]


@call("tilewise.warmup")
def call_warmup(warmup):
    # One that compiles takes a minute; test_warmup.py has it.
    with pytest.raises(ValueError, match="no operator is named"):
        warmup(shapes=["small"], dtypes=["bf16"], arch="sm_90", forward_only=True, advanced=lambda done, total: None)


@call("tilewise.nn.NativeSparseAttention")
def call_nsa_layer(layer):
    made = layer(8, H, H, D, compression="learned", window_size=3, backend="reference", **SIZES, **BLOCKS)
    finite(made(torch.ones(1, T, 8)), made.step(torch.ones(1, 1, 8), made.init_cache(1, T)))


@call("tilewise.nn.WindowCompression")
def call_compression(layer):
    finite(*layer(4, D, D)(*tensors(2, 4, H, D, count=2)))


@call("tilewise.nn.HSTULayer")
def call_hstu_layer(layer):
    finite(layer(8, H, backend="reference")(torch.ones(T, 8), torch.tensor([0, T]), max_seq_len=T))


@call("tilewise.nn.rotary.rotate")
def call_rotate(rotate):
    x = whole()[0]
    assert torch.equal(rotate(x, torch.zeros(T, dtype=torch.long), 10_000.0), x)


@call(
    "tilewise.verify.verify",
    *(f"tilewise.verify.{name}" for name in ("Report", "Result", "Check", "Settings", "Comparison", "Failure")),
    *(f"tilewise.verify.{name}" for name in ("Finding", "MutantResult", "UsageError")),
    "tilewise.verify.compare.Comparison",
    "tilewise.verify.result.CHOICE",
)
def call_verify(_):
    from tilewise import verify
    from tilewise.verify.compare import Comparison
    from tilewise.verify.result import CHOICE

    def zeros(q, k, v, **options):
        return torch.zeros_like(q), q.new_zeros(1, q.shape[2], q.shape[1])

    report = verify.verify("flash", zeros, configs=["T=5,H=1,D=4"], dtypes=["fp32"], gradients=False)
    (result,) = report.failures
    assert not report.passed
    found = (report, result, result.check, result.check.settings)
    assert [type(x) for x in found] == [verify.Report, verify.Result, verify.Check, verify.Settings]
    assert result.check.command().startswith("tilewise verify flash --config T=5,H=1,D=4 --dtype fp32")
    assert isinstance(result.worst, verify.Comparison)
    assert isinstance(result.worst.failure, verify.Failure)
    again = verify.Result(result.check, findings=(verify.Finding(CHOICE, "block 3"),))
    assert again.statuses == (CHOICE,)
    assert verify.MutantResult("flash", "scale", "forgotten", "small", "wrong values").caught
    assert Comparison is verify.Comparison
    with pytest.raises(verify.UsageError, match="there is no case"):
        verify.verify("flash", zeros, configs=["none"])


@call("tilewise.verify.compare_tensors")
def call_compare(compare_tensors):
    assert compare_tensors(torch.ones(3), torch.ones(3), "o", rtol=1e-3, atol=1e-4, verbose=False).passed


@call("tilewise.trace.block_flash_attention")
def call_block(block_flash_attention, tmp_path):
    q, k, v = (x[0, :, 0] for x in whole())
    o = block_flash_attention(q, k, v, 4, 4, out=tmp_path / "values.txt", causal=True)
    expected = public("tilewise.flash_attention")(*whole(), causal=True, backend="reference")[0, :, 0]
    assert torch.allclose(o, expected, atol=1e-5)
    assert "O_final" in (tmp_path / "values.txt").read_text()


@call("tilewise.trace.record.record", "tilewise.trace.Recording", "tilewise.trace.Event")
def call_record(_):
    import tilewise
    from tilewise.trace import Event, Recording
    from tilewise.trace.record import record

    if not tilewise.interpreter.interpreting():
        pytest.skip("kernels are compiled here: there is nothing to record")
    with record(0) as recording:
        tilewise.flash_attention(*whole(), backend="triton")
    assert isinstance(recording, Recording)
    events = recording.of_kernel(recording.kernels[0])
    assert events == recording.of_launch(0)
    assert all(isinstance(event, Event) for event in events)


@call(*(f"tilewise.interpreter{name}" for name in ("", ".use_where_no_gpu", ".interpreting", ".repair", ".quiet")))
def call_interpreter(_):
    from tilewise import interpreter

    assert interpreter.use_where_no_gpu() == interpreter.interpreting()
    with contextlib.nullcontext() if interpreter.interpreting() else pytest.raises(RuntimeError):
        interpreter.repair()
    with interpreter.quiet():
        pass


@call(*(f"tilewise.doctor.{name}" for name in ("examine", "as_json", "report")))
def call_doctor(_):
    from tilewise.doctor import as_json, examine, report

    assert set(as_json(examine(probe=False))[0]) == {"subject", "found", "level", "advice"}
    assert "tilewise" in report()


@call("tilewise.__version__")
def call_version(version):
    assert version.split(".")[0].isdigit()


@call("mytorch.Tensor", "mytorch.Device", "mytorch.no_grad", "mytorch.cat", "mytorch.manual_seed")
def call_tensor(_):
    import mytorch

    mytorch.manual_seed(0)
    x = mytorch.Tensor.randn((2, 3), requires_grad=True, device=mytorch.Device.CPU)
    mytorch.cat([x, x], axis=0).sum().backward()
    assert np.array_equal(x.grad.numpy(), np.full((2, 3), 2.0))
    with mytorch.no_grad():
        assert not (x * x).requires_grad


@call("mytorch.tensor", "mytorch.stack", "mytorch.einsum")
def call_torchs_spellings(_):
    import mytorch

    x = mytorch.tensor([1.0, 2.0], requires_grad=True, dtype="float32", device="cpu")
    assert float(mytorch.einsum("ij,ij->", *[mytorch.stack([x, x], dim=0)] * 2)) == 10


@call("mytorch.Function", "mytorch.gradcheck", "mytorch.gradcheck.gradcheck", "mytorch.autograd.gives_new_memory")
def call_function(_):
    from mytorch import Function, Tensor, gradcheck
    from mytorch.autograd import gives_new_memory

    class Square(Function):
        def _forward(self, x):
            self.save(x)
            return self.backend.binary("mul", x, x)

        @gives_new_memory
        def _backward(self, grad):
            (x,) = self.saved
            return self.backend.binary("mul", grad, self.backend.binary("add", x, x))

    assert gradcheck(lambda x: Square().apply(x), [Tensor.randn((2, 2), requires_grad=True, dtype="float64")])


@call(*(f"mytorch.{name}" for name in ("set_cpu_backend", "cpu_backend", "set_num_threads", "get_num_threads")))
def call_backends(_):
    import mytorch

    name, threads = mytorch.cpu_backend(), mytorch.get_num_threads()
    try:
        mytorch.set_cpu_backend("serial")
        mytorch.set_num_threads(1)
        assert (mytorch.cpu_backend(), mytorch.get_num_threads()) == ("serial", 1)
    finally:
        mytorch.set_cpu_backend(name)
        mytorch.set_num_threads(threads)


@call(*(f"mytorch.{name}" for name in ("bool_", "float16", "float32", "float64", "int64")))
def call_dtype(dtype):
    import mytorch

    assert mytorch.Tensor.zeros((2,), dtype=dtype).dtype == dtype


@call("mytorch.nn", *(name for name in public_names.PARAMETERS if name.startswith("mytorch.nn.")))
def call_layers(_, tmp_path):
    from mytorch import Tensor, nn

    image = nn.Sequential(nn.Conv2D(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2), nn.Flatten(), nn.Linear(8, 3))
    loss = nn.CrossEntropyLoss()(image(Tensor.ones((2, 1, 4, 4))), Tensor.create([0, 1], dtype="int64"))
    loss.backward()
    words = nn.Sequential(nn.Embedding(5, 8), nn.LayerNorm(8), nn.MultiHeadAttention(8, 2), nn.GELU(), nn.SiLU())
    block = nn.TransformerBlock(8, 2, causal=True, dropout=0.1).eval()
    hidden = nn.Dropout(0.5).eval()(block(words(Tensor.create([[0, 4, 2]], dtype="int64"))))
    assert nn.MSELoss()(hidden, hidden).item() == 0
    assert nn.BCELoss()(nn.Sigmoid()(hidden), Tensor.ones(hidden.shape)).item() > 0
    assert isinstance(image, nn.Module)
    image.save(tmp_path / "model.safetensors")
    image.load(tmp_path / "model.safetensors")


@call("mytorch.optim", *(name for name in public_names.PARAMETERS if name.startswith("mytorch.optim.")))
def call_optimisers(_):
    from mytorch import Tensor, optim

    for make in (optim.SGD, optim.Adam, optim.AdamW):
        x = Tensor.ones((2,), requires_grad=True)
        made = make([x], lr=0.1)
        assert isinstance(made, optim.Optimizer)
        schedule = optim.CosineSchedule(made, total_steps=4, warmup_steps=1)
        (x * x).sum().backward()
        assert optim.clip_grad_norm([x], 1.0) > 1.0
        made.step()
        schedule.step()
        made.zero_grad()
        assert x.numpy()[0] < 1


@call("mytorch.data", *(name for name in public_names.PARAMETERS if name.startswith("mytorch.data.")))
def call_data(_, tmp_path):
    from mytorch import data

    dataset = data.ArrayDataset(np.zeros((5, 2), np.float32), np.zeros(5, np.int64))
    assert isinstance(dataset, data.Dataset)
    assert len(list(data.DataLoader(dataset, batch_size=2, shuffle=True, seed=0, drop_last=True))) == 2
    (tmp_path / "few.idx").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    assert data.load_idx(tmp_path / "few.idx").tolist() == [7, 8, 9]
