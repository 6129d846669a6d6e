"""Images, from files on disk to batches."""
