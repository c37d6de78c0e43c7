"""The doctor: what stands in the way of a captured step."""
