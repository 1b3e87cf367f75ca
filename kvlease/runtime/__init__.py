"""The Trio side: actors, streams, transfers, the scheduler and the engine."""
