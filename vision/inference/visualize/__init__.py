"""`vision visualize`: figures and scores of attention."""
