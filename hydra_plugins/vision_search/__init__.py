"""The sweeper of this project: `hydra/sweeper=search`."""
