"""The choice of a mixture's experts: the product with the router's weight, and the largest scores."""
