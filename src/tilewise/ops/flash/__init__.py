"""Dense flash attention."""
