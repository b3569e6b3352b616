"""Optimisers, clipping and the schedule against torch's, step by step; training that repeats bit by bit; states."""

import math

import numpy as np
import pytest
import torch
from against_torch import close, each_backend, normal, on

import mytorch
from mytorch import Tensor, data, nn, optim

each_cpu = pytest.mark.parametrize("backend", ["serial", "parallel"])
SHAPES = [(3, 4), (5,), (2, 1, 3), (70, 130)]
# Ours, torch's, options of both.
OPTIMIZERS = {
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "decay": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}),
    "decay without momentum": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "adam": (optim.Adam, torch.optim.Adam, {"lr": 0.01}),
    "adam with decay": (
        optim.Adam,
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1},
    ),
    "adamw": (optim.AdamW, torch.optim.AdamW, {"lr": 0.01}),
    "adamw with options": (
        optim.AdamW,
        torch.optim.AdamW,
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.3},
    ),
}


def parameters(device, dtype="float32"):
    arrays = [normal(*shape).astype(dtype) for shape in SHAPES]
    return [Tensor.create(a, requires_grad=True, device=device) for a in arrays], [
        torch.tensor(a, requires_grad=True) for a in arrays
    ]


def give_gradients(mine, theirs, step, device):
    """Other ones each step; the second parameter gets none at every other step."""
    for i, (x, y) in enumerate(zip(mine, theirs, strict=True)):
        if i == 1 and step % 2:
            x.set_grad(None)
            y.grad = None
        else:
            grad = normal(*x.shape, seed=step + 1).astype(str(x.dtype))
            x.set_grad(Tensor.create(grad, device=device))
            y.grad = torch.tensor(grad)


@each_backend
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_torchs(backend, name):
    ours, reference, options = OPTIMIZERS[name]
    with on(backend) as device:
        mine, theirs = parameters(device)
        optimizer, expected = ours(mine, **options), reference(theirs, **options)
        for step in range(3 if backend == "cuda" else 6):
            give_gradients(mine, theirs, step, device)
            optimizer.step()
            expected.step()
            for i, (x, y) in enumerate(zip(mine, theirs, strict=True)):
                close(x, y, f"parameter {i} after step {step}", scale=2)


@each_cpu
@pytest.mark.parametrize("name", ["decay", "adamw"])
def test_float64(backend, name):
    ours, reference, options = OPTIMIZERS[name]
    with on(backend) as device:
        mine, theirs = parameters(device, "float64")
        optimizer, expected = ours(mine, **options), reference(theirs, **options)
        for step in range(4):
            give_gradients(mine, theirs, step, device)
            optimizer.step()
            expected.step()
        for x, y in zip(mine, theirs, strict=True):
            close(x, y, "parameter")


@each_backend
@pytest.mark.parametrize("largest", [0.5, 1e6])
def test_clipping(backend, largest):
    with on(backend) as device:
        mine, theirs = parameters(device)
        give_gradients(mine, theirs, 1, device)
        before = optim.clip_grad_norm(iter(mine), largest)
        expected = torch.nn.utils.clip_grad_norm_(theirs, largest)
        assert math.isclose(before, expected.item(), rel_tol=1e-5)
        for x, y in zip(mine, theirs, strict=True):
            assert (x.grad is None) == (y.grad is None)
            if y.grad is not None:
                close(x.grad, y.grad, "gradient", scale=2)


def test_clipping_of_fp16_does_not_overflow():
    with on("serial"):
        x = Tensor.ones((4,), requires_grad=True, dtype="float16")
        x.set_grad(Tensor.create([1000.0] * 4, dtype="float16"))
        assert optim.clip_grad_norm([x], 1.0) == 2000
        assert abs(x.grad.numpy() - 0.5).max() < 1e-3
        assert x.grad.dtype == mytorch.float16


def test_clipping_without_gradients_and_of_nan():
    with on("serial"):
        x = Tensor.ones((2,), requires_grad=True)
        assert optim.clip_grad_norm([x], 1.0) == 0
        x.set_grad(Tensor.create([float("nan"), 1.0]))
        assert math.isnan(optim.clip_grad_norm([x], 1.0))
        assert np.isnan(x.grad.numpy()).all()


@pytest.mark.parametrize(("warmup", "minimum"), [(0, 0.0), (0, 0.02), (3, 0.0), (4, 0.05)])
def test_the_schedule_is_torchs(warmup, minimum):
    with on("serial"):
        total = 20
        mine, theirs = parameters(mytorch.Device.CPU)
        optimizer, expected = optim.SGD(mine, lr=0.3), torch.optim.SGD(theirs, lr=0.3)
        schedule = optim.CosineSchedule(optimizer, total, warmup_steps=warmup, minimum=minimum)
        parts = [torch.optim.lr_scheduler.CosineAnnealingLR(expected, total - warmup, eta_min=minimum)]
        if warmup:
            parts.insert(0, torch.optim.lr_scheduler.LinearLR(expected, 1 / (warmup + 1), total_iters=warmup))
        reference = torch.optim.lr_scheduler.SequentialLR(expected, parts, [warmup] if warmup else [])
        for step in range(total + 1):
            assert math.isclose(optimizer.lr, expected.param_groups[0]["lr"], rel_tol=1e-6, abs_tol=1e-12), step
            schedule.step()
            expected.step()
            reference.step()
        assert optimizer.lr == minimum


# Training.


class Network(nn.Module):
    """One of each kind of layer."""

    def __init__(self):
        self.conv = nn.Sequential(nn.Conv2D(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2), nn.Flatten())
        self.embedding = nn.Embedding(5, 16)
        self.block = nn.TransformerBlock(16, 2, causal=True, dropout=0.1)
        self.out = nn.Linear(16, 3)

    def forward(self, images, numbers):
        tokens = self.embedding(numbers) + self.conv(images).reshape(len(images), -1, 16)
        return self.out(self.block(tokens).mean(1))


def trained(seed, steps, device=mytorch.Device.CPU):
    """The losses and the final state of a short training."""
    mytorch.manual_seed(seed)
    model = Network().to(device)
    images, numbers, classes = (
        normal(32, 1, 8, 8).astype("float32"),
        np.arange(32 * 4).reshape(32, 4) % 5,
        np.arange(32) % 3,
    )
    loader = data.DataLoader(data.ArrayDataset(images, numbers, classes), 8, shuffle=True, device=device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    schedule = optim.CosineSchedule(optimizer, steps, warmup_steps=2)
    loss_of, losses = nn.CrossEntropyLoss(), []
    while len(losses) < steps:
        for x, i, y in loader:
            loss = loss_of(model(x, i), y)
            optimizer.zero_grad()
            loss.backward()
            optim.clip_grad_norm(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return losses, model.state_dict()


@each_cpu
def test_training_repeats_bit_by_bit_and_learns(backend):
    with on(backend):
        losses, state = trained(3, 40)
        again, state_again = trained(3, 40)
        assert losses == again
        assert all((state[name] == state_again[name]).all() for name in state)
        assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])
        assert trained(4, 4)[0] != losses[:4]


def test_the_backends_train_alike():
    runs = []
    for backend in ("serial", "parallel"):
        with on(backend):
            mytorch.manual_seed(0)
            layers = nn.Sequential(nn.Conv2D(1, 4, 3), nn.ReLU(), nn.MaxPool2D(2), nn.Flatten(), nn.Linear(36, 3))
            optimizer = optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
            x, y = Tensor.create(normal(16, 1, 8, 8), dtype="float32"), Tensor.create(np.arange(16) % 3)
            losses = []
            for _ in range(5):
                loss = nn.CrossEntropyLoss()(layers(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            runs.append(losses)
    np.testing.assert_allclose(*runs, rtol=1e-4)


@pytest.mark.gpu
def test_training_goes_on_after_a_move():
    """A model that moves to CUDA keeps its optimiser, and what that remembers."""

    def losses(move):
        mytorch.manual_seed(0)
        model, found = nn.Linear(4, 2), []
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        for step in range(4):
            device = move if step >= 2 else mytorch.Device.CPU
            model.to(device)
            loss = nn.MSELoss()(
                model(Tensor.create(normal(3, 4), dtype="float32", device=device)), Tensor.ones((3, 2), device=device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    with on("serial"):
        expected = losses(mytorch.Device.CPU)
        with on("cuda") as device:
            np.testing.assert_allclose(losses(device), expected, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_state_goes_on_where_it_stopped(name):
    ours, _, options = OPTIMIZERS[name]
    with on("serial") as device:
        mine, theirs = parameters(device)
        optimizer = ours(mine, **options)
        for step in range(1, 4):
            give_gradients(mine, theirs, step, device)
            optimizer.step()
        copies = [Tensor.create(x.numpy(), requires_grad=True) for x in mine]
        # Another learning rate: the state brings its own.
        other = ours(copies, **{**options, "lr": 7.0})
        other.load_state_dict(optimizer.state_dict())
        assert other.lr == options["lr"]
        for step in range(4, 7):
            for run, tensors in ((optimizer, mine), (other, copies)):
                give_gradients(tensors, theirs, step, device)
                run.step()
        for x, y in zip(mine, copies, strict=True):
            assert (x.numpy() == y.numpy()).all()


def test_states_that_do_not_fit():
    with on("serial") as device:
        mine, theirs = parameters(device)
        adam = optim.Adam(mine)
        give_gradients(mine, theirs, 0, device)
        adam.step()
        state = adam.state_dict()
        with pytest.raises(ValueError, match="expected the state of SGD, got that of 'Adam'"):
            optim.SGD(mine, lr=1).load_state_dict(state)
        with pytest.raises(ValueError, match="the state is of 4 parameters, and this Adam has 2"):
            optim.Adam(mine[:2]).load_state_dict(state)
        with pytest.raises(
            ValueError, match=r"first of parameter 0 \(expected \[70, 130\], got \[3, 4\]\); second of parameter 0"
        ):
            optim.Adam(mine[::-1]).load_state_dict(state)
        with pytest.raises(ValueError, match="velocity of parameter 0 .*got nothing"):
            optim.SGD(mine, lr=1, momentum=0.9).load_state_dict({**state, "optimizer": "SGD"})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: optim.SGD([], lr=1), "SGD got no parameters: give it model.parameters()"),
        (lambda x: optim.SGD([x * 2], lr=1), "SGD's parameter 0 must be a tensor made with requires_grad=True"),
        (lambda x: optim.Adam([x, x.detach()]), "Adam's parameter 1 must be"),
        (lambda x: optim.SGD([x], lr=-1), "SGD's lr is a number of at least 0, not -1"),
        (lambda x: optim.SGD([x], lr=1, momentum=float("nan")), "SGD's momentum is a number of at least 0, not nan"),
        (
            lambda x: optim.AdamW([x], betas=(0.9, 1.0)),
            "AdamW's betas are two numbers from 0 to below 1, not (0.9, 1.0)",
        ),
        (lambda x: optim.clip_grad_norm([x], 0), "max_norm is a number above 0, not 0"),
        (lambda x: optim.CosineSchedule(optim.Adam([x]), 5, warmup_steps=5), "got warmup_steps 5 and total_steps 5"),
        (
            lambda x: optim.CosineSchedule(optim.Adam([x]), 5, minimum=1.0),
            "between 0 and the optimiser's lr, 0.001, not 1.0",
        ),
    ],
)
def test_errors(make, said):
    with on("serial"), pytest.raises(ValueError) as error:  # noqa: PT011
        make(Tensor.ones((2,), requires_grad=True))
    assert said in str(error.value)


def test_a_parameter_given_twice_is_stepped_once():
    with on("serial"):
        x = Tensor.ones((2,), requires_grad=True)
        optimizer = optim.SGD([x, x], lr=1.0)
        x.set_grad(Tensor.ones((2,)))
        optimizer.step()
        assert (x.numpy() == 0).all()
        optimizer.zero_grad()
        assert x.grad is None


@each_backend
def test_steps_in_fp16_and_without_decay(backend):
    """eps is 0 in fp16, and 0 times infinity NaN: neither may reach the parameter."""
    with on(backend) as device:
        x = Tensor.create([1.0, 1.0], requires_grad=True, dtype="float16", device=device)
        x.set_grad(Tensor.create([0.0, 1e-3], dtype="float16", device=device))
        optim.Adam([x], lr=0.1).step()
        np.testing.assert_allclose(x.numpy().astype(float), [1, 0.9], atol=1e-3)
        for kind in (optim.SGD, optim.Adam):
            y = Tensor.create([np.inf], requires_grad=True, dtype="float32", device=device)
            y.set_grad(Tensor.ones((1,), device=device))
            kind([y], lr=0.1).step()
            assert y.numpy().tolist() == [np.inf]
