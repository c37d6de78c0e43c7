"""Guards: find what a step depends on or must not do, and look at that before each replay."""
