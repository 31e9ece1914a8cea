"""The derivative of an outer loss through, or at the end of, an inner loop."""
