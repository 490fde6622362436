"""Plans, and the compiler that turns one into a step."""
