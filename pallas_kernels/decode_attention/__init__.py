"""Attention of one query per row over selected slots of a paged KV cache."""
