"""What functions along an axis, places and prints refuse and say; their numbers are in test_against_h200.py."""

import pytest
import torch

pytest.importorskip("triton")

from gluon_language_kernels import arrange_kernel, refused_kernel, talks_kernel

from tilewise import flash_attention, interpreter
from tilewise._gluon.faults import KernelFaultError

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("gather", "out of bounds: gather takes places from 0 to 127: got 1 to 128"),
        ("histogram", "out of bounds: a histogram of 64 bins: got 0 to 127"),
        ("split", "shapes differ: split takes a last axis of 2: got [128]"),
        ("layouts", "layouts differ: operands have different layouts"),
        ("combines", "dtypes differ: a function combines"),
        ("condition", "condition: a tile of [128] where one number is needed"),
        ("fp8", "not simulated: arithmetic in 8 bits"),
        ("bits", "dtypes differ: the bits of torch.int32 as torch.float16"),
        ("indices", "not simulated: a reduction with return_indices"),
        ("layout", "layouts differ: set_auto_layout of a tile in"),
    ],
)
def test_what_a_kernel_may_not_do(how, says):
    with pytest.raises(KernelFaultError) as raised:
        refused_kernel[(1,)](torch.zeros(128, dtype=torch.int32), how)
    assert str(raised.value).startswith(says)
    assert raised.value.lines[-1][0].function == "refused_kernel"


def test_prints(capsys):
    talks_kernel[(2,)](torch.tensor([3], dtype=torch.int32))
    assert capsys.readouterr().out.splitlines() == ["of 4", "pid (0, 0, 0) found: 3", "pid (1, 0, 0) found: 3"]


def test_the_language_is_itself_after_other_kernels_have_run():
    """Triton's interpreter leaves functions of its own in the language's place."""
    x = torch.ones(1, 1, 1, 16)
    flash_attention(x, x, x, backend="triton")
    found = torch.zeros(128, dtype=torch.int32)
    arrange_kernel[(1,)](torch.arange(128, dtype=torch.int32), found, "ravel")
    assert torch.equal(found, torch.arange(128, dtype=torch.int32))
