"""Query-aware block scores against pooled keys."""
