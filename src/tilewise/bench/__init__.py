"""Speed beside what a user would pick instead, timed only where it is right."""
