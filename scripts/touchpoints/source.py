"""Definitions in a version of vLLM, read from its source and never imported.

1. a target "module:Qualified.name" leads to one definition: through re-exports, and for a class's
   member through its base classes in order
2. only modules on that way are read
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zipfile import ZipFile

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True, eq=False)
class Found:
    """A definition, and the module that has it."""

    module: str
    node: Definition

    def normal(self) -> str:
        """Its code, without comments, docstrings and layout."""
        return _normal(self.node)

    def members(self) -> dict[str, str]:
        """Name -> `normal` of what a class defines itself; {} for anything else."""
        if not isinstance(self.node, ast.ClassDef):
            return {}
        return {name: _normal(node) for node in _defined(self.node.body) for name in _names(node)}


class Source:
    """The Python files of one version: `root` is a wheel, or the folder that has the package."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._wheel = ZipFile(root) if root.is_file() else None
        self._names = set(self._wheel.namelist()) if self._wheel is not None else set()
        self.module = cache(self._module)

    def find(self, target: str) -> Found | None:
        """The definition of `target`; None: there is none."""
        module, _, path = target.partition(":")
        first, *rest = path.split(".")
        found = self._in_module(module, first)
        for name in rest:
            found = None if found is None else self._member(found, name)
        return found

    def parameters(self, target: str) -> list[str]:
        """What a call of `target` takes: a function's parameters, or a class's fields."""
        found = self.find(target)
        if found is None:
            return []
        if isinstance(found.node, ast.ClassDef):
            init = self._member(found, "__init__")
            if init is None:
                fields = (
                    node
                    for base in self._lineage(found)
                    for node in _defined(base.node.body)  # type: ignore[union-attr]
                    if isinstance(node, ast.AnnAssign)
                )
                return [name for node in fields for name in _names(node)]
            found = init
        if not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return []
        args = found.node.args
        return [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]

    def abstract_methods(self, target: str) -> set[str]:
        """Methods that a subclass of the class `target` must define; none for anything else."""
        found = self.find(target)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return set()
        names = {
            name
            for base in self._lineage(found)
            for node in _defined(base.node.body)  # type: ignore[union-attr]
            if _is_abstract(node)
            for name in _names(node)
        }
        return {name for name in names if _is_abstract(self._member(found, name).node)}  # type: ignore[union-attr]

    def _module(self, name: str) -> ast.Module | None:
        for path in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
            if self._wheel is not None:
                if path in self._names:
                    return ast.parse(self._wheel.read(path))
            elif (self._root / path).is_file():
                return ast.parse((self._root / path).read_bytes())
        return None

    def _in_module(self, module: str, name: str) -> Found | None:
        tree = self.module(module)
        if tree is None:
            return None
        for node in reversed(list(_defined(tree.body))):
            if isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._in_module(origin, alias.name)
                    if alias.name == "*" and (found := self._in_module(origin, name)):
                        return found
            elif name in _names(node):
                return Found(module, node)
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.module(f"{module}.__init__") is not None
        parts = module.split(".")
        base = parts[: len(parts) - node.level + is_package]
        return ".".join([*base, *([node.module] if node.module else [])])

    def _lineage(self, found: Found) -> Iterator[Found]:
        """The class `found` and its base classes, each before its own."""
        assert isinstance(found.node, ast.ClassDef)
        yield found
        for base in found.node.bases:
            if isinstance(base, ast.Subscript):  # of a generic class
                base = base.value
            if isinstance(base, ast.Name):
                parent = self._in_module(found.module, base.id)
                if parent is not None and isinstance(parent.node, ast.ClassDef):
                    yield from self._lineage(parent)

    def _member(self, found: Found, name: str) -> Found | None:
        if not isinstance(found.node, ast.ClassDef):
            return None
        for owner in self._lineage(found):
            for node in reversed(list(_defined(owner.node.body))):  # type: ignore[union-attr]
                if name in _names(node):
                    return Found(owner.module, node)
        return None


def _defined(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Definitions and imports of `body`, those under conditions included, in order."""
    for node in body:
        match node:
            case ast.If() | ast.Try():
                yield from _defined(node.body)
                for handler in getattr(node, "handlers", ()):
                    yield from _defined(handler.body)
                yield from _defined(node.orelse)
            case (
                ast.FunctionDef()
                | ast.AsyncFunctionDef()
                | ast.ClassDef()
                | ast.Assign()
                | ast.AnnAssign()
                | ast.ImportFrom()
            ):
                yield node


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign():
            return [node.target.id] if isinstance(node.target, ast.Name) else []
    return []


def _is_abstract(node: ast.stmt) -> bool:
    decorators = getattr(node, "decorator_list", ())
    return any(ast.unparse(decorator).endswith("abstractmethod") for decorator in decorators)


def _normal(node: ast.stmt) -> str:
    copy = ast.parse(ast.unparse(node))
    for inner in ast.walk(copy):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = inner.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(copy)
