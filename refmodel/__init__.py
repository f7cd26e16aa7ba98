"""The model: what one rank computes. Pure functions on NumPy arrays; state is passed in."""
