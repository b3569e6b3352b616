"""`import tilewise` and the command line leave the choice of how Triton runs open."""

import subprocess
import sys

import pytest


def run(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    "module",
    ["tilewise", "tilewise.cli", "tilewise.workbench", "tilewise.interpreter", "tilewise.integrations.transformers"],
)
def test_importing_imports_neither_torch_nor_triton(module):
    assert run(f"import sys, {module}; print([m for m in ('torch', 'triton') if m in sys.modules])") == "[]"


def test_what_is_wrong_with_a_command_line_is_said_without_torch(tmp_path):
    """Help, typos, and files that are not there, not Python or new: importing torch takes seconds."""
    broken = tmp_path / "broken.py"
    broken.write_text("def attention(q, k, v:\n")
    lines = {
        "--help": "Usage",
        "verify --help": "Usage",
        "bench --help": "Usage",
        "verfy": "No such command",
        "verify flush": "did you mean flash?",
        "verify flash --config smal": "did you mean small?",
        "verify flash --impl nowhere.py:f": "there is no file nowhere.py",
        f"verify flash --impl {broken}:f": "does not import: SyntaxError",
        "bench flash --impl nowhere.py:f": "there is no file nowhere.py",
        "trace flash --impl nowhere.py:f": "there is no file nowhere.py",
        "inspect flash --impl nowhere.py:f": "there is no file nowhere.py",
        "new mine.txt": "ends in .py",
        f"new {tmp_path}/mine.py": "run next",
        "warmup flsh": "did you mean flash?",
    }
    code = (
        "import sys; from typer.testing import CliRunner; from tilewise import cli\n"
        f"for line, said in {lines!r}.items():\n"
        "    output = ' '.join(CliRunner().invoke(cli.app, line.split()).output.split())\n"
        "    print(said in output or (line, output))\n"
        "print('torch' in sys.modules)"
    )
    assert run(code).split("\n") == ["True"] * len(lines) + ["False"]


def test_public_names_load_when_named():
    assert (
        run("import sys, tilewise; f = tilewise.flash_attention; print(f.__name__, 'torch' in sys.modules)")
        == "flash_attention True"
    )
    assert "flash_attention" in run("import tilewise; print(dir(tilewise))")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'flush_attention'"):
        __import__("tilewise").flush_attention  # noqa: B018


def test_interpretation_is_chosen_before_triton_is_imported():
    code = (
        "import sys, torch; torch.cuda.is_available = lambda: False\nbefore = 'triton' in sys.modules\nfrom tilewise"
        " import interpreter; on = interpreter.use_where_no_gpu()\nfrom tilewise.ops._host.backend import interpreting;"
        " print(before, on, interpreter.interpreting(), interpreting())"
    )
    assert run(code) == "False True True True"


@pytest.mark.slow
def test_a_gpu_or_the_user_keeps_triton_compiling():
    code = (
        "import os, torch; torch.cuda.is_available = lambda: {gpu}\nfrom tilewise import interpreter;"
        " print(interpreter.use_where_no_gpu())"
    )
    assert run(code.format(gpu=True)) == "False"
    assert run(code.format(gpu=False), TRITON_INTERPRET="0") == "False"


@pytest.mark.slow
def test_too_late_is_said():
    code = (
        "import triton, torch; torch.cuda.is_available = lambda: False\n"
        "from tilewise import interpreter\n"
        "try: interpreter.use_where_no_gpu()\n"
        "except RuntimeError as error: print(error)"
    )
    assert "triton is already imported" in run(code)


@pytest.mark.slow
def test_importing_the_operators_sets_nothing():
    assert run("import os, tilewise; tilewise.flash_attention; print(os.environ.get('TRITON_INTERPRET'))") == "None"
