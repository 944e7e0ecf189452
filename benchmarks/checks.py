"""The legality checks of the package, and the package with a switch at each.

A check is what can be left out of the source, so that something is fused that was refused before:

- a condition under which `Refused` is raised or a contract gives a reason; of `a or b`, and of `not (a and b)`, each of
  both is one, and so is each bound of `not low <= size <= high`;
- a call of rules that are written elsewhere, such as `yield from contiguity("x", x)` or `refuse_backward(p)`;
- in `GUARDS`, and in the recognisers, also a condition under which a function gives up, and a part of what it returns.

Checks are told apart by file, function and text, so that they keep their names while lines move.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Files of functions that judge by what they return.
_GUARDS = ("in_place", "edit", "repeated", "bidirectional", "freed_calls", "effects")
GUARDS = frozenset(f"passes/{name}.py" for name in _GUARDS)
_RECOGNISERS = "patterns/"

# A call of such a function as a statement can do nothing but refuse.
_REFUSING = ("refuse", "check", "note")


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        path: its file, from the root of the package.
        function: the qualified name of the function that it is in.
        text: what is left out.
        line: where it is by now.
    """

    path: str
    function: str
    text: str
    line: int

    @property
    def key(self) -> str:
        return f"{self.path} {self.function}: {self.text}"

    @property
    def recognises(self) -> bool:
        """Whether it belongs to a recogniser, and not to a rule of legality."""
        return self.path.startswith(_RECOGNISERS)


def sources(*, recognisers: bool) -> list[str]:
    """The files that have checks."""
    folders = ["passes", "runtime/ops", *([_RECOGNISERS] if recognisers else [])]
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def checks(*, recognisers: bool = False) -> list[Check]:
    """All checks, in the order of the source."""
    return [check for path in sources(recognisers=recognisers) for check in switched(path)[0]]


def switched(path: str, first: int = 0) -> tuple[list[Check], str]:
    """The checks of a file, and its source with a switch at each; they are numbered from `first`."""
    switches = _Switches(path, first)
    tree = switches.visit(ast.parse((ROOT / path).read_text()))
    if switches.found:
        tree.body.insert(_behind_future(tree), ast.Import([ast.alias("switches")]))
    return switches.found, ast.unparse(ast.fix_missing_locations(tree))


def _behind_future(tree: ast.Module) -> int:
    places = [
        i
        for i, statement in enumerate(tree.body)
        if (i == 0 and isinstance(statement, ast.Expr))
        or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")
    ]
    return max(places, default=-1) + 1


class _Switches(ast.NodeTransformer):
    def __init__(self, path: str, first: int) -> None:
        self.path = path
        self.first = first
        self.found: list[Check] = []
        self._gives_up = path in GUARDS or path.startswith(_RECOGNISERS)
        self._scope: list[str] = []
        self._returns: list[str] = []
        self._known: Counter[tuple[str, str]] = Counter()

    # Where ---------------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._scope.append(node.name)
        self._returns.append(ast.unparse(node.returns) if node.returns else "")
        self.generic_visit(node)
        self._returns.pop()
        self._scope.pop()
        return node

    def _add(self, node: ast.AST, text: str) -> ast.Constant:
        """Notes a check, and gives its number."""
        function = ".".join(self._scope)
        self._known[function, text] += 1
        times = self._known[function, text]
        text = text if times == 1 else f"{text} ({times})"
        self.found.append(Check(self.path, function, text, node.lineno))  # type: ignore[attr-defined]
        return ast.Constant(self.first + len(self.found) - 1)

    # What ----------------------------------------------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> ast.AST:
        *before, last = node.body
        if self._refuses(last) and all(isinstance(statement, ast.Assign) for statement in before):
            node.test = self._condition(node.test, True)
            node.orelse = [self.visit(statement) for statement in node.orelse]
            return node
        self.generic_visit(node)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return self._statement(node) if self._refuses(node) else node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if self._gives_up and self._returns[-1] == "bool" and isinstance(node.value, ast.BoolOp):
            node.value = self._condition(node.value, isinstance(node.value.op, ast.Or))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        match node.value:
            case ast.Yield() if self._refuses(node):
                return self._statement(node)
            case ast.YieldFrom(given) if self._gives_reasons():
                node.value.value = _call("reasons", self._add(node, ast.unparse(node)), given)
            case ast.Call(function) if _name(function).lstrip("_").startswith(_REFUSING) and self._may_refuse():
                number = self._add(node, ast.unparse(node))
                how = "noting" if "note" in _name(function) else "refusing"
                return ast.If(_call("is_on", number), [ast.With([ast.withitem(_call(how, number))], [node])], [])
        return node

    def _statement(self, node: ast.stmt) -> ast.If:
        return ast.If(_call("stands", self._add(node, ast.unparse(node))), [node], [])

    def _may_refuse(self) -> bool:
        return self.path.startswith("passes/lowering/") or self.path == "passes/fuse.py"

    def _gives_reasons(self) -> bool:
        return self.path.startswith("runtime/ops/") and self._returns[-1:] == ["Iterator[str]"]

    def _refuses(self, node: ast.stmt) -> bool:
        match node:
            case ast.Raise(ast.Call(ast.Name("Refused"))):
                return True
            case ast.Expr(ast.Yield()):
                return self._gives_reasons()
            case ast.Return(ast.JoinedStr() | ast.Call(ast.Name("Lacking"))):
                return self._returns[-1:] == ["str | None"] and self.path.startswith("runtime/ops/")
            case ast.Return(None | ast.Constant(None | True | False) | ast.Call(ast.Name("Miss"))):
                return self._gives_up
            case ast.Continue():
                return self.path.startswith(_RECOGNISERS)
        return False

    def _condition(self, node: ast.expr, refuses: bool) -> ast.expr:
        """A condition with a switch at each of its parts that refuses alone, by being true or by not being true."""
        match node:
            case ast.UnaryOp(ast.Not(), inner):
                return ast.UnaryOp(ast.Not(), self._condition(inner, not refuses))
            case ast.BoolOp(op, parts) if isinstance(op, ast.Or) is refuses:
                return ast.BoolOp(op, [self._condition(part, refuses) for part in parts])
            case ast.BoolOp(op, parts) if any(_splits(part, refuses) for part in parts):
                return ast.BoolOp(op, [self._condition(p, refuses) if _splits(p, refuses) else p for p in parts])
            case ast.Compare(left, [first, *more], [middle, *others]) if more and not refuses:
                pair = [ast.Compare(left, [first], [middle]), ast.Compare(middle, more, others)]
                for part in pair:
                    part.lineno = node.lineno
                return ast.BoolOp(ast.And(), [self._condition(part, refuses) for part in pair])
        text = ast.unparse(node if refuses else ast.UnaryOp(ast.Not(), node))
        return _call("holds" if refuses else "fails", self._add(node, text), node)


def _splits(node: ast.expr, refuses: bool) -> bool:
    """Whether several parts of a condition refuse alone."""
    match node:
        case ast.UnaryOp(ast.Not(), inner):
            return _splits(inner, not refuses)
        case ast.BoolOp(op, parts):
            return isinstance(op, ast.Or) is refuses or any(_splits(part, refuses) for part in parts)
        case ast.Compare(_, [_, _, *_]):
            return not refuses
    return False


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name("switches", ast.Load()), name, ast.Load()), list(args), [])


def all_numbered() -> Iterator[tuple[str, str, list[Check]]]:
    """Each file that has checks, its source with switches, and its checks, numbered through."""
    first = 0
    for path in sources(recognisers=True):
        found, source = switched(path, first)
        if found:
            yield path, source, found
        first += len(found)
