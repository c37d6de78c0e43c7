"""Code of libraries that reads on the host, and what its caller writes in place of it."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import replace

from lightning_graphs.core.obstacles import Obstacle

_Remedy = tuple[str, str]

_IS_CAUSAL: _Remedy = (
    "say whether the mask is causal: is_causal=True or False; torch compares the mask otherwise",
    "y = self.encoder(x, mask=self.mask, is_causal=True)",
)
_VALIDATION: _Remedy = (
    "switch off the check of values: validate_args=False for this distribution, or "
    "torch.distributions.Distribution.set_default_validate_args(False)",
    "Normal(mean, scale, validate_args=False)",
)
_MOMENTUM: _Remedy = (
    "give the BatchNorm a momentum: with None its factor is read from num_batches_tracked",
    "nn.BatchNorm1d(64, momentum=0.1)",
)
_GROUPED: _Remedy = (
    "train weights in bfloat16 (precision='bf16-true'): torch multiplies those of all experts in "
    "one kernel, which reads nothing on the host",
    'Trainer(precision="bf16-true")',
)
_CAUSES: dict[tuple[str, str], _Remedy] = {
    ("torch/nn/modules/transformer.py", "_detect_is_causal_mask"): _IS_CAUSAL,
    ("torch/distributions/distribution.py", "__init__"): _VALIDATION,
    ("torch/distributions/distribution.py", "_validate_sample"): _VALIDATION,
    ("torch/nn/modules/batchnorm.py", "forward"): _MOMENTUM,
    ("transformers/integrations/moe.py", "_grouped_mm"): _GROUPED,
    ("transformers/integrations/moe.py", "_grouped_mm_fallback"): _GROUPED,
}
"""End of a file's path, and the function in it that reads."""


def with_known_remedy(obstacle: Obstacle) -> Obstacle:
    """The obstacle with the remedy for the library's function that the calling thread is in."""
    frame: types.FrameType | None = sys._getframe(1)
    found = None
    while frame is not None and found is None:
        found, frame = _remedy_for(frame.f_code), frame.f_back
    return obstacle if found is None else replace(obstacle, remedy=found[0], code=found[1])


def known_remedy(error: BaseException, otherwise: str) -> str:
    """The remedy for the library's function that raised an error."""
    found, traceback = None, error.__traceback__
    while traceback is not None and found is None:
        found, traceback = _remedy_for(traceback.tb_frame.f_code), traceback.tb_next
    return otherwise if found is None else found[0]


def _remedy_for(code: types.CodeType) -> _Remedy | None:
    path = code.co_filename.replace(os.sep, "/")
    return next(
        (
            remedy
            for (file, function), remedy in _CAUSES.items()
            if code.co_name == function and path.endswith(file)
        ),
        None,
    )
