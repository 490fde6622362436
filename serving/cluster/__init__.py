"""Several engines behind one router: the choice of an engine for each request."""
