"""The host side of a replay: numbers, draws, logs and stores, done again."""
