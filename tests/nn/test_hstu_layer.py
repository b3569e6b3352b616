"""HSTULayer: its parts written out, packed sequences as if alone, gradients, saving, causality."""

import itertools

import pytest
import torch

from tilewise.nn import GateModel, HSTULayer

SIZES = {"block_counts": 2, "block_size": 8, "window_size": 5}
OPTIONS = {
    "dense": {},
    "limits": {"max_attn_len": 9, "contextual_seq_len": 3},
    "not-causal": {"causal": False},
    "block-sparse": {"attention": "block-sparse"},
    "no-window": {"attention": "block-sparse", "window_size": 0},
    "odd-heads": {"attention": "block-sparse", "heads": 3, "gate_hidden": 5},
}
BOTH = [OPTIONS["dense"], OPTIONS["block-sparse"]]
BOTH_IDS = ["dense", "block-sparse"]


def make(seed=0, *, heads=4, dtype=torch.float64, **more):
    torch.manual_seed(seed)
    layer = HSTULayer(24, heads, 8, 6, **{**SIZES, "backend": "reference", **more}, dtype=dtype)
    # Norms and biases that change something.
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    return layer


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def norm(x, *weights):
    centred = x - x.mean(-1, keepdim=True)
    x = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return x * weights[0] + weights[1] if weights else x


def silu(x):
    return x / (1 + torch.exp(-x))


def dense_sequence(q, k, v, longest, causal=True, targets=0, limit=0, context=0):
    """One sequence, pair by pair: q, k [L, H, D], v [L, H, Dv]."""
    length = len(q)
    end = length - targets - (context - 1 if context else 0)
    ids = [min(max(i - context + 1, 0) if context else i, end) for i in range(length)]
    rows = []
    for i in range(length):
        total = torch.zeros_like(v[0])
        for j in range(length):
            distance = ids[i] - ids[j] if causal else abs(ids[i] - ids[j])
            keep = (i == j or distance > 0) and not (limit and distance > limit)
            if keep or (context and ids[i] == 0 and ids[j] < end):
                total = total + silu((q[i] * k[j]).sum(-1) * 8**-0.5)[:, None] / longest * v[j]
        rows.append(total)
    return torch.stack(rows) if rows else v


def sparse_sequence(q, k, v, u, gates, count, block, window):
    """One sequence, query by query and head by head; heads in pairs where they are even in number."""
    scale, heads = 8**-0.5, q.shape[1]
    branches = torch.zeros(3 if window else 2, *v.shape, dtype=v.dtype)

    def weigh(t, h, key):
        return silu(scale * (q[t, h] * key).sum(-1)) / scale

    means = [[x[c * block : (c + 1) * block].mean(0) for c in range(len(k) // block)] for x in (k, v)]
    for t in range(len(q)):
        own = t // block
        for h in range(heads):
            chooser = h // 2 * 2 if heads % 2 == 0 else h
            branches[0, t, h] = (
                sum(weigh(t, h, means[0][c][h]) * means[1][c][h] for c in range((t + 1) // block))
                if t + 1 >= block
                else 0.0
            )
            best = sorted(range(own), key=lambda c, t=t, h=chooser: (-weigh(t, h, means[0][c][h]).item(), c))[
                : count - 1
            ]
            keys = [j for j in range(t + 1) if j // block in (*best, own)]
            branches[1, t, h] = sum(weigh(t, h, k[j, h]) * v[j, h] for j in keys)
            if window:
                branches[2, t, h] = sum(weigh(t, h, k[j, h]) * v[j, h] for j in range(max(0, t - window + 1), t + 1))
    gated = [norm((gate[..., None] * branch).flatten(-2)) for gate, branch in zip(gates, branches, strict=False)]
    return u * sum(gated).unflatten(-1, v.shape[1:])


@pytest.mark.parametrize("name", list(OPTIONS))
def test_forward_is_its_parts(name):
    """Written out by hand: norm, projection, attention, norm, gating, projection, residual."""
    options, offsets, longest = OPTIONS[name], [0, 27, 27, 45], 40
    layer, x = make(**options), draw(45, 24)
    heads, limits = options.get("heads", 4), options if "attention" not in options else None
    state = dict(layer.named_parameters())
    h = silu(
        norm(x, state["norm_in.weight"], state["norm_in.bias"]) @ state["to_uvqk.weight"].T + state["to_uvqk.bias"]
    )
    u, v, q, k = (part.reshape(45, heads, -1) for part in h.split([6 * heads, 6 * heads, 8 * heads, 8 * heads], -1))
    targets = torch.tensor([4, 0, 2]) if limits is not None else None
    parts = []
    for b, (start, stop) in enumerate(itertools.pairwise(offsets)):
        rows = slice(start, stop)
        if limits is None:
            sizes = {**SIZES, **options}
            gates = [gate[rows] for gate in layer.gate_model(q)]
            parts.append(
                sparse_sequence(
                    q[rows],
                    k[rows],
                    v[rows],
                    u[rows],
                    gates,
                    sizes["block_counts"],
                    sizes["block_size"],
                    sizes["window_size"],
                )
            )
        else:
            more = {
                "causal": options.get("causal", True),
                "limit": options.get("max_attn_len", 0),
                "context": options.get("contextual_seq_len", 0),
            }
            o = dense_sequence(q[rows], k[rows], v[rows], longest, targets=int(targets[b]), **more).flatten(1)
            parts.append(norm(o, state["norm_out.weight"], state["norm_out.bias"]) * u[rows].flatten(1))
    expected = x + torch.cat([part.flatten(1) for part in parts]) @ state["to_out.weight"].T + state["to_out.bias"]
    actual = layer(x, torch.tensor(offsets), max_seq_len=longest, num_targets=targets)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("offsets", [[0, 20, 20, 53], [0, 53], [0, 0, 1, 9, 9]], ids=str)
def test_packed_sequences_are_as_if_alone(name, offsets):
    layer, x = make(**OPTIONS[name]), draw(offsets[-1], 24)
    o = layer(x, torch.tensor(offsets), max_seq_len=60)
    assert o.shape == x.shape
    for start, stop in itertools.pairwise(offsets):
        alone = layer(x[start:stop], torch.tensor([0, stop - start]), max_seq_len=60)
        torch.testing.assert_close(o[start:stop], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_tokens(options, offsets, backend):
    layer, x = make(**options, dtype=torch.float32, backend=backend), torch.zeros(0, 24, requires_grad=True)
    o = layer(x, torch.tensor(offsets), max_seq_len=0)
    assert o.shape == (0, 24)
    o.sum().backward()
    assert all(not parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_gradients_reach_every_parameter(name, backend):
    layer = make(**OPTIONS[name], dtype=torch.float32, backend=backend)
    x = draw(50, 24, dtype=torch.float32).requires_grad_()
    layer(x, torch.tensor([0, 30, 30, 50]), max_seq_len=30).square().sum().backward()
    for parameter_name, parameter in [("x", x), *layer.named_parameters()]:
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.norm() > 0, parameter_name


@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
def test_gradients_are_those_of_finite_differences(options):
    """Every parameter along a random direction; the blocks are all chosen, so that no step jumps from one choice to
    another.
    """
    layer, x = make(**options, block_counts=8), draw(45, 24)
    offsets, weight = torch.tensor([0, 13, 45]), draw(45, 24, seed=1)

    def loss():
        return (layer(x, offsets, max_seq_len=40) * weight).sum()

    parameters = dict(layer.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(loss(), list(parameters.values())), strict=True))
    step = 1e-5
    for seed, (name, parameter) in enumerate(parameters.items()):
        direction = draw(*parameter.shape, seed=seed)
        with torch.no_grad():
            parameter += step * direction
            above = loss()
            parameter -= 2 * step * direction
            below = loss()
            parameter += step * direction
        slope = (above - below) / (2 * step)
        torch.testing.assert_close((gradients[name] * direction).sum(), slope, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
def test_trains(options):
    """To give one random sequence for another."""
    layer = make(**options, dtype=torch.float32, backend="cpu")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-2)
    x, target = draw(20, 24, dtype=torch.float32), draw(20, 24, dtype=torch.float32, seed=1)
    losses = []
    for _ in range(60):
        loss = (layer(x, torch.tensor([0, 12, 20]), max_seq_len=12) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.0
    assert losses[-1] < 0.1


@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
def test_state_dict_saves_and_loads(options, tmp_path):
    layer, other, x, offsets = make(0, **options), make(1, **options), draw(40, 24), torch.tensor([0, 25, 40])
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    assert not torch.equal(layer(x, offsets, max_seq_len=25), other(x, offsets, max_seq_len=25))
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(layer(x, offsets, max_seq_len=25), other(x, offsets, max_seq_len=25))


@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
def test_reset_parameters(options):
    """Whatever the parameters held, they are drawn by the seed alone."""
    layer, other = make(0, **options), make(1, **options)
    for each in (layer, other):
        torch.manual_seed(4)
        each.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    assert not layer.to_uvqk.bias.any()
    assert torch.equal(layer.norm_in.weight, torch.ones(24, dtype=torch.float64))


@pytest.mark.parametrize("name", ["dense", "block-sparse", "no-window", "odd-heads"])
def test_what_comes_later_changes_nothing_before_it(name):
    layer, x, offsets = make(**OPTIONS[name]), draw(50, 24), torch.tensor([0, 4, 50])
    changed = x.clone()
    changed[37:] = draw(13, 24, seed=1)
    before, after = (layer(each, offsets, max_seq_len=50) for each in (x, changed))
    assert torch.equal(before[:37], after[:37])
    assert (before[37:] != after[37:]).all()


def test_targets_do_not_see_each_other():
    layer, x, offsets = make(), draw(30, 24), torch.tensor([0, 30])
    changed = x.clone()
    changed[26] = draw(24, seed=1)
    before, after = (layer(each, offsets, max_seq_len=30, num_targets=torch.tensor([5])) for each in (x, changed))
    assert (before != after).any(-1).nonzero().flatten().tolist() == [26]


@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
def test_dropout_only_in_training(options):
    layer, plain, x, offsets = make(**options, dropout=0.4), make(**options), draw(40, 24), torch.tensor([0, 40])
    expected = plain(x, offsets, max_seq_len=40)
    assert torch.equal(plain.eval()(x, offsets, max_seq_len=40), expected)
    torch.manual_seed(5)
    o = layer(x, offsets, max_seq_len=40)
    dropped = o == x
    assert 0.3 < dropped.double().mean() < 0.5
    torch.testing.assert_close((o - x)[~dropped], (expected - x)[~dropped] / 0.6, rtol=1e-9, atol=1e-11)
    assert torch.equal(layer.eval()(x, offsets, max_seq_len=40), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
def test_the_default_backend_agrees_with_the_reference(options, dtype, device):
    layer, x, offsets = (
        make(**options, dtype=dtype, backend=None).to(device),
        draw(60, 24).to(device, dtype),
        torch.tensor([0, 33, 60], device=device),
    )
    o = layer(x, offsets, max_seq_len=33)
    assert o.dtype == dtype
    layer.backend = "reference"
    expected = layer(x, offsets, max_seq_len=33)
    error = (o.double() - expected.double()).norm() / expected.double().norm()
    # In 16 bits two blocks of nearly equal score may be chosen the other way round.
    assert error < (1e-5 if dtype == torch.float32 else 5e-2), error


@pytest.mark.gpu
@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
def test_kernels_agree_with_the_reference(options, device):
    layer, x = (
        make(**options, dtype=torch.float32, backend="triton").to(device),
        draw(30, 24, dtype=torch.float32).to(device),
    )
    offsets = torch.tensor([0, 17, 30], device=device)
    o = layer(x, offsets, max_seq_len=17)
    o.sum().backward()
    gradient, layer.to_uvqk.weight.grad = layer.to_uvqk.weight.grad, None
    layer.backend = "reference"
    expected = layer(x, offsets, max_seq_len=17)
    expected.sum().backward()
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, layer.to_uvqk.weight.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
def test_autocast(options):
    """bf16 inside, fp32 weights and residual."""
    layer, x, offsets = (
        make(**options, dtype=torch.float32, backend=None),
        draw(50, 24, dtype=torch.float32),
        torch.tensor([0, 50]),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = layer(x, offsets, max_seq_len=50)
    assert o.dtype == torch.float32
    expected = layer(x, offsets, max_seq_len=50)
    error = (o - expected).norm() / expected.norm()
    assert 1e-6 < error < 5e-2
    o.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
def test_compiles(options):
    layer, x = make(**options, dtype=torch.float32, backend="cpu"), draw(40, 24, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    offsets = torch.tensor([0, 25, 40])
    torch.testing.assert_close(compiled(x, offsets, max_seq_len=25), layer(x, offsets, max_seq_len=25))


def test_moves_and_names_itself():
    layer = HSTULayer(32, 4, attention="block-sparse", device="meta", dtype=torch.bfloat16)
    assert {(x.device.type, x.dtype) for x in layer.parameters()} == {("meta", torch.bfloat16)}
    assert layer.attention_dim == layer.linear_dim == 8
    assert isinstance(layer.gate_model, GateModel)
    assert layer.norm_out is None
    assert (
        "width=32, heads=4, attention_dim=8, linear_dim=8, attention='block-sparse', block_counts=4, block_size=32,"
        " window_size=0" in repr(layer)
    )
    dense = HSTULayer(32, 4, 16, 6, max_attn_len=3, bias=False)
    assert dense.gate_model is None
    assert dense.to_uvqk.bias is None
    assert dense.to_uvqk.out_features == 2 * 4 * (16 + 6)
    assert (
        "attention_dim=16, linear_dim=6, attention='dense', causal=True, max_attn_len=3, contextual_seq_len=0"
        in repr(dense)
    )


BAD_LAYERS = {
    "heads": ({"heads": 0}, ValueError, "heads is 0: expected a whole number of at least 1"),
    "width": ({"width": 30}, ValueError, "width is 30 and heads is 4: give attention_dim"),
    "wide": ({"linear_dim": 300}, ValueError, "linear_dim is 300: expected 1 to 256"),
    "attention": ({"attention": "sparse"}, ValueError, "attention is 'sparse': expected one of dense, block-sparse"),
    "limit": ({"max_attn_len": -1}, ValueError, "max_attn_len is -1"),
    "block": ({"block_size": 0}, ValueError, "block_size is 0"),
    "gates": ({"attention": "block-sparse", "gate_hidden": 0}, ValueError, "hidden is 0"),
    "dropout": ({"dropout": 1.0}, ValueError, "dropout is 1.0: expected a number below 1"),
    "negative-dropout": ({"dropout": -0.1}, ValueError, "dropout is -0.1: expected a finite number of at least 0"),
    "causal": (
        {"attention": "block-sparse", "causal": False},
        ValueError,
        "causal is False.*block-sparse attention is causal",
    ),
    "context": (
        {"attention": "block-sparse", "contextual_seq_len": 2},
        ValueError,
        "contextual_seq_len is 2: block-sparse attention is causal",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_bad_layers(changes, error, message):
    with pytest.raises(error, match=message):
        HSTULayer(**{"width": 32, "heads": 4} | changes)


@pytest.mark.parametrize("options", BOTH, ids=BOTH_IDS)
def test_bad_input(options):
    layer, x, offsets = make(**options), draw(10, 24), torch.tensor([0, 10])
    with pytest.raises(TypeError, match="x is a list"):
        layer([1.0], offsets, max_seq_len=10)
    with pytest.raises(ValueError, match=r"x has shape \[10, 23\]: expected \[N, 24\]"):
        layer(x[:, 1:], offsets, max_seq_len=10)
    with pytest.raises(ValueError, match=r"x has shape \[1, 10, 24\]: expected \[N, 24\]"):
        layer(x[None], offsets, max_seq_len=10)
    with pytest.raises(TypeError, match="seq_offsets is a list"):
        layer(x, [0, 10], max_seq_len=10)
    with pytest.raises(ValueError, match="seq_offsets ends at 9"):
        layer(x, torch.tensor([0, 9]), max_seq_len=10)
    with pytest.raises(ValueError, match="max_seq_len is 9 and seq_offsets holds a sequence of 10 tokens"):
        layer(x, offsets, max_seq_len=9)
    with pytest.raises(TypeError, match="max_seq_len is 9.5"):
        layer(x, offsets, max_seq_len=9.5)


def test_bad_targets():
    x, offsets = draw(10, 24), torch.tensor([0, 10])
    with pytest.raises(ValueError, match="num_targets is 11 for sequence 0: expected 0 to 10"):
        make()(x, offsets, max_seq_len=10, num_targets=torch.tensor([11]))
    with pytest.raises(
        ValueError, match="num_targets is given and attention is 'block-sparse', which knows no targets"
    ):
        make(attention="block-sparse")(x, offsets, max_seq_len=10, num_targets=torch.tensor([1]))
