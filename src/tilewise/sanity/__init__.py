"""Every tile configuration of an operator against its reference."""
