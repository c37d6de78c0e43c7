"""Files that people and programs hand in: safe loaders only, and errors that say where.

What each option refuses, with key and line: tests/training/lifecycle/test_environment.py.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lightning_graphs
from lightning_graphs import GraphCapture
from lightning_graphs.errors import GraphError
from lightning_graphs.lightning.plugins import capture_of

SOURCES = sorted(Path(lightning_graphs.__file__).parent.rglob("*.py"))
# Loaders that run code which is written in the file.
UNSAFE = {
    "yaml": {"load", "load_all", "full_load", "unsafe_load", "full_load_all", "unsafe_load_all"},
    "pickle": {"load", "loads"},
    "torch": {"load"},
    "marshal": {"load", "loads"},
    "builtins": {"eval"},
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_source_uses_a_loader_that_runs_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        assert name not in UNSAFE.get(owner or "builtins", ()), f"{path}:{node.lineno}: {called}"
        given_loader = {k.arg: ast.unparse(k.value) for k in node.keywords}.get("Loader")
        assert given_loader in (None, "yaml.SafeLoader"), f"{path}:{node.lineno}: {called}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    monkeypatch.chdir(directory)


def configured(name: str, text: str) -> GraphCapture:
    Path(name).write_text(text, encoding="utf-8", errors="surrogatepass")
    return capture_of(name)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.mkdir [made]",
        "!!python/object/new:os.mkdir [made]",
        "!!python/name:os.mkdir",
        "!!python/module:antigravity",
    ],
)
def test_a_file_runs_no_code(tag: str) -> None:
    with pytest.raises(GraphError, match=r"a\.yaml must .*: could not determine a constructor"):
        configured("a.yaml", f"warmup_steps: 4\nscope: {tag}\n")
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "modules: " + "[" * 5000 + "]" * 5000, r"a\.yaml"),
        ("a.json", '{"modules": ' + "[" * 200000 + "]" * 200000 + "}", r"a\.json"),
        ("a.yaml", "1: step\n", r"got .1: step. in a\.yaml"),
        ("a.yaml", "? [scope]\n: step\n", r"a\.yaml"),
        ("a.yaml", "modules: ''\n", r"a\.yaml: modules must .*, got ''"),
        ("a.yaml", "modules: {net: 1}\n", r"a\.yaml: modules must .*, got \{'net': 1\}"),
        ("a.yaml", "a: &a [x]\nmodules: [*a]\n", r"a\.yaml: .*'a'"),
        ("a.yaml", "max_graphs: !!binary aGVsbG8=\n", r"a\.yaml: max_graphs must .*, got b'hello'"),
        ("a.yaml", "max_graphs: 1\n---\nmax_graphs: 2\n", r"a\.yaml must .*: expected a single"),
        ("a.yaml", "max_graphs: .nan", r"a\.yaml: max_graphs must .*, got nan"),
        ("a.json", '{"max_graphs": NaN}', r"a\.json: max_graphs must .*, got 'NaN'"),
        ("a.yaml", "max_graphs: !!int many", r"a\.yaml must .*: invalid literal"),
    ],
)  # fmt: skip
def test_a_strange_file_is_refused_by_name(name: str, text: str, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        configured(name, text)


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KNOWN = set(GraphCapture.__init__.__kwdefaults__)
NAMES = st.sampled_from([*sorted(KNOWN), "other", ""])
FUZZED = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def refused_by_name(name: str, text: str) -> bool:
    """Whether a file was refused, in the one way that there is; it is not, if it is taken."""
    try:
        configured(name, text)
    except GraphError as error:
        refused = str(error)
    else:
        return False
    assert name in refused
    return True


@FUZZED
@given(st.dictionaries(NAMES, VALUES, max_size=3))
def test_any_json_is_taken_or_refused_by_name(values: dict[str, Any]) -> None:
    refused = refused_by_name("a.json", json.dumps(values, indent=1))
    assert refused or values.keys() <= KNOWN


@FUZZED
@given(st.text())
@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_any_text_is_taken_or_refused_by_name(name: str, text: str) -> None:
    refused_by_name(name, text)  # and nothing else happens
