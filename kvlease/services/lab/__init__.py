"""The race lab: a simulated device, faults, and schedules that are explored."""
