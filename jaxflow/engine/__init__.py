"""The engine: requests, the scheduler that picks a step's work, its layout in arrays, and the loop that runs
it.
"""
