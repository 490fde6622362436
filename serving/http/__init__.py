"""The HTTP server: OpenAI's API for a served model."""
