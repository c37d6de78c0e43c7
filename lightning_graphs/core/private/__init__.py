"""Private API of torch, each use with its reason and a public fallback."""
