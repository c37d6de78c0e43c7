"""A capture that only notes."""
