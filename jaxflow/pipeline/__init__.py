"""Plans, and the compiler that makes a step of a plan."""
