"""The documentation builds, runs as it stands, and leaves no message of the package out."""

from __future__ import annotations

import ast
import contextlib
import html
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from lightning.pytorch.loops.fit_loop import _FitLoop

from lightning_graphs import cli, errors
from lightning_graphs.lightning.plugins import capture_of
from lightning_graphs.policy.options import OptionError, Options
from tests.training.costs.test_entered_files import REPLAYED

for library in ("mkdocs", "material", "mkdocstrings", "jsonargparse"):
    pytest.importorskip(library)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What runs here is what users run, with whatever their libraries advise them.
as_a_user = pytest.mark.filterwarnings("ignore")


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """Title and text of the blocks in these languages; what a block says ``before`` is left out."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(title, text) for kind, title, text in found if kind in languages and title != "before"]


@pytest.fixture(scope="module")
def messages() -> Iterator[ModuleType]:
    """What reads the messages from the source; it lies beside the pages."""
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("messages")
    sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def found(messages: ModuleType) -> Any:
    """All messages of the package."""
    return messages.Messages()


@pytest.fixture(scope="module")
def hooks(messages: ModuleType) -> ModuleType:
    """What puts the messages into the pages."""
    return importlib.import_module("hooks")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


# ---------------------------------------------------------------------- the pages


def test_every_page_is_built(site: Path) -> None:
    for page in PAGES[1:]:
        assert (site / f"{page.stem}.html").is_file()
    assert not (site / "messages.py").exists()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    foreign = re.compile(r"<(?:script|img|link rel=\"stylesheet\")[^>]+(?:src|href)=\"(http[^\"]+)")
    for page in site.glob("*.html"):
        assert foreign.findall(page.read_text(encoding="utf-8")) == [], page.name


def test_the_header_links_to_the_code(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    [address] = {*re.findall(r'<a href="([^"]+)" title="Go to repository"', page)}
    assert address.startswith(("https://", ROOT.as_uri()))


def test_docstrings_show_no_role_of_sphinx(site: Path) -> None:
    for page in site.glob("*.html"):
        assert not re.search(r":(class|func|meth|data):", page.read_text(encoding="utf-8"))


def test_anchors_can_be_told_apart(site: Path) -> None:
    """mkdocs numbers those of equal headings, and the numbers move with the next heading."""
    for page in site.glob("*.html"):
        anchors = re.findall(r'<h[1-6] id="([^"]+)"', page.read_text(encoding="utf-8"))
        assert not [one for one in anchors if re.search(r"_\d+$", one)], page.name
        assert len(anchors) == len(set(anchors)), page.name


def test_headings_have_the_words_that_readers_search(site: Path) -> None:
    text = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    titles = " ".join(entry["title"] for entry in json.loads(text)["docs"]).lower()
    sought = (
        "validation fp8 wandb tensorboard fabric accelerate hugging profiling doctor optimizers"
    )
    assert [word for word in sought.split() if word not in titles] == []


def test_the_search_works_from_the_disk(site: Path) -> None:
    """Browsers refuse workers and requests to a page from the disk: both are replaced."""
    assert (site / "search" / "search_index.js").is_file()
    for page in site.glob("*.html"):
        found = re.findall(r'<script src="([^"]+)"', page.read_text(encoding="utf-8"))
        shims = [one for one in found if "iframe-worker" in one]
        assert len(shims) == 1
        assert (site / shims[0].lstrip("/")).is_file()


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 150


def test_the_design_lists_the_files_of_a_replayed_step() -> None:
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    table = text.partition("files, first from top")[2].partition("\n\n|")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(.+)\.py`", table, re.MULTILINE) == list(REPLAYED)


def test_the_reference_names_every_option(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in Options.__dataclass_fields__:
        assert f"<code>{name}</code>" in text


# ---------------------------------------------------------------------- what they say runs


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with the examples in it, as the working directory."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_GRAPHS", raising=False)
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # Lightning sets them and leaves them
        monkeypatch.setenv(variable, "0")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def with_blocks(*languages: str) -> list[Any]:
    return [pytest.param(p, id=p.stem) for p in PAGES if blocks(p, *languages)]


@as_a_user
@pytest.mark.parametrize("page", with_blocks("python"))
def test_python_runs_as_it_stands(
    page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [page.stem])
    names: dict[str, Any] = {"__name__": page.stem}
    for number, (_, text) in enumerate(blocks(page, "python")):
        place = workplace / f"block_{number}.py"  # where the doctor finds its lines
        place.write_text(text, encoding="utf-8")
        exec(compile(text, str(place), "exec"), names)


@as_a_user
def test_the_doctors_page_shows_what_its_program_prints(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = DOCS / "doctor.md"
    (_, program), *_ = blocks(page, "python")
    place = workplace / "train.py"
    place.write_text(program, encoding="utf-8")
    exec(compile(program, str(place), "exec"), {"__name__": "train"})
    (_, shown), *_ = blocks(page, "text")
    assert shown in capsys.readouterr().out


@as_a_user
def test_the_readme_example_is_captured_on_the_emulated_backend(workplace: Path) -> None:
    text = blocks(PAGES[0], "python")[0][1]
    assert text.count("GraphCapture()") == 1
    assert len(text.splitlines()) <= 10
    text = text.replace("GraphCapture()", 'GraphCapture(backend="emulated")')
    names: dict[str, Any] = {}
    exec(text.replace("devices=1", 'devices=1, accelerator="cpu"'), names)
    assert names["graphs"].report.replayed > 50
    assert names["graphs"].report.fallbacks == ()


@pytest.mark.parametrize("page", with_blocks("yaml"))
def test_configurations_make_callbacks(page: Path) -> None:
    for title, text in blocks(page, "yaml"):
        if title == "graphs.yaml":
            assert capture_of(text).options != Options()
        else:
            assert all(Options(**options) for options in _options_in(yaml.safe_load(text)))


def _options_in(value: Any) -> Iterator[dict[str, Any]]:
    """The options of every callback in a configuration, for LightningCLI or for Hydra."""
    if isinstance(value, list):
        for item in value:
            yield from _options_in(item)
    elif isinstance(value, dict):
        if value.get("class_path") == "lightning_graphs.GraphCapture":
            yield value["init_args"]
        elif value.get("_target_") == "lightning_graphs.GraphCapture":
            yield {key: option for key, option in value.items() if key != "_target_"}
        else:
            yield from _options_in(list(value.values()))


def commands(page: Path) -> list[str]:
    return "".join(text for _, text in blocks(page, "bash")).splitlines()


@as_a_user
@pytest.mark.parametrize("page", with_blocks("bash"))
def test_commands_run_as_they_stand(
    page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for title, text in blocks(page, "python", "yaml"):
        if title:
            (workplace / title).write_text(text, encoding="utf-8")
    for _, text in blocks(page, "python"):  # what they write is read by commands
        if "to_json" in text:
            exec(text, {})
    earlier = [line for other in PAGES[: PAGES.index(page)] for line in commands(other)]
    for line in commands(page):
        if "examples/" in line and line in earlier:
            continue  # the same wherever it stands, and it takes seconds
        words = shlex.split(line, comments=True)
        with monkeypatch.context() as context:
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                context.setenv(*words.pop(0).split("=", 1))
            if words:
                _run(words, context)


def _run(words: list[str], context: pytest.MonkeyPatch) -> None:
    program, *arguments = words
    if program == "make":
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{arguments[0]}:", targets, re.MULTILINE), words
    elif program == "lightning-graphs":
        assert cli.main(arguments) == 0, words
    elif program == "python":
        context.setattr(sys, "argv", arguments)
        epochs = property(lambda _: 1, lambda *_: None)  # one shows that a fit runs
        context.setattr(_FitLoop, "max_epochs", epochs, raising=False)
        context.syspath_prepend(str(Path(arguments[0]).parent))
        with contextlib.ExitStack() as stack:
            if any(word.endswith(("help", "print_config")) or ".help=" in word for word in words):
                stack.enter_context(pytest.raises(SystemExit, match=r"^0$"))
            runpy.run_path(arguments[0], run_name="__main__")
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", arguments[-1])
        table = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for extra in ",".join(extras).split(",") if extras else ():
            assert re.search(rf"^{extra} = \[$", table, re.MULTILINE), words
    else:
        assert (ROOT / program).is_file(), words


# ---------------------------------------------------------------------- every message


def test_every_exception_class_is_known(found: Any) -> None:
    for module in found.modules:
        name = ".".join(module.path.relative_to(ROOT).with_suffix("").parts)
        if not name.endswith("__main__"):
            importlib.import_module(name.removesuffix(".__init__"))

    def family(kind: type) -> set[str]:
        return {kind.__name__}.union(*map(family, kind.__subclasses__()))

    ours = family(errors.GraphError)
    assert ours <= set(found.exceptions)
    assert len(ours) >= 8


def test_every_raise_has_a_message(messages: ModuleType, found: Any) -> None:
    """Each raises an exception of ours, or what was caught, or what Python's protocols want."""
    places = {message.site for message in found.errors}
    known = {*found.exceptions, *messages.REFUSALS}
    makers: set[str] = set()
    for _ in range(2):  # some call another one
        makers |= {
            function.name
            for module in found.modules
            for function in module.functions
            if any(messages.name_of(c.func) in known | makers for c in _calls_in(function))
        }
    protocols = {"AttributeError", "TypeError", "ValueError"}
    seen = 0
    for module in found.modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            name = messages.name_of(node.exc.func)
            if name in found.exceptions or name in messages.REFUSALS:
                assert module.site(node.exc) in places
                seen += 1
            else:
                assert name in makers | protocols, f"{module.site(node.exc)}: raise {name}"
    assert seen > 80


def _calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (child for child in ast.walk(node) if isinstance(child, ast.Call))


def test_every_message_says_what_to_do(found: Any) -> None:
    for message in (*found.errors, *found.obstacles):
        assert message.remedy or message.passed_on, message.site


def test_a_message_is_one_sentence_and_its_fix(found: Any) -> None:
    """What was found follows a rule after a colon, and ``got ...`` follows what must be."""
    for message in (*found.errors, *found.obstacles):
        if not message.passed_on:
            text = str(errors.GraphError(message.rule, message.observed, message.remedy))
            assert re.fullmatch(r"[^\n]+\n  Fix: [^\n]+(\n    [^\n]+)*", text), message.site
            assert ": " not in message.rule, message.site
            assert not re.match(r"(it|that|this|they)\b", message.rule, re.IGNORECASE), message.site
            if message.observed.startswith("got "):
                assert " must " in message.rule, message.site


def test_every_message_is_on_its_page(site: Path, found: Any) -> None:
    pages = {"troubleshooting": [*found.errors, *found.sentences], "doctor": found.obstacles}
    for page, expected in pages.items():
        text = _text_of(site / f"{page}.html")
        for message in expected:
            if not message.passed_on:
                for part in (message.rule, message.observed, message.remedy):
                    assert _squeezed(part) in text, message.site


def test_a_constant_is_that_of_its_own_file(messages: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("one", "two"):
        (package / f"{name}.py").write_text(
            f"_RULE = 'The rule of {name} holds.'\n"
            "class OneError(RuntimeError): ...\n"
            "def f():\n"
            "    raise OneError(_RULE)\n",
            encoding="utf-8",
        )
    found = messages.Messages(package, root=tmp_path)
    assert [m.rule for m in found.errors] == ["The rule of one holds.", "The rule of two holds."]


def test_a_rule_of_several_files_is_listed_with_its_own_observation(found: Any) -> None:
    same = [m for m in found.errors if m.rule.startswith("A replay must compute ")]
    assert {m.site.partition(":")[0] for m in same} == {"lightning_graphs/regions/verify.py"}
    assert all(m.observed for m in same)


def test_no_advice_leans_on_another(hooks: ModuleType) -> None:
    """The page has another order than the file."""
    assert not [text for text in hooks.advice().values() if "before" in text and "sentence" in text]


def test_the_lists_in_the_repository_are_current(
    hooks: ModuleType, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "Messages", lambda: found)
    listed = 0
    for page in PAGES[1:]:
        text = page.read_text(encoding="utf-8")
        assert hooks.filled(text) == text, f"{page.name}: run python docs/hooks.py"
        listed += sum(text.count(f"<!-- {name} -->") for name in hooks.LISTS)
    assert listed == len(hooks.LISTS)


def _text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return _squeezed(html.unescape(re.sub(r"<[^>]+>", "", text)))


def _squeezed(text: str) -> str:
    """Without white space and marks of code, which a page renders in its own way."""
    return re.sub(r"[\s`]", "", text)


def test_every_sentence_has_advice(found: Any, hooks: ModuleType) -> None:
    known = hooks.advice()
    for message in found.sentences:
        assert hooks.advice_on(message.rule, known), (
            f"{message.site}: docs/advice.yaml has nothing for {message.rule!r}"
        )
    used = {hooks.part_of(message.rule, known) for message in found.sentences}
    assert set(known) == used


def test_messages_as_they_are_raised(found: Any) -> None:
    """What is read from the source is what users see, with blanks for what is filled in."""
    with pytest.raises(OptionError, match="must be one of") as caught:
        Options(scope="everything")  # type: ignore[arg-type]
    site = caught.traceback[-1]
    line = f"{Path(site.path).relative_to(ROOT).as_posix()}:{site.lineno + 1}"
    [message] = [m for m in found.errors if m.site == line]
    for part in ("rule", "observed", "remedy"):
        pattern = re.sub(r"<[^<>]+>", ".+", getattr(message, part).replace(".", r"\."))
        assert re.fullmatch(pattern, getattr(caught.value, part))


def test_a_message_without_advice_would_be_noticed(messages: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "one.py").write_text(
        "class OneError(RuntimeError): ...\n"
        "def f(name):\n"
        "    raise OneError(f'A {name} must hold.')\n"
        "def say(line: str):\n"
        "    rank_zero_warn(f'GraphCapture: {line}')\n"
        "class A:\n"
        "    def g(self):\n"
        "        self._say('a step runs backwards now')\n",
        encoding="utf-8",
    )
    found = messages.Messages(package, root=tmp_path)
    assert [(m.site, m.rule) for m in found.errors] == [("package/one.py:3", "A <name> must hold.")]
    assert "a step runs backwards now" in [m.rule for m in found.sentences]
