"""What anybody's function launches, compiled without a GPU."""

import os
from pathlib import Path

import pytest
from compiling import run_compiling

FUNCTIONS = ("tuned", "spilling", "descriptors", "differentiable", "looking", "refusing", "silent")


@pytest.mark.slow
def test_what_functions_launch(tmp_path, monkeypatch):
    """One process for all of it, for to start one takes longest."""
    monkeypatch.setitem(os.environ, "TRITON_CACHE_DIR", str(tmp_path))
    found = run_compiling(Path(__file__).with_name("compile_tiny.py"), *FUNCTIONS)

    # Every configuration of the autotuner, through the heuristics: 64 x 4 x 16 elements are a multiple of both blocks.
    assert [(row["name"], row["warps"], row["direction"]) for row in found["tuned"]] == [
        ("tiny_tuned_kernel", 1, "forward"),
        ("tiny_tuned_kernel (2)", 4, "forward"),
        ("tiny_tuned_kernel (3)", 8, "forward"),
    ]
    (row,) = found["spilling"]
    assert row["registers"] <= 24
    assert row["spill_stores"] > 0
    assert row["spill_loads"] > 0
    assert row["mix"]["local"] > 0
    assert row["mix"]["exp2"] >= 4096 // 32
    assert [row[name] for name in ("multiplies", "wgmma", "tma", "tcgen05")] == [False] * 4
    (row,) = found["descriptors"]
    assert row["multiplies"]
    assert row["wgmma"]
    assert not row["wgmma_serialised"]
    assert row["tma"]
    assert row["spill_stores"] == row["mix"]["local"] == 0
    assert row["mix"]["matrix"] >= 1
    assert row["mix"]["barriers"] >= 1
    assert "HGMMA" in row["sass"]
    assert [(row["name"], row["direction"], row["label"]) for row in found["differentiable"]] == [
        ("tiny_copy_kernel", "forward", "small"),
        ("tiny_copy_kernel", "backward", "small"),
    ]
    # On the CPU, where values are.
    assert [row["name"] for row in found["looking"]] == ["tiny_copy_kernel"]
    assert "q is not on a GPU" in found["refusing"]
    assert "let it take tensors of any device" in found["refusing"]
    assert "launches no Triton kernel" in found["silent"]
    # The second look is at the cache.
    assert found["compiled again"] == 0
    assert list(tmp_path.glob("tilewise-inspect/*.json"))
