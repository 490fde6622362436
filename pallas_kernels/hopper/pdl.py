"""Kernels that begin before the one before them has ended: CUDA's programmatic dependent launch, for kernels
launched one by one.

A kernel that waits for the last one may be launched as soon as every CTA of that one has said `launch_next`.
Before it has waited it reads only what is constant, a product's weight, and writes nothing. All that let
others begin wait for the last one themselves, so a kernel that has waited comes after everything that was
issued before it. Bits do not change.

In a CUDA graph, where XLA records each kernel as a graph of its own, it makes no difference.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu


def launch_next(early: bool) -> None:
    """In a kernel: the next one may be launched, when this CTA is the last to say so or to end."""
    if early:
        plgpu.griddepcontrol_launch_dependents()


def wait_for_last(early: bool) -> None:
    """In a kernel, by every thread that reads what others wrote, or writes: waits until the kernel before has
    ended.
    """
    if early:
        plgpu.griddepcontrol_wait()
