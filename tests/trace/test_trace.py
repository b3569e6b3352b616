"""trace finds nothing where nothing is wrong, and of each planted bug the right value in the right block."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli
from tilewise.trace import block_flash_attention, record

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
PLANTED = Path(__file__).parent / "planted.py"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are recorded interpreted")


def invoke(tmp_path, *words):
    return CliRunner().invoke(cli.app, ["trace", "flash", "--out", str(tmp_path), *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--block-m", "32", "--block-n", "32"],
        ["--block-m", "32", "--block-n", "32", "--causal", "--dtype", "fp32", "--program", "1"],
        ["--block-m", "32", "--block-n", "64", "--causal", "--dtype", "fp16", "--head", "1"],
        ["--block-m", "16", "--block-n", "64", "--seq-blocks", "3", "-r"],
        ["--block-m", "32", "--block-n", "32", "--direction", "backward"],
        ["--block-m", "32", "--block-n", "16", "--direction", "backward", "--causal", "--dtype", "fp32", "-r"],
        [
            "--block-m",
            "16",
            "--block-n",
            "32",
            "--direction",
            "backward",
            "--causal",
            "--program",
            "1",
            "--seq-blocks",
            "3",
        ],
        ["--block-m", "40", "--impl", f"{EXAMPLES / 'triton_kernel.py'}:fixed"],
        [
            "--block-m",
            "32",
            "--impl",
            f"{EXAMPLES / 'triton_kernel.py'}:fixed",
            "--causal",
            "--dtype",
            "fp32",
            "--names",
            "S=b_s,P=b_p",
        ],
    ],
    ids=" ".join,
)
def test_a_right_kernel_agrees(tmp_path, words):
    outcome = invoke(tmp_path, *words)
    assert outcome.exit_code == 0, outcome.output
    assert "agree" in outcome.output


def test_the_head_and_program_asked_for_are_traced(tmp_path):
    words = ["--block-m", "32", "--block-n", "32", "--direction", "backward"]
    head = invoke(tmp_path, *words, "--head", "1")
    assert head.exit_code == 0, head.output
    assert "flash_bwd_dq_kernel, program 2, head 1, rows 0 to 31" in head.output
    assert "flash_bwd_dkdv_kernel, program 0, KV head 0, keys 0 to 31" in head.output
    # There is one key head: its programs come round again.
    last = invoke(tmp_path, *words, "--program", "3")
    assert last.exit_code == 0, last.output
    assert "flash_bwd_dq_kernel, program 3, head 1, rows 32 to 63" in last.output
    assert "flash_bwd_dkdv_kernel, program 1, KV head 0, keys 32 to 63" in last.output


# (what, module, old, new, options) -> what the first line must say, and what must follow from it
BUGS = {
    "scale": (
        "flash.kernels.fwd",
        "m, l, scales.scale_log2, MASKED",
        "m, l, 1.4426950408889634, MASKED",
        [],
        "block 0, M",
        "8 times",
    ),
    "mask": (
        "_device.scores",
        "<= o_m + (off + right)",
        "<= o_m + (off + right + 1)",
        ["--causal"],
        "block 1, S",
        "the mask: row 0 sees key 1",
    ),
    "max": (
        "_device.scores",
        "tl.maximum(m, tl.max(b_s, 1) * scale_log2)",
        "tl.max(b_s, 1) * scale_log2",
        [],
        "block 1, M",
        "running maximum is not kept",
    ),
    "rescale of O": (
        "flash.kernels.fwd",
        "acc_scaled = acc * rescale[:, None]",
        "acc_scaled = acc",
        [],
        "block 1, O_scale",
        "the rescale of O is missing",
    ),
    "rescale of L": (
        "_device.scores",
        "l_new = l * rescale +",
        "l_new = l +",
        [],
        "block 1, L",
        "without the rescale",
    ),
    "sum": ("_device.scores", "tl.sum(b_p, 1)", "tl.max(b_p, 1)", [], "block 0, L", "the running sum"),
    "tail mask": (
        "_device.scores",
        "m_keep = o_n < n_keys",
        "m_keep = o_n >= 0",
        ["--block-n", "128"],
        "block 0, S",
        "the mask: row 0 sees key 64",
    ),
    "V index": (
        "flash.kernels.fwd",
        "load_rows(v_rows, i_n,",
        "load_rows(v_rows, i_n + 1,",
        [],
        "block 0, V",
        "shifted by -1 row",
    ),
    "LSE": ("_device.scores", "(m + tl.log2(l)) * 0.6931471805599453", "m + tl.log2(l)", [], "LSE", "1.443 times"),
    "delta": (
        "_device.scores",
        "b_delta = tl.sum(b_o * b_do, 1)",
        "b_delta = tl.sum(b_o, 1)",
        ["--direction", "backward"],
        "delta",
        "rowsum",
    ),
    "dS": (
        "_device.scores",
        "b_ds = b_p * (b_dp - b_delta)",
        "b_ds = b_p * b_dp",
        ["--direction", "backward"],
        "block 0, dS",
        "delta is not subtracted",
    ),
    "dQ scale": (
        "flash.kernels.bwd",
        "acc_dq * scales.scale",
        "acc_dq",
        ["--direction", "backward"],
        "dQ_final",
        "8 times",
    ),
    "dK and dV": (
        "flash.kernels.bwd",
        "i_n, acc_dk * scales.scale, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D) store_rows(dv_rows, i_n, acc_dv,",
        "i_n, acc_dv, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D)\n    store_rows(dv_rows, i_n, acc_dk * scales.scale,",
        ["--direction", "backward"],
        "dK_final",
        "exchanged",
    ),
}


# Each takes seconds.
QUICK = ("dS",)


@pytest.mark.parametrize("bug", [bug if bug in QUICK else pytest.param(bug, marks=pytest.mark.slow) for bug in BUGS])
def test_each_planted_bug_is_found_where_it_is(tmp_path, bug):
    module, old, new, options, place, follows = BUGS[bug]
    words = ["--block-m", "32", "--block-n", "32", "--out", str(tmp_path), *options]
    command = [sys.executable, str(PLANTED), module, old, new, "flash", *words]
    outcome = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
    )
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    firsts = re.findall(r"first mismatch: (.*)\[", outcome.stdout)
    assert place in firsts, outcome.stdout
    assert follows in outcome.stdout, outcome.stdout


def test_a_users_kernel_with_an_unmasked_tail(tmp_path):
    outcome = invoke(
        tmp_path, "--block-m", "40", "--impl", f"{EXAMPLES / 'triton_kernel.py'}:broken", "--dtype", "fp32"
    )
    assert outcome.exit_code == 1
    assert "first mismatch: block 2" in outcome.output
    # Its scores past the last key are shown as they were recorded.
    values = np.load(next(tmp_path.rglob("trace.npz")))
    (kernel,) = (values[name] for name in values if name.startswith("kernel/") and name.endswith("/S_2"))
    (simulation,) = (values[name] for name in values if name.startswith("simulation/") and name.endswith("/S_2"))
    assert np.isneginf(simulation).any()
    assert np.isfinite(kernel).all()
    against = invoke(
        tmp_path,
        "--block-m",
        "40",
        "--impl",
        f"{EXAMPLES / 'triton_kernel.py'}:broken",
        "--against",
        f"{EXAMPLES / 'triton_kernel.py'}:fixed",
    )
    assert against.exit_code == 1
    same = invoke(
        tmp_path,
        "--block-m",
        "40",
        "--impl",
        f"{EXAMPLES / 'triton_kernel.py'}:fixed",
        "--against",
        f"{EXAMPLES / 'triton_kernel.py'}:fixed",
    )
    assert same.exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--direction", "sideways"], "expected forward or backward"),
        (["--dtype", "fp8"], "expected one of fp32, fp16, bf16"),
        (["--block-m", "20"], "expected a power of two"),
        (["--kernel-index", "999"], "there is no configuration 999"),
        (["--program", "99"], "expected --head and --program below that"),
        (["--program", "2", "--head", "1"], "together below 4"),
        (["--warp", "4"], "there is no warp 4"),
        (["--names", "S"], "expected NAME=VARIABLE pairs"),
        (["--order", "lists"], "--order means nothing to flash"),
        (["--impl", f"{EXAMPLES / 'triton_kernel.py'}:fixed", "--names", "S=nope"], "seen were .*b_s.*m_new"),
        (
            ["--impl", f"{EXAMPLES / 'triton_kernel.py'}:fixed", "--names", "X=b_s"],
            "there is no value 'X': expected some of Q, K, S",
        ),
        (["--impl", f"{EXAMPLES / 'flash_implementations.py'}:correct"], "no Triton kernel was launched"),
    ],
)
def test_wrong_usage_exits_with_2(tmp_path, words, message):
    outcome = invoke(tmp_path, *words)
    assert outcome.exit_code == 2
    assert re.search(message, " ".join(outcome.output.split()))


def test_the_files_line_up_and_hold_everything(tmp_path):
    assert invoke(tmp_path, "--block-m", "32", "--block-n", "32", "--warp", "1", "--causal").exit_code == 0
    simulation, kernel = ((tmp_path / name).read_text().splitlines() for name in ("debug_pt.txt", "debug_kernel.txt"))
    headings = [line for line in simulation if line.startswith(("==", "--", "####"))]
    assert headings == [line for line in kernel if line.startswith(("==", "--", "####"))]
    assert len(simulation) == len(kernel)
    names = [line.split()[1] for line in headings if line.startswith("==")]
    assert names[:5] == ["Q", "K_0", "S_pre_scaling_0", "S_0", "M_0"]
    assert names[-4:] == ["O_final", "LSE", "O_full", "O_ref"]
    # A warp of four owns 8 of 32 rows.
    assert "== P_0 [8, 32]" in simulation
    arrays = np.load(tmp_path / "trace.npz")
    assert any(key.startswith("kernel/") and key.endswith("/O_1") for key in arrays)
    full, final = (
        next(arrays[key] for key in arrays if key.startswith("simulation/") and key.endswith(end))
        for end in ("/O_full", "/O_final")
    )
    np.testing.assert_allclose(full, final, atol=2e-2)


def test_by_range_two_runs_give_identical_files(tmp_path):
    texts = []
    for number in range(2):
        folder = tmp_path / str(number)
        assert invoke(folder, "--block-m", "32", "--block-n", "32", "-r").exit_code == 0
        texts.append([(folder / name).read_bytes() for name in ("debug_pt.txt", "debug_kernel.txt", "trace.npz")])
    assert texts[0] == texts[1]


def test_an_operator_that_is_not_traced(tmp_path):
    outcome = CliRunner().invoke(cli.app, ["trace", "flush", "--out", str(tmp_path)])
    assert outcome.exit_code == 2
    assert "expected one of flash, flash-hopper, flash-decode, nsa-compressed, nsa-selected" in " ".join(
        outcome.output.split()
    )
    outcome = CliRunner().invoke(cli.app, ["trace", "nsa", "--out", str(tmp_path)])
    assert outcome.exit_code == 2
    assert "there is no trace of 'nsa': its branches are traced one at a time" in " ".join(outcome.output.split())


def test_block_flash_attention(tmp_path):
    q, k, v = (torch.randn(50, 16, dtype=torch.float64) for _ in range(3))
    truth = torch.softmax(q @ k.T / 4, -1) @ v
    for fused in (True, False):
        for reverse in (True, False):
            o = block_flash_attention(
                q, k, v, 16, 32, out=tmp_path / "values.txt", warp=2, fused_softmax=fused, reverse=reverse
            )
            torch.testing.assert_close(o, truth, rtol=0, atol=1e-10)
    text = (tmp_path / "values.txt").read_text()
    assert text.count("####") == 4
    assert "== M_1 [4]" in text
    with pytest.raises(ValueError, match="expected one head"):
        block_flash_attention(q[None], k, v, 16, 16)
    with pytest.raises(ValueError, match="owns no whole rows"):
        block_flash_attention(q, k, v, 16, 16, warp=5, out=tmp_path / "values.txt")


def test_recording_changes_nothing_and_ends():
    from tilewise import flash_attention

    q = torch.randn(1, 20, 1, 16)
    plain = flash_attention(q, q, q, backend="triton")
    with record(0) as recording:
        recorded = flash_attention(q, q, q, backend="triton")
    count = len(recording.events)
    assert torch.equal(plain, recorded)
    assert recording.kernels == ["flash_fwd_kernel"]
    assert {"b_s", "m_new", "acc"} <= {event.name for event in recording.events}
    flash_attention(q, q, q, backend="triton")
    assert len(recording.events) == count


def test_a_recording_is_this_threads_alone():
    """Another thread's launches are neither recorded nor lost, and recordings of two threads may overlap."""
    from tilewise import flash_attention

    q = torch.randn(1, 20, 1, 16)
    plain = flash_attention(q, q, q, backend="triton")
    entered, left = threading.Event(), threading.Event()
    results, found = [], []

    def other():
        results.append(flash_attention(q, q, q, backend="triton"))
        with record(0) as recording:
            entered.set()
            assert left.wait(60)
            results.append(flash_attention(q, q, q, backend="triton"))
        found.append(recording)

    with record(0) as mine:
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60)
        assert mine.events == []
        results.append(flash_attention(q, q, q, backend="triton"))
    left.set()
    thread.join()
    assert all(torch.equal(result, plain) for result in results)
    assert mine.kernels == found[0].kernels == ["flash_fwd_kernel"]
    assert len(mine.events) == len(found[0].events) > 0


def test_each_kernel_has_the_program_that_is_asked_for():
    from tilewise import flash_attention

    q = torch.randn(1, 20, 2, 16, requires_grad=True)
    with record({"flash_bwd_dkdv_kernel": 1, "flash_bwd_dq_kernel": 0}) as recording:
        flash_attention(q, q, q, backend="triton").sum().backward()
    assert {recording.kernels[event.launch] for event in recording.events} == {
        "flash_bwd_dkdv_kernel",
        "flash_bwd_dq_kernel",
    }
    # One tile a head: the program is the head.
    keys, queries = (
        next(e.value for e in recording.of_kernel(f"flash_bwd_{name}_kernel") if e.name == "i_h")
        for name in ("dkdv", "dq")
    )
    assert (int(keys), int(queries)) == (1, 0)
