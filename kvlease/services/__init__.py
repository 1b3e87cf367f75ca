"""What people run: the command line and the workloads behind it."""
