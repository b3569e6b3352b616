"""One training step of a small CNN, in mytorch and in torch, from the same weights on the same images: what the
benchmarks of mytorch time.
"""

from collections.abc import Callable

import numpy as np
import torch

from mytorch import Device, Tensor, backends

BATCH, LEARNING_RATE = 64, 0.01
# [O, C, h, w] of convolutions, [K, N] of linear layers.
WEIGHTS = ((16, 1, 5, 5), (32, 16, 5, 5), (800, 120), (120, 84), (84, 10))
PADDINGS = (2, 0)


def initial() -> list[np.ndarray]:
    """Weights and biases in turns."""
    generator = np.random.default_rng(0)
    found = []
    for shape in WEIGHTS:
        inputs = int(np.prod(shape[1:])) if len(shape) == 4 else shape[0]
        found.append((generator.standard_normal(shape) * (2 / inputs) ** 0.5).astype(np.float32))
        found.append(np.zeros(shape[0] if len(shape) == 4 else shape[1], np.float32))
    return found


def data() -> tuple[np.ndarray, np.ndarray]:
    """Images and their classes, both random."""
    generator = np.random.default_rng(1)
    return generator.standard_normal((BATCH, 1, 28, 28)).astype(np.float32), generator.integers(0, 10, BATCH)


def mytorch_step(device: Device) -> Callable[[], Tensor]:
    """Forward, cross-entropy, backward and SGD; gives the loss."""
    parameters = [Tensor.create(x, requires_grad=True, device=device) for x in initial()]
    images, classes = data()
    x, targets = Tensor.create(images, device=device), Tensor.create(classes[:, None], device=device)

    def step() -> Tensor:
        y = x
        for i, padding in enumerate(PADDINGS):
            y = y.conv2d(*parameters[2 * i : 2 * i + 2], padding=padding).relu().max_pool2d(2)
        y = y.flatten(1)
        for i in (4, 6, 8):
            y = y.linear(*parameters[i : i + 2])
            y = y.relu() if i < 8 else y
        loss = -y.log_softmax().gather(1, targets).mean()
        loss.backward()
        for parameter in parameters:
            backends.of(device).sgd_(parameter._data, parameter.grad._data, None, LEARNING_RATE, 0.0, 0.0)
            parameter.set_grad(None)
        return loss

    return step


def torch_step(device: str) -> Callable[[], torch.Tensor]:
    """The same in torch, with its own modules and optimiser."""
    nn = torch.nn
    convolutions = [
        nn.Conv2d(shape[1], shape[0], shape[2:], padding=p) for shape, p in zip(WEIGHTS[:2], PADDINGS, strict=True)
    ]
    linear = [nn.Linear(*shape) for shape in WEIGHTS[2:]]
    blocks = [layer for convolution in convolutions for layer in (convolution, nn.ReLU(), nn.MaxPool2d(2))]
    net = nn.Sequential(*blocks, nn.Flatten(), linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2]).to(device)
    for parameter, start in zip(net.parameters(), initial(), strict=True):
        parameter.data.copy_(torch.tensor(start if start.ndim != 2 else start.T))
    optimiser = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    x, targets = (torch.tensor(array).to(device) for array in data())

    def step() -> torch.Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(x), targets)
        loss.backward()
        optimiser.step()
        return loss

    return step
