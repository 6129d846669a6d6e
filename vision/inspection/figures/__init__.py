"""Figures of attention: the only place that draws."""
