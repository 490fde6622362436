"""Op times, interference and energy, measured on a device."""
