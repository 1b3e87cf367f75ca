"""Benchmarks of the product on this machine, beside the peers that it has; loads torch."""
