"""Names of kernels: demangled as the compiler wrote them, and shortened for reading."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

_ANONYMOUS = "(anonymous namespace)::"


@functools.cache
def _load_demangler() -> Callable[[str], str] | None:
    """The C++ runtime's own demangler (Itanium ABI), or None where there is no such runtime."""
    library = "libc++.1.dylib" if sys.platform == "darwin" else "libstdc++.so.6"
    try:
        runtime = ctypes.CDLL(library)
        free = ctypes.CDLL(None).free
    except (OSError, TypeError, AttributeError):
        return None
    function = runtime.__cxa_demangle
    # The result is malloc'ed for the caller: c_char_p would lose the address that must be freed.
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    free.restype = None
    free.argtypes = [ctypes.c_void_p]

    def run(symbol: str) -> str:
        address = function(symbol.encode(), None, None, None)
        if not address:
            return symbol
        try:
            return ctypes.string_at(address).decode()
        finally:
            free(address)

    return run


def demangle(symbol: str) -> str:
    """The C++ name behind a mangled symbol.

    Args:
        symbol: A kernel's name as the driver gives it.

    Returns:
        The demangled name; ``symbol`` itself when it is not mangled (Triton, cuBLAS) or when this
        machine has no C++ runtime to ask.
    """
    if not symbol.startswith("_Z"):
        return symbol
    run = _load_demangler()
    return symbol if run is None else run(symbol)


def short_name(name: str) -> str:
    """A kernel's bare name: without return type, namespaces, template and call arguments.

    ``void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>(int)``
    becomes ``vectorized_elementwise_kernel``; a name with none of these stays as it is.
    """
    kept: list[str] = []
    depth = 0
    # The arrow of a trailing return type inside template arguments would close a bracket.
    for character in name.replace(_ANONYMOUS, "").replace("->", ""):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif depth == 0:
            if character == "(":
                break
            kept.append(character)
    words = "".join(kept).split()
    # A memory node's name ("memcpy D to H") has spaces, but no return type to take away.
    bare = words[-1] if words and ("<" in name or "(" in name or "::" in name) else name
    return bare.rpartition("::")[2] or name
