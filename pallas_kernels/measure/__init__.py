"""Scripts that compare each kernel with its twin on a GPU and measure it beside its rivals."""
