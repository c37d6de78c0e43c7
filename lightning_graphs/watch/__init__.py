"""What code does while it is captured: reads, draws, stores, refusals."""
