"""The package as a whole: what importing it costs, which way imports go, and its size."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import lightning_graphs
from lightning_graphs import FORMER, errors
from lightning_graphs.report import GraphRecord
from tests.processes import run_script

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_graphs"
FILES = sorted(PACKAGE.rglob("*.py"))
FILE_LINES, CLASS_LINES, FUNCTION_LINES, ARGUMENTS = 700, 410, 110, 6
OPTIONS = PACKAGE / "lightning/callback.py"  # what users write, by name

# From the bottom up: a layer imports itself and what lies below it, never what lies above.
LAYERS = (
    "errors",
    "padding",
    "private",
    "values",
    "device",
    "autograd",
    "core",
    "report",
    "watch",
    "policy",
    "regions",
    "loops",
    "lightning",
    "pytorch_lightning",
    "__main__",
)
# Imported inside the functions that need them, never while a module of ours is being imported.
LAZY = {"cuda", "rich", "transformers", "yaml"}
LIGHTNING = {"lightning", "pytorch_lightning"}

BLOCKER = """
import sys

class Blocker:
    met = set()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            self.met.add(name.partition(".")[0])
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
        return None

BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str, *arguments: str) -> str:
    """Runs ``code`` in a fresh interpreter from the checkout and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["lightning_graphs", "lightning_graphs.report"])
def test_imports_without_torch(module: str) -> None:
    code = f"{BLOCKER}\nimport {module}\nprint({module}.__name__, sorted(Blocker.met))"
    assert run_python(code, ",".join([*LAZY, *LIGHTNING, "torch"])) == f"{module} []"


def test_the_blocker_blocks() -> None:
    code = f"{BLOCKER}\ntry:\n    import rich\nexcept ImportError as error:\n    print(error)"
    assert run_python(code, "rich") == "rich is blocked"


PLAIN = """
import torch, lightning_graphs.core
print(torch.cuda.is_initialized(), sorted(Blocker.met & OURS))
sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, Blocker)]

import lightning_graphs
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)

def train_step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

step = lightning_graphs.capture(
    train_step, model, optimizer, backend="emulated", only_if_faster=False
)
for _ in range(8):
    step(torch.ones(2, 4))
print(step.report.replayed > 2, sorted({*OURS, "torchmetrics"} & set(sys.modules)))
"""


FACTORY = """
import torch
from lightning_graphs import core

graph = core.CUDAGraph(backend="emulated")
with core.graph(graph):
    made = torch.ones(3)
graph.replay()
print(made.tolist())
"""


def test_the_core_alone_captures_factories() -> None:
    """Nothing else has imported what torch knows of the default device."""
    assert run_python(FACTORY) == "[1.0, 1.0, 1.0]"


def test_neither_the_core_nor_a_captured_loop_imports_lightning() -> None:
    """And the import takes no context of CUDA; of the optional packages it needs none."""
    code = f"OURS = {LIGHTNING!r}\n{BLOCKER}\n{PLAIN}"
    printed = run_python(code, ",".join([*LAZY, *LIGHTNING]))
    assert printed.splitlines() == ["False []", "True []"]


UNUSUAL = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_graphs"]:
    del sys.modules[name]  # found again
sys.path.insert(0, {path!r})
import lightning as L
import lightning_graphs
assert lightning_graphs.__file__.startswith({path!r})
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_graphs import GraphCapture

weights = []
for scope in (None, "step", "modules"):
    L.seed_everything(1)
    graphs = GraphCapture(scope=scope or "step", on_failure="raise", backend={backend!r},
                          only_if_faster=False)
    module = BoringModel()
    L.Trainer(
        max_epochs=1, devices=1, accelerator="cpu" if {backend!r} == "emulated" else "gpu",
        callbacks=[graphs] if scope else [], limit_val_batches=0, logger=False,
        enable_checkpointing=False,
    ).fit(module)
    assert not scope or graphs.report.replayed > 50, graphs.report
    weights.append(module.layer.weight.tolist())
assert weights[0] == weights[1] == weights[2]
"""


def test_a_package_that_is_found_through_an_unusual_path(backend: str, tmp_path: Path) -> None:
    """Its own code is then no user's."""
    program = tmp_path / "program.py"
    program.write_text(UNUSUAL.format(path=f"{ROOT}/tests/..", backend=backend), encoding="utf-8")
    done = run_script(program)
    assert done.returncode == 0, done.stderr


LOWER = ("private", "values", "device", "autograd", "core")
OF_LIGHTNING = re.compile(r"self\.log\b|training_step|Trainer\(|GraphCapture|scope=['\"]")


def test_the_engine_does_not_speak_of_lightning() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for folder in LOWER
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OF_LIGHTNING.search(line)
    ]
    assert not found, "a remedy in Lightning's words belongs to the client's table"


def test_public_names() -> None:
    for name in lightning_graphs.__all__:
        assert getattr(lightning_graphs, name) is not None
    assert lightning_graphs.CaptureError is errors.CaptureError
    assert dir(lightning_graphs) == sorted(lightning_graphs.__all__)


@pytest.mark.parametrize("before", sorted(FORMER))
def test_names_of_before_lead_to_the_same_objects(before: str) -> None:
    """Entry points of an installed package, saved configurations and pickles hold them."""
    found = importlib.import_module(f"lightning_graphs.{before}")
    present = importlib.import_module(f"lightning_graphs.{FORMER[before]}")
    for name, value in vars(present).items():
        if not name.startswith("__"):
            assert getattr(found, name) is value


FIRST = """
import sys
from importlib.metadata import EntryPoint

def first(path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_graphs"]:
        del sys.modules[name]  # found again
    return EntryPoint("name", path, "group").load()

for path in {paths!r}:
    assert first(path).__name__ == path.rpartition(":")[2], path

graph = first("lightning_graphs.core.graph:graph")
from lightning_graphs.core.inspect import diff, inspect
from lightning_graphs import core
assert core.graph is graph and core.inspect.inspect is inspect

first("lightning_graphs.lightning.callback:GraphCapture")
assert "lightning_graphs.lightning.doctor" not in sys.modules, "it comes when it is called"
"""


def test_every_path_may_be_the_first_that_is_imported(tmp_path: Path) -> None:
    """Those that were documented before, too."""
    paths = [
        "lightning_graphs.training.plugins:callbacks",  # an entry point
        "lightning_graphs.training.callback:GraphCapture",
        "lightning_graphs.training.options:OptionError",
        "lightning_graphs.reporting:Report",
        "lightning_graphs.reporting.diagnosis:Diagnosis",
    ]
    program = tmp_path / "program.py"
    program.write_text(FIRST.format(paths=paths), encoding="utf-8")
    done = run_script(program)
    assert done.returncode == 0, done.stderr


def test_a_pickle_of_before_is_read() -> None:
    """It holds the path of the class."""
    text = pickle.dumps(GraphRecord(signature="x", replays=3), protocol=2)
    before = text.replace(b"lightning_graphs.report.report", b"lightning_graphs.reporting.report")
    assert before != text
    assert pickle.loads(before) == GraphRecord(signature="x", replays=3)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'lightning_graphs' has no attribute 'nothing'"):
        _ = lightning_graphs.nothing


def test_the_version_has_one_source() -> None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in config["project"]
    assert config["project"]["dynamic"] == ["version"]

    source = ROOT / config["tool"]["hatch"]["version"]["path"]
    versions = [
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert versions == [lightning_graphs.__version__]


def layer_of(module: str) -> int | None:
    """Height of a module of ours in :data:`LAYERS`; the package root is above all of them."""
    first, _, rest = module.partition(".")
    if first != "lightning_graphs":
        return None
    return LAYERS.index(rest.partition(".")[0]) if rest else len(LAYERS)


def imported_names(tree: ast.AST, package: str, *, members: bool = False) -> set[str]:
    """Absolute names of all modules imported anywhere below ``tree``.

    With ``members``, of what is imported from them as well: it may be a module.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parts if node.level else []), *filter(None, [node.module])])
            # `from lightning_graphs import core` names a module of ours only with its tail.
            tails = [alias.name for alias in node.names] if base == "lightning_graphs" else []
            names.update(f"{base}.{alias.name}" for alias in node.names if members or tails)
            names.update([] if tails else [base])
    return names


def at_import_time(tree: ast.Module) -> ast.Module:
    """The tree without function bodies and without ``if TYPE_CHECKING`` blocks."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None: ...

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None: ...

        def visit_If(self, node: ast.If) -> ast.AST:
            if ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
                return ast.Module(body=node.orelse, type_ignores=[])
            return self.generic_visit(node)

    return Strip().visit(tree)


def module_and_package(path: Path) -> tuple[str, str]:
    """Dotted name of a file of ours, and of the package its relative imports start from."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        return ".".join(parts[:-1]), ".".join(parts[:-1])
    return ".".join(parts), ".".join(parts[:-1])


@cache
def text_and_tree(path: Path) -> tuple[str, ast.Module]:
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


def test_imports_go_downward() -> None:
    for path in FILES:
        module, package = module_and_package(path)
        own = layer_of(module)
        assert own is not None, module
        names = imported_names(text_and_tree(path)[1], package)

        above = [name for name in names if (layer := layer_of(name)) is not None and layer > own]
        assert above == [], f"{module} imports from a layer above its own"
        if own <= LAYERS.index("core"):
            tops = {name.partition(".")[0] for name in names}
            assert not tops & LIGHTNING, f"{module} must work without Lightning"


ENGINE = {
    *("errors", "private", "values", "device", "autograd", "core", "report", "watch"),
    *("policy", "regions"),
}
WORDS = re.compile(r"self\.log\b|training_step|Trainer\(")


def test_the_engine_knows_nothing_of_lightning() -> None:
    """Neither its modules, nor the words of a remedy, which come from the client."""
    for path in FILES:
        module, package = module_and_package(path)
        if {*module.split(".")[1:2]} & (ENGINE | {"loops"}):
            text, tree = text_and_tree(path)
            tops = {name.partition(".")[0] for name in imported_names(tree, package)}
            assert not tops & (LIGHTNING | {"torchmetrics"}), module
            assert WORDS.findall(text) == [], module


def test_no_circle_of_imports() -> None:
    """Those inside of functions and for types alone count, too."""
    files = dict(sorted((module_and_package(path)[0], path) for path in FILES))
    left: dict[str, set[str]] = {}
    for module, path in files.items():
        names = imported_names(text_and_tree(path)[1], module_and_package(path)[1], members=True)
        left[module] = names & files.keys() - {module}
    while free := {module for module, names in left.items() if not names & left.keys()}:
        left = {module: names for module, names in left.items() if module not in free}
    assert left == {}


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.stem for path in FILES if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_page_about_the_design_is_that_of_this_tree() -> None:
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    for name in re.findall(r"[\w/]+\.py", page):
        assert any((place / name).exists() for place in (PACKAGE, ROOT)), name
    for folder in PACKAGE.glob("*/__init__.py"):
        assert f"| `{folder.parent.name}/` |" in page


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    for path in FILES:
        module, package = module_and_package(path)
        tree = at_import_time(ast.parse(path.read_text(encoding="utf-8")))  # it changes the tree
        tops = {name.partition(".")[0] for name in imported_names(tree, package)}
        assert not tops & LAZY, f"{module} imports them while it is itself being imported"


def test_nothing_outgrows_a_reader() -> None:
    for path in FILES:
        text, tree = text_and_tree(path)
        assert len(text.splitlines()) <= FILE_LINES, f"{path}: split the concept, not the text"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                most = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
                assert (node.end_lineno or 0) - node.lineno < most, f"{path}: {node.name}"
            if isinstance(node, ast.FunctionDef) and node.name == "__init__" and path != OPTIONS:
                count = len([*node.args.args[1:], *node.args.kwonlyargs])
                assert count <= ARGUMENTS, f"{path}:{node.lineno}"


# ---------------------------------------------------------------------- what targets install


def installs(target: str, environment: Path) -> list[str]:
    """What ``make`` would install for a target, into an environment."""
    done = subprocess.run(
        ["make", "-n", target, f"VENV={environment}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return re.findall(r"pip install .* -e \"\.\[(.*)\]\"", done.stdout)


@pytest.mark.parametrize(("target", "other"), [("demo", "lint"), ("lint", "demo")])
def test_each_target_installs_what_it_needs(target: str, other: str, tmp_path: Path) -> None:
    assert installs(target, tmp_path) == [target]
    (tmp_path / f".installed-{target}").touch()
    assert installs(target, tmp_path) == []
    assert installs(other, tmp_path) == [other]
    assert installs("test", tmp_path) == ["dev,docs,examples"]
    (tmp_path / f".installed-{target}").unlink()
    (tmp_path / ".installed").touch()
    assert installs(target, tmp_path) == installs("test", tmp_path) == []


def test_the_demo_imports_nothing_else() -> None:
    examples, pending, imported = ROOT / "examples", ["finetune_classifier"], set[str]()
    while pending:
        path = examples / f"{pending.pop().replace('.', '/')}.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {getattr(n, "module", None) or n.names[0].name for n in nodes}
        imported |= {name.partition(".")[0] for name in names}
        pending += [name for name in names if name.startswith("helpers.")]
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*table["dependencies"], *table["optional-dependencies"]["demo"]]
    known = {re.match(r"[\w-]+", line)[0] for line in required}  # type: ignore[index]
    here = {"helpers", "lightning_graphs"}
    assert imported - set(sys.stdlib_module_names) - here <= known
