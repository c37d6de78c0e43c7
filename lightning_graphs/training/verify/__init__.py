"""Verification: replays compute what eager steps compute."""
