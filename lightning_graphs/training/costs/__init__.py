"""Time and memory: what graphs cost and gain, and when one is worth it."""
