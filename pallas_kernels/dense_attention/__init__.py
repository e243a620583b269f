"""Causal attention over everything: what the sparse operation is compared with."""
