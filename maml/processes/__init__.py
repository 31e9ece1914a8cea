"""A process among others: how they start, meet, know of each other, and part."""
