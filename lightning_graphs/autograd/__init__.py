"""Captured calls inside of autograd."""
