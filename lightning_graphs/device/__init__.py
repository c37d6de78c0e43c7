"""Graphs on a device: torch's API over two backends, their operators and rules."""
