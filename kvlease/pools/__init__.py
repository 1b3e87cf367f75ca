"""Memory and its book-keeping: page pools, the prefix index, leases; synchronous throughout."""
