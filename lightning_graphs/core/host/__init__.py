"""What captured code computes on the CPU: recorded, and computed again by every replay."""
