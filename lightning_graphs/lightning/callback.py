"""``GraphCapture``, the callback: begins and ends the captures of a fit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_graphs.device.cuda import joined_stream
from lightning_graphs.device.graph import BACKENDS
from lightning_graphs.errors import UnsupportedError, in_one_line
from lightning_graphs.lightning.evaluation_runner import EvaluationHandler
from lightning_graphs.lightning.fit import (
    FitSummary,
    StepRate,
    fit_context,
    rate_shown,
    reason_to_stay_out,
    refused,
    runner_for,
    save_nothing,
)
from lightning_graphs.lightning.loop import evaluations_looped, replays_looped
from lightning_graphs.lightning.private import untested
from lightning_graphs.lightning.ranks import (
    capture_stream,
    is_ddp,
    is_model_parallel,
    why_not_captured,
)
from lightning_graphs.lightning.runner import ModuleRunner, StrategyHandler
from lightning_graphs.lightning.strategy import BatchTransfer
from lightning_graphs.lightning.words import moves_batches_itself, why_no_whole_step
from lightning_graphs.policy.options import OPTIONS, OptionError, Options, refuse_unnamed
from lightning_graphs.private.callsite import stacklevel_of_user
from lightning_graphs.report import Report
from lightning_graphs.report.messages import Statistics
from lightning_graphs.watch.assertions import OpenAssertions


class GraphCapture(Callback):
    """Captures the training step into a CUDA graph and replays it for every batch.

    The first steps run eagerly, on a stream of their own. Then forward, loss, backward, gradient
    clipping and optimizer step become one graph, or two or three if a hook looks at gradients in
    between. Losses, logs, hooks, counters and checkpoints are those of a fit without the callback.
    What cannot be captured runs eagerly, and a warning says why.

    Example::

        trainer = Trainer(callbacks=[GraphCapture()])

    Args:
        scope: ``"step"``: the whole training step is captured. ``"modules"``: submodules are
            captured, each with its backward; manual optimization and code that depends on values
            may run between them. ``"auto"``: the whole step if possible, otherwise submodules.
        modules: Which submodules: patterns of qualified names, matched between dots
            (``"encoder.layers.*"``), or names of classes. By default the largest that can be
            captured.
        exclude: Submodules that stay eager: patterns or classes, as for ``modules``. Either option
            asks for graphs of submodules.
        evaluation: The steps of evaluations become graphs, too, each as a whole: those of
            validations, and of ``trainer.validate``, ``trainer.test`` and ``trainer.predict``.
        warmup_steps: Real training steps that run eagerly before the first capture.
        min_repeats: How often a batch signature (structure, shapes, dtypes) must have come back
            after the warm-up before it is captured. By default it is captured as soon as the
            remaining steps are expected to repay the capture, by measured times.
        max_graphs: How many signatures may have graphs at a time. A graph is released only for a
            signature that is used much more. By default memory is the only limit.
        on_failure: ``"eager"``: what cannot be captured runs eagerly, with a warning; with
            ``scope="auto"`` submodules are tried first. ``"raise"``: the first refusal raises.
        backend: ``"cuda"``, ``"emulated"`` (a rehearsal on the CPU), or ``"auto"``: CUDA on a GPU
            trainer, inactive on a CPU trainer.
        verify: Whether a captured step is also run eagerly, from the same state, and everything
            that both compute is compared. True: after each capture. A whole number K: also at
            every K-th optimizer step. False: never. A difference is handled by ``on_failure``.
        memory: How much more GPU memory than eager steps the callback may take, as a share of
            their peak; ``"auto"`` is 0.35. What does not fit runs eagerly, or is not verified.
        only_if_faster: True: nothing is captured that is not expected to pay off, and if replayed
            steps turn out not to be faster than eager ones, the callback switches itself off with
            a message. False: whatever comes back is captured.
        overlap: After some hundred replays, once they have saved ten times what it costs, a step
            on one GPU is captured once more, with the gradients of weights and biases on a second
            stream of its graph. Both graphs compute the same, to the bit, and the faster one is
            kept. It may take a seventh more memory. False: each graph stays in one stream.
        optimizer_kernel: ``"fused"``: Adam, AdamW and SGD run their fused kernels during the fit,
            whose results differ by rounding, unless they were made with ``fused=False`` or
            ``foreach=True``. ``"own"``: none is switched to its fused kernel; on a GPU Adam and
            AdamW run torch's ``capturable`` form, and all others the kernel that torch chooses.
        annotate: Note which submodule, operator and line launches each kernel of a graph:
            ``report.name_trace`` writes that into traces of ``torch.profiler``, for looking at a
            fit. What ``torch.compile`` has made is captured as it would be without.
        log_metrics: Log the figures of the report as ``graphs/...``, after the first steps and at
            the end of the fit, and the time of a step whenever Lightning logs.
        diagnose: Capture nothing. The first ``warmup_steps`` steps are observed, on a GPU or a CPU,
            and a list names everything that stands in the way of a capture, with the line and
            the remedy. It is ``report.diagnosis``.

    Raises:
        OptionError: an option has an impossible value.
    """

    def __init__(
        self,
        *nameless: Any,  # refused: options have names
        scope: Literal["auto", "step", "modules"] = "auto",
        modules: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        evaluation: bool = True,
        warmup_steps: int = 3,
        min_repeats: int | None = None,
        max_graphs: int | None = None,
        on_failure: Literal["eager", "raise"] = "eager",
        backend: Literal["auto", "cuda", "emulated"] = "auto",
        verify: bool | int = True,
        memory: float | Literal["auto"] = "auto",
        only_if_faster: bool = True,
        overlap: bool = True,
        optimizer_kernel: Literal["fused", "own"] = "fused",
        annotate: bool = False,
        log_metrics: bool = False,
        diagnose: bool = False,
        **unknown: NoReturn,  # refused with the names that there are
    ) -> None:
        refuse_unnamed(nameless, unknown)
        self.options = Options(**{n: value for n, value in locals().items() if n in OPTIONS})
        super().__init__()
        self._statistics = Statistics()
        self.gives_way = False  # made by LIGHTNING_GRAPHS: the program's own one is used
        self._handler: StrategyHandler | None = None
        self._summary: FitSummary | None = None
        self._assertions: OpenAssertions | None = None
        self._evaluation: EvaluationHandler | None = None
        self._rate: StepRate | None = None
        self._fit = contextlib.ExitStack()
        self._stream: torch.cuda.Stream | None = None

    @property
    def report(self) -> Report:
        """The results of the present fit so far, or of the last fit when none runs."""
        return self._statistics.report()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what no batch can make possible, and make the stream for captures."""
        if stage != "fit" or self._has_given_way(trainer):
            return
        same = [one for one in trainer.callbacks if isinstance(one, GraphCapture)]  # type: ignore[attr-defined]
        if sum(not one.gives_way for one in same) > 1:
            raise OptionError(
                "A trainer must have one GraphCapture.",
                f"got {len(same)} of them among its callbacks",
                "leave out all but one of them",
            )
        device = trainer.strategy.root_device
        backend = self.options.backend
        if backend not in ("auto", BACKENDS.get(device.type)):
            raise OptionError(
                "backend must be 'auto', 'cuda' on a GPU or 'emulated' on the CPU.",
                f"got {backend!r} with a trainer on {device}",
                "write backend='auto', or Trainer(accelerator="
                f"{'gpu' if backend == 'cuda' else 'cpu'!r})",
            )
        if self.options.diagnose:
            return
        reason = why_not_captured(trainer, self.options)
        if reason and self.options.on_failure == "raise":
            raise refused(reason)
        if device.type == "cuda" and not reason:
            self._stream = capture_stream(trainer, self._fit)

    def _has_given_way(self, trainer: Trainer) -> bool:
        """Tell whether this one is of the environment, and the program has one of its own."""
        others = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]
        if not self.gives_way or not any(isinstance(one, GraphCapture) for one in others):
            return False
        # Lightning goes on with the list that it has begun, and finds this one in the next.
        trainer.callbacks = others  # type: ignore[attr-defined]
        rank_zero_info(
            "LIGHTNING_GRAPHS is set, and the trainer has a GraphCapture of its own: that one is "
            "used."
        )
        return True

    def on_after_setup(self, **_: object) -> None:
        """Refuse a Fabric: it calls this hook and :meth:`on_after_optimizer_step` only.

        Where the package is installed it is refused already when it is made.
        """
        raise UnsupportedError(
            "GraphCapture must be a callback of a Trainer.",
            "got Fabric(callbacks=[GraphCapture()])",
            "leave GraphCapture out, and write step = lightning_graphs.capture(train_step, model, "
            "optimizer), with what fabric.setup has returned",
        )

    on_after_optimizer_step = on_after_setup  # with Fabric(...).setup_module

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the capture stream the current one.

        From this hook on user code may keep gradient nodes, and torch before 2.13 binds a node to
        the stream that is current when it is made.
        """
        if self._stream is not None:
            device = trainer.strategy.root_device
            self._fit.enter_context(joined_stream(device, self._stream))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the strategy's methods, on the capture stream."""
        own_stream = self._stream  # DDP and gradient nodes are bound to it
        self._release()
        self._statistics = Statistics()
        if self.options.diagnose or not self._is_active(trainer, pl_module):
            # No runner counts steps: at the end of the fit Lightning's count is that of eager ones
            statistics, loop = self._statistics, trainer.fit_loop.epoch_loop
            first = loop.total_batch_idx
            self._fit.callback(lambda: setattr(statistics, "eager", loop.total_batch_idx - first))
            if self.options.diagnose:
                self._observe(trainer, pl_module)
            return
        with contextlib.ExitStack() as stack:
            fit = fit_context(trainer, pl_module, self.options, self._statistics, own_stream, stack)
            evaluation: EvaluationHandler | None = None

            def switch_off() -> None:
                handler.close()
                if evaluation is not None:
                    evaluation.close()
                if fit.progress is not None:
                    fit.progress.mirrored = frozenset()

            summary = FitSummary(fit, switch_off)
            runners = runner_for(fit), partial(ModuleRunner, fit, 0)
            timed = summary.timing, summary.conclude
            handler = StrategyHandler(*runners, fit.recovery, fit.statistics, *timed)
            stack.callback(handler.close)
            handler.take_over(trainer.strategy)
            if trainer.enable_validation and self._evaluates(trainer):
                evaluation = EvaluationHandler(fit, "validation_step", beside=handler)
                stack.callback(evaluation.close)
                evaluation.take_over(trainer.strategy)
                stack.enter_context(evaluations_looped(trainer, pl_module, evaluation))
            logs = self.options.log_metrics and bool(trainer.loggers)
            self._rate = stack.enter_context(rate_shown(self, trainer, summary.counted, logs=logs))
            stack.enter_context(replays_looped(trainer, pl_module, handler))
            self._fit = stack.pop_all()
        self._handler, self._summary, self._assertions = handler, summary, fit.assertions
        self._evaluation = evaluation
        if self.options.log_metrics and not trainer.loggers:
            rank_zero_warn(
                "GraphCapture: log_metrics=True logs nothing: the trainer has no logger",
                stacklevel=stacklevel_of_user(),
            )
        earliest, warmup = fit.policy.earliest, self.options.warmup_steps
        why = f"{warmup} of warm-up"
        if fit.policy.measures:
            why += ", and then as soon as measured times say that it pays off"
        elif earliest > warmup:
            why += f", and {earliest - warmup} that show that shapes come back"
        steps = f"{earliest} step{'s' * (earliest != 1)}"
        if newer := untested():
            rank_zero_info(f"GraphCapture: {newer} was not tested yet; public ways are used")
        rank_zero_info(f"GraphCapture: the first graph comes after {steps} at the earliest ({why})")

    def _evaluates(self, trainer: Trainer) -> bool:
        return self.options.evaluation and _serves_evaluations(trainer)

    def _begin_evaluation(self, trainer: Trainer, module: LightningModule, name: str) -> None:
        """Take over the strategy's method for an evaluation that is no part of a fit."""
        if trainer.state.fn == TrainerFn.FITTING:
            return
        self._release()
        device, options = trainer.strategy.root_device, self.options
        if options.diagnose:
            self._observe_evaluation(trainer, module, name)
            return
        if (device.type == "cpu" and options.backend == "auto") or not self._evaluates(trainer):
            return
        raises = options.on_failure == "raise" and not options.by_submodules
        if not self._permits(reason_to_stay_out(trainer, options), raises=raises):
            return
        with contextlib.ExitStack() as stack:
            fit = fit_context(trainer, module, options, self._statistics, None, stack)
            evaluation = EvaluationHandler(fit, name)
            stack.callback(evaluation.close)

            def switch_off(reason: str) -> None:
                evaluation.close()
                fit.messages.note(reason)

            fit.ranks.on_leave = switch_off
            evaluation.take_over(trainer.strategy)
            stack.enter_context(evaluations_looped(trainer, module, evaluation))
            self._fit = stack.pop_all()
        self._evaluation = evaluation

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the strategy's method in ``trainer.validate``.

        In a fit, raise what training steps have failed by, before their parameters are judged.
        """
        self._settle()
        if self._handler is not None and self._evaluation is not None:
            self._evaluation.begin(lent=self._handler.lend_memory())
        self._begin_evaluation(trainer, pl_module, "validation_step")

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the strategy's method in ``trainer.test``."""
        self._begin_evaluation(trainer, pl_module, "test_step")

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the strategy's method in ``trainer.predict``."""
        self._begin_evaluation(trainer, pl_module, "predict_step")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise what its steps have failed by; if it is no part of a fit, hand all back."""
        if self._evaluation is not None:
            self._evaluation.assertions.settle()
        if trainer.state.fn == TrainerFn.FITTING:
            if self._evaluation is not None:
                self._evaluation.end()
            if self._rate is not None:
                self._rate.restart()
            return
        if self._evaluation is not None:
            self._evaluation.finish()
        self._release()

    on_test_end = on_predict_end = on_validation_end

    def _observe(self, trainer: Trainer, module: LightningModule) -> None:
        from lightning_graphs.lightning.doctor import Doctor

        reason = "diagnose=True: steps are observed, and none is captured"
        self._statistics.fallbacks.append(reason)
        strategy, why_none = trainer.strategy, reason_to_stay_out(trainer, self.options)
        if strategy.root_device.type == "cuda" and not moves_batches_itself(trainer, module):
            self._fit.enter_context(BatchTransfer(trainer).installed())
        why = why_no_whole_step(trainer, module, self.options.optimizer_kernel)
        doctor = Doctor(trainer, module, self.options, why_none, why)
        self._fit.callback(doctor.finish)
        self._statistics.diagnosis = doctor.diagnosis
        self._observe_evaluation(trainer, module, "validation_step")

    def _observe_evaluation(self, trainer: Trainer, module: LightningModule, name: str) -> None:
        from lightning_graphs.lightning.doctor import EvaluationDoctor

        if self._evaluates(trainer):
            doctor = EvaluationDoctor(trainer, module, self.options, name)
            self._fit.callback(doctor.finish)
            self._statistics.evaluation[name] = Statistics(diagnosis=doctor.diagnosis)

    def _is_active(self, trainer: Trainer, module: LightningModule) -> bool:
        device = trainer.strategy.root_device
        if device.type == "cpu" and self.options.backend == "auto":
            why = 'inactive on a CPU trainer; GraphCapture(backend="emulated") rehearses there'
            rank_zero_info(f"GraphCapture is {why}.")
            self._statistics.fallbacks.append(why)
            return False
        reason = reason_to_stay_out(trainer, self.options)
        raises = self.options.on_failure == "raise"
        whole = self.options.scope == "step" or is_model_parallel(trainer)
        if whole or (raises and not self.options.by_submodules):
            kernel = self.options.optimizer_kernel
            reason = reason or why_no_whole_step(trainer, module, kernel)
        return self._permits(reason, raises=raises)

    def _permits(self, reason: str, *, raises: bool) -> bool:
        """Tell whether there is no reason to be inactive; say or raise it if there is one."""
        if reason and raises:
            raise refused(reason)
        if reason:
            rank_zero_warn(f"GraphCapture is inactive: {reason}", stacklevel=stacklevel_of_user())
            self._statistics.fallbacks.append(reason)
        return not reason

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise what steps of the epoch have failed by."""
        self._settle()

    def _settle(self) -> None:
        if self._assertions is not None:
            self._assertions.settle()

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the state of optimizers in the form that it has without the callback."""
        capturables = self._handler.runner.capturables if self._handler is not None else {}
        states = checkpoint.get("optimizer_states") or []
        for i, (optimizer, state) in enumerate(zip(trainer.optimizers, states, strict=False)):
            capturable = capturables.get(optimizer)
            if capturable is not None and state:  # rank 0 alone has one of FSDP2
                states[i] = capturable.neutral(state)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand stream, strategy and optimizer back, release the graphs, and show the report."""
        self._settle()
        summary = self._summary
        if summary is not None:
            summary.finish()
        self._release()
        if summary is not None:
            summary.tell()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Hand everything back after an exception, when Lightning calls no :meth:`on_train_end`."""
        if self._summary is not None:
            self._summary.count_rest()
        failed = None
        if self._assertions is not None:
            with contextlib.suppress(RuntimeError):  # a device that has failed itself
                failed = self._assertions.find()
        self._release()
        if failed is not None:
            if failed is not exception:
                rank_zero_warn(f"GraphCapture: before this error, {in_one_line(failed)}")
            save_nothing(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hand everything back if neither :meth:`on_train_end` nor :meth:`on_exception` ran."""
        self._release()

    def _release(self) -> None:
        self._handler = self._summary = self._stream = self._assertions = self._evaluation = None
        self._rate = None
        self._fit.close()


def _serves_evaluations(trainer: Trainer) -> bool:
    """Tell whether steps of evaluations may have graphs; say it if not."""
    is_served = trainer.world_size == 1 or is_ddp(trainer.strategy)
    if not is_served and (trainer.enable_validation or trainer.state.fn != TrainerFn.FITTING):
        rank_zero_info(
            "GraphCapture: evaluations run eagerly with FSDP2, which gathers parameters in each "
            "step, since ranks do not agree on replays there"
        )
    return is_served
