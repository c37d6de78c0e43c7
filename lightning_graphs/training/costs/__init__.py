"""What graphs cost and gain: time, memory, and when it is worth it."""
