"""Programmatic dependent launch (PDL): a kernel starts before the previous kernel of its stream has ended.

CUDA launches a kernel that calls `wait_for_last` as soon as every CTA of the previous kernel has called
`launch_next`. Before this wait the kernel reads only constants, such as a weight, and writes nothing. Every
kernel that calls `launch_next` also calls `wait_for_last`, so a kernel that has waited follows all earlier
kernels. Results do not change.

PDL has no effect inside a CUDA graph, because XLA records each kernel as a separate graph.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu


def launch_next(pdl: bool) -> None:
    """Allow the launch of the next kernel once every CTA of this kernel has called this function or ended."""
    if pdl:
        plgpu.griddepcontrol_launch_dependents()


def wait_for_last(pdl: bool) -> None:
    """Wait until the previous kernel has ended.

    Every thread that reads another kernel's results, or writes, must call this function.
    """
    if pdl:
        plgpu.griddepcontrol_wait()
