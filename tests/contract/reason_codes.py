"""Finds the reason codes in the code: every short word that a dead letter, mask, missing member, error or refusal may carry."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

CODE = re.compile(r"[a-z][a-z0-9_]*")
_NAMES = {"reason", "excluded", "code", "whole"}
"""Keywords, variables and parameters that hold a code."""
_CALLS = {"reject": 1, "Reject": 2, "MissingMember": 0, "MaskedCall": 2, "correction": 2}
"""Functions that are given a code, and at which place."""
_TABLES = {"DEFECTS", "_EXCLUDED"}
"""Dictionaries of codes: the keys of the first, keys and values of the second."""
_RETURNS = {"defect_of", "_reason", "_reason_of"}
"""Functions that return one."""


def codes_in(path: Path) -> dict[str, int]:
    """Code → line where it is given first."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        for expression in _givers(node):
            for code, line in _words(expression):
                found.setdefault(code, line)
    return found


def _givers(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions of a node whose value is a code."""
    if isinstance(node, ast.Call):
        yield from (word.value for word in node.keywords if word.arg in _NAMES)
        yield from (_before_colon(word.value) for word in node.keywords if word.arg == "error")
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in _CALLS and len(node.args) > _CALLS[name]:
            yield node.args[_CALLS[name]]
        if name == "add" and getattr(getattr(node.func, "value", None), "id", "") == "found":
            yield from node.args
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {getattr(target, "id", "") for target in targets}
        if names & _NAMES:
            yield node.value
        if names & _TABLES and isinstance(node.value, ast.Dict):
            yield from (key for key in node.value.keys if key is not None)
            yield from node.value.values
    elif isinstance(node, ast.FunctionDef):
        arguments = node.args.posonlyargs + node.args.args
        yield from (d for a, d in zip(arguments[::-1], node.args.defaults[::-1], strict=False) if a.arg in _NAMES)
        yield from (
            d for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d and a.arg in _NAMES
        )
        if node.name in _RETURNS:
            yield from (one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None)
    elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and _is_sentence(node.elts[1]):
        yield node.elts[0]
    elif isinstance(node, ast.DictComp):
        yield node.value


def _words(expression: ast.expr) -> Iterator[tuple[str, int]]:
    """The codes that an expression may be; what it compares is none."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        if CODE.fullmatch(expression.value):
            yield expression.value, expression.lineno
    elif isinstance(expression, ast.IfExp):
        yield from _words(expression.body)
        yield from _words(expression.orelse)
    elif isinstance(expression, ast.BoolOp):
        for value in expression.values:
            yield from _words(value)
    elif isinstance(expression, ast.Call) and getattr(expression.func, "attr", "") == "get":
        yield from (word for default in expression.args[1:] for word in _words(default))


def _before_colon(text: ast.expr) -> ast.expr:
    """`raised: it did not work` → `raised`: scores carry code and message in one."""
    first = text.values[0] if isinstance(text, ast.JoinedStr) and text.values else text
    if isinstance(first, ast.Constant) and isinstance(first.value, str) and ": " in first.value:
        return ast.copy_location(ast.Constant(first.value.partition(":")[0]), text)
    return text


def _is_sentence(expression: ast.expr) -> bool:
    if isinstance(expression, ast.JoinedStr):
        return True
    is_text = isinstance(expression, ast.Constant) and isinstance(expression.value, str)
    return is_text and " " in str(expression.value)
