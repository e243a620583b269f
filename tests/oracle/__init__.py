"""A float64 NumPy restatement of what NOSA computes, independent of the JAX code that it judges."""
