"""Commands around a data set: prepare, check, contact sheet."""
