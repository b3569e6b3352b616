"""The folder for the Hugging Face Hub: what `make hub` makes of it, loaded by `kernels`."""

import os
import re
import shutil
import subprocess
import sys

import hub_kernel
import pytest
import torch

from tilewise import compat

pytestmark = pytest.mark.transformers
kernels = pytest.importorskip("kernels", reason="kernels is not installed: make test-hub")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy, filled."""
    copy = tmp_path_factory.mktemp("hub") / "hub"
    filled = shutil.ignore_patterns("build", "ops", "compat.py", "__pycache__")
    shutil.copytree(hub_kernel.HUB, copy, ignore=filled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_kernel, "HUB", copy)
        # Twice, as after a change.
        hub_kernel.main()
        hub_kernel.main()
    return copy


ALONE = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tilewise":
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, NotInstalled())
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests"]))
"""


def test_its_own_tests_pass_where_tilewise_is_not_installed(folder):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_nothing_else_of_tilewise_is_imported(folder):
    """But for type checkers, and where Triton interprets kernels."""
    code = "\n".join(path.read_text() for path in (folder / "build").rglob("*.py"))
    assert set(re.findall(r"(?m)^\s*((?:from|import) tilewise\b.*)$", code)) == {
        "from tilewise import interpreter",
        "from tilewise.parallel import ContextPlan",
    }


def test_next_to_tilewise(folder):
    """Each has its own operators, and computes the same bits."""
    kernel = kernels.get_local_kernel(folder)
    assert set(compat.__all__) < set(kernel.__all__)
    q, k, v = torch.randn(3, 1, 50, 2, 16)
    assert torch.equal(kernel.flash_attn_func(q, k, v), compat.flash_attn_func(q, k, v))
    names = [getattr(torch.ops, name).flash_forward.default.name() for name in ("tilewise", kernel.__name__)]
    assert names == ["tilewise::flash_forward", f"{kernel.__name__}::flash_forward"]
    assert kernel.__name__.startswith("_tilewise_")


def test_its_files_are_those_of_its_digest(folder):
    rust = pytest.importorskip("kernels._rust", reason="this kernels reads no digests")
    assert rust.Build.open(folder)
    for variant in sorted((folder / "build").iterdir()):
        for cache in list(variant.rglob("__pycache__")):
            shutil.rmtree(cache)
        digest = rust.Metadata.read_from_file(variant / "metadata.json").digest
        digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))


@pytest.mark.parametrize("model", ["llama", "gemma2", "gpt-oss"])
def test_transformers_takes_it_by_its_name(model, folder, monkeypatch):
    """With its own handling of padding, training and generating; softcap, windows and sinks."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-hub")
    if not transformers.utils.is_kernels_available():
        pytest.skip("this transformers takes other versions of kernels")
    from tiny_models import failures, generated

    monkeypatch.setenv("LOCAL_KERNELS", f"tilewise/tilewise={folder}")
    assert failures(model, "left", implementation="tilewise/tilewise") == []
    assert generated(model, "tilewise/tilewise").tolist() == generated(model, "eager").tolist()
