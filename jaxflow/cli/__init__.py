"""Command-line parts that several commands share: flags, exit status, output files."""
