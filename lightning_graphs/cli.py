"""The ``lightning-graphs`` command: ``doctor``, ``inspect`` and ``env``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

    from lightning_graphs.training.diagnosis import Diagnosis

CLEAN, OBSTACLES, BAD_INPUT = 0, 1, 2
"""Exit codes: nothing stands in the way, something does, the input cannot be used."""

READER_GONE = 141
"""Exit code where the output is read no further, as in ``| head``: that of other programs there."""


class InputError(Exception):
    """What was given to the command cannot be used; the message says what and where."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the program's name; that of the process by default.

    Returns:
        The exit code: 0, or 1 where the doctor found obstacles, or 2 on bad input.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "doctor":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        code: int = options.run(options, rest)
        sys.stdout.flush()
    except InputError as error:
        print(f"lightning-graphs {options.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # What is still in the buffer is written at exit, and would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return code


def _env(options: argparse.Namespace, _: list[str]) -> int:
    from lightning_graphs.cli_environment import show_environment

    show_environment(options)
    return CLEAN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-graphs",
        description="CUDA graphs for PyTorch Lightning.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="list what stands in the way of capturing a training step",
        description="Runs a few real training steps of a LightningCLI configuration, on a GPU or "
        "a CPU, without capturing, and lists everything that stands in the way of a capture, with "
        "line and remedy. Further arguments are those of LightningCLI, such as "
        "--trainer.accelerator=cpu. Exit code 0: nothing stands in the way; 1: something does; 2: "
        "bad input.",
    )
    doctor.add_argument(
        "-c", "--config", action="append", default=[], metavar="FILE",
        help="configuration of LightningCLI: trainer, model, data; may be given again",
    )  # fmt: skip
    doctor.add_argument(
        "--steps", type=_positive, default=3, metavar="N", help="steps to observe (default: 3)"
    )
    doctor.add_argument(
        "--json", action="store_true", help="print the rows as JSON, everything else to stderr"
    )
    doctor.set_defaults(run=_doctor)

    inspect = commands.add_parser(
        "inspect", allow_abbrev=False, help="show a saved report",
        description="Shows a report that report.to_json() wrote.",
    )  # fmt: skip
    inspect.add_argument("report", type=Path, help="the JSON file")
    inspect.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    inspect.set_defaults(run=_inspect)

    env = commands.add_parser(
        "env", allow_abbrev=False, help="versions, and what works here and why not",
        description="Prints versions, and which parts of lightning-graphs work on this machine.",
    )  # fmt: skip
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=_env)
    return parser


def _version() -> str:
    # Of the package itself: it also runs from a checkout that nobody has installed.
    return str(sys.modules["lightning_graphs"].__version__)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


# ---------------------------------------------------------------------- doctor


def _doctor(options: argparse.Namespace, rest: list[str]) -> int:
    if not options.config and not rest:
        raise InputError("a configuration is missing: write --config config.yaml")
    for path in options.config:
        _check_configuration(Path(path))
    files = [argument for path in options.config for argument in ("--config", path)]
    # Modules beside the configuration are importable, as they are for `python train.py`.
    sys.path.insert(0, os.getcwd())
    everything_to_stderr = contextlib.redirect_stdout(sys.stderr) if options.json else None
    with everything_to_stderr or contextlib.nullcontext():
        diagnosis = _diagnose([*files, *rest], options)
    if options.json:
        print(diagnosis.to_json())
    return OBSTACLES if diagnosis.obstacles else CLEAN


def _check_configuration(path: Path) -> None:
    """Say of a file what is wrong with it before anything else is made of it."""
    import yaml

    try:
        content = yaml.safe_load(_text_of(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        raise InputError(f"{place}: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise InputError(f"{path}: it is nested too deeply") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: a configuration is a mapping with the keys trainer, model, data")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None


def _diagnose(arguments: list[str], options: argparse.Namespace) -> Diagnosis:
    from lightning_graphs.core.callsite import CallSiteFinder
    from lightning_graphs.training.callback import GraphCapture

    cli = _lightning_cli(arguments, options)
    trainer = cli.trainer
    given = [one for one in trainer.callbacks if isinstance(one, GraphCapture)]  # type: ignore[attr-defined]
    rehearse = any(one.options.backend == "emulated" for one in given)
    doctor = GraphCapture(
        doctor=True,
        scope=given[0].options.scope if given else "auto",
        warmup_steps=options.steps,
        backend="emulated" if rehearse else "auto",
    )
    trainer.callbacks = [one for one in trainer.callbacks if one not in given] + [doctor]  # type: ignore[attr-defined]
    try:
        with _without_remarks():
            trainer.fit(cli.model, datamodule=cli.datamodule)
    except Exception as error:
        site = CallSiteFinder().of_exception(error)
        place = f", at {site.describe()}" if site.line else ""
        raise InputError(f"the fit failed with {type(error).__name__}: {error}{place}") from error
    if doctor.diagnosis is None:
        raise InputError("the fit took no training step: has the data loader any batches?")
    return doctor.diagnosis


def _lightning_cli(arguments: list[str], options: argparse.Namespace) -> LightningCLI:
    try:
        import jsonargparse
        from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
    except ImportError as error:
        raise InputError(
            f'LightningCLI needs jsonargparse ({error}): pip install "lightning-graphs[cli]"'
        ) from None

    class DoctorCLI(LightningCLI):
        """Makes trainer, model and data; the trainer takes a few steps and writes no file."""

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            # Configurations that `train.py fit --print_config` wrote have these keys as well.
            for key in ("ckpt_path", "weights_only"):
                parser.add_argument(f"--{key}", type=Any, default=None, help="not used")

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            quiet = {"enable_progress_bar": False, "enable_model_summary": False}
            return super().instantiate_trainer(fast_dev_run=options.steps, **quiet, **kwargs)

    try:
        with _without_remarks():
            return DoctorCLI(
                args=arguments,
                run=False,
                save_config_callback=None,
                parser_kwargs={"exit_on_error": False},
            )
    except jsonargparse.ArgumentError as error:
        message = _without_class(error.message, options.config)
        raise InputError(message or _with_line(error.message, options.config)) from None
    except Exception as error:
        raise InputError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Lightning advises on workers, intervals and loggers, which is of no use for a few steps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.")
        yield


def _without_class(message: str, files: Sequence[str]) -> str:
    """What to write where a message is about options whose class no file names; else empty."""
    import yaml

    for file in files:
        content = yaml.safe_load(_text_of(Path(file)))
        nameless = {
            key: {"class_path": f"your_module.Your{kind}", "init_args": given}
            for key, kind in (("model", "Model"), ("data", "Data"))
            if isinstance(given := content.get(key), dict) and "class_path" not in given
        }
        if any(f'key "{key}"' in message for key in nameless):
            return (
                f"{file}: the doctor does not know the classes that your program hands to "
                f"LightningCLI. Name class_path under {' and '.join(nameless)}:\n\n"
                f"{yaml.safe_dump(nameless, sort_keys=False)}\n"
                "or have your program run the doctor: LIGHTNING_GRAPHS='doctor: true' "
                f"python train.py fit --config {file} (with --trainer.callbacks=null, if the "
                "file has a GraphCapture of its own)"
            )
    return ""


def _with_line(message: str, files: Sequence[str]) -> str:
    """Put file and line in front of a message that names a key or a class of a configuration."""
    import yaml

    names = set(re.findall(r"[\"'`]([\w.]+)[\"'`]", message.partition("Given value")[0]))
    for file in files:
        node = yaml.compose(_text_of(Path(file)), Loader=yaml.SafeLoader)
        if found := max(_named(node, names), default=None):
            return f"{file}, line {found[1]}: {message}"
    return message


def _named(node: Any, names: set[str], depth: int = 1) -> Iterator[tuple[int, int]]:
    """Depth and line of the keys and values of a YAML document that are among ``names``."""
    for key, value in node.value if node.id == "mapping" else ():
        if key.value in names or (value.id == "scalar" and value.value in names):
            yield depth, key.start_mark.line + 1
        yield from _named(value, names, depth + 1)
    for item in node.value if node.id == "sequence" else ():
        yield from _named(item, names, depth + 1)


# ---------------------------------------------------------------------- inspect


def _inspect(options: argparse.Namespace, _: list[str]) -> int:
    text = _text_of(options.report)
    from lightning_graphs.errors import GraphError
    from lightning_graphs.reporting import Report, show

    try:
        report = Report.from_json(text)
        if options.html is None:
            show(report)
        else:
            report.to_html(options.html, overwrite=False)
            print(options.html)
    except (GraphError, OSError) as error:
        raise InputError(f"{options.report}: {error}") from None
    return CLEAN
