"""HSTU attention: SiLU in place of softmax, over packed sequences."""
