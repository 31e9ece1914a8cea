"""Policies, which learn by acting in environments. No other package imports this one."""
