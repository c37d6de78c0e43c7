"""Builds a wheel, installs it into an empty environment, and uses it there: ``make wheel``.

The environment has this package alone, and finds what that needs in the one that runs this script.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
USE = """
import sys
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_graphs
from lightning_graphs import GraphCapture

assert lightning_graphs.__file__.startswith(sys.prefix), lightning_graphs.__file__
trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(BoringModel())
[graphs] = [one for one in trainer.callbacks if isinstance(one, GraphCapture)]
assert graphs.report.replayed > 50, graphs.report
print(graphs.report)
"""


def run(*command: str | Path, **environment: str) -> str:
    """Runs a command outside of the checkout, which Python must not find."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LIGHTNING_GRAPHS")}
    done = subprocess.run(
        [*map(str, command)],
        cwd=tempfile.gettempdir(),
        env=variables | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", place, ROOT)
        [wheel] = place.glob("lightning_graphs-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        assert "lightning_graphs/py.typed" in names
        assert all(name.startswith("lightning_graphs") for name in names), names
        [metadata] = [name for name in names if name.endswith("dist-info/METADATA")]
        text = zipfile.ZipFile(wheel).read(metadata).decode()
        for line in ("Requires-Python: >=3.10", "License-Expression: Apache-2.0", "# lightning-gr"):
            assert line in text, line

        builder = venv.EnvBuilder(with_pip=True)
        builder.create(place / "env")
        python = place / "env/bin/python"
        run(python, "-m", "pip", "install", "-q", "--no-deps", wheel)
        inside = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        around = sysconfig.get_path("purelib")
        Path(inside, "needed.pth").write_text(f"{around}\n", encoding="utf-8")
        print(run(place / "env/bin/lightning-graphs", "--version").strip(), "from", wheel.name)
        print(run(python, "-W", "ignore", "-c", USE, LIGHTNING_GRAPHS="backend: emulated").strip())


if __name__ == "__main__":
    main()
