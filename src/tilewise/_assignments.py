"""A function's source with a call after each assignment, at the start of each iteration and at the end of each loop."""

import ast

# In place of a variable's name: a loop iteration begins, or a loop has ended.
TURN, END = "(turn)", "(end)"
# What is called, as `HOOK(function, name, value, line)`.
HOOK = "__tilewise_record__"


class Recorder(ast.NodeTransformer):
    """Adds a call after each assignment of a function, in the order of its statements."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self._function = node.name
        node.body = self._block(node.body)
        return node

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for statement in body:
            for part in ("body", "orelse"):
                if getattr(statement, part, None):
                    setattr(statement, part, self._block(getattr(statement, part)))
            result.append(statement)
            if isinstance(statement, ast.For | ast.While):
                targets = _names(statement.target) if isinstance(statement, ast.For) else []
                statement.body = [
                    self._mark(TURN, statement),
                    *(self._call(name, statement) for name in targets),
                    *statement.body,
                ]
                result.append(self._mark(END, statement))
            result += [self._call(name, statement) for target in _targets(statement) for name in _names(target)]
        return result

    def _call(self, name: str, statement: ast.stmt) -> ast.stmt:
        return self._expression(name, ast.Name(name, ast.Load()), statement)

    def _mark(self, name: str, statement: ast.stmt) -> ast.stmt:
        return self._expression(name, ast.Constant(None), statement)

    def _expression(self, name: str, value: ast.expr, statement: ast.stmt) -> ast.stmt:
        arguments: list[ast.expr] = [
            ast.Constant(self._function),
            ast.Constant(name),
            value,
            ast.Constant(statement.lineno),
        ]
        return ast.copy_location(ast.Expr(ast.Call(ast.Name(HOOK, ast.Load()), arguments, [])), statement)


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AugAssign | ast.AnnAssign) else []


def _names(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
