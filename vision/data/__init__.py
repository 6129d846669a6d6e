"""Pictures, from files on disk to batches."""
