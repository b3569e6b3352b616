"""Host helpers that every launcher shares."""
