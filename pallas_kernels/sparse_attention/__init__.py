"""Attention of many queries over the blocks selected for each of them."""
