"""What the examples share: two fits and the table of both, and data."""
