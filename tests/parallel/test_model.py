"""A model over several processes trains as it does in one; with FSDP2 and checkpoints too."""

import os
import subprocess
import sys

import pytest
import torch
from parallel import model_ranks
from processes import processes


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("world", "sharded"), [(2, False), (4, True)])
def test_its_gradients_are_those_of_one_process(world, sharded, checkpointed, sparse):
    (expected,) = processes().run(model_ranks.gradients, 1, False, False, sparse)
    for found in processes().run(model_ranks.gradients, world, sharded, checkpointed, sparse):
        assert found.keys() == expected.keys()
        for name, x in found.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--sparse"]], ids=["dense", "sparse"])
def test_the_example_has_one_curve_however_many_processes(options, tmp_path):
    def losses(*command):
        path = tmp_path / "losses"
        words = [sys.executable, *command, str(model_ranks.FILE), "--context", "160", "--losses", str(path), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
        result = subprocess.run(words, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stderr
        assert "nats a letter" in result.stdout
        return torch.tensor([float(line) for line in path.read_text().splitlines()], dtype=torch.float64)

    one = losses()
    two = losses("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert len(one) == 50
    assert one[-1] < 0.8 * one[0]
    torch.testing.assert_close(two, one, rtol=1e-4, atol=0.0)
