"""The unmodified module: traced, cut, and replayed by each stage."""
