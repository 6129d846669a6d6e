"""Attention methods: from a capture to one map per image."""
