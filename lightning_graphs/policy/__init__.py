"""Whether a capture is worth its time and memory."""
