"""Backends that capture and replay: CUDA, and its emulation on a CPU."""
