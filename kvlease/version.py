"""The one place that states the version; this module imports nothing."""

__version__ = "0.1.0"
"""Version of the package, also written in the head of every event log."""
