"""Containers of a module that steps fill, and that steps or hooks empty: as after eager steps."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.programs.table import Promises, row
from tests.training.fits import Net, batches

Code = Callable[..., None]


@dataclass(slots=True)
class Meter:
    """A meter with slots."""

    total: Any = 0.0
    count: int = 0
    last: list[Any] = field(default_factory=list)


class Opaque:
    """An object that nothing is known of."""

    def __repr__(self) -> str:
        return "opaque"


KINDS = {
    "Counter": Counter, "OrderedDict": OrderedDict, "UserDict": UserDict, "UserList": UserList,
    "defaultdict": defaultdict, "deque": deque, "SimpleNamespace": SimpleNamespace, "Meter": Meter,
    "partial": partial, "torch": torch, "Opaque": Opaque,
}  # fmt: skip


def code(text: str) -> Code:
    """A function of a container's owner, the loss, hidden features and the number of the batch."""
    names: dict[str, Any] = {"__name__": __name__, **KINDS}
    body = "".join(f"    {line}\n" for line in text.split("\n"))
    exec(f"def run(s, loss, h, i):\n{body}", names)
    run: Code = names["run"]
    return run


CLEAR, LIST, DICT = "s.c.clear()", "s.c = []", "s.c = {}"
APPEND, DEFAULT = "s.c.append(loss)", "s.c.setdefault('loss', []).append(loss)"
TABLE: dict[str, tuple[str, str, str]] = {  # how it begins, what a step does, what an epoch's end
    "append, clear": (LIST, APPEND, CLEAR),
    "append, new": (LIST, APPEND, LIST),
    "append, slice": (LIST, APPEND, "del s.c[:]"),
    "append, gone": (LIST, f"if not hasattr(s, 'c'): s.c = []\n{APPEND}", "del s.c"),
    "append, None": ("s.c = None", f"if s.c is None: s.c = []\n{APPEND}", "s.c = None"),
    "append, deque": (LIST, APPEND, "s.c = deque() if type(s.c) is list else []"),
    "append, history": (LIST, APPEND, "s.d = (s.d or []) + [s.c]\ns.c = []"),
    "extend": (LIST, "s.c.extend(x * 2 for x in (loss, h))\ns.c += (1, loss)", CLEAR),
    "insert": (LIST, "s.c.insert(1, loss)", LIST),
    "slices": (LIST, "s.c[:] = [h]", CLEAR),
    "window by slices": (LIST, f"{APPEND}\ns.c[:-3] = []", CLEAR),
    "window by del": (LIST, f"{APPEND}\ndel s.c[:-3]", "pass"),
    "window by pop": (LIST, f"{APPEND}\nif len(s.c) > 3: s.c.pop(0)", CLEAR),
    "window by a new list": (LIST, f"{APPEND}\ns.c = s.c[-3:]", LIST),
    "window of tuples": ("s.c = ()", "s.c = (*s.c, loss)[-3:]", "s.c = ()"),
    "index": ("s.c = [0, 0]", "try: s.c[2] = h\nexcept IndexError: s.c[-1] = h", "s.c.append(1)"),
    "reverse, sort": ("s.c = [3, 1]", "s.c.reverse()\ns.d = sorted(s.c)", "s.c[:] = [3, 1]"),
    "remove": ("s.c = ['a']", "s.c.append('b')\ns.c.remove('b')\ns.c[0] = loss", "s.c = ['a']"),
    "read": (LIST, f"{APPEND}\ns.d = torch.stack(s.c[-2:]).sum()", CLEAR),
    "by its type": (LIST, f"if type(s.c) is list: {APPEND}\nelse: s.d = 1", CLEAR),
    "cleared by the step": (LIST, f"s.c.clear()\n{APPEND}", "pass"),
    "cleared now and then": (LIST, f"if i % 3 == 0: s.c.clear()\n{APPEND}", "pass"),
    "new now and then": (LIST, f"{APPEND}\nif i % 3 == 2:\n    s.d = s.c\n    s.c = []", "pass"),
    "two names": ("s.c = []\ns.d = s.c", f"{APPEND}\ns.d.append(h)\ns.c.append(1)", CLEAR),
    "two names, then one": ("s.c = []\ns.d = s.c", f"{APPEND}\ns.d.append(h)", LIST),
    "exchanged": ("s.c = [0]\ns.d = [1]", f"s.c, s.d = s.d, s.c\n{APPEND}", "s.d.clear()"),
    "setdefault, clear": (DICT, DEFAULT, CLEAR),
    "setdefault, new": (DICT, DEFAULT, DICT),
    "setdefault, pop": (DICT, DEFAULT, "s.c.pop('loss')"),
    "not in": (DICT, "if 'q' not in s.c: s.c['q'] = []\ns.c['q'].append(loss)", CLEAR),
    "defaultdict": ("s.c = defaultdict(list)", "s.c['q'].append(loss)\ns.c['p'] += [h]", CLEAR),
    "defaultdict of numbers": ("s.c = defaultdict(float)", "s.c[0] += 1\ns.c['q'] += loss", CLEAR),
    "get": (DICT, "s.c['n'] = s.c.get('n', 0) + 1\ns.c['q'] = s.c.get('q', 0.0) + loss", CLEAR),
    "keys": (DICT, "s.c[None] = 1\ns.c['a', 1] = h\ns.c[0.5] = [loss]", CLEAR),
    "update": (DICT, "s.c |= {'z': loss}\ns.c.update(a=h)\ndel s.c['z']", CLEAR),
    "popitem": ("s.c = {'a': 1}", "s.c['b'] = loss\ns.d = s.c.popitem()", "pass"),
    "order": (DICT, "s.c.pop('z', None)\ns.c['y'] = 1\ns.c['z'] = loss", CLEAR),
    "order alone": ("s.c = {'a': 1, 'b': 2}", "s.c['a'] = s.c.pop('a')", "s.c = {'a': 1, 'b': 2}"),
    "OrderedDict": (
        "s.c = OrderedDict(a=1, b=2)", "s.c['a'] = loss\ns.c.move_to_end('b', last=False)",
        "s.c = OrderedDict(a=1, b=2)",
    ),
    "Counter": ("s.c = Counter()", "s.c.update('ab')\ns.c['a'] += 1\ns.c.subtract(b=2)", CLEAR),
    "comprehension": ("s.c = {'a': 0.0}", "s.c = {k: v + loss for k, v in s.c.items()}", "pass"),
    "deque": ("s.c = deque(maxlen=3)", "s.c.append(loss)\ns.c.extendleft([h])", CLEAR),
    "deque, read": ("s.c = deque(maxlen=3)", "s.c.append(loss)\ns.d = sum(s.c) / len(s.c)", CLEAR),
    "deque, turned": ("s.c = deque([1, 2])", "s.c.rotate()\ns.c[0] = loss", "s.c[0] = 3"),
    "deque, popleft": ("s.c = deque()", f"{APPEND}\nif len(s.c) > 2: s.c.popleft()", CLEAR),
    "set": ("s.c = set()", "s.c.add(0.5)\ns.c |= {'a', 'b'}\ns.c.discard('b')", CLEAR),
    "set, read": ("s.c = set()", "if 'a' in s.c: s.d = loss\ns.c.update({'a'})", CLEAR),
    "dict of lists": ("s.c = {'a': []}", "s.c['a'].append(loss)", "s.c = {'a': []}"),
    "dicts of dicts": (DICT, "s.c.setdefault('a', {}).setdefault('b', []).append(loss)", CLEAR),
    "a dict at times": (
        DICT, "if i % 3 == 0: s.c['a'] = {}\ns.c['a'].setdefault('b', []).append(h)", "pass"
    ),
    "list of dicts": ("s.c = [{}]", "s.c[0].setdefault('a', []).append(loss)", "s.c[0].clear()"),
    "dicts in a list": (LIST, "s.c.append({'i': i, 'loss': loss})", CLEAR),
    "deques": ("s.c = defaultdict(partial(deque, maxlen=2))", "s.c['a'].append(loss)", CLEAR),
    "namespace": (
        "s.c = SimpleNamespace(a=[])", "s.c.a.append(loss)\ns.c.b = h",
        "s.c = SimpleNamespace(a=[])",
    ),
    "slots": ("s.c = Meter()", "s.c.total += loss\ns.c.count += 1\ns.c.last.append(h)",
              "s.c = Meter()"),
    "UserDict": ("s.c = UserDict()", "s.c['a'] = loss", CLEAR),
    "UserList": ("s.c = UserList()", APPEND, CLEAR),
    "weights": (LIST, "s.c.append(s.net[4].bias)", CLEAR),
}  # fmt: skip


class Filling(Net):
    """Writes down what is in its containers, in which order and of which types."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        begin, step, end = map(code, texts)
        self.d: Any = None
        self.seen: list[str] = []
        self._step, self._end = step, end
        begin(self, None, None, 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch["x"]).float()
        loss = nn.functional.cross_entropy(hidden, batch["y"])
        self._step(self, loss.detach(), self.mean_of(hidden), batch_idx)
        return loss

    @torch.no_grad()  # a wrapper: what it wraps is looked at ahead of the capture
    def mean_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.sum(0) / len(hidden)

    def note(self) -> None:
        """Write down what there is now."""
        found = getattr(self, "c", "nothing")
        values = sorted(map(repr, found)) if isinstance(found, set) else found
        keys = [*vars(found)] if isinstance(found, SimpleNamespace) else []
        self.seen.append(f"{values!r} {keys} {self.d!r} {found is self.d}")

    def on_train_batch_end(self, *_: Any) -> None:
        self.note()

    def on_train_epoch_end(self) -> None:
        self._end(self, None, None, 0)
        self.note()


NONE_STAYS = {  # how it begins, what a step does, what an epoch's end; what is said
    "in a tuple": ("s.c = ([], [])", "s.c[0].append(loss)", "pass", r"step changes self.c\[0\]"),
    "by its index": (DICT, "s.c[i] = loss", CLEAR, "batch_idx is read at"),
    "of objects": (LIST, "s.c.append(Opaque())", CLEAR, "self.c"),
}
ROWS = {
    name: row(
        partial(Filling, *texts), below="", replayed=11,
        max_epochs=5, data=lambda: batches(7), validation=0,
    )
    for name, texts in TABLE.items()
}  # fmt: skip
ROWS["append now and then, beside a cast"] = row(
    partial(Filling, LIST, f"h.type(torch.float64)\nif i % 3 == 0: {APPEND}", "pass"),
    graphs=3, below="", max_epochs=5, data=lambda: batches(7), validation=0,
)  # fmt: skip
ROWS |= {
    name: row(partial(Filling, *texts), said=said, placed=False, max_epochs=2, validation=0)
    for name, (*texts, said) in NONE_STAYS.items()
}


class TestContainers(Promises):
    rows = ROWS
