"""What training minimises, and what it is evaluated by."""
