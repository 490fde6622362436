"""The waiting and running queues, admission, and the work of one step."""
