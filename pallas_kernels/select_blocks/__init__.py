"""Dual selection of KV blocks: forced, query-aware and query-agnostic picks."""
