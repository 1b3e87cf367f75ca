"""Compute: one operation a file, the views that open rows, and the models."""
