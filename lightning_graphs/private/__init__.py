"""Private API of torch and of Python, each use with its reason."""
