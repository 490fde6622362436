"""Parts that the Mosaic kernels for Hopper share: device limits, memory layouts, thread registers,
launches.
"""
