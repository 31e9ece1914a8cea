"""How a meta-gradient is executed: compiled, captured, rounded; its tasks prefetched."""
