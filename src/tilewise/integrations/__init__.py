"""tilewise inside other libraries. Nothing is imported or changed before it is asked for."""
