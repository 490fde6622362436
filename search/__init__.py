"""Read measurements and write plans, placements and fits. Serving imports nothing of this package."""

INSTALL = "install the extra `search`: pip install 'jaxflow[search]'"


class UserError(ValueError):
    """An input that search commands refuse. The message says what is accepted."""
