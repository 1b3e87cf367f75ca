"""What every door shares: tenants, limits, refusals, access log, draining, `kvlease serve`."""
