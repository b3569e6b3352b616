"""The audit passes our kernels at sizes that no machine holds, and catches offsets that do not fit 32 bits."""

import dataclasses
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import audit_kernels
import numpy as np
import pytest
import torch
from audit_kernels import copy_rows_kernel, cut_kernel
from rich.console import Console
from typer.testing import CliRunner

from tilewise import cli, workbench
from tilewise.inspect import audit
from tilewise.inspect.audit import faults, limits
from tilewise.inspect.audit_memory import has_values
from tilewise.ops._host.launching import Launch, descriptor, fits_descriptor
from tilewise.ops.bsa.selected import launch as bsa
from tilewise.verify.suite import Mutant
from tilewise.workbench.operator import UsageError

pytestmark = pytest.mark.skipif(
    "__import__('torch').cuda.is_available()", reason="kernels of this process are compiled, not interpreted"
)

ROWS, STRIDE = 10_000_019, 1 << 20


COPY, CUT = "tl.store(y + o_r", "i = tl.load(x).to(tl.int32)"


def place(piece):
    """File and line of a piece of the kernels' source, as a fault begins with it."""
    lines = Path(audit_kernels.__file__).read_text(encoding="utf-8").splitlines()
    return f"audit_kernels.py:{next(number for number, line in enumerate(lines, 1) if piece in line)}: "


def copy_rows(**changes):
    x, y = torch.empty_strided((ROWS, 1), (STRIDE, 1), device="meta"), torch.empty(ROWS, device="meta")
    return Launch(
        copy_rows_kernel,
        3,
        {"x": x, "y": y, "n_rows": ROWS, "stride": STRIDE, "WIDE": True, "PAST": 0, "BLOCK": 64} | changes,
    )


def test_a_kernel_with_wide_offsets_passes():
    assert faults(copy_rows(), {}) == []


def test_a_product_that_does_not_fit_is_said_with_its_line():
    (fault, *_) = faults(copy_rows(WIDE=False), {})
    assert fault.startswith(f"{place(COPY)}int32 overflows: mul gives ")


def test_an_access_past_the_end_is_said_once_for_its_line():
    (fault,) = faults(copy_rows(PAST=2), {})
    assert fault == f"{place(COPY)}reads element {ROWS * STRIDE:,} of x, which has {(ROWS - 1) * STRIDE + 1:,}"


def test_an_access_before_the_start_is_said():
    launch = copy_rows(stride=-STRIDE)
    assert f"reads element {-STRIDE:,} of x" in faults(launch, {})[0]


def test_a_number_that_is_cut_is_said_and_a_sum_that_may_wrap_is_not():
    x, y = torch.tensor([2**40]), torch.empty(1, dtype=torch.int32, device="meta")
    (fault,) = faults(Launch(cut_kernel, 1, {"x": x, "y": y, "number": 2**31 - 1}), {})
    assert fault == f"{place(CUT)}int64 is cut to int32: {2**40:,} does not fit"
    assert faults(Launch(cut_kernel, 1, {"x": x - 2**40, "y": y, "number": 2**31 - 1}), {}) == []


def test_tables_are_read_where_a_tensor_has_no_values():
    x, y = torch.empty(1, dtype=torch.int64, device="meta"), torch.empty(1, dtype=torch.int32, device="meta")
    (fault,) = faults(
        Launch(cut_kernel, 1, {"x": x, "y": y, "number": 1}), {"x": lambda elements: np.full(elements.shape, 2**33)}
    )
    assert f"{2**33:,} does not fit" in fault


def test_a_launch_can_run_where_all_its_tensors_have_values():
    held, virtual = torch.zeros(3), torch.empty(3, device="meta")
    assert has_values([1, None, held, (held, (held, 2))])
    assert not has_values([held, (1, (held, virtual))])


def test_a_kernel_that_cannot_be_interpreted_is_a_fault():
    (fault,) = faults(Launch(cut_kernel, 1, {"x": None, "y": None, "number": 1}), {})
    assert fault.startswith("the kernel cannot be interpreted to its end: ")


def test_nothing_stays_changed_afterwards():
    faults(copy_rows(), {})
    assert "range" not in vars(audit_kernels)
    x, y = torch.arange(5.0), torch.empty(5)
    copy_rows_kernel[(1,)](x, y, 5, 1, WIDE=False, PAST=0, BLOCK=4)
    assert torch.equal(x, y)


def test_descriptors_are_not_made_of_strides_beyond_what_they_take():
    def strided(stride):
        return torch.empty_strided((1, 4, 2, 64), (stride, 128, 64, 1), dtype=torch.bfloat16, device="meta")

    assert fits_descriptor(strided(2**38))
    assert not fits_descriptor(strided(2**39))


def test_block_sparse_attention_refuses_more_blocks_than_its_index_can_number():
    x = torch.empty(1, ROWS, 2, 64, dtype=torch.bfloat16, device="meta")
    indices = torch.empty(1, ROWS, 2, 4, dtype=torch.int32, device="meta")
    assert bsa.make_inputs(x, x, x, indices, None, 16, 0.1).named.block_size == 16
    with pytest.raises(
        ValueError, match="block_size is 1 and there are 10000019 tokens: more blocks than the index can number"
    ):
        bsa.make_inputs(x, x, x, indices, None, 1, 0.1)


def run(*arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_limits_of_grids_and_descriptors():
    x = torch.empty_strided((1, 4, 2, 64), (2**39, 128, 64, 1), dtype=torch.bfloat16, device="meta")
    assert limits(Launch(None, 2**31 - 1, {"q": x, "n": 2**40})) == []
    assert "a grid of 2,147,483,648 programs" in limits(Launch(None, 2**31, {}))[0]
    assert (
        "a descriptor of q with a stride of 1,099,511,627,776 bytes"
        in limits(Launch(None, 1, {"q": descriptor(x, 16, 64)}))[0]
    )


def test_every_operator_has_an_audit():
    assert workbench.names("audit") == workbench.names("suite")
    with pytest.raises(UsageError, match="there is no operator 'flush': did you mean flash\\? expected one of flash"):
        audit.audit(["flush"])


@pytest.mark.parametrize(
    ("words", "message"),
    [(["flush"], "there is no operator 'flush'"), (["flash", "--sass"], "it takes no other option")],
)
def test_wrong_usage_of_the_command(words, message):
    outcome = CliRunner().invoke(cli.app, ["inspect", *words, "--audit"])
    assert outcome.exit_code == 2
    assert message in outcome.output


@pytest.mark.parametrize(("wrong", "code"), [((), 0), (("x.py:1: int32 overflows",), 1)])
def test_the_command_audits_and_says_by_its_exit_code_what_came_of_it(monkeypatch, wrong, code):
    asked = []
    monkeypatch.setattr(
        audit, "audit", lambda names: asked.extend(names) or [audit.AuditResult(names[0], "kernel", "many", 3, wrong)]
    )
    assert CliRunner().invoke(cli.app, ["inspect", "flash", "--audit"]).exit_code == code
    assert CliRunner().invoke(cli.app, ["inspect", "--audit"]).exit_code == code
    assert asked == ["flash", *workbench.names("audit")]


def planted(part, module, old, new):
    return run(str(Path(__file__).parent / "audit_planted.py"), f"tilewise.workbench.{part}", module, old, new)


# The part under tilewise.workbench, the module under tilewise.ops, and what loses its 64 bits.
PLANTED = [
    (
        "nsa.inspect:audit_combine",
        "nsa.kernels",
        "tl.program_id(0).to(tl.int64) * BLOCK_R",
        "tl.program_id(0) * BLOCK_R",
    ),
    ("flash.inspect:audit_cases", "_device.rows", "tl.cast(i_row, tl.int64) * strides.token", "i_row * strides.token"),
    (
        "hstu.inspect:audit_cases",
        "_device.rows",
        "tl.cast(rows.start, tl.int64) * strides.token",
        "rows.start * strides.token",
    ),
    (
        "nsa.inspect:audit_compressed",
        "nsa.compress.kernels",
        "(start + o_c * STRIDE).to(tl.int64)[:, None]",
        "(start + o_c * STRIDE)[:, None]",
    ),
    (
        "nsa.inspect:audit_choose",
        "nsa.choose.kernels",
        "(start + o_t).to(tl.int64) * n_heads_k",
        "(start + o_t) * n_heads_k",
    ),
    ("nsa.inspect:audit_selected", "_device.blocks", "tl.cast(i_t, tl.int64) * tensor.strides", "i_t * tensor.strides"),
    ("nsa.inspect:audit_attend", "_device.blocks", "(start + o_t).to(tl.int64) * n_heads", "(start + o_t) * n_heads"),
    (
        "flash.decode.inspect:audit_cases",
        "flash.decode.kernels",
        "(keys.rows.start + tl.cast(i_n, tl.int64)) * strides.token",
        "(keys.rows.start + i_n) * strides.token",
    ),
    (
        "flash.decode.inspect:audit_cases",
        "flash.decode.kernels",
        "o_page = o_b o_row = o_n",
        "o_page = o_b\n    o_row = o_n.to(tl.int32)",
    ),
    ("bsa.inspect:audit_cases", "bsa.combine.kernels", "o_r.to(tl.int64)[:, None] * SHAPE.H", "o_r[:, None] * SHAPE.H"),
]


def test_every_narrow_offset_can_be_planted():
    for _, module, old, new in PLANTED:
        source = importlib.util.find_spec(f"tilewise.ops.{module}").origin
        Mutant("", "", module, old, new).plant(Path(source).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_planted_narrow_offset_is_caught():
    assert any("int32 overflows" in fault for fault in planted(*PLANTED[0]))


# The last one of each operator is slow, all are nightly.
LAST = {case[0].split(".")[0]: i for i, case in enumerate(PLANTED)}.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case[0], marks=[] if i in LAST else [pytest.mark.nightly])
        for i, case in enumerate(PLANTED)
        if i
    ],
)
def test_planted_narrow_offsets_are_caught(case):
    assert any("int32" in fault for fault in planted(*case))


@pytest.mark.slow
def test_one_part_passes(monkeypatch):
    nsa = dataclasses.replace(workbench.find("nsa"), audit=("tilewise.workbench.nsa.inspect:audit_combine",))
    monkeypatch.setattr(workbench, "find", lambda _name, _part: nsa)
    results = audit.audit(["nsa"])
    assert {result.kernel for result in results} == {"nsa_combine_fwd_kernel", "nsa_combine_bwd_kernel"}
    out = io.StringIO()
    assert audit.print_audit(results, Console(file=out, width=200))
    assert "PASS: all 2 launches" in out.getvalue()
    wrong = audit.AuditResult("nsa", "kernel", "many [tokens]", 3, ("x.py:1: int32 overflows",))
    assert not audit.print_audit([*results, wrong], Console(file=out, width=200))
    assert "many [tokens]; 3 programs" in out.getvalue()
    assert "FAIL: 1 of 3 launches" in out.getvalue()


@pytest.mark.slow
def test_every_operator_passes():
    wrong = [result for result in audit.audit(workbench.names("audit")) if not result.passed]
    assert not wrong, wrong


def test_a_worker_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 1, "", "ValueError: no memory")
    )
    with pytest.raises(
        RuntimeError, match=r"flash.inspect:audit_cases did not end well \(exit code 1\): ValueError: no memory"
    ):
        audit.audit(["flash"])
