"""The package's messages, put into the pages; and hooks of mkdocs (``mkdocs.yml`` names this file).

``python docs/hooks.py`` writes the lists of messages anew.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from messages import PACKAGE, Message, Messages

ADVICE = Path(__file__).with_name("advice.yaml")


def advice() -> dict[str, str]:
    """Part of a sentence -> what to do about it, for sentences that carry no remedy."""
    texts: dict[str, str] = yaml.safe_load(ADVICE.read_text(encoding="utf-8"))
    return texts


def part_of(sentence: str, known: Mapping[str, str]) -> str:
    """The part of a sentence by which its advice is known; empty if there is none."""
    return next((part for part in known if part in sentence), "")


def advice_on(sentence: str, known: Mapping[str, str]) -> str:
    """The advice on a sentence; empty if there is none."""
    return known.get(part_of(sentence, known), "")


AREAS = {
    "Options and configuration": (
        *("policy/options", "lightning/plugins", "lightning/callback", "lightning/fit"),
        *("padding"),
    ),
    "Training steps": ("lightning/", "regions/", "watch/", "policy/", "errors"),
    "Functions of plain loops": ("loops/",),
    "The core": ("core/", "device/", "values/", "autograd/", "private/"),
    "Reports": ("report/",),
}  # fmt: skip
"""Title -> beginnings of the paths of its messages; the first that fits."""


def area_of(message: Message) -> str:
    path = message.site.removeprefix(f"{PACKAGE.name}/")
    return next(title for title, starts in AREAS.items() if path.startswith(starts))


def markdown(text: str) -> str:
    """The text for a page: code between backticks stays, everything else is no markup."""
    parts = re.split(r"(`[^`]+`)", text)
    for i in range(0, len(parts), 2):
        plain = re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", parts[i])
        parts[i] = plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return " ".join("".join(parts).split())


def errors_as_markdown(messages: Messages) -> str:
    """All exceptions, by area; messages of one rule stand together."""
    lines = []
    for title in AREAS:
        lines += [f"### {title}", ""]
        rules: dict[str, list[Message]] = {}
        for message in messages.errors:
            if area_of(message) == title and not message.passed_on:
                rules.setdefault(message.rule, []).append(message)
        for rule, of_rule in rules.items():
            lines += [f"#### {markdown(rule)}", "", _class_line(of_rule), ""]
            for name, label in (("observed", "found"), ("remedy", "Fix")):
                texts = dict.fromkeys(filter(None, (getattr(m, name) for m in of_rule)))
                lines += [f"* *{label}:* {markdown(text)}" for text in texts]
            lines.append("")
    return "\n".join(lines)


def _class_line(messages: Sequence[Message]) -> str:
    kinds = ", ".join(dict.fromkeys(f"`{message.kind}`" for message in messages))
    return f"{kinds}, from {', '.join(dict.fromkeys(_file(message) for message in messages))}"


def _file(message: Message) -> str:
    return f"`{message.site.rpartition(':')[0]}`"


def obstacles_as_markdown(messages: Messages) -> str:
    """What the doctor can name, with the code to write."""
    lines = []
    for message in messages.obstacles:
        if not message.passed_on:
            lines += [f"### {markdown(message.rule)}", "", f"`{message.name}`", ""]
            lines += [f"*Fix:* {markdown(message.remedy)}", "", "```py", message.code, "```", ""]
    return "\n".join(lines)


def sentences_as_markdown(messages: Messages) -> str:
    """What is printed beside exceptions, a row each."""
    known = advice()
    rows = {m.rule: advice_on(m.rule, known) for m in messages.sentences}
    table = ["| sentence | what to do |", "| --- | --- |"]
    cells = (f"| {markdown(text)} | {todo} |" for text, todo in rows.items())
    return "\n".join([*table, *cells])


LISTS = {
    "errors": errors_as_markdown,
    "obstacles": obstacles_as_markdown,
    "sentences": sentences_as_markdown,
}
"""What stands in pages between ``<!-- name -->`` and ``<!-- end of name -->``."""


def filled(page: str) -> str:
    """The text of a page, its lists made anew from the source."""
    for name, text in LISTS.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        if found:
            after = rest.partition(end)[2]
            page = f"{before}{begin}\n{text(Messages()).strip()}\n{end}{after}"
    return page


def on_config(config: Any) -> None:
    """Hook of mkdocs: the header links to the code, where the clone came from or where it lies."""
    root = Path(__file__).parents[1]
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        origin = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        address = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", origin)
        if address.startswith("https://"):
            config.repo_url = address.removesuffix(".git")
    config.repo_url = config.repo_url or root.as_uri()
    config.repo_name = "Code"


_ROLE = re.compile(r":\w+:<code>~?([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Hook of mkdocs: what docstrings write for Sphinx (roles, ``::``), as plain text."""
    html = html.replace("::</p>", ":</p>")
    return _ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)


if __name__ == "__main__":
    for path in Path(__file__).parent.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")
