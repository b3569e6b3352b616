"""Device code reads by names: few parameters, short unpackings, and no field of a record reached by its number."""

import ast
from pathlib import Path

import pytest

OPS = Path(__file__).parents[1] / "src" / "tilewise" / "ops"
MOST_PARAMETERS = 20
MOST_UNPACKED = 6


def jitted(tree):
    """Functions that a decorator called jit, with arguments or without, compiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = [x.func if isinstance(x, ast.Call) else x for x in node.decorator_list]
            if any(isinstance(x, ast.Attribute) and x.attr == "jit" for x in decorators):
                yield node


def faults(function):
    """What is wrong with one function, in words."""
    arguments = function.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    if count > MOST_PARAMETERS:
        yield f"{function.name} takes {count} parameters"
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Tuple | ast.List)
            and isinstance(node.ctx, ast.Store)
            and len(node.elts) > MOST_UNPACKED
        ):
            yield f"{function.name}, line {node.lineno}: unpacks {len(node.elts)} by position"
        if isinstance(node, ast.Subscript) and is_number(node.slice) and not is_shape(node.value):
            yield f"{function.name}, line {node.lineno}: {ast.unparse(node)}"


def is_number(node):
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def is_shape(node):
    return isinstance(node, ast.Attribute) and node.attr == "shape"


FUNCTIONS = {
    str(path.relative_to(OPS)): found
    for path in sorted(OPS.rglob("*.py"))
    if (found := list(jitted(ast.parse(path.read_text()))))
}


def test_there_is_device_code():
    assert len(FUNCTIONS) >= 20
    assert sum(map(len, FUNCTIONS.values())) >= 100


def test_device_code_reads_by_names():
    found = {file: [fault for one in functions for fault in faults(one)] for file, functions in FUNCTIONS.items()}
    assert {file: some for file, some in found.items() if some} == {}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("x = rows[5]", "rows[5]"),
        ("x = rows[-1]", "rows[-1]"),
        ("x = rows.strides[0]", "rows.strides[0]"),
        ("a, b, c, d, e, f, g = locate(i)", "unpacks 7"),
        ("x = b_x.shape[0]", None),
        ("x = runs[RUN + 1]", None),
        ("x = o_m[:, None]", None),
        ("a, b, c, d, e, f = locate(i)", None),
    ],
)
def test_the_rule_finds_what_it_should(line, fault):
    (function,) = jitted(ast.parse(f"@triton.jit(do_not_specialize=SIZES)\ndef f(i):\n    {line}\n"))
    found = list(faults(function))
    assert (not found) if fault is None else (len(found) == 1 and fault in found[0])


def test_the_rule_counts_parameters():
    names = ", ".join(f"a{i}: tl.constexpr" for i in range(MOST_PARAMETERS + 1))
    (function,) = jitted(ast.parse(f"@gluon.jit\ndef f({names}):\n    pass\n"))
    assert list(faults(function)) == ["f takes 21 parameters"]
