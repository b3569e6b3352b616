"""Speed compared with what a user would pick instead; only correct implementations are timed."""
