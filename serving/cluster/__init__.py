"""Several engines behind one door: the choice of an engine for each request."""
