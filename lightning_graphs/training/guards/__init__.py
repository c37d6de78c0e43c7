"""What a step depends on and must not do: found at its capture, looked at before each replay."""
