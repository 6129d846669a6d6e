"""The report of an evaluation: numbers, page, tables and files."""
