"""Who repairs Triton's interpreter, and who leaves Triton alone. One process has one mode: each has its own here."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from tilewise import interpreter

# What is callable in Triton's modules and in their classes, by name.
SNAPSHOT = """
import sys, triton, triton.language, triton.runtime.interpreter

def snapshot():
    found = {}
    for place, module in list(sys.modules.items()):
        if place.split(".")[0] == "triton":
            for name, value in list(vars(module).items()):
                found[f"{place}.{name}"] = value
                if isinstance(value, type) and value.__module__.startswith("triton"):
                    found |= {f"{place}.{name}.{inner}": part for inner, part in vars(value).items()}
    return {name: value for name, value in found.items() if callable(value)}

before = snapshot()

def changed():
    after = snapshot()
    return sorted(name for name, value in before.items() if after.get(name) is not value)
"""
CALLS = """
import torch, tilewise
x = torch.randn(1, 20, 2, 16, dtype=torch.bfloat16, requires_grad=True)
packed, offsets = torch.randn(20, 2, 16, requires_grad=True), torch.tensor([0, 20])
for backend in ("cpu", "reference"):
    tilewise.flash_attention(x, x, x, backend=backend).float().sum().backward()
    tilewise.hstu_attention(packed, packed, packed, offsets, max_seq_len=20, backend=backend).sum().backward()
    g = torch.rand(1, 20, 2)
    tilewise.native_sparse_attention(x.float(), x.float(), x.float(), g_cmp=g, g_slc=g, g_swa=g, backend=backend)
"""


def run(code: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""} | variables
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
def test_a_process_that_compiles_is_left_as_it_is():
    """Importing everything and calling the backends that need no GPU."""
    code = f"{SNAPSHOT}\n{CALLS}\nimport tilewise.cli, tilewise.pytest_plugin\nprint(changed())"
    assert run(code) == "[]"


def test_the_same_comparison_sees_the_repair():
    code = f"{SNAPSHOT}\nfrom tilewise import interpreter\ninterpreter.repair()\nprint(changed())"
    found = run(code, TRITON_INTERPRET="1")
    for name in ("language.sort", "interpreter._patch_lang", "GridExecutor.__call__", "core.dtype.__eq__"):
        assert name in found


def test_a_process_that_compiles_cannot_be_repaired():
    code = (
        f"{SNAPSHOT}\nfrom tilewise import interpreter\ntry: interpreter.repair()\n"
        "except RuntimeError as error: print(error, changed(), interpreter.interpreting())"
    )
    assert run(code).startswith("this process compiles kernels")
    assert run(code).endswith("[] False")


def test_a_variable_that_is_set_too_late_does_not_count():
    code = (
        "import os, triton; os.environ['TRITON_INTERPRET'] = '1'\nfrom tilewise import interpreter\n"
        "print(interpreter.interpreting())\n"
        "try: interpreter.use_where_no_gpu()\nexcept RuntimeError as error: print(error)"
    )
    assert run(code).startswith("False\ntriton is already imported")


def test_without_triton_nothing_is_chosen():
    code = (
        "import importlib.util, os; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "from tilewise import interpreter; print(interpreter.use_where_no_gpu(), 'TRITON_INTERPRET' in os.environ)"
    )
    assert run(code) == "False False"


A_CALL = "from tilewise.interpreter import use_where_no_gpu; use_where_no_gpu()"
COMMAND_LINE = """
from typer.testing import CliRunner
from tilewise import cli
CliRunner().invoke(cli.app, ["verify", "--list"])
"""
TRACE = """
from tilewise import trace
with trace.record(): pass
"""
MYTORCH = """
import mytorch
mytorch.Tensor.randn((2, 2), device=mytorch.Device.CUDA) + 1
"""
OPERATORS = """
import torch, tilewise
x = torch.randn(1, 4, 1, 16)
tilewise.flash_attention(x, x, x, backend="triton")
"""


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        pytest.param(OPERATORS, {"TRITON_INTERPRET": "1"}, id="operators"),
        pytest.param(A_CALL, {}, id="a-call", marks=pytest.mark.slow),
        pytest.param(COMMAND_LINE, {}, id="command-line", marks=pytest.mark.slow),
        pytest.param(TRACE, {"TRITON_INTERPRET": "1"}, id="trace", marks=pytest.mark.slow),
        pytest.param(MYTORCH, {"TRITON_INTERPRET": "1"}, id="mytorch", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_interprets_is_repaired(code, variables):
    ask = "from tilewise import interpreter; print(interpreter._repaired, interpreter.interpreting())"
    assert run(f"{code}\n{ask}", **variables) == "True True"


def test_threads_that_repair_at_once_repair_once():
    code = (
        "import threading\nfrom tilewise import interpreter\ncalls = []\n"
        "def repair_range():\n    calls.append(1)\n    __import__('time').sleep(0.2)\n"
        "interpreter._repair_range = repair_range\n"
        "threads = [threading.Thread(target=interpreter.repair) for _ in range(4)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "interpreter.repair(); print(len(calls))"
    )
    assert run(code, TRITON_INTERPRET="1") == "1"


def test_quiet_is_this_threads_alone():
    seen = []
    with np.errstate(all="warn"):
        with interpreter.quiet():
            assert set(np.geterr().values()) == {"ignore"}
            thread = threading.Thread(target=lambda: seen.append(np.geterr()))
            thread.start()
            thread.join()
        assert set(np.geterr().values()) == {"warn"}
    assert set(seen[0].values()) != {"ignore"}
