"""Whether replays compute what eager steps compute."""
