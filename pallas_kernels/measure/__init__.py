"""Scripts that compare each kernel with its reference implementation on a GPU
and measure it beside its rivals.
"""
