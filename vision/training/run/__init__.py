"""A run's folder, its lock, its log, and the processes that share it."""
