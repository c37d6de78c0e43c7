"""Every message of the package, read from its source, for the page on troubleshooting.

What the page says can so neither lag behind the code nor leave anything out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_graphs"

OBSTACLE = "Obstacle"
PRINTERS = ("rank_zero_warn", "rank_zero_info", "say", "warn_user")
"""What prints a sentence in the end."""

CARRIERS = ("_left_out",)
"""Functions that take sentences which are printed somewhere else."""

REASONS = ("reason", "obstacle", "missed", "note", "stale", "verdict")
"""Variables and attributes whose sentences are put into others."""

_EXPLAINS = re.compile(r"Why |.*what to say", re.DOTALL)
"""The docstrings of functions that return such sentences."""

REFUSALS = {
    **dict.fromkeys(("refused", "refuse"), ""),
    **dict.fromkeys(("refused_here", "refuse_here", "stop_here", "refuse_use"), " at <...>"),
}
"""What makes an error of an obstacle and of what was observed, and adds this to it.

Methods of the obstacle, and functions that are given it first.
"""

BLANK = "<...>"
"""Stands for what is filled in and has no name."""

_FIELDS = ("rule", "observed", "remedy", "name", "code")
_OBSTACLE_FIELDS = ("rule", "remedy", "name", "code")


@dataclass(frozen=True, slots=True)
class Message:
    """One place in the source that makes a message.

    Attributes:
        kind: Name of the exception, ``"Obstacle"``, or the function that prints it.
        site: ``path:line``.
        rule: What must hold, or the sentence itself; ``<name>`` stands for what is filled in.
        observed: What was found instead.
        remedy: What to do.
        code: The remedy as code.
        name: The doctor's word for an obstacle.
        passed_on: The text is that of another message.
    """

    kind: str
    site: str
    rule: str
    observed: str = ""
    remedy: str = ""
    code: str = ""
    name: str = ""
    passed_on: bool = False


class Module:
    """A file of the package.

    Attributes:
        path: Where it is.
        tree: Its syntax.
        functions: Every function and method in it.
        constants: Name -> value of what it assigns at its top.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self._root = root
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = ast.walk(self.tree)
        self.functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        self.constants = {
            node.targets[0].id: node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }

    def site(self, node: ast.expr) -> str:
        """``path:line`` of a part of it."""
        return f"{self.path.relative_to(self._root).as_posix()}:{node.lineno}"

    def calls(self, names: Collection[str]) -> Iterator[tuple[ast.Call, Place]]:
        """The calls with arguments of functions and classes of these names."""
        for call, function in _calls(self.tree, None):
            if name_of(call.func) in names and call.args:
                yield call, Place(self, function)


@dataclass(frozen=True, slots=True)
class Place:
    """Where names mean something: a function of a module, or its top.

    Attributes:
        module: The module.
        function: The function; None at the top.
        is_called: It is looked into from a call of it; calls in it are not.
    """

    module: Module
    function: ast.FunctionDef | None
    is_called: bool = False


def _calls(
    node: ast.AST, function: ast.FunctionDef | None
) -> Iterator[tuple[ast.Call, ast.FunctionDef | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, function
        yield from _calls(child, child if isinstance(child, ast.FunctionDef) else function)


def name_of(function: ast.expr) -> str:
    """``f`` of ``f(...)`` and of ``a.b.f(...)``."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


class Messages:
    """All messages of a package.

    Args:
        package: Its folder.
        root: The folder that sites are told from.
    """

    def __init__(self, package: Path = PACKAGE, root: Path = ROOT) -> None:
        self.modules = [Module(path, root) for path in sorted(package.rglob("*.py"))]

    @cached_property
    def exceptions(self) -> dict[str, list[str]]:
        """Name of each exception class that the package defines -> names of its arguments."""
        classes = [n for m in self.modules for n in m.tree.body if isinstance(n, ast.ClassDef)]
        found: dict[str, list[str]] = {}
        known = {"Exception": ["rule"], "RuntimeError": ["rule"]}
        while more := {c.name: c for c in classes if c.name not in found and _bases(c) & {*known}}:
            for name, kind in more.items():
                inherited = next(known[base] for base in _bases(kind) if base in known)
                found[name] = known[name] = _arguments_of(kind) or inherited
        return found

    def constant(self, name: str, module: Module) -> ast.expr | None:
        """What a name stands for at the top of a module, or of the one that it comes from."""
        homes = [module, *(self.modules if not name.startswith("_") else ())]
        return next((m.constants[name] for m in homes if name in m.constants), None)

    @cached_property
    def speakers(self) -> set[str]:
        """Functions that print one of their arguments, or hand it to another one of them.

        An attribute ``_say`` may hold a function ``say``.
        """
        functions = [function for module in self.modules for function in module.functions]
        known = set(PRINTERS)
        while more := {f.name for f in functions if f.name not in known and _hands_on(f, known)}:
            known |= more
        return known | {f"_{name}" for name in known}

    @cached_property
    def errors(self) -> list[Message]:
        """Every construction of one of the package's exceptions, by obstacles, too."""
        found = []
        for module in self.modules:
            for call, place in module.calls({*self.exceptions, *REFUSALS}):
                names = self.exceptions.get(name_of(call.func))
                if names is None:
                    found.append(self._refusal(module, call, place))
                elif "rule" in names:
                    found.append(self._message(module, call, place, names))
            for kind in module.tree.body:  # those that make their message themselves
                if isinstance(kind, ast.ClassDef) and "rule" not in self.exceptions.get(
                    kind.name, ["rule"]
                ):
                    base = next(b for b in map(name_of, kind.bases) if b in self.exceptions)
                    for call, function in _calls(kind, None):
                        if name_of(call.func) == "__init__":
                            place, names = Place(module, function), self.exceptions[base]
                            message = self._message(module, call, place, names)
                            found.append(replace(message, kind=kind.name))
        return found

    @cached_property
    def obstacles(self) -> list[Message]:
        """What the doctor can name."""
        return [
            self._message(module, call, place, _OBSTACLE_FIELDS)
            for module in self.modules
            for call, place in module.calls({OBSTACLE})
        ]

    @cached_property
    def sentences(self) -> list[Message]:
        """What is printed and is no exception, and the reasons that are put into it."""
        found = []
        for module in self.modules:
            for call, place in module.calls(self.speakers | {*CARRIERS}):
                kind = name_of(call.func)
                found += [self._sentence(kind, text, place) for text in call.args]
            for function in module.functions:
                place = Place(module, function)
                for name in REASONS:
                    texts = _values_of(name, function)
                    found += [self._sentence(name, text, place) for text in texts]
                if _EXPLAINS.match(ast.get_docstring(function) or ""):
                    found += [self._sentence(function.name, t, place) for t in _returned(function)]
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Lambda) and isinstance(node.body, ast.Constant):
                    found.append(self._sentence("lambda", node.body, Place(module, None)))
        return [message for message in found if not message.passed_on]

    @cached_property
    def words(self) -> dict[str, dict[str, ast.expr]]:
        """Name of an obstacle -> what the client says in place of the obstacle's own words."""
        tables = [m.constants["WORDS"] for m in self.modules if "WORDS" in m.constants]
        return {
            name_of(name): {ast.unparse(k).strip("'"): v for k, v in _items(row)}
            for table in tables
            for name, row in _items(table)
            if name_of(name)
        }

    # ------------------------------------------------------------------ reading

    def _message(
        self, module: Module, call: ast.Call, place: Place, names: Sequence[str]
    ) -> Message:
        given = dict(zip(names, call.args, strict=False))
        keywords = {keyword.arg or "": keyword.value for keyword in call.keywords}
        given |= {("name" if arg == "kind" else arg): v for arg, v in keywords.items()}
        given |= self.words.get(next((n for n, v in module.constants.items() if v is call), ""), {})
        texts = {n: self._text(node, place) for n, node in given.items() if n in _FIELDS}
        passed_on = _passes_on(given["rule"]) or not _says_something(texts["rule"])
        return Message(name_of(call.func), module.site(call), **texts, passed_on=passed_on)

    def _refusal(self, module: Module, call: ast.Call, place: Place) -> Message:
        """The error that an obstacle makes of what was observed."""
        owner, *words = call.args
        if isinstance(call.func, ast.Attribute):
            owner, words = call.func.value, call.args[:1]
        rule, remedy = (
            self._text_of_attribute(ast.Attribute(owner, name), place)
            for name in ("rule", "remedy")
        )
        observed = " ".join(self._text(word, place) for word in words)
        observed += REFUSALS[name_of(call.func)]
        is_known = isinstance(owner, ast.Name) and owner.id.isupper()
        texts = {"rule": rule, "observed": observed, "remedy": remedy}
        return Message("CaptureError", module.site(call), **texts, passed_on=not is_known)

    def _sentence(self, kind: str, node: ast.expr, place: Place) -> Message:
        text = self._text(node, place)
        # What is filled in as a whole says nothing beside what has words.
        telling = [part for part in text.split(" / ") if not re.fullmatch("<[^<>]*>", part)]
        text = " / ".join(telling) or text
        return Message(kind, place.module.site(node), text, passed_on=not _says_something(text))

    def _text(self, node: ast.expr, place: Place) -> str:
        """The text that an expression makes."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(self._text(value, place) for value in node.values)
        if isinstance(node, ast.FormattedValue):
            text = self._text(node.value, place)
            is_quoted = node.conversion == ord("r") and "<" not in text
            return " / ".join(map(repr, text.split(" / "))) if is_quoted else text
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left, place) + self._text(node.right, place)
        if isinstance(node, ast.IfExp):
            return _either(self._text(node.body, place), self._text(node.orelse, place))
        if isinstance(node, ast.BoolOp):
            return _either(*(self._text(value, place) for value in node.values))
        if isinstance(node, ast.Call):
            return self._text_of_call(node, place)
        if isinstance(node, ast.Name):
            return self._text_of_name(node.id, place)
        if isinstance(node, ast.Attribute):
            return self._text_of_attribute(node, place)
        return BLANK

    def _text_of_call(self, node: ast.Call, place: Place) -> str:
        """What a function of the same module returns, if it is nothing but a text."""
        name = name_of(node.func)
        functions = [f for f in place.module.functions if f.name == name]
        if place.is_called or len(functions) != 1 or len(_returned(functions[0])) != 1:
            return BLANK
        inside = Place(place.module, functions[0], is_called=True)
        text = self._text(_returned(functions[0])[0], inside)
        return text if _says_something(text) else BLANK

    def _text_of_name(self, name: str, place: Place) -> str:
        texts = [self._text(value, place) for value in _assigned(name, place.function)]
        if texts and all(map(_says_something, texts)):
            return _either(*texts)
        constant = self.constant(name, place.module)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            return constant.value
        return _blank(name)

    def _text_of_attribute(self, node: ast.Attribute, place: Place) -> str:
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        owner = self.constant(name, place.module)
        if isinstance(owner, ast.Call) and name_of(owner.func) == OBSTACLE:
            return str(
                getattr(self._message(place.module, owner, place, _OBSTACLE_FIELDS), node.attr)
            )
        return _blank(node.attr)


def _items(table: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The entries of a dict as it is written."""
    assert isinstance(table, ast.Dict)
    return zip(filter(None, table.keys), table.values, strict=True)


def _bases(kind: ast.ClassDef) -> set[str]:
    return set(map(name_of, kind.bases))


def _arguments_of(kind: ast.ClassDef) -> list[str]:
    """What its ``__init__`` takes, if it has one."""
    own = [n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return [argument.arg for function in own for argument in function.args.args[1:]]


def _values_of(name: str, function: ast.FunctionDef | None) -> list[ast.expr]:
    """What a function assigns to a variable or an attribute."""
    return [
        node.value
        for node in (ast.walk(function) if function is not None else ())
        if isinstance(node, ast.Assign) and name in map(name_of, node.targets)
    ]


def _assigned(name: str, function: ast.FunctionDef | None) -> list[ast.expr]:
    """The same of a variable, but for what is made of the variable itself."""
    values = _values_of(name, function)
    return [v for v in values if name not in {n.id for n in ast.walk(v) if isinstance(n, ast.Name)}]


def _is_text(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "str"


def _hands_on(function: ast.FunctionDef, speakers: Collection[str]) -> bool:
    """Whether a text among its arguments is in what it gives to one of the speakers."""
    arguments = {a.arg for a in function.args.args if _is_text(a.annotation)}
    return any(
        isinstance(part, ast.Name) and part.id in arguments
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and name_of(node.func) in speakers
        for given in node.args
        for part in ast.walk(given)
    )


def _returned(function: ast.FunctionDef) -> list[ast.expr]:
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    return [node.value for node in returns if node.value is not None]


def _passes_on(rule: ast.expr) -> bool:
    """Whether it is the rule of another error, which has an entry itself."""
    attribute = isinstance(rule, ast.Attribute) and rule.attr == "rule"
    return attribute and isinstance(rule.value, ast.Name) and not rule.value.id.isupper()


def _either(*texts: str) -> str:
    return " / ".join(dict.fromkeys(filter(None, texts)))


def _blank(name: str) -> str:
    return f"<{name.strip('_').replace('_', ' ')}>"


def _says_something(text: str) -> bool:
    """Whether there are words beside what is filled in."""
    return bool(re.search("[a-z]{3,} ", re.sub("<[^<>]*>", "", text)))
