"""Regions of user code that are captured, and the one life cycle that all of them have."""
