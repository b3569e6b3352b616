"""The plugin in a project of its own."""

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

IMPLEMENTATION = """
    import pytest, torch
    from tilewise.ops.flash.reference import flash_attention

    def right(q, k, v, *, return_lse=False, **options):
        return flash_attention(q, k, v, **options)

    def wrong(q, k, v, *, return_lse=False, causal=False, **options):
        return flash_attention(q, k, v, **options)
"""


@pytest.fixture
def project(pytester):
    # Installed, pytest finds the plugin by itself; from a bare checkout it is named.
    pytester.makeini("[pytest]\n")
    return pytester


def run(project, *arguments):
    from importlib.metadata import entry_points

    installed = any(point.name == "tilewise" for point in entry_points(group="pytest11"))
    return project.runpytest_subprocess(
        "-p", "no:cacheprovider", *([] if installed else ["-p", "tilewise.pytest_plugin"]), *arguments
    )


@pytest.mark.slow
def test_one_test_a_case_and_dtype(project):
    project.makepyfile(
        IMPLEMENTATION
        + """
    @pytest.mark.tilewise("flash", configs=["small", "T=9,causal=true"], dtypes=["fp32", "bf16"])
    def test_right(tilewise_check):
        tilewise_check(right)

    @pytest.mark.tilewise("flash", configs=["small", "T=9,causal=true"], dtypes=["fp32"], gradients=False)
    def test_wrong(tilewise_check):
        tilewise_check(wrong)
    """
    )
    result = run(project, "-v")
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["*test_right?small-bf16? PASSED*", "*test_wrong?T=9,causal=true-fp32? FAILED*"])
    result.stdout.fnmatch_lines(["*✗ flash T=9,causal=true*wrong values*", "*✗ o *max_diff*", "*worst at*"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("", "mark it with @pytest.mark.tilewise"),
        ('@pytest.mark.tilewise("flush")', "there is no operator 'flush'"),
        ('@pytest.mark.tilewise("flash", configs=["smal"])', "there is no case 'smal'"),
        ('@pytest.mark.tilewise("flash", sed=1)', "sed"),
    ],
)
def test_wrong_usage_is_said(project, marker, message):
    project.makepyfile(f"import pytest\n{marker}\ndef test_it(tilewise_check): pass")
    result = run(project)
    assert result.ret != 0
    assert message in result.stdout.str() + result.stderr.str()


@pytest.mark.slow
def test_interpretation_is_chosen_before_a_conftest_imports_triton(project):
    project.makeini("[pytest]\ntilewise_interpret = true\n")
    project.makeconftest("import os; SEEN = os.environ.get('TRITON_INTERPRET'); import triton")
    project.makepyfile("import conftest\ndef test_it(): assert conftest.SEEN == '1'")
    run(project).assert_outcomes(passed=1)


@pytest.mark.slow
def test_kernels_that_no_operator_has_a_part_in_are_interpreted_right(project, monkeypatch):
    """As Triton comes, bf16 is wrong; the project's tests need not import anything of tilewise."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    project.makeini("[pytest]\ntilewise_interpret = true\n")
    project.makepyfile(
        """
        import torch, triton, triton.language as tl

        @triton.jit
        def double_kernel(x, out, SIZE: tl.constexpr):
            o = tl.arange(0, SIZE)
            b = tl.load(x + o)
            tl.store(out + o, b + b)

        def test_it():
            x = torch.randn(16).bfloat16()
            out = torch.empty_like(x)
            double_kernel[(1,)](x, out, SIZE=16)
            assert torch.equal(out, x + x)
        """
    )
    run(project).assert_outcomes(passed=1)


def test_without_the_setting_nothing_is_chosen(project, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    project.makepyfile("import os\ndef test_it(): assert 'TRITON_INTERPRET' not in os.environ")
    run(project).assert_outcomes(passed=1)


def test_importing_the_plugin_imports_neither_torch_nor_triton():
    code = "import sys, tilewise.pytest_plugin; print([m for m in ('torch', 'triton') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
