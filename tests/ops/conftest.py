"""What the tests of several operators share."""

import pytest
import torch


@pytest.fixture(params=[pytest.param("triton", marks=pytest.mark.gpu), "cpu"])
def place(request, device):
    """A backend and a device that it runs on."""
    return request.param, device if request.param == "triton" else torch.device("cpu")
