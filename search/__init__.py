"""Reads measurements, writes plans and fits. Nothing of it is imported while serving."""
