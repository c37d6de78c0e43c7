"""Where graphs are captured: CUDA, and its emulation on a CPU."""
