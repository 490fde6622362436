"""Limits of a Hopper GPU: the number of SMs and the shared memory of an SM."""

SMEM_BYTES = 227 * 1024  # shared memory that one CTA can use
SMS = 132  # SMs of an H100 or H200


def sms_of(sms: int | None) -> int:
    """Return the number of SMs that a kernel may occupy: `sms`, or all SMs for None.

    Raises: ValueError for a number outside 1 to 132.
    """
    if sms is not None and not 1 <= sms <= SMS:
        raise ValueError(f"sms={sms}: accepted are 1 to {SMS}, or None for all SMs")
    return SMS if sms is None else sms
