"""Which fields of which config classes a program reads, found by inference on its source.

Names are typed by annotations of parameters, fields and return values, and by what is assigned to
them; `isinstance` and `match` narrow. A container and its elements have the same type here, and the
order of statements does not matter: that is enough to know whose attribute is read.
"""

import ast
import contextlib
import inspect
import sys
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from types import ModuleType
from typing import Any

from vision.config import Config

Types = frozenset[type]
NONE: Types = frozenset()
SAME = {
    "sorted",
    "list",
    "tuple",
    "zip",
    "enumerate",
    "next",
    "iter",
    "reversed",
    "replace",
    "cast",
}
"""Functions without annotations whose result is made of their arguments."""
ELEMENTS = {"items", "values", "get", "pop", "model_copy", "copy"}
"""Methods whose result is made of the object itself."""


class Reads:
    """(class, field) of every setting that the functions of some modules read."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        sources = {module.__name__: ast.parse(inspect.getsource(module)) for module in modules}
        self.classes = {
            name: value
            for module in sources
            for name, value in vars(sys.modules[module]).items()
            if isinstance(value, type)
        }
        self.namespaces = {module: self._namespace(module, sources[module]) for module in sources}
        self.evaluated: dict[tuple[str, str], Types] = {}
        self.attributes: dict[type, dict[str, Types]] = defaultdict(dict)
        """Of objects: what is assigned to self.name."""
        self.found: set[tuple[type, str]] = set()
        for _ in range(2):  # the second time with the attributes that the first has found
            for module, tree in sources.items():
                _Scope(self, module, {}, None).visit(tree)

    def _namespace(self, module: str, tree: ast.Module) -> dict[str, Any]:
        """The names of a module, those that its functions import, and all classes."""
        names = {**self.classes, **vars(sys.modules[module])}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in sys.modules:
                source = sys.modules[node.module]
                for alias in node.names:
                    names.setdefault(alias.asname or alias.name, getattr(source, alias.name, None))
        return names

    def covers(self, config: type[Config], field: str) -> bool:
        """Whether a field is read of objects that are annotated as a class or one of its bases."""
        return any((base, field) in self.found for base in config.__mro__)

    def annotation(self, text: Any, module: str) -> Types:
        """The classes in an annotation, which may be a string."""
        if not isinstance(text, str):
            return frozenset(_classes(text))
        if (text, module) not in self.evaluated:
            names = self.namespaces.get(module) or vars(sys.modules[module])
            try:
                found = frozenset(_classes(eval(text, names)))
            except Exception:  # a name of another library that is imported for annotations only
                found = NONE
            self.evaluated[text, module] = found
        return self.evaluated[text, module]

    def returned(self, function: Any) -> Any:
        return getattr(function, "__annotations__", {}).get("return")

    def attribute(self, owner: type, name: str) -> Types:
        """The types of an attribute of an object."""
        if issubclass(owner, Config) and name in owner.model_fields:
            return frozenset(_classes(owner.model_fields[name].annotation))
        found = self.attributes[owner].get(name, NONE)
        for base in owner.__mro__:
            hints = inspect.get_annotations(base)
            if name in hints:
                return found | self.annotation(hints[name], base.__module__)
            found |= self.attributes.get(base, {}).get(name, NONE)
        value = inspect.getattr_static(owner, name, None)
        if isinstance(value, property):
            return found | self.result(value.fget, owner)
        if isinstance(value, cached_property):
            return found | self.result(value.func, owner)
        return found

    def result(self, function: Any, owner: type | None = None) -> Types:
        """The types of what a function or a method returns."""
        function = inspect.unwrap(getattr(function, "__func__", function))
        hint = self.returned(function)
        if hint in (typing.Self, "Self") and owner is not None:
            return frozenset([owner])
        return self.annotation(hint, function.__module__) if hint is not None else NONE


def _classes(annotation: Any) -> Iterator[type]:
    """All classes in an annotation, those of its arguments included."""
    arguments = typing.get_args(annotation)
    own = typing.get_origin(annotation) if arguments else annotation
    if isinstance(own, type) and own.__module__ not in ("builtins", "collections.abc", "types"):
        yield own
    for argument in arguments:
        yield from _classes(argument)


class _Scope(ast.NodeVisitor):
    """A function, or the top of a module: names and their types."""

    def __init__(
        self, reads: Reads, module: str, names: dict[str, Types], owner: type | None
    ) -> None:
        self.reads, self.module, self.names, self.owner = reads, module, names, owner

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        owner = self.reads.namespaces[self.module].get(node.name)
        for inner in node.body:
            kind = owner if isinstance(owner, type) else None
            _Scope(self.reads, self.module, {}, kind).visit(inner)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if self.module.endswith(".configs") and node.name.startswith("_"):
            return  # a validator, which looks at settings but does nothing with them
        names = dict(self.names)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [a for a in (node.args.vararg, node.args.kwarg) if a]
        for argument in arguments:
            names[argument.arg] = NONE
            if argument.annotation is not None:
                text = ast.unparse(argument.annotation).strip("'\"")
                names[argument.arg] = self._named(text)
        if self.owner is not None and arguments and arguments[0].arg in ("self", "cls"):
            names[arguments[0].arg] = frozenset([self.owner])
        scope = _Scope(self.reads, self.module, names, self.owner)
        for _ in range(2):  # the second time with names that are assigned further down
            for inner in node.body:
                scope.visit(inner)

    def _named(self, text: str) -> Types:
        return self.reads.annotation(text, self.module)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        _Scope(self.reads, self.module, dict(self.names), self.owner).visit(node.body)

    def visit_Assign(self, node: ast.Assign) -> None:
        found = self.type(node.value)
        for target in node.targets:
            self.bind(target, found)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        found = self._named(ast.unparse(node.annotation).strip("'\""))
        self.bind(node.target, found | (self.type(node.value) if node.value else NONE))

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, self.type(node.iter))
        for inner in (*node.body, *node.orelse):
            self.visit(inner)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            found = self.type(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, found)
        for inner in node.body:
            self.visit(inner)

    def visit_If(self, node: ast.If) -> None:
        self.type(node.test)
        yes, no = self.narrowing(node.test)
        with self.known(yes):
            for inner in node.body:
                self.visit(inner)
        with self.known(no):
            for inner in node.orelse:
                self.visit(inner)
        if isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
            self.names |= no

    def visit_Assert(self, node: ast.Assert) -> None:
        self.type(node.test)
        self.names |= self.narrowing(node.test)[0]

    def visit_Match(self, node: ast.Match) -> None:
        subject = self.type(node.subject)
        for case in node.cases:
            kept = self.pattern(case.pattern, subject)
            with self.known({ast.unparse(node.subject): kept}):
                for inner in (*([case.guard] if case.guard else []), *case.body):
                    self.visit(inner)

    def pattern(self, pattern: ast.pattern, subject: Types) -> Types:
        """The types that a pattern lets through."""
        match pattern:
            case ast.MatchClass():
                value = self.runtime(pattern.cls)
                kept = frozenset([value]) if isinstance(value, type) else NONE
                for name, inner in zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True):
                    self.pattern(inner, self.read(kept, name))
            case ast.MatchAs():
                kept = self.pattern(pattern.pattern, subject) if pattern.pattern else subject
                if pattern.name:
                    self.names[pattern.name] = self.names.get(pattern.name, NONE) | kept
            case ast.MatchOr():
                kept = NONE.union(*(self.pattern(p, subject) for p in pattern.patterns))
            case _:
                kept = subject
        return kept

    @contextlib.contextmanager
    def known(self, types: dict[str, Types]) -> Iterator[None]:
        """With other types of some expressions."""
        before = {name: self.names.get(name) for name in types}
        self.names |= types
        yield
        for name, found in before.items():
            self.names.pop(name)
            if found is not None:
                self.names[name] = found

    def narrowing(self, test: ast.expr) -> tuple[dict[str, Types], dict[str, Types]]:
        """The types of expressions where a condition holds, and where it does not."""
        match test:
            case ast.Call(func=ast.Name(id="isinstance"), args=[value, kinds]):
                found, name = self.runtime_classes(kinds), ast.unparse(value)
                return {name: found}, {name: self.type(value) - found}
            case ast.UnaryOp(op=ast.Not()):
                return self.narrowing(test.operand)[::-1]
            case ast.BoolOp():
                both: dict[str, Types] = {}
                for value in test.values:
                    both |= self.narrowing(value)[isinstance(test.op, ast.Or)]
                return ({}, both) if isinstance(test.op, ast.Or) else (both, {})
            case _:
                return {}, {}

    def runtime_classes(self, node: ast.expr) -> Types:
        if isinstance(node, ast.Tuple | ast.List):
            return NONE.union(*(self.runtime_classes(e) for e in node.elts))
        return self._named(ast.unparse(node))

    def bind(self, target: ast.expr, found: Types) -> None:
        match target:
            case ast.Name():
                self.names[target.id] = self.names.get(target.id, NONE) | found
            case ast.Tuple() | ast.List():
                for element in target.elts:
                    self.bind(element, found)
            case ast.Starred():
                self.bind(target.value, found)
            case ast.Attribute(value=ast.Name(id="self")) if self.owner is not None:
                known = self.reads.attributes[self.owner]
                known[target.attr] = known.get(target.attr, NONE) | found
            case _:
                self.type(target)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.type(node)
        else:
            super().generic_visit(node)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and not isinstance(node, ast.Lambda):
            return self.type(node)
        return super().visit(node)

    def read(self, owners: Types, name: str) -> Types:
        """The types of an attribute; a setting that is read is noted."""
        found = NONE
        for owner in owners:
            if issubclass(owner, Config) and name in owner.model_fields:
                self.reads.found.add((owner, name))
            found |= self.reads.attribute(owner, name)
        return found

    def runtime(self, node: ast.expr) -> Any:
        """The function or class that an expression names, or None."""
        if isinstance(node, ast.Name):
            return (
                None if node.id in self.names else self.reads.namespaces[self.module].get(node.id)
            )
        if isinstance(node, ast.Attribute):
            base = self.runtime(node.value)
            return getattr(base, node.attr, None) if isinstance(base, ModuleType | type) else None
        return None

    def type(self, node: ast.expr) -> Types:
        """The types of an expression. Everything below it is visited."""
        match node:
            case ast.Name():
                return self.names.get(node.id, NONE)
            case ast.Attribute():
                found = self.read(self.type(node.value), node.attr)
                return self.names.get(ast.unparse(node), found) if found else found
            case ast.Call():
                return self.call(node)
            case ast.NamedExpr():
                found = self.type(node.value)
                self.bind(node.target, found)
                return found
            case ast.IfExp():
                self.type(node.test)
                yes, no = self.narrowing(node.test)
                with self.known(yes):
                    found = self.type(node.body)
                with self.known(no):
                    return found | self.type(node.orelse)
            case ast.BoolOp():
                found = NONE
                with contextlib.ExitStack() as stack:
                    for value in node.values:
                        found |= self.type(value)
                        turn = isinstance(node.op, ast.Or)
                        stack.enter_context(self.known(self.narrowing(value)[turn]))
                return found
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for loop in node.generators:
                    self.bind(loop.target, self.type(loop.iter))
                    for condition in loop.ifs:
                        self.type(condition)
                parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                return NONE.union(*map(self.type, parts))
            case ast.Subscript():
                self.type(node.slice)
                return self.type(node.value)
            case ast.Lambda():
                self.visit_Lambda(node)
                return NONE
            case ast.Compare() | ast.JoinedStr() | ast.FormattedValue() | ast.BinOp():
                for child in ast.iter_child_nodes(node):
                    self.visit(child)
                return NONE
            case _:
                found = NONE
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        found |= self.type(child)
                return found

    def call(self, node: ast.Call) -> Types:
        given = NONE.union(
            *(self.type(a) for a in node.args), *(self.type(k.value) for k in node.keywords)
        )
        callee = self.runtime(node.func)
        if isinstance(node.func, ast.Attribute) and callee is None:
            found = NONE
            for owner in self.type(node.func.value):
                method = inspect.getattr_static(owner, node.func.attr, None)
                found |= self.reads.result(method, owner) if method else NONE
                found |= self.reads.attribute(owner, node.func.attr) if not method else NONE
                if node.func.attr in ELEMENTS:
                    found |= {owner}
            return found
        if isinstance(node.func, ast.Name) and node.func.id in SAME:
            return given
        if isinstance(callee, type):
            return frozenset([callee])
        if callee is None:
            return self.type(node.func) if not isinstance(node.func, ast.Name) else NONE
        found = self.reads.result(callee)
        if isinstance(self.reads.returned(inspect.unwrap(callee)), typing.TypeVar):  # as `parse`
            return NONE.union(*(self.runtime_classes(a) for a in node.args[:1]))
        return found
