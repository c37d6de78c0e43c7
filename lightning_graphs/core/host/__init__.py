"""The host half: what captured code computes on the CPU, computed again by every replay."""
