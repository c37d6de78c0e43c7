"""Graph capture under Lightning's Trainer; docs/design.md says what lives where."""
