"""Two-stage pooling: means inside windows of tokens, maxima of windows inside blocks."""
