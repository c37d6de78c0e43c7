"""Functions that call others for a while, wherever they are held."""

from __future__ import annotations

from functools import partial
from types import FrameType
from typing import Any

import pytest

from lightning_graphs.private.exchange import called_instead, code_of


def scaled(x: float, factor: float = 2.0, *, shift: float = 0.0) -> float:
    return x * factor + shift


HELD = {"itself": scaled, "partial": partial(scaled, shift=1.0)}


def noting(seen: list[str], own: Any, frame: FrameType, *args: Any, **kwargs: Any) -> Any:
    seen.append(frame.f_code.co_name)
    return own(*args, **kwargs)


def test_exchanges_of_one_function_end_in_turn() -> None:
    code, seen = scaled.__code__, []
    for _ in range(2):
        with called_instead({scaled: partial(noting, seen)}):
            with called_instead({scaled: partial(noting, seen)}):
                assert (HELD["itself"](3.0), HELD["partial"](3.0)) == (6.0, 7.0)
                assert code_of(scaled) is code is not scaled.__code__
            assert HELD["itself"](3.0, 4.0) == 12.0
            assert code_of(scaled) is code is not scaled.__code__
        assert scaled.__code__ is code is code_of(scaled)
    assert seen.count("test_exchanges_of_one_function_end_in_turn") == 2 * 3


def test_an_error_ends_an_exchange() -> None:
    code = scaled.__code__
    with pytest.raises(ZeroDivisionError, match="division"), called_instead({scaled: noting}):
        raise ZeroDivisionError("division")
    assert scaled.__code__ is code
