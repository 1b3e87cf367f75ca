"""Models composed from the ops: reading a checkpoint, holding its weights, running a step."""
