"""The client for loops that users write: a function that trains or evaluates, captured as one."""
