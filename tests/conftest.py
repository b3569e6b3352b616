"""Kernels run compiled where there is a GPU, interpreted elsewhere; fresh memory is poisoned with NaN everywhere."""

from tilewise import interpreter

interpreter.use_where_no_gpu()

import os  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a process for every core: threads of theirs would wait for each other, forty times as long as the work itself.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch fills fresh floating-point memory with NaN, so that a result left unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
