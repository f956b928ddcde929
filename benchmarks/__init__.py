"""Measurements of fp4comm: `benchmarks.bandwidth` (dispatch and combine) and `benchmarks.codec` (conversions)."""
